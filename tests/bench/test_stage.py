"""What peers meet in place of a network."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools

import pytest
from peers.stage import HTTPFailure, NetworkFailure, Stage, weighted_cycle

from qreward_plugins.simulation import Fault, run, scenario, score_of

from ..kit import each_of


def a_stage(**server):
    """A stage with one server that answers as it is told to."""
    made = scenario("equal", samples=8)
    plain = {"error_share": 0.0, "requests_per_minute": None, "concurrency": None, **server}
    return Stage(dataclasses.replace(made, servers=(dataclasses.replace(made.servers[0], **plain),)))


def test_an_answer_holds_the_sample_s_score():
    stage = a_stage()
    item = stage.items[3]
    answer = run(stage.ask("a", item))
    assert (answer.score, answer.prompt_tokens) == (score_of(item.id), item.prompt_tokens)
    assert stage.counts() == (1, 0, 0)
    with pytest.raises(ValueError, match="Expecting value"):
        _ = run((refusing := a_stage(invalid_share=1.0)).ask("a", refusing.items[0])).score
    assert "".join(itertools.islice(weighted_cycle({"a": 2, "b": 1}), 9)) == "abaabaaba"
    # All policies send what the engine sends.
    assert all(stage.item_of(list(item.messages)) is item for item in stage.items)
    assert sum(item.prompt_tokens + item.completion_tokens for item in stage.items) / 8 == stage.mean_tokens


@each_of(
    ("server", "what", "status", "waits", "counts"),
    [
        ({"requests_per_minute": 1}, HTTPFailure, 429, True, (2, 1, 0)),
        # A limit that nobody told of is counted apart.
        ({"requests_per_minute": 1, "declared": False}, HTTPFailure, 429, True, (2, 0, 1)),
        ({"error_share": 1.0}, HTTPFailure, 500, False, (2, 0, 0)),
        ({"faults": (Fault(0.0, 60.0, "refuse"),)}, NetworkFailure, None, False, (2, 0, 0)),
        ({"faults": (Fault(0.0, 600.0, "hang"),)}, asyncio.TimeoutError, None, False, (2, 0, 0)),
    ],
)
def test_what_a_policy_meets(server, what, status, waits, counts):
    stage = a_stage(**server)

    async def two():
        asking = (stage.ask("a", item, timeout_s=7.0) for item in stage.items[:2])
        answers = await asyncio.gather(*asking, return_exceptions=True)
        return next(answer for answer in answers if isinstance(answer, Exception))

    failure = run(two())
    assert type(failure) is what
    assert (getattr(failure, "status", None), stage.counts()) == (status, counts)
    if status is not None:
        assert (failure.retry_after is not None) is waits
    if waits:
        assert failure.retry_after.isdigit()
        assert 1 <= failure.retry_after_s <= 60


def test_faults_move_to_where_the_measured_batch_starts():
    made = scenario("dies-hanging", samples=64)
    before, after = Stage(made), Stage(made, starts_at_s=600.0)
    fault, moved = (stage.servers["a"].server.faults[0] for stage in (before, after))
    assert moved.start_s == fault.start_s + 600.0
    assert after.scenario.bound_s() == before.scenario.bound_s()
