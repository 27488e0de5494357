"""What can be asked of a judge server: a chat completion, or the score of a sample. Each reads and answers its own way;
limits, latency, faults and the report are the same for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .calls import Answer, Completion, JudgeCall, as_verdict, dump_verdict, read_call
from .faults import FaultKind
from .faulty_replies import ReplyForms
from .faulty_scores import spoil_score
from .faulty_verdicts import spoil_verdict
from .scores import Score, as_score, read_score_call

CHAT_PATH = "/v1/chat/completions"
SCORE_PATH = "/score"


class Spoken(Protocol):
    """What the server has to say to one request."""

    @property
    def tokens(self) -> int:
        """What is charged for it."""
        ...

    def reply(self, call: JudgeCall, number: int) -> ReplyForms:
        """The body of the `number`-th reply."""
        ...


@dataclass(frozen=True)
class Route:
    """One address. `read` raises `Refused` for the client's mistakes; `say` makes of the scorer's answer what is sent,
    spoilt where the fault is one of the stage "verdict", and raises `TypeError` for what is no answer.
    """

    read: Callable[[bytes], JudgeCall]
    say: Callable[[JudgeCall, Answer, FaultKind | None], Spoken]


def routes(models: Sequence[str]) -> Mapping[str, Route]:
    """The routes of a server of these models, by path."""
    return {
        CHAT_PATH: Route(lambda body: read_call(body, models), _completion),
        SCORE_PATH: Route(lambda body: read_score_call(body, models[0] if models else ""), _score),
    }


def _completion(call: JudgeCall, answer: Answer, fault: FaultKind | None) -> Completion:
    verdict = as_verdict(call, answer)
    if fault is not None and fault.stage == "verdict":
        return spoil_verdict(fault, call, verdict)
    return Completion(verdict if isinstance(verdict, str) else dump_verdict(verdict)).cut(call.max_tokens)


def _score(call: JudgeCall, answer: Answer, fault: FaultKind | None) -> Score:
    score = as_score(answer)
    return score if fault is None or fault.stage != "verdict" else spoil_score(fault, score)
