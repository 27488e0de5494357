"""Defines `OpenAISource`: a language model behind a chat server, in one of several dialects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal
from urllib.parse import quote

from yarl import URL

from ..config.source_models import BaseURLs, EndpointConfig, ModelName
from ..errors import Mistake
from ..redaction import without_secrets
from .base import Request
from .completions import CompletionAnswer
from .demand import completion_bound
from .dialects import DIALECTS, Dialect, Refusal
from .endpoint import Endpoint
from .http import HTTPReply
from .kind import TEXT
from .replies import Answer

_AUTO = "auto"


class OpenAISource(Endpoint):
    """A language model behind a chat server.

    Raises ConfigurationError as every `Endpoint` does, and for parameters that its dialect cannot send.
    """

    class Config(EndpointConfig):
        """A chat server that speaks OpenAI's chat completions, or another dialect."""

        URL_KEY: ClassVar[str] = "base_url"

        base_url: BaseURLs
        """URL up to and including the version, e.g. `https://api.example.com/v1`; or a list of replicas that share the
        limits of this source. Inside a trainer, `framework://NAME/v1` is a server that the trainer has started."""

        model: ModelName
        """Name of the model on the server."""

        dialect: Literal["openai", "openai_reasoning", "responses", "anthropic", "gemini", "auto"] = "openai"
        """How requests are written and replies are read. `openai` (default): chat completions, as every compatible
        server reads them. `openai_reasoning`: the same for OpenAI's reasoning models, which refuse `max_tokens` and
        `temperature`. `responses`: OpenAI's responses. `anthropic`: Anthropic's messages. `gemini`: Gemini's
        generateContent. `auto`: the server is asked once at the start, and the log says what was found. `parameters`
        holds keys of the dialect. Only `openai` and `gemini` send the judge's `temperature`."""

        structured_output: Literal["native", "tool"] = "native"
        """How the dialect `anthropic` asks for a judge's `json_schema`. `native` (default): by `output_config`. `tool`:
        by a tool whose input is the verdict, for models and servers without `output_config`."""

        vision: bool = False
        """Whether the model reads images. Judges send images only to sources that say so, unless their `images.send`
        says otherwise. Default: false."""

    answers = (TEXT,)
    usual_latency_s = 3.0
    ANSWER = CompletionAnswer

    def __init__(self, name: str, config: Config) -> None:
        self._dialect = dialect = _dialect_of(config)
        settings: dict[str, Any] = without_secrets(config.parameters)
        self._settings = settings
        self._thinks = dialect.thinks(settings)
        self._as_tool = config.structured_output == "tool"
        super().__init__(name, config, mistakes=_mistakes(f"sources.{name}", config, dialect), path=_path(config))
        self._model = config.model

    @property
    def model(self) -> str:
        return self._model

    @property
    def dialect(self) -> Dialect:
        """The dialect that it speaks."""
        return self._dialect

    @classmethod
    def key_header(cls, config: Config) -> tuple[str, str]:
        return _dialect_of(config).key_header

    @classmethod
    def plain_headers(cls, config: Config) -> Mapping[str, str]:
        return _dialect_of(config).headers

    @property
    def bound_key(self) -> tuple[str, ...]:
        return self._dialect.bound

    @property
    def containers(self) -> tuple[str, ...]:
        return self._dialect.containers

    @property
    def reads(self) -> object:
        return self._dialect.identity(self._model)

    def body(self, request: Request) -> Mapping[str, Any]:
        parameters = dict(request.parameters)
        if self._thinks and request.thinking_tokens and isinstance(parameters.get("max_tokens"), int):
            parameters["max_tokens"] += request.thinking_tokens
        return self._dialect.body(self._model, request, parameters, as_tool=self._as_tool)

    def prompt(self, body: dict[str, Any]) -> tuple[list[str], int, int]:
        return self._dialect.prompt(body)

    def completion_bound(self, body: Mapping[str, Any]) -> int | None:
        return completion_bound(body, holds_budget=self._dialect.bound_holds_budget)

    def answer(self, url: URL, http: HTTPReply) -> Answer:
        return self._dialect.answer(self._name, url, self._model, self._url_key, http, self._http.redactor)

    def unmet(self, asked: Mapping[str, Any], *, thinking_tokens: int = 0) -> list[Refusal]:
        """Return the parameters of a judge that this source would not send, each with the reason. `asked` are those of
        its requests, and `thinking_tokens` is that of its requests.
        """
        bound = asked.get("max_tokens")
        if self._thinks and isinstance(bound, int):
            asked = {**asked, "max_tokens": bound + thinking_tokens}
        return self._dialect.unmet(asked, self._settings)


def _dialect_of(config: OpenAISource.Config) -> Dialect:
    # A plan opens no connection; it takes an undetected dialect for the most frequent one.
    return DIALECTS["openai" if config.dialect == _AUTO else config.dialect]


def _path(config: OpenAISource.Config) -> str:
    model = config.model if "/" in config.model else f"models/{config.model}"
    return _dialect_of(config).path.replace("{model}", quote(model, safe="/"))


def _mistakes(path: str, config: OpenAISource.Config, dialect: Dialect) -> list[Mistake]:
    mistakes: list[Mistake] = []
    if config.parameters.get("stream"):
        mistakes.append(Mistake(f"{path}.parameters.stream", "streamed replies are not supported.", "Leave it out."))
    for url in config.urls:
        end = next((other.path for other in DIALECTS.values() if url.rstrip("/").endswith(other.path)), "")
        end = end or (url[url.rfind("/models/") :] if url.endswith(":generateContent") else "")
        if end:
            said = f"it must end before {end}, which is added."
            mistakes.append(Mistake(f"{path}.base_url", said, f"Leave out {end}."))
            break
    headers = {name.lower(): value.get_secret_value().strip() for name, value in config.headers.items()}
    for refusal in dialect.refusals(without_secrets(config.parameters), headers):
        mistakes.append(Mistake(f"{path}.parameters.{refusal.key}", refusal.problem, refusal.remedy))
    if config.structured_output == "tool":
        if dialect.name != "anthropic":
            said = f"only the dialect anthropic has this choice, not {dialect.name}."
            mistakes.append(Mistake(f"{path}.structured_output", said, "Leave it out."))
        elif config.parameters.get("thinking") and dialect.thinks(config.parameters):
            said = "a tool cannot be forced with thinking."
            mistakes.append(Mistake(f"{path}.structured_output", said, "Write native, or turn thinking off."))
    return mistakes
