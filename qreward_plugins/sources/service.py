"""A source behind any service that is sent a sample as JSON and answers with its score.

Reward models and rules are served in many ways that agree on little more than that, so the body and the place of the
score are the configuration's. The default is what slime's remote reward model speaks: prompt, response and label in,
and a bare number or an object out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import orjson
from yarl import URL

from ..samples import Sample
from .base import Request
from .bodies import as_json
from .endpoint import Endpoint
from .http import HTTPReply
from .values import ValueAnswer

if TYPE_CHECKING:
    from ..config import models


class HTTPSource(Endpoint):
    """Asks one scoring service, at one or several URLs. `Reply.value` is what it answered, to be checked by a judge.

    Raises ConfigurationError as every `Endpoint` does.
    """

    URL_KEY = "url"

    def __init__(self, name: str, config: models.HTTPSource) -> None:
        # A named model replaces the addresses in the journal's key, because these may change from run to run.
        known = config if config.version or not config.model else config.model_copy(update={"version": config.model})
        super().__init__(name, known, config.url, mistakes=())
        self._parts = dict(config.body)
        self._score_key = config.score_key
        self._model = _named(config)

    @property
    def model(self) -> str:
        return self._model

    @property
    def _reads(self) -> object:
        return self._score_key

    def _body(self, request: Request) -> Mapping[str, Any]:
        """The body. Raises `InputError` for values that JSON does not have."""
        sample = request.sample
        return {key: as_json(_PARTS[part](sample), part) for key, part in self._parts.items()}

    def _answer(self, url: URL, http: HTTPReply) -> ValueAnswer:
        return ValueAnswer(
            self._name, url, self._model, self.URL_KEY, http, self._http.excerpts, score_key=self._score_key
        )


def _named(config: models.HTTPSource) -> str:
    name = config.model or config.url[0].partition("://")[2]
    said = {"body": config.body, "score_key": config.score_key}
    fields = type(config).model_fields
    if said == {key: fields[key].get_default(call_default_factory=True) for key in said}:
        return name
    canonical = orjson.dumps(said, option=orjson.OPT_SORT_KEYS)
    return f"{name}#{hashlib.blake2b(canonical, digest_size=4).hexdigest()}"


def _prompt(sample: Sample) -> Any:
    """The prompt as the framework has it; else the text of one that is one user message, else the messages ("" without
    any).
    """
    if sample.prompt is not None:
        return sample.prompt
    messages = _messages(sample)
    if not messages:
        return ""
    if len(messages) == 1 and isinstance(messages[0], Mapping) and messages[0].get("role", "user") == "user":
        content = messages[0].get("content")
        if isinstance(content, str):
            return content
    return messages


def _messages(sample: Sample) -> list[Any]:
    return list(sample.messages)


def _conversation(sample: Sample) -> list[Any]:
    return [*sample.messages, {"role": "assistant", "content": sample.response}]


_PARTS: Mapping[models.SamplePart, Callable[[Sample], Any]] = {
    "prompt": _prompt,
    "messages": _messages,
    "conversation": _conversation,
    "response": lambda sample: sample.response,
    "ground_truth": lambda sample: sample.ground_truth,
    "data_source": lambda sample: sample.data_source,
    "extras": lambda sample: sample.extras,
    "group_id": lambda sample: sample.group_id,
    "id": lambda sample: sample.id,
}
