"""Defines `Leaf`: a judge that makes one call for each sample; and `text_call`, which asks a chat source for a text.

All methods except `judge` are pure functions: they build the request, read the reply, and give the floor for a failure.
So every rule about untrusted text and valid verdicts is tested with plain values, and the engine can make the call of a
leaf without a coroutine.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import orjson

from ..config import configured_name
from ..config.models import AskingConfig
from ..errors import ConfigurationError, InputError, InvalidReply, Mistake, input_problem
from ..samples import Cause, Failed, Message, RawScore, Sample, Verdict
from ..samples.json_values import as_json
from ..scheduling.calls import Answer, Call, CallFailed, Unanswered
from ..sources.base import Reply, Request
from .base import Ask, Judge, JudgeFailed, reaches
from .extraction import Extract
from .views import checked_turns

_VERSION = 3
"""Version of how replies are read. Raise it with every change after which a judge reads another number or none."""


_MAPPED = ("score", "components", "correct", "steps", "dense")
"""The fields of a verdict that follow from its raw numbers."""


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What a source of `qreward plan` replies: the place of a score in the score range, 0 to 1. No other source makes
    it.
    """

    share: float


class Leaf(Judge):
    """A judge that makes one call.

    `sources` are the names of the sources that may answer. `fingerprint` is a short hash of how it reads replies; it
    does not cover the request. Raises `ConfigurationError` for numbers of the configuration that contradict each other,
    with the other `mistakes` that a kind has found.
    """

    def __init__(
        self,
        name: str,
        config: AskingConfig,
        *,
        sources: Sequence[str],
        fingerprint: str,
        mistakes: Sequence[Mistake] = (),
    ) -> None:
        super().__init__(name)
        if found := [*number_mistakes(name, config), *mistakes]:
            raise ConfigurationError(found)
        self.sources = tuple(sources)
        self.fingerprint = fingerprint
        self._asking = config
        # All calls share these: thousands of calls wait at once, and each object costs time of the garbage collector.
        self._reading, self._recalled, self._instead = self._read, self._recall, self.missing

    extract: Extract | None = None
    """Where the judge looks for the answer in a response, if it sees nothing else of it."""

    # Each kind of leaf defines these

    def screen(self, sample: Sample) -> Verdict | None:
        """Return the verdict on a sample that needs no call, such as the floor for an empty response; else None.

        Raises `JudgeFailed` for a sample that fails without a call.
        """
        return None

    @abstractmethod
    def request(self, sample: Sample, *, attempt: int) -> Request:
        """Build the request of the `attempt`-th try (from 0). Each attempt has its own nonce.

        Raises `InputError` if the sample cannot be turned into a request.
        """

    @abstractmethod
    def verdict(self, request: Request, reply: Reply) -> Verdict:
        """Read the reply strictly. Raises `InvalidReply`."""

    @abstractmethod
    def mapped(self, raw: RawScore) -> Verdict:
        """Map recorded numbers to a verdict under the present configuration.

        Raises `InvalidReply` if they are not a valid verdict under it.
        """

    def rehearsed_verdict(self, request: Request, share: float) -> Verdict:
        """Return a verdict whose score is at `share` of the reward range, or of 0 to 1, for `qreward plan`."""
        low, high = self.reward_range or (0.0, 1.0)
        score = low + share * (high - low)
        return self.verdict_with(score, dict.fromkeys(self.component_names(), score))

    # All leaves share these

    @classmethod
    def rehearsed(cls, config: Any, request: Request, share: float) -> Reply:
        return Reply(value=Rehearsed(share))

    @property
    def calls(self) -> int:
        return 1

    @property
    def reward_range(self) -> tuple[float, float] | None:
        return self._asking.reward_range

    @property
    def defines_correct(self) -> bool:
        return self._asking.correct_at is not None

    async def judge(self, sample: Sample, ask: Ask) -> Verdict:
        verdict = self.screened(sample)
        if verdict is not None:
            return verdict
        try:
            answer = await ask(self.call(sample))
        except CallFailed as failed:
            return self.missing(failed.why)
        return judged(answer, self.name)

    def screened(self, sample: Sample) -> Verdict | None:
        """Call `screen`; if it raises, raise `JudgeFailed` (`infra/input`)."""
        try:
            return self.screen(sample)
        except JudgeFailed:
            raise
        except Exception as error:
            failed = Failed(Cause.INFRA, "input", input_problem(error), judge=self.name)
            raise JudgeFailed(failed) from None

    def call(self, sample: Sample) -> Call[Verdict]:
        """Return the call for a sample."""
        return Call(
            self.sources,
            partial(self._attempt, sample),
            self._reading,
            name=self.name,
            invalid_retries=self._asking.invalid_retries,
            clear_blame=self._clear_blame,
            identity=self.fingerprint,
            recall=self._recalled,
            instead=self._instead,
        )

    @cached_property
    def _clear_blame(self) -> bool:
        return self.floor(Cause.VERDICT) is not None

    def _read(self, request: Request, reply: Reply) -> Verdict:
        if type(reply.value) is Rehearsed:
            return self.rehearsed_verdict(request, reply.value.share)
        return self.verdict(request, reply)

    def _attempt(self, sample: Sample, attempt: int) -> Request:
        return self.request(sample, attempt=attempt)

    def missing(self, why: Unanswered) -> Verdict:
        """Return the floor for a call without an answer. Raises `JudgeFailed` if no floor applies."""
        return self.instead(failed(why, self.name))

    def instead(self, failed: Failed) -> Verdict:
        """Return the floor for a failure. Raises `JudgeFailed` if no floor applies."""
        score = self.floor(failed.cause)
        if score is None:
            raise JudgeFailed(failed)
        return self.verdict_with(score, {}, source=failed.source, basis="floor", failure=failed, spent=failed.spent)

    def verdict_with(self, reward: float, components: Mapping[str, float], **further: Any) -> Verdict:
        """Return a verdict with this reward, which `correct_at` calls correct or not. `further` are other fields."""
        return Verdict(reward, components, correct=self.correct(reward), judge=self.name, **further)

    def correct(self, reward: float) -> bool | None:
        """Whether `correct_at` calls this reward correct; None without it."""
        bar = self._asking.correct_at
        return None if bar is None else reaches(reward, bar)

    def floor(self, cause: Cause) -> float | None:
        """Return the floor for a failure of this cause; None if it has none, as for infrastructure."""
        config = self._asking
        if cause is Cause.POLICY or (cause is Cause.VERDICT and config.on_invalid == "floor"):
            if config.floor is not None:
                return config.floor
            return config.reward_range[0] if config.reward_range is not None else None
        return None

    def _recall(self, recorded: Verdict) -> Verdict:
        """Map a recorded verdict under the present configuration. Raises as `mapped` does, and LookupError if it has no
        raw numbers.
        """
        if recorded.raw is None:
            raise LookupError("the record has no raw numbers")
        now = self.mapped(recorded.raw)
        return replace(recorded, judge=self.name, **{name: getattr(now, name) for name in _MAPPED})


