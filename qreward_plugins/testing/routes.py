"""The routes of a judge server: chat completions and scores. Each has its own requests and replies; limits, latency,
faults and the report are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .faults import FaultKind
from .faulty_replies import ReplyForms
from .faulty_scores import faulty_score
from .faulty_verdicts import faulty_verdict
from .judge_calls import Answer, Completion, JudgeCall, as_verdict, dump_verdict, read_call
from .scores import Score, as_score, read_score_call

CHAT_PATH = "/v1/chat/completions"
SCORE_PATH = "/score"


class Content(Protocol):
    """The content of a reply to one request."""

    @property
    def tokens(self) -> int:
        """Its completion tokens."""
        ...

    def reply(self, call: JudgeCall, number: int) -> ReplyForms:
        """The body of the `number`-th reply."""
        ...


@dataclass(frozen=True)
class Route:
    """One path. `read` reads a request and raises `Refused` for the client's mistakes. `content` turns the scorer's
    answer into content, with a fault of the stage "verdict" applied; it raises `TypeError` for an invalid answer.
    """

    read: Callable[[bytes], JudgeCall]
    content: Callable[[JudgeCall, Answer, FaultKind | None], Content]


def routes(models: Sequence[str]) -> Mapping[str, Route]:
    """The routes of a server of these models, by path."""
    return {
        CHAT_PATH: Route(lambda body: read_call(body, models), _completion),
        SCORE_PATH: Route(lambda body: read_score_call(body, models[0] if models else ""), _score),
    }


def _completion(call: JudgeCall, answer: Answer, fault: FaultKind | None) -> Completion:
    verdict = as_verdict(call, answer)
    if fault is not None and fault.stage == "verdict":
        return faulty_verdict(fault, call, verdict)
    return Completion(verdict if isinstance(verdict, str) else dump_verdict(verdict)).cut(call.max_tokens)


def _score(call: JudgeCall, answer: Answer, fault: FaultKind | None) -> Score:
    score = as_score(answer)
    return score if fault is None or fault.stage != "verdict" else faulty_score(fault, score)
