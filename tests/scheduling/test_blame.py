"""Blame: each kind of waiting is found and laid at the right source, and the parts add up to the makespan."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qreward_plugins.errors import PermanentError, SourceUnusable, Throttled, TransientError
from qreward_plugins.observers.batch_report import PART_KINDS
from qreward_plugins.quotas.ledger import MARGIN_S
from qreward_plugins.samples import Failed
from qreward_plugins.scheduling import Cutoff
from qreward_plugins.scheduling.blame import STRAGGLES_FROM
from qreward_plugins.simulation import run
from qreward_plugins.sources.base import Reply


def spent(report, *, least=0.001):
    """The parts of a report as {(kind, source): seconds}; they have to add up."""
    assert sum(part.seconds for part in report.parts) == pytest.approx(report.makespan_s, abs=1e-9)
    assert all(part.seconds > 0 for part in report.parts)
    assert {part.kind for part in report.parts} <= set(PART_KINDS)
    total = {}
    for part in report.parts:
        total[part.kind, part.source] = total.get((part.kind, part.source), 0.0) + part.seconds
    return {key: seconds for key, seconds in total.items() if seconds >= least}


def approx(parts):
    return {key: pytest.approx(seconds, abs=0.02) for key, seconds in parts.items()}


def test_service_is_what_an_answer_usually_takes(stage):
    stage.add("a", behaviour=lambda *_: 3.0)
    stage.knows("a", 3.0)
    assert spent(stage.play([10]).report) == approx({("service", "a"): 3.0})


def test_what_is_longer_than_usual_is_a_straggler(stage):
    stage.add("a", behaviour=lambda *_: 10.0)
    stage.knows("a", 2.0)
    usual_s = STRAGGLES_FROM * 2.0
    assert spent(stage.play([10]).report) == approx({("service", "a"): usual_s, ("straggler", "a"): 10.0 - usual_s})


def test_waiting_behind_others_is_queue(stage):
    stage.add("a", limits={"concurrency": 2}, behaviour=lambda *_: 2.0)
    stage.knows("a", 2.0)
    assert spent(stage.play([10] * 8).report) == approx({("queue", "a"): 6.0, ("service", "a"): 2.0})


def test_waiting_for_a_window_is_quota(stage):
    stage.add("a", limits={"requests_per_minute": 5, "concurrency": 50})
    stage.knows("a", 1.0)
    played = stage.play([10] * 15)
    assert spent(played.report) == approx({("quota", "a"): 2 * (60 + MARGIN_S), ("service", "a"): 1.0})


def test_waiting_for_tokens_is_quota(stage):
    stage.add("a", limits={"tokens_per_minute": 750, "concurrency": 50})
    stage.knows("a", 1.0, size=300)
    parts = spent(stage.play([300] * 4).report)
    assert set(parts) == {("quota", "a"), ("service", "a")}
    assert parts["quota", "a"] == pytest.approx(60, abs=2)


def test_waiting_for_a_pause_that_the_source_asked_for_is_pause(stage):
    stage.add("a", behaviour=lambda number, *_: Throttled("429", retry_after_s=7) if number == 0 else 1.0)
    stage.knows("a", 1.0)
    assert spent(stage.play([10]).report) == approx({("pause", "a"): 7.0, ("service", "a"): 1.0})


def test_failed_attempts_and_the_rest_after_them_are_retry(stage):
    async def fails_slowly(request, *, on_sent):
        on_sent()
        stage.sources["a"].arrivals.append(0.0)
        await asyncio.sleep(2.0 if len(stage.sources["a"].arrivals) == 1 else 1.0)
        if len(stage.sources["a"].arrivals) == 1:
            raise TransientError("reset")
        return Reply(text="1")

    stage.add("a").send = fails_slowly
    stage.knows("a", 1.0)
    played = stage.play([10])
    rested_s = played.finished_at - 3.0
    assert 0 < rested_s <= 0.5
    assert spent(played.report) == approx({("retry", "a"): 2.0 + rested_s, ("service", "a"): 1.0})


def test_an_invalid_verdict_is_a_retry_at_the_source_that_gave_it(stage):
    stage.add("a", behaviour=lambda *_: 2.0, answer=lambda request: Reply(text="bad"))
    stage.add("b", behaviour=lambda *_: 2.9)
    stage.knows("a", 2.0)
    stage.knows("b", 2.9)
    played = stage.play([10])
    assert spent(played.report) == approx({("retry", "a"): 2.0, ("service", "b"): 2.9})


def test_a_source_that_is_taken_out_cost_the_time_it_took(stage):
    async def refuses_late(request, *, on_sent):
        on_sent()
        await asyncio.sleep(2.0)
        raise SourceUnusable("401", status=401)

    stage.add("a", behaviour=lambda *_: 1.0).send = refuses_late
    stage.add("b", behaviour=lambda *_: 1.3)
    stage.knows("a", 1.0)
    stage.knows("b", 1.3)
    assert spent(stage.play([10]).report) == approx({("retry", "a"): 2.0, ("service", "b"): 1.3})


def test_a_sample_that_came_later_is_arrival(stage):
    stage.add("a")
    stage.knows("a", 1.0)

    async def main():
        dispatcher = stage.dispatcher()
        samples = [stage.sample(), stage.sample()]
        batch = dispatcher.batches.new([each.group_id for each in samples])
        futures = []
        for sample in samples:
            futures.append(dispatcher.score(sample, stage.judge, deadline_s=90, batch=batch))
            await asyncio.sleep(4.0)
        await asyncio.gather(*futures)
        dispatcher.batches.seal(batch)
        await dispatcher.aclose()
        return stage.statistics.last_batch

    assert spent(run(main())) == approx({("arrival", ""): 4.0, ("service", "a"): 1.0})


def test_a_hedge_leads_to_the_attempt_that_was_too_slow(stage):
    seconds = iter([100.0])
    for name in "ab":
        stage.add(name, behaviour=lambda *_: next(seconds, 2.0))
        stage.knows(name, 2.0)
    played = stage.play([10], hedge=True)
    first, second = (sent.source for sent in stage.sent)
    until_hedge = stage.sent[1].at
    assert played.report.hedges == 1
    assert spent(played.report) == approx({("service", first): until_hedge, ("service", second): 2.0})


def test_a_hedge_of_something_overdue_leads_to_a_straggler(stage):
    seconds = iter([100.0])
    stage.add("a", behaviour=lambda *_: next(seconds, 1.0), limits={"concurrency": 5})
    stage.knows("a", 1.0)
    played = stage.play([10], hedge=True)
    hedged_at = stage.sent[1].at
    assert spent(played.report) == approx(
        {("service", "a"): STRAGGLES_FROM + 1.0, ("straggler", "a"): hedged_at - STRAGGLES_FROM}
    )


def test_a_hedge_that_lost_is_not_to_blame(stage):
    seconds = iter([2.6])
    for name in "ab":
        stage.add(name, behaviour=lambda *_: next(seconds, 2.0))
        stage.knows(name, 2.0)
    played = stage.play([10], hedge=True)
    assert played.report.hedges == 1
    assert spent(played.report) == approx({("service", stage.sent[0].source): 2.6})


def test_each_wait_is_laid_at_the_source_that_came_next(stage):
    stage.add("a", limits={"concurrency": 1}, behaviour=lambda n, *_: PermanentError("422") if n == 1 else 3.0)
    stage.add("b", behaviour=lambda *_: 3.0)
    for name in "ab":
        stage.knows(name, 3.0)
    stage.upstreams["b"].throttled(4.0, 0.0, 0.0)
    played = stage.play([10, 10])
    assert spent(played.report) == approx({("queue", "a"): 3.0, ("pause", "b"): 1.0, ("service", "b"): 3.0})


def test_a_hang_that_is_rescued_is_retry(stage):
    stage.add("a", limits={"concurrency": 10}, behaviour=lambda number, *_: 1e6 if number == 0 else 1.0, timeout_s=90)
    stage.knows("a", 1.0)
    played = stage.play([10])
    parts = spent(played.report)
    assert played.all_scored
    assert parts["service", "a"] == pytest.approx(1.0, abs=0.02)
    assert sum(seconds for (kind, _), seconds in parts.items() if kind in ("retry", "pause")) == pytest.approx(
        played.finished_at - 1.0, abs=0.05
    )
    assert parts["retry", "a"] >= 5


@pytest.mark.parametrize("failure", ["deadline", "cutoff"])
def test_a_batch_that_ended_in_failure_has_parts_too(stage, failure):
    stage.add("a", behaviour=lambda *_: 1e6, timeout_s=1e5, limits={"concurrency": 1})
    stage.knows("a", 2.0)
    cutoff = Cutoff(5.0, quorum=0.0) if failure == "cutoff" else None
    played = stage.play([10], deadline_s=6.0, cutoff=cutoff)
    end = 5.0 if failure == "cutoff" else 6.0
    assert (played.report.failed, played.report.scored, played.report.makespan_s) == (1, 0, end)
    assert spent(played.report) == approx({("service", "a"): 3.0, ("straggler", "a"): end - 3.0})


def test_a_sample_that_was_never_sent_waited_in_the_queue(stage):
    stage.add("a", behaviour=lambda *_: 1e6, timeout_s=1e5, limits={"concurrency": 1})
    stage.knows("a", 1e6)
    played = stage.play([10, 9], deadline_s=6.0)
    assert all(isinstance(outcome, Failed) for outcome in played.outcomes)
    parts = spent(played.report)
    assert sum(parts.values()) == pytest.approx(6.0)


def test_counts(stage):
    stage.add("a", behaviour=lambda number, request, now: TransientError("reset") if number == 0 else 1.0)
    stage.sources["a"].answer = lambda request: Reply(text="bad" if request.size == 13 else "1")
    report = stage.play([13, 10, 10, 10]).report
    assert (report.samples, report.scored, report.failed) == (4, 3, 1)
    assert report.attempts == len(stage.sent) == 6


sources = st.fixed_dictionaries(
    {
        "requests": st.one_of(st.none(), st.integers(2, 30)),
        "concurrency": st.integers(1, 10),
        "seconds": st.floats(0.05, 15),
        "transient": st.floats(0, 0.5),
        "throttle": st.floats(0, 0.3),
        "straggle": st.floats(0, 0.3),
        "reject": st.floats(0, 0.2),
        "garbage": st.floats(0, 0.6),
        "seed": st.integers(0, 2**32),
    }
)


def behaviour_of(spec):
    rng = random.Random(spec["seed"])

    def behaviour(number, request, now):
        for rate, end in (
            ("transient", TransientError("reset")),
            ("throttle", Throttled("429", retry_after_s=3.0)),
            ("reject", PermanentError("422")),
            ("straggle", spec["seconds"] * 10),
        ):
            if rng.random() < spec[rate]:
                return end
        return spec["seconds"] * rng.lognormvariate(0, 0.3)

    return behaviour


@settings(max_examples=60, deadline=None)
@given(
    specs=st.lists(sources, min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=30),
    hedge=st.booleans(),
    deadline=st.floats(1, 200),
    cutoff=st.one_of(st.none(), st.builds(Cutoff, st.floats(0, 100), st.floats(0, 1))),
)
def test_parts_add_up_whatever_happened(new_stage, specs, sizes, hedge, deadline, cutoff):
    stage = new_stage()
    for number, spec in enumerate(specs):
        limits = {"concurrency": spec["concurrency"]}
        if spec["requests"]:
            limits["requests_per_minute"] = spec["requests"]
        rng = random.Random(spec["seed"] + 1)
        stage.add(
            f"s{number}",
            limits=limits,
            behaviour=behaviour_of(spec),
            answer=lambda request, rng=rng, spec=spec: Reply(text="bad" if rng.random() < spec["garbage"] else "1"),
        )
    played = stage.play(sizes, deadline_s=deadline, cutoff=cutoff, hedge=hedge)
    report = played.report
    spent(report)
    assert report.makespan_s == pytest.approx(played.finished_at, abs=1e-6)
    assert (report.samples, report.scored + report.failed) == (len(sizes), len(sizes))
    # A cut-off may end an attempt before it is sent.
    unsent = report.attempts - len(stage.sent)
    assert 0 <= unsent <= sum(stage.counted(name).cancelled for name in stage.upstreams)
    assert report.hedges == sum(stage.counted(name).hedges for name in stage.upstreams)
    assert {part.source for part in report.parts} <= {"", *stage.upstreams}
