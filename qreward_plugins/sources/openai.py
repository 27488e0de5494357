"""Defines `OpenAISource`: a language model behind an OpenAI-compatible `/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from ..config.source_models import BaseURLs, EndpointConfig, ModelName
from ..errors import Mistake
from .base import Request
from .completions import CompletionAnswer
from .endpoint import Endpoint
from .kind import TEXT

_REASONING_BOUND = "max_completion_tokens"


class OpenAISource(Endpoint):
    """A language model behind an OpenAI-compatible `/chat/completions`.

    Raises ConfigurationError as every `Endpoint` does, and for parameters that this source cannot serve.
    """

    class Config(EndpointConfig):
        """Any server with an OpenAI-compatible `/chat/completions`."""

        URL_KEY: ClassVar[str] = "base_url"

        base_url: BaseURLs
        """URL up to and including the version, e.g. `https://api.example.com/v1`; or a list of replicas that share the
        limits of this source."""

        model: ModelName
        """Name of the model on the server."""

        dialect: Literal["openai", "openai_reasoning"] = "openai"
        """How the body is written. `openai` (default): as every compatible server reads it. `openai_reasoning`: for
        OpenAI's reasoning models, which refuse `max_tokens` and `temperature`: the judge's `max_tokens` is sent as
        `max_completion_tokens`, its `temperature` is left out. Set `reasoning_effort` in `parameters`."""

        vision: bool = False
        """Whether the model reads images. Judges send images only to sources that say so, unless their `images.send`
        says otherwise. Default: false."""

    answers = (TEXT,)
    usual_latency_s = 3.0
    ANSWER = CompletionAnswer
    PATH = "/chat/completions"

    def __init__(self, name: str, config: Config) -> None:
        mistakes: list[Mistake] = []
        if config.parameters.get("stream"):
            path = f"sources.{name}.parameters.stream"
            mistakes.append(Mistake(path, "streamed replies are not supported.", "Leave it out."))
        if any(url.rstrip("/").endswith(self.PATH) for url in config.urls):
            path = f"sources.{name}.base_url"
            mistakes.append(
                Mistake(path, f"it must end before {self.PATH}, which is added.", f"Leave out {self.PATH}.")
            )
        if config.dialect == "openai_reasoning" and config.parameters.get("max_tokens") is not None:
            path = f"sources.{name}.parameters.max_tokens"
            mistakes.append(Mistake(path, "reasoning models of OpenAI refuse it.", f"Write {_REASONING_BOUND}."))
        super().__init__(name, config, mistakes=mistakes)
        self._model = config.model
        self._reasons = config.dialect == "openai_reasoning"

    @property
    def model(self) -> str:
        return self._model

    @classmethod
    def bound_key(cls, config: Config) -> str:
        return _REASONING_BOUND if config.dialect == "openai_reasoning" else super().bound_key(config)

    def body(self, request: Request) -> Mapping[str, Any]:
        parameters = dict(request.parameters)
        if self._reasons:
            parameters.pop("temperature", None)
            if "max_tokens" in parameters:
                parameters[_REASONING_BOUND] = parameters.pop("max_tokens")
        return {"model": self._model, "messages": request.messages, **parameters}
