"""Defines `OpenAISource`: a language model behind a chat server, in one of several dialects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ClassVar, Literal
from urllib.parse import quote

from yarl import URL

from ..config.nodes import Flag
from ..config.source_models import BaseURLs, EndpointConfig, ModelName, StreamTimeouts
from ..errors import InvalidReply, Mistake, PermanentError
from ..quotas.tokens import Demand
from ..secrets import without_secrets
from .base import Reply, Request
from .bodies import completion_bound
from .dialects import DIALECTS, Dialect, Refusal
from .dialects.chat import CompletionAnswer
from .endpoint import Endpoint
from .http import HTTPReply
from .kind import TEXT
from .passed_requests import PassedRequest, RawReply, StreamPassing, cleaned, loads_leniently, returned_headers
from .replies import Problem, announced_limits, json_of, name_of
from .streams import StreamReader

_GENERATES = (":generateContent", ":streamGenerateContent")


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

        dialect: Literal["openai", "openai_reasoning", "responses", "anthropic", "gemini"] = "openai"
        """How requests are written and replies are read. `openai` (default): chat completions, as every compatible
        server reads them. `openai_reasoning`: the same for OpenAI's reasoning models, which refuse `max_tokens` and
        `temperature`. `responses`: OpenAI's responses. `anthropic`: Anthropic's messages. `gemini`: Gemini's
        generateContent. `parameters` holds keys of the dialect. Only `openai` and `gemini` send the judge's
        `temperature`. `qreward init` finds the dialect of a server."""

        vision: Flag = False
        """Whether the model reads images. Judges send images only to sources that say so. Default: false."""

        stream: Flag = False
        """Read replies as server-sent events, as they come. So `timeouts.idle_s` ends a reply that stops coming, and
        the time to the first token is known. Default: false."""

        timeouts: StreamTimeouts = StreamTimeouts()

    answers = (TEXT,)
    usual_latency_s = 3.0
    ANSWER = CompletionAnswer

    def __init__(self, name: str, config: Config) -> None:
        self._dialect = dialect = self.dialect_of(config)
        settings: dict[str, Any] = without_secrets(config.parameters)
        self._settings = settings
        self._thinks = dialect.thinks(settings)
        self.bound_key, self.containers = dialect.bound, dialect.containers
        super().__init__(
            name,
            config,
            mistakes=_mistakes(f"sources.{name}", config, dialect),
            path=_path(config, dialect.path),
            stream_path=_path(config, dialect.stream_path) if dialect.stream_path else None,
        )
        self._model = config.model
        self.passes = (dialect.name,)
        self._reads_with = dialect.answer
        self._own_headers = frozenset(name.lower() for name in config.headers)
        self._reader = dialect.stream if config.stream else None
        self._idle_s = getattr(config.timeouts, "idle_s", None)

    @classmethod
    def dialect_of(cls, config: Any) -> Dialect:
        """Return the dialect of a configuration of this kind."""
        return DIALECTS[config.dialect]

    def send(self, request: Request, *, on_sent: Callable[[], None]) -> Coroutine[Any, Any, Reply]:
        if request.passed is None:
            return super().send(request, on_sent=on_sent)
        return self._pass_on(request, request.passed, on_sent)

    async def _pass_on(self, request: Request, passed: PassedRequest, on_sent: Callable[[], None]) -> Reply:
        """Send a client's own request with the model of this source, and return the reply as it comes (`RawReply`). Of
        a stream, the pieces go to `on_text`.
        """
        body = passed.written(self._model if "{model}" not in self._dialect.path else None)
        streaming: StreamPassing | None = None
        if passed.stream and request.on_text is not None:
            streaming = StreamPassing(passed.receiver, request.on_text, self._http.redactor, self._idle_s)
        headers = {name: value for name, value in passed.headers.items() if name not in self._own_headers}
        loop = asyncio.get_running_loop()
        url, http, lease = await self._post(loop, [request], body, on_sent, streaming=streaming, headers=headers)
        reply = lease.read(loop.time(), lambda: self._passed_reply(passed, url, http, streamed=streaming is not None))
        self.replicas_asked.used(lease.replica, reply.usage)
        return reply

    def _passed_reply(self, passed: PassedRequest, url: URL, http: HTTPReply, *, streamed: bool) -> Reply:
        """Read the reply to a client's own request. Raises what `Answer.reply` raises."""
        clean = self._http.redactor.clean
        answer = self.answer(url, http)
        raw = RawReply(http.status, returned_headers(http.headers, clean), cleaned(http.body, clean))
        if not 200 <= http.status < 300:
            error = answer.of_status(http.status, Problem.of(json_of(http.body)))
            unknown = passed.alone and http.status in (403, 404)
            if isinstance(error, InvalidReply) or type(error) is PermanentError or unknown:
                passed.receiver.refused(raw)
                error = PermanentError(str(error), status=http.status)
            raise error
        content = loads_leniently(http.body)
        if content is None:
            raise answer.unreadable(f"{answer.content_type()} that is not a JSON object", http.body)
        if content.get("error"):
            raise answer.error_of(Problem.of(content))
        if streamed and not http.streamed:
            raise answer.unreadable("no stream, which it was asked for", http.body)
        if not http.streamed and not self._dialect.holds_answer(content):
            raise answer.unreadable(f"no {self._dialect.answers_in}", http.body)
        return Reply(
            value=None if http.streamed else raw,
            usage=answer.usage_in(content),
            model=answer.redactor.of(name_of(content.get("model"))),
            announced=announced_limits(http.headers),
            first_token_s=http.first_token_s,
        )

    def demand(self, request: Request) -> Demand | None:
        passed = request.passed
        if passed is None:
            return super().demand(request)
        bound = self.completion_bound(passed.body)
        if bound is None:
            # It may still ask for several completions.
            bound = self.completion_bound({**passed.body, "max_tokens": request.max_completion_tokens})
        return Demand(passed.texture, passed.overhead, bound or request.max_completion_tokens)

    def streaming(self, request: Request) -> StreamReader | None:
        if self._reader is None:
            return None
        reader = self._reader()
        reader.idle_s, reader.on_text = self._idle_s, request.on_text
        return reader

    @classmethod
    def key_header(cls, config: Config) -> tuple[str, str]:
        return cls.dialect_of(config).key_header

    @classmethod
    def plain_headers(cls, config: Config) -> Mapping[str, str]:
        return cls.dialect_of(config).headers

    @property
    def reads(self) -> object:
        return self._dialect.identity(self._model)

    def body(self, request: Request) -> Mapping[str, Any]:
        parameters = dict(request.parameters)
        if self._thinks and request.thinking_tokens and isinstance(parameters.get("max_tokens"), int):
            parameters["max_tokens"] += request.thinking_tokens
        return self._dialect.body(self._model, request, parameters)

    def prompt(self, body: dict[str, Any]) -> tuple[list[str], int, int]:
        return self._dialect.prompt(body)

    def completion_bound(self, body: Mapping[str, Any]) -> int | None:
        return completion_bound(body, holds_budget=self._dialect.bound_holds_budget)

    def unmet(self, asked: Mapping[str, Any], *, thinking_tokens: int = 0) -> list[Refusal]:
        bound = asked.get("max_tokens")
        if self._thinks and isinstance(bound, int):
            asked = {**asked, "max_tokens": bound + thinking_tokens}
        found = self._dialect.unmet(asked, self._settings)
        if asked.get("logprobs") and not found:
            if self._reader is not None:
                found.append(Refusal("logprobs", "no log probabilities are read from a stream.", "Set stream: false."))
            if self._thinks:
                remedy = "Turn thinking off in its parameters."
                found.append(Refusal("logprobs", "its model thinks, so its first token begins no answer.", remedy))
        return found


