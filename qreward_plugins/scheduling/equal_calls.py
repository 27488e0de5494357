"""Merges equal calls: a call that is already under way is not sent again, and all of its callers get the answer.

The samples of a group often have equal responses: at temperature 0, or once the policy has collapsed. Two calls are
equal if the same judge asks the same sources with the same texts and parameters. Those of one sample never are, because
a judge that asks twice wants two answers. Images and the arguments of functions are not compared.

A call that waits for an equal one keeps its own deadline. If the first one comes to nothing, whoever waits for it asks
for itself.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from .calls import Answer
from .jobs import Job


class EqualCalls:
    """The calls of an event loop that are asked, and those that wait for an equal one. None waits unless `enabled`."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._asked: dict[Hashable, Job] = {}
        self._waiting: dict[Job, list[Job]] = {}

    def joins(self, job: Job) -> bool:
        """Return whether `job` waits for an equal one from now on. Otherwise others may wait for it."""
        question = _question(job) if self._enabled else None
        first = None if question is None else self._asked.get(question)
        if first is None:
            if question is not None:
                self._asked[question], job.question = job, question
            return False
        urgent = job.rank.priority < first.rank.priority
        if first.member is job.member or urgent or first.request.parameters != job.request.parameters:
            return False
        self._waiting.setdefault(first, []).append(job)
        job.last_problem = "an equal call, which was asked first, has not been answered"
        return True

    def ended(self, job: Job) -> list[Job]:
        """Note that `job` has ended; return the jobs that wait for it."""
        if self._asked.get(job.question) is job:
            del self._asked[job.question]
        others = [other for other in self._waiting.pop(job, ()) if not other.ended]
        for other in others:
            other.last_problem = ""
        return others

    def forget(self) -> None:
        """Let no job wait for one that was asked before now, because the sources have changed."""
        self._asked.clear()


def answer_to(job: Job, answer: Answer[Any], now: float) -> Answer[Any]:
    """Return an answer to an equal call as that to `job`, for which nothing was spent."""
    return replace(answer, spent=job.spent(now), service_s=0.0)


def _question(job: Job) -> Hashable | None:
    """What `job` asks, and how the reply is read; None if that is not compared."""
    call, texts = job.call, [message["content"] for message in job.request.messages]
    if not (call.identity and texts) or call.on_text is not None or call.once:
        return None
    return (call.read, call.identity, call.sources, *texts) if all(isinstance(text, str) for text in texts) else None
