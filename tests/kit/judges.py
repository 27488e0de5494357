"""Judges without an engine: what they ask, and what they make of the answers."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from qreward_plugins import Sample, Verdict
from qreward_plugins.judges import Judge, JudgeFailed
from qreward_plugins.scheduling.calls import Answer, CallFailed, Unanswered
from qreward_plugins.simulation import run
from qreward_plugins.sources import Request

SAMPLE = Sample([{"role": "user", "content": "?"}], "yes", step=250)


def asked(judge: Judge, step: int | None = 250, **says: Any) -> tuple[Any, list[str], float]:
    """What a judge says if its leaves say this (a score, a verdict, or why there is none; after so many seconds, if it
    is a pair), whom it has asked in which order, and when it had its verdict. No task may be left.
    """
    order: list[str] = []

    async def ask(call: Any) -> Any:
        order.append(call.name)
        said = says[call.name]
        seconds, said = said if isinstance(said, tuple) else (1.0, said)
        await asyncio.sleep(seconds)
        if isinstance(said, Unanswered):
            raise CallFailed(said)
        verdict = said if isinstance(said, Verdict) else Verdict(said, correct=said >= 0.5)
        return Answer(verdict, "f")

    async def main() -> Any:
        try:
            said: Any = await judge.judge(dataclasses.replace(SAMPLE, step=step), ask)
        except JudgeFailed as error:
            said = error.failed
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return said, asyncio.get_running_loop().time()

    said, at = run(main())
    return said, order, at


def told(request: Request) -> str:
    """What a language model is told by a request."""
    assert request.messages[-1]["role"] == "user"
    return str(request.messages[-1]["content"])