def judged(answer: Answer[Verdict], judge: str) -> Verdict:
    """Return the verdict of an answer to the judge of this name, with its source, model and spending."""
    verdict = answer.value
    # A copy, because a judge of one's own may keep what it returned, or have changed it: its numbers are checked again.
    # This runs for every sample, and `dataclasses.replace` takes three times as long.
    return Verdict(
        verdict.score,
        verdict.components,
        verdict.rationale,
        verdict.correct,
        judge,
        configured_name(answer.source),
        answer.model,
        verdict.basis,
        verdict.failure,
        answer.spent,
        answer.recorded,
        verdict.cut,
        verdict.returned,
        answer.service_s,
        verdict.raw,
        verdict.steps,
        "" if answer.weights is None else answer.weights.version,
        verdict.dense,
    )


def failed(why: Unanswered, judge: str) -> Failed:
    """Convert an unanswered call of the judge of this name to a failure."""
    cause = Cause.VERDICT if why.invalid else Cause.INFRA
    return Failed(cause, why.reason, why.detail, judge=judge, source=configured_name(why.source), spent=why.spent)


def number_mistakes(name: str, config: AskingConfig) -> list[Mistake]:
    """Find numbers of the configuration that contradict each other."""
    mistakes: list[Mistake] = []
    if config.reward_range is not None:
        low, high = config.reward_range
        remedy = "It is compared with rewards, not with the judge's scores."
        for key, value in (("floor", config.floor), ("correct_at", config.correct_at)):
            if value is not None and not low <= value <= high:
                problem = f"{value:g} is outside the reward range {low:g} to {high:g}."
                mistakes.append(Mistake(f"judges.{name}.{key}", problem, remedy))
    elif config.on_invalid == "floor" and config.floor is None:
        remedy = "Set `floor`, or `reward_range` for its low end."
        mistakes.append(Mistake(f"judges.{name}.on_invalid", "there is no floor.", remedy))
    return mistakes


