"""Faults: when they happen, and that each spoils one reply. `sources/test_faults.py` says what a real
source makes of each; here stands what that cannot tell.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from qreward_plugins import Sample
from qreward_plugins.errors import InvalidReply
from qreward_plugins.judges.tasks import ScoreTask
from qreward_plugins.judges.verdicts import parse_verdict
from qreward_plugins.testing import FaultKind, Faults, JudgeServer, Latency, PlayFault
from qreward_plugins.testing.faults import FaultPlan

from ..kit import each_of
from .conftest import NONCE, Client, read_all


def chosen(faults: Faults, count: int, *, seed: int = 0) -> list[str | None]:
    plan = FaultPlan(faults, random.Random(seed))
    return [None if (kind := plan.choose()) is None else kind.value for _ in range(count)]


def test_rates_are_met_and_come_from_the_seed() -> None:
    faults = Faults(rates={"error_500": 0.2, FaultKind.RESET: 0.1, "hang": 0.0})
    counts = Counter(chosen(faults, 5_000, seed=1))
    assert counts["error_500"] / 5_000 == pytest.approx(0.2, abs=0.02)
    assert counts["reset"] / 5_000 == pytest.approx(0.1, abs=0.02)
    assert counts["hang"] == 0
    assert chosen(faults, 500, seed=1) == chosen(faults, 500, seed=1) != chosen(faults, 500, seed=2)
    assert None not in chosen(Faults(rates={"error_500": 0.5, "reset": 0.5}), 1_000)
    rates, script = {"error_500": 0.3}, [None] * 50
    after = chosen(Faults(rates=rates, script=script), 200, seed=7)[50:]
    assert after == chosen(Faults(rates=rates), 200, seed=7)[50:], "a script shifts nothing"


def test_a_script_goes_first_and_a_callable_one_covers_every_request() -> None:
    faults = Faults(script=["reset", None, "hang"], rates={"error_500": 1.0})
    assert chosen(faults, 5) == ["reset", None, "hang", "error_500", "error_500"]
    assert chosen(Faults(script=lambda k: "reset" if k % 2 else None), 4) == [None, "reset", None, "reset"]


@each_of(
    ("make", "problem"),
    [
        (lambda: Faults(rates={"eror_500": 0.1}), "--list-faults"),
        (lambda: Faults(rates={"error_500": 1.1}), "between 0 and 1"),
        (lambda: Faults(rates={"error_500": 0.7, "reset": 0.7}), r"add up to 1\.400"),
        (lambda: Faults(script=lambda k: None, rates={"reset": 0.1}), "omit the rates"),
        (lambda: Latency(median_s=-1.0), "median_s"),
        (lambda: PlayFault("score_nan"), "a scorer that raises gives none"),
    ],
)
def test_mistakes_are_said(make: Callable[[], object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make()


def score_in(content: str | None) -> float:
    def read(answer: Any, source: str) -> Any:
        return ScoreTask((0.0, 1.0), {}).read(answer, Sample([], ""), source)

    return parse_verdict(content or "", nonce=NONCE, read=read).raw.score


def test_a_fault_of_a_verdict_leaves_none_to_read() -> None:
    """What every other fault is to a source, `sources/test_faults.py` tells; these are for the judge to refuse."""
    kinds = [kind for kind in FaultKind if kind.stage == "verdict"]
    with JudgeServer(lambda call: 0.25, faults=Faults(script=kinds)) as server:
        for kind in kinds:
            with pytest.raises(InvalidReply):
                raise AssertionError(f"{kind} can be read as {score_in(Client(server).send().content)}")
        assert score_in(Client(server).send().content) == 0.25
        report = server.report()
    assert report.faults == {str(kind): 1 for kind in kinds}
    assert (report.requests, report.answered) == (len(kinds) + 1, 1)


def test_a_hang_ends_with_its_client_and_with_the_server() -> None:
    with JudgeServer(faults=Faults(rates={"hang": 1.0})) as server:
        connection = Client(server).open()
        server.wait_for(lambda report: report.faults == {"hang": 1} and report.in_flight == 1)
        connection.close()
        report = server.wait_for(lambda report: report.in_flight == 0)
        assert (report.statuses, report.abandoned) == ({}, 0), "it ended as a fault"
        connections = [Client(server).open() for _ in range(20)]
        server.wait_for(lambda report: report.in_flight == 20)
        server.stop()
        assert server.report().in_flight == 0
        for connection in connections:
            with connection:
                assert read_all(connection).raw == b""


@pytest.mark.parametrize("path", ["chat", "classify"])
def test_a_scorer_may_play_a_fault_for_its_request(path: str) -> None:
    def score(call: Any) -> float:
        if "bad" in call.prompt + getattr(call, "response", ""):
            raise PlayFault("reset")
        return 1.0

    with JudgeServer(score) as server:
        for text, was_reset in (("good", False), ("bad", True)):
            texts = {"model": "judge", "input": ["a", text]}
            reply = Client(server).chat(text) if path == "chat" else Client(server).post("/classify", **texts)
            assert reply.was_reset == was_reset
        report = server.report()
    assert (report.faults, report.answered, report.scorer_errors_total) == ({"reset": 1}, 1, 0)
