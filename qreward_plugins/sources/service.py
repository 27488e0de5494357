"""Defines `HTTPSource`: a service that receives a sample as JSON and answers with its score.

Servers of reward models and rules differ in the keys of the body and in the place of the score, so both are configured.
The default is the protocol of slime's remote reward model: it receives prompt, response and label, and answers with a
number or an object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from ..config.nodes import takes
from ..config.source_models import Batch, EndpointConfig, ModelName, URLs
from ..errors import Mistake
from ..samples import Sample
from ..samples.json_values import as_json
from .base import Reply, Request
from .bodies import Lists, in_order, one
from .endpoint import Endpoint
from .kind import VALUE
from .values import ValueAnswer, at_path

SamplePart = Literal[
    "prompt",
    "messages",
    "conversation",
    "response",
    "ground_truth",
    "data_source",
    "extras",
    "group_id",
    "id",
]


_Path = Annotated[
    str,
    Field(pattern=r"^[^.]+(\.[^.]+)*$"),
    takes("the way to the value in a reply, its keys joined by dots (`data.score`)"),
]


def _remote_rm_body() -> dict[str, SamplePart]:
    return {"prompt": "prompt", "response": "response", "label": "ground_truth"}


_RESPONSE = {"response", "conversation"}
"""The parts of a sample that hold the response."""


class HTTPSource(Endpoint):
    """A scoring service: it is sent a sample as JSON and answers with a value.

    `Reply.value` is its answer; a judge checks it. Raises ConfigurationError as every `Endpoint` does.
    """

    class Config(EndpointConfig):
        """Any service that is sent a sample as JSON and answers with its score: a reward model's server, a rule
        service, what slime calls a remote reward model."""

        url: URLs
        """The whole URL that requests are posted to, e.g. `http://localhost:8000/score`; or a list of replicas that
        share the limits of this source. A query is not allowed, because messages and metrics show URLs."""

        model: ModelName | None = None
        """Name of the reward model or rule, for metrics. For the journal it replaces the URLs, as `version` does.
        Default: the first URL without its scheme. Set it if the address changes from run to run."""

        body: Annotated[dict[str, SamplePart], Field(min_length=1)] = Field(default_factory=_remote_rm_body)
        """The keys of the body, each with the part of the sample that it holds. `prompt`: the text if the prompt is one
        user message, else its messages; `messages`: the prompt as a list of messages; `conversation`: that list plus
        the response as the assistant's turn; `response`, `ground_truth`, `data_source`, `extras`, `group_id` and `id`.
        Samples that differ in a part that is sent never share an answer of the journal. Keys with a constant value go
        into `parameters`. Default: `{prompt: prompt, response: response, label: ground_truth}`, the body that slime
        posts to its `--rm-url`."""

        score_key: _Path | None = None
        """The path to the value in the reply: keys joined by dots, and a number for an item of a list (`data.score`,
        `results.0.score`). A text or a mapping under `error` beside it is a failure of the service, whatever the score
        is. Default: the whole reply is the value, a number or a mapping with `score`."""

        batch: Batch | None = None
        """Send several samples in one request: each key of `body` then holds a list with an item for each sample, and
        the reply a list of results, of which `score_key` reads each. The service must take lists of one, too. Keys of
        `parameters` stay as they are. Default: one sample a request."""

        results_key: _Path | None = None
        """The path to the list of results in a reply, for `batch`; they have the order of the samples. Default: the
        whole reply is the list."""

        @field_validator("results_key")
        @classmethod
        def _for_batches(cls, value: str | None, info: ValidationInfo) -> str | None:
            if value is not None and info.data.get("batch") is None:
                raise ValueError("it says how the reply to several samples is read; set batch, or leave it out")
            return value

        @field_validator("body")
        @classmethod
        def _sends_the_response(cls, body: dict[str, SamplePart]) -> dict[str, SamplePart]:
            if not _RESPONSE & set(body.values()):
                raise ValueError(
                    "no key holds the response; add `response: response`, or one that holds `conversation`"
                )
            return body

    answers = (VALUE,)
    ANSWER = ValueAnswer

    def __init__(self, name: str, config: Config) -> None:
        # In the journal's key, a named model replaces the URLs, because these may change from run to run.
        known = config if config.version or not config.model else config.model_copy(update={"version": config.model})
        where, problem = f"sources.{name}.parameters", "`body` has this key, too."
        both = [key for key in config.body if key in config.parameters]
        mistakes = [Mistake(f"{where}.{key}", problem, "Keep one of the two.") for key in both]
        super().__init__(name, known, mistakes=mistakes)
        self._config = config
        self._in_lists = config.batch is not None
        self._reads_with = partial(ValueAnswer, score_key=config.score_key)
        self.model = config.model or config.url[0].partition("://")[2]

    @property
    def reads(self) -> object:
        return self._config.score_key

    @property
    def lists(self) -> Lists | None:
        return Lists(dict.fromkeys(self._config.body, one), self._results)

    def _results(self, content: Any) -> list[tuple[Any, Any]]:
        results = content if self._config.results_key is None else at_path(content, self._config.results_key)
        return in_order(results, lambda result: result)

    async def send(self, request: Request, *, on_sent: Callable[[], None]) -> Reply:
        if self.batch is None:
            return await super().send(request, on_sent=on_sent)
        (result,) = await self.send_batch([request], on_sent=on_sent)
        if isinstance(result, Reply):
            return result
        try:
            raise result
        finally:
            # Breaks the reference cycle of error, traceback and frame.
            del result

    def body(self, request: Request) -> Mapping[str, Any]:
        """Return the body. Raises `InputError` for a value that JSON cannot hold."""
        return {key: as_json(_PARTS[part](request.sample), part) for key, part in self._config.body.items()}


def _prompt(sample: Sample) -> Any:
    """Return the framework's own prompt if the sample has it. Otherwise the text of a single user message, or the
    messages; "" if there are none.
    """
    if sample.prompt is not None:
        return sample.prompt
    messages = list(sample.messages)
    if not messages:
        return ""
    if len(messages) == 1 and isinstance(messages[0], Mapping) and messages[0].get("role", "user") == "user":
        content = messages[0].get("content")
        if isinstance(content, str):
            return content
    return messages


_PARTS: Mapping[SamplePart, Callable[[Sample], Any]] = {
    "prompt": _prompt,
    "messages": lambda sample: list(sample.messages),
    "conversation": lambda sample: [*sample.messages, {"role": "assistant", "content": sample.response}],
    "response": lambda sample: sample.response,
    "ground_truth": lambda sample: sample.ground_truth,
    "data_source": lambda sample: sample.data_source,
    "extras": lambda sample: sample.extras,
    "group_id": lambda sample: sample.group_id,
    "id": lambda sample: sample.id,
}
