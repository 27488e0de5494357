"""Defines the input and the output of the core: `Sample`, and `Outcome = Scored | Failed`.

A `Failed` never has a number. If a failed sample were trained as a zero, the policy would learn that its answer was
bad, although no judge has scored it. If the configuration sets a floor for a failure, the outcome is a `Scored` whose
verdict has that basis (`Verdict.basis`, `Verdict.failure`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar

from .spent import NOTHING, Spent, Usage

if TYPE_CHECKING:
    from .images import Image


T = TypeVar("T")


Split = Literal["train", "val"]
Basis = Literal["judged", "floor"]

FLOAT32_LIMIT = 2.0**128 - 2.0**103
"""The smallest number that rounds to infinity in float32 (IEEE 754 binary32), the type that trainers use."""


def fits_float32(number: float) -> bool:
    """Whether a number is finite in float32. False for NaN."""
    return abs(number) < FLOAT32_LIMIT


class Message(TypedDict):
    """One turn of a conversation, as in chat completions."""

    role: str
    content: str


class ResponseTurn(Message):
    """One turn of a response of several turns. `end`: where it ends in `Sample.response`, in characters, exclusive."""

    end: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout to score.

    `messages` is the prompt. `response` is the text of the policy, which is never trusted. `ground_truth` may be any
    value that the judge can read (None: there is none). `data_source` selects the judge. `group_id` identifies the
    prompt that the samples of a group share, and `step` the training step. `extras` are the remaining columns of the
    data set. `id` is the caller's name for the sample and does not affect its score. `prompt` is the prompt in the
    framework's own form, for services that expect it (None: use the messages).

    The content of a message is a text or a list of parts, as in chat completions. A part may hold an image in any of
    the forms that `Image.of` takes. `response_images` are those that belong to the response, for example what a tool
    returned. `turns`: the turns of a response that has several, those of tools and users included. Empty: the response
    is one turn.
    """

    messages: Sequence[Message]
    response: str
    ground_truth: Any = None
    data_source: str = ""
    group_id: str | None = None
    step: int | None = None
    split: Split | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None
    prompt: Any = None
    response_images: Sequence[Image] = ()
    turns: Sequence[ResponseTurn] = ()


# Not frozen: it is made for every sample, and a frozen one takes three times as long.
@dataclass(slots=True)
class RawScore:
    """The numbers of a verdict in the judge's own range, before they are mapped to the reward range.

    The journal stores them, so that another reward range or `correct_at` can be applied without asking again.
    """

    score: float
    components: Mapping[str, float] = field(default_factory=dict)


class _Provenance:
    """The spending of a verdict or a failure. `spent` is the sum of all attempts."""

    __slots__ = ()
    spent: Spent

    @property
    def attempts(self) -> int:
        return self.spent.attempts

    @property
    def usage(self) -> Usage:
        return self.spent.usage

    @property
    def latency_s(self) -> float:
        """Seconds from submission to the outcome."""
        return self.spent.latency_s

    @property
    def cost_usd(self) -> float:
        """US dollars of all attempts whose usage the source reported."""
        return self.spent.cost_usd


# Not frozen, as `RawScore`.
@dataclass(slots=True)
class Verdict(_Provenance):
    """A score in the judge's reward range, with its origin.

    `basis` is "judged" for the score of a source, or "floor" for a score that the configuration sets for `failure`.
    `components` are further numbers of the judge (criteria, or the keys of a reward function's dict). `correct` is None
    unless the judge defines correctness. `spent` is the sum of all attempts. `cached` is true for a verdict from the
    journal. `returned` is the mapping of a reward function, in JSON's types and without secrets; None for other judges,
    and for a verdict from the journal, which stores only numbers. `cut` is true if a text of the sample was too long
    and the judge saw it without its middle. `service_s` is the time in seconds from sending the request of the
    successful attempt to its reply, without waiting, retries and other attempts. `raw` holds the numbers before
    mapping; None if they are unknown, and then the verdict cannot be mapped again. `steps` are the scores of the parts
    of a response: the steps that a process reward model scores, or the turns; each with its end in the response, in
    characters; empty for a judge of whole responses. `dense`: pairs of end and part of the score, one a step. If the
    parts do not add up to the score, the rest belongs to the end of the response. `weight_version` is the version of
    the weights that judged, for a source of kind `replicas` whose weights were updated; otherwise "".

    Raises ValueError if the score, a component, the score of a step or its part of the score is not a number that is
    finite in float32 (promise P2).
    """

    score: float
    components: Mapping[str, float] = field(default_factory=dict)
    rationale: str = ""
    correct: bool | None = None
    judge: str = ""
    source: str = ""
    model: str = ""
    basis: Basis = "judged"
    failure: Failed | None = None
    spent: Spent = NOTHING
    cached: bool = False
    cut: bool = False
    returned: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    service_s: float = field(default=0.0, compare=False)
    raw: RawScore | None = field(default=None, compare=False, repr=False)
    steps: tuple[tuple[int, float], ...] = ()
    weight_version: str = ""
    dense: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _check_score("score", self.score)
        for name, value in self.components.items():
            _check_score(name, value)
        for offset, value in self.steps + self.dense:
            _check_score(f"the step that ends at {offset}", value)


class Cause(str, enum.Enum):
    """Why a sample has no verdict. Training treats the three causes differently."""

    INFRA = "infra"
    """The reward is missing (sources down, deadline, quota): keep the sample out of training."""

    VERDICT = "verdict"
    """The judge's answer was invalid, and the response may have provoked that. `on_invalid: floor` gives the sample the
    floor."""

    POLICY = "policy"
    """The response is empty. It gets the judge's floor."""


SCREENED = "policy/screened"
"""The `Failed.label` of a sample that a judge of kind `screen` took out. `failed_rate` does not count it."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The sample has a verdict."""

    verdict: Verdict

    @property
    def reward(self) -> float:
        return self.verdict.score

    @property
    def failure(self) -> Failed | None:
        """The failure for which the reward is a floor; None if the reward was judged."""
        return self.verdict.failure


@dataclass(frozen=True, slots=True)
class Failed(_Provenance):
    """The sample has no verdict, and therefore no number.

    `reason` is one word for metrics ("deadline", "throttled", "empty", ...), `detail` one sentence for messages.
    """

    cause: Cause
    reason: str
    detail: str = ""
    judge: str = ""
    source: str = ""
    spent: Spent = NOTHING

    @property
    def reward(self) -> None:
        return None

    @property
    def failure(self) -> Failed:
        return self

    @property
    def label(self) -> str:
        """Cause and reason, for metrics: "infra/deadline"."""
        return f"{self.cause.value}/{self.reason}"

    @property
    def screened(self) -> bool:
        """Whether a monitor took the sample out: it has no reward, and nothing has failed."""
        return self.label == SCREENED

    def describe(self) -> str:
        """Describe the failure in one line."""
        what = "screened" if self.screened else f"{self.cause.value} failure ({self.reason})"
        tries = f" after {self.attempts} attempt{'' if self.attempts == 1 else 's'}" if self.attempts else ""
        return f"{what}{tries}" + (f": {self.detail}" if self.detail else "")


Outcome: TypeAlias = Scored | Failed


def _check_score(name: str, value: Any) -> None:
    if type(value) is float and -FLOAT32_LIMIT < value < FLOAT32_LIMIT:
        return  # the usual case: this runs for every verdict
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not fits_float32(value):
        # Python refuses to write integers with many digits.
        given = value if isinstance(value, (bool, float)) else type(value).__name__
        raise ValueError(f"{name} of a verdict must be a number that is finite in float32, not {given}")