def _path(config: OpenAISource.Config, path: str) -> str:
    model = config.model if "/" in config.model else f"models/{config.model}"
    return path.replace("{model}", quote(model, safe="/"))


def _mistakes(path: str, config: OpenAISource.Config, dialect: Dialect) -> list[Mistake]:
    mistakes: list[Mistake] = []
    if "stream" in config.parameters and "stream" not in dialect.prompt_keys:
        problem, remedy = "it has a key of its own.", f"Set {path}.stream."
        mistakes.append(Mistake(f"{path}.parameters.stream", problem, remedy))
    if config.stream and config.parameters.get("n") not in (None, 1):
        problem = "the pieces of several completions cannot be told apart."
        mistakes.append(Mistake(f"{path}.parameters.n", problem, f"Leave it out, or {path}.stream."))
    if getattr(config.timeouts, "idle_s", None) is not None and not config.stream:
        problem = "replies are not streamed, so there are no events to wait for."
        mistakes.append(Mistake(f"{path}.timeouts.idle_s", problem, f"Set {path}.stream, or leave it out."))
    for url in config.urls:
        end = next((other.path for other in DIALECTS.values() if url.rstrip("/").endswith(other.path)), "")
        end = end or (url[url.rfind("/models/") :] if url.endswith(_GENERATES) else "")
        if end:
            problem = f"it must end before {end}, which is added."
            mistakes.append(Mistake(f"{path}.base_url", problem, f"Leave out {end}."))
            break
    for refusal in dialect.refusals(without_secrets(config.parameters)):
        mistakes.append(Mistake(f"{path}.parameters.{refusal.key}", refusal.problem, refusal.remedy))
    return mistakes
