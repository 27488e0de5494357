"""Every fault that the judge server knows, met by a scoring source, and its judge, over a real connection."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from qreward_plugins.errors import InvalidReply, PermanentError, QRewardError, SourceUnusable, Throttled, TransientError
from qreward_plugins.judges import FunctionJudge
from qreward_plugins.samples import Sample, Verdict
from qreward_plugins.testing import FaultKind, Faults, JudgeServer

pytestmark = pytest.mark.anyio
PATIENCE_S = 20.0
SAMPLE = Sample([{"role": "user", "content": "q"}], "r")

CLASSES: dict[type, set[str]] = {
    PermanentError: {"error_400", "error_413", "error_422"},
    SourceUnusable: {"error_401", "error_403", "error_404", "redirect", "redirect_loop"},
    Throttled: {
        "error_429",
        "error_429_seconds",
        "error_429_date",
        "error_429_huge",
        "error_429_negative",
        "error_429_reset",
        "error_503_seconds",
    },
    # JSON that stops in the middle, a sentence, and two values are no JSON: that is the server's trouble.
    InvalidReply: {"no_choices", "wrong_json_type"}
    | {
        kind.value
        for kind in FaultKind
        if kind.stage == "verdict" and kind.value not in ("cut_off", "prose", "two_verdicts")
    },
    Verdict: {"close_after", "wrong_model", "slow_headers", "slow_body"}
    | {kind.value for kind in FaultKind if kind.stage in ("stream", "list")},
}
CLOSING = ("close_after", "slow_headers", "slow_body", "short_length")
ANSWERS: dict[str, Any] = {
    "number": 0.25,
    "mapping": {"score": 0.25, "acc": True},
    "nested": {"data": {"score": 0.25}, "took_s": 3},
}


def expected(kind: FaultKind) -> type:
    found = [outcome for outcome, names in CLASSES.items() if kind.value in names]
    return found[0] if found else TransientError


@pytest.mark.parametrize("answer", ANSWERS)
async def test_every_fault_has_its_class(answer: str, open_service: Any, key: str, next_fault: Any) -> None:
    judge = FunctionJudge("j", FunctionJudge.Config(kind="function", reward_range=(0, 1)), sources=["rm"])
    settings = {"score_key": "data.score"} if answer == "nested" else {}
    request = judge.request(SAMPLE, attempt=0)
    with JudgeServer(lambda call: ANSWERS[answer], faults=next_fault.faults, api_key=key) as server:
        source = open_service(server.score_url, **settings)
        sent: list[int] = []

        async def verdict() -> Verdict:
            reply = await asyncio.wait_for(source.send(request, on_sent=lambda: sent.append(1)), PATIENCE_S)
            return judge.verdict(request, reply)

        for kind in next_fault.each(kind for kind in FaultKind if kind is not FaultKind.HANG):
            sent.clear()
            try:
                outcome: Verdict | QRewardError = await verdict()
            except QRewardError as error:
                outcome = error
            assert type(outcome) is expected(kind), (kind, outcome)
            assert sent == [1], kind
            assert key not in str(outcome)
            if isinstance(outcome, Verdict):
                assert outcome.score == 0.25
            if kind.value in CLOSING:
                # The next request may still be written into the connection that is going away; it is not sent twice
                # unseen.
                with suppress(TransientError):
                    await verdict()
            assert (await verdict()).score == 0.25, kind
        await source.aclose()


async def test_a_hang_ends_with_the_attempt(open_service: Any) -> None:
    with JudgeServer(faults=Faults(script=["hang"])) as server:
        source = open_service(server.score_url)
        request = FunctionJudge("j", FunctionJudge.Config(kind="function"), sources=[]).request(SAMPLE, attempt=0)
        task = asyncio.create_task(source.send(request, on_sent=lambda: None))
        await asyncio.to_thread(server.wait_for, lambda report: report.faults == {"hang": 1})
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(server.wait_for, lambda report: report.in_flight == 0)
        await source.aclose()
