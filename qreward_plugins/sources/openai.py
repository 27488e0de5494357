"""A source behind an OpenAI-compatible `/chat/completions`: what it is asked, and who reads its answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from yarl import URL

from ..errors import Mistake
from .base import Request
from .completions import CompletionAnswer
from .endpoint import Endpoint
from .http import HTTPReply

if TYPE_CHECKING:
    from ..config import models


class OpenAISource(Endpoint):
    """Asks one model, at one or several base URLs.

    Raises ConfigurationError as every `Endpoint` does, and for parameters that this source cannot serve.
    """

    URL_KEY = "base_url"

    def __init__(self, name: str, config: models.OpenAISource) -> None:
        mistakes: list[Mistake] = []
        if config.parameters.get("stream"):
            path = f"sources.{name}.parameters.stream"
            mistakes.append(Mistake(path, "replies are not read as a stream.", "Leave it out."))
        super().__init__(name, config, config.base_url, path="/chat/completions", mistakes=mistakes)
        self._model = config.model

    @property
    def model(self) -> str:
        return self._model

    def _body(self, request: Request) -> Mapping[str, Any]:
        return {"model": self._model, "messages": request.messages, **request.parameters}

    def _answer(self, url: URL, http: HTTPReply) -> CompletionAnswer:
        return CompletionAnswer(self._name, url, self._model, self.URL_KEY, http, self._http.excerpts)