def fingerprint(*reading: Any) -> str:
    """Hash how a judge reads replies. `reading` holds all settings that change which numbers it finds in a reply.

    Returns 32 hex digits (BLAKE2b, RFC 7693). Settings that only map the numbers (reward range, `correct_at`, floor)
    are not part of it.
    """
    canonical = orjson.dumps([_VERSION, *reading])
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()


DEFAULT_MAX_TOKENS = 1024

_SET_BY_SOURCE = ("model", "messages", "stream", "stream_options", "n")
_NO_SAMPLE = Sample([], "")


def text_call(
    sources: Sequence[str],
    messages: Sequence[Message],
    parameters: Mapping[str, Any] | None = None,
    *,
    name: str,
    sample: Sample = _NO_SAMPLE,
) -> Call[Reply]:
    """Return a call for the text that follows `messages`: `text` of the `Reply` that is its answer.

    `sources` are the names of the sources that may answer, `parameters` further keys of the body (default: `max_tokens`
    of 1,024), and `name` says who asks, in logs and events. `sample` is the one that a judge asks about. The journal
    does not keep the answer. Raises `ValueError` for `parameters` that a source sets itself. Messages that cannot be
    sent make the call fail (`input`).
    """
    sent = _checked(parameters or {})
    given = list(messages) if isinstance(messages, (list, tuple)) else messages

    def request(attempt: int) -> Request:
        return Request(sample, _checked_messages(given), sent, max_completion_tokens=sent["max_tokens"], judge=name)

    return Call(tuple(sources), request, _read, name)


def _checked(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plain copy, with `max_tokens`. Raises `ValueError`."""
    taken = [key for key in _SET_BY_SOURCE if key in parameters]
    if taken:
        raise ValueError(f"parameters.{taken[0]} is set by the source; leave it out")
    bound = parameters.get("max_tokens", DEFAULT_MAX_TOKENS)
    if not isinstance(bound, int) or isinstance(bound, bool) or bound < 1:
        raise ValueError(f"parameters.max_tokens must be a whole number from 1 on, not {bound!r}")
    try:
        plain = {key: as_json(value, f"parameters.{key}") for key, value in parameters.items()}
    except InputError as error:
        raise ValueError(str(error)) from None
    return {"max_tokens": bound, **plain}


def _checked_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    turns = checked_turns(messages)
    if not turns:
        raise InputError("the messages must be a list with at least one message")
    if not all(isinstance(turn["content"], str) for turn in turns):
        raise InputError("each of the messages needs a content that is a text")
    return tuple(Message(role=turn["role"], content=turn["content"]) for turn in turns)


def _read(request: Request, reply: Reply) -> Reply:
    if not isinstance(reply.text, str):
        raise InvalidReply("the reply has no text")
    return reply
