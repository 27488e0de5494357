"""A source that no other can stand in for: it is probed all the time, and one answer brings it back."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qreward_plugins.errors import PermanentError, SourceUnusable, Throttled, TransientError
from qreward_plugins.samples import Cause, Scored
from qreward_plugins.scheduling.breaker import LONGEST_PROBE_GAP_S
from qreward_plugins.scheduling.health import PROBES_TO_UNUSABLE, PROBES_WHILE_UNUSABLE, REFUSED_TO_OPEN
from qreward_plugins.simulation import run
from qreward_plugins.sources.base import Reply

LIMIT_S = 120.0
HANGS = 1e9
REFUSED = SourceUnusable("answered 403: the key may not do this (blocked by the firewall)", status=403)


def down_until(at, what, *, latency_s=0.08):
    return lambda number, request, now: what if now < at else latency_s


@pytest.mark.parametrize("outage_s", [10.0, 33.0, 62.0])
@pytest.mark.parametrize("what", [TransientError("connection refused"), HANGS], ids=["refuses", "hangs"])
@pytest.mark.parametrize("samples", [16, 256])
def test_the_only_judge_is_used_at_once_when_it_is_well_again(stage, what, outage_s, samples):
    source = stage.add("a", limits={"concurrency": 16}, timeout_s=LIMIT_S, behaviour=down_until(outage_s, what))
    stage.knows("a", 0.08)
    played = stage.play([10] * samples)
    assert played.all_scored
    answered_at = min(outcome.verdict.latency_s for outcome in played.outcomes)
    assert answered_at <= outage_s + (4.0 if what != HANGS else LONGEST_PROBE_GAP_S + 1)
    assert played.finished_at < answered_at + 0.08 * samples / 16 + 5
    # A probe every half second at most, beside the first burst.
    assert sum(at < outage_s for at in source.arrivals) < 6 * 16 + 2 * outage_s


@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("latency_s", [0.08, 20.0])
def test_probes_that_hang_leave_a_place_for_the_next(stage, concurrency, latency_s):
    stage.add(
        "a",
        limits={"concurrency": concurrency},
        timeout_s=LIMIT_S,
        behaviour=down_until(30.0, HANGS, latency_s=latency_s),
    )
    stage.knows("a", 0.08)
    stage.upstreams["a"].breaker.trip(0.0)
    played = stage.play([10] * 6)
    assert played.all_scored
    assert min(outcome.verdict.latency_s for outcome in played.outcomes) <= 30 + 30 + 2 * latency_s


@pytest.mark.parametrize("samples", [1, 4])
def test_a_few_samples_outlast_an_outage_with_their_tries(stage, samples):
    stage.add("a", behaviour=down_until(62.0, TransientError("connection refused")), timeout_s=LIMIT_S)
    played = stage.play([10] * samples)
    assert played.all_scored
    # A lone sample may be to blame itself and saves its tries; several share one probe a second.
    assert max(outcome.verdict.attempts for outcome in played.outcomes) <= (12 if samples == 1 else 62 / samples + 8)


def test_the_next_step_finds_a_judge_that_came_back(stage):
    """Each step is over before the pause of the last one would have been."""
    stage.add("a", behaviour=down_until(40.0, TransientError("connection refused")), timeout_s=LIMIT_S)

    async def main():
        dispatcher = stage.dispatcher()
        steps = []
        for _ in range(6):
            futures = [dispatcher.score(stage.sample(), stage.judge, deadline_s=9) for _ in range(8)]
            steps.append(await asyncio.gather(*futures))
            await asyncio.sleep(1)
        await dispatcher.aclose()
        return steps

    steps = run(main())
    assert [all(isinstance(outcome, Scored) for outcome in step) for step in steps] == [False] * 4 + [True] * 2


def test_a_judge_that_became_slow_is_not_down(stage):
    stage.add("a", limits={"concurrency": 4}, timeout_s=LIMIT_S, behaviour=down_until(20.0, HANGS, latency_s=30.0))
    stage.knows("a", 0.08)
    played = stage.play([10] * 12)
    assert played.all_scored


def test_probes_are_taken_in_turns_and_use_up_nobody(stage):
    source = stage.add("a", behaviour=down_until(30.0, TransientError("500")), limits={"concurrency": 4})
    played = stage.play([10] * 100)
    assert played.all_scored
    attempts = [outcome.verdict.attempts for outcome in played.outcomes]
    assert sum(attempts) == len(source.arrivals)
    assert max(attempts) <= 7


def test_probes_leave_the_limit_to_the_samples(stage):
    source = stage.add(
        "a", behaviour=down_until(90.0, TransientError("500")), limits={"requests_per_minute": 30, "concurrency": 4}
    )
    assert stage.play([10] * 20).all_scored
    assert sum(30 < at < 90 for at in source.arrivals) <= 0.25 * 30 + 1


def test_a_source_is_probed_while_samples_wait_although_another_could_take_them(new_stage):
    """A small fallback must not make the recovery slower than none."""
    finished = {}
    for beside in ((), ("b",)):
        stage = new_stage()
        stage.add("a", limits={"concurrency": 32}, behaviour=down_until(80.0, TransientError("refused")))
        for name in beside:
            stage.add(name, limits={"requests_per_minute": 60})
        played = stage.play([10] * 400, deadline_s=900)
        assert played.all_scored
        finished[beside] = played.finished_at
    assert finished["b",] <= finished[()]


def test_what_is_down_is_named_with_its_last_error(stage, caplog):
    stage.add("a", behaviour=down_until(10.0, TransientError("could not connect (refused)")))
    assert stage.play([10] * 16).all_scored
    said = [record.message for record in caplog.records if "a is down" in record.message]
    assert said
    assert said == ["source a is down (could not connect (refused)); one request at a time probes it until it answers"]
    assert [record.message for record in caplog.records].count("source a answers again") == 1


def test_an_outage_is_told_again_when_its_cause_changes(stage, caplog):
    errors = iter(["no route"] * 40 + ["refused"] * 1000)
    stage.add("a", behaviour=lambda *_: TransientError(next(errors)))
    stage.play([10] * 16)
    said = [record.message for record in caplog.records if "a is down" in record.message]
    assert [("no route" in line, "refused" in line) for line in said] == [(True, False), (False, True)]


def test_a_text_that_always_differs_does_not_flood_the_log(stage, caplog):
    numbers = itertools.count()
    stage.add("a", behaviour=lambda *_: TransientError(f"request {next(numbers)} was lost"))
    stage.play([10] * 16)
    assert 1 <= sum("a is down" in record.message for record in caplog.records) <= 10


def test_who_was_never_asked_is_told_what_its_source_said(stage):
    stage.add("a", behaviour=lambda *_: TransientError("could not connect (refused)"), limits={"concurrency": 1})
    played = stage.play([10] * 64)
    assert not any(outcome.reward is not None for outcome in played.outcomes)
    assert all("could not connect (refused)" in outcome.detail for outcome in played.outcomes)


def test_a_source_that_only_throttles_is_named_once_with_what_it_says(stage, caplog):
    stage.add("a", behaviour=lambda *_: Throttled("429 (over your plan)", status=429))
    played = stage.play([10] * 16)
    said = [record.message for record in caplog.records if "429 (over your plan)" in record.message]
    assert len(said) == len(set(said)), said
    assert all("429 (over your plan)" in outcome.detail for outcome in played.outcomes)


# What is refused


def test_a_dead_key_ends_a_batch_at_once_and_clearly(stage, caplog):
    source = stage.add(
        "a",
        answer=lambda request: Reply(text="1"),
        behaviour=lambda *_: SourceUnusable("401: the key was refused", status=401),
        limits={"concurrency": 32},
    )
    played = stage.play([10] * 512)
    assert {(outcome.cause, outcome.reason) for outcome in played.outcomes} == {(Cause.INFRA, "no_source")}
    assert all("401: the key was refused" in outcome.detail for outcome in played.outcomes)
    assert played.finished_at < 1
    assert len(source.arrivals) <= 32 + PROBES_TO_UNUSABLE
    assert stage.upstreams["a"].state(played.finished_at) == "unusable"
    assert "401" in "".join(record.message for record in caplog.records if record.levelname == "ERROR")


def test_a_source_that_is_out_is_asked_by_every_batch_and_comes_back(stage):
    source = stage.add("a", limits={"concurrency": 8}, behaviour=down_until(20.0, SourceUnusable("401", status=401)))

    async def main():
        dispatcher = stage.dispatcher()
        batches = []
        for _ in range(4):
            arrived = len(source.arrivals)
            futures = [dispatcher.score(stage.sample(), stage.judge, deadline_s=60) for _ in range(40)]
            outcomes = await asyncio.gather(*futures)
            batches.append((sum(isinstance(outcome, Scored) for outcome in outcomes), len(source.arrivals) - arrived))
            await asyncio.sleep(8)
        await dispatcher.aclose()
        return batches

    batches = run(main())
    assert [scored for scored, _ in batches] == [0, 0, 0, 40]
    assert batches[0][1] <= 8 + PROBES_TO_UNUSABLE
    assert [asked for _, asked in batches[1:3]] == [PROBES_WHILE_UNUSABLE] * 2
    assert stage.upstreams["a"].state(60.0) == "up"


def test_samples_one_by_one_probe_a_source_that_is_out(stage):
    source = stage.add("a", behaviour=down_until(30.0, SourceUnusable("401", status=401)))

    async def main():
        dispatcher = stage.dispatcher()
        outcomes = []
        for _ in range(60):
            outcomes.append(await dispatcher.score(stage.sample(), stage.judge, deadline_s=60))
            await asyncio.sleep(1)
        await dispatcher.aclose()
        return outcomes

    outcomes = run(main())
    lost = [outcome for outcome in outcomes if not isinstance(outcome, Scored)]
    assert 20 <= len(lost) <= 31
    assert len(source.arrivals) == 60


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("front", [True, False], ids=["front", "spread"])
def test_responses_that_a_firewall_blocks_take_nothing_from_the_others(stage, share, front):
    """Even many of them, all in the first burst."""
    size_of = {True: (900, 10), False: (11, 10)}[front]
    stage.add(
        "a",
        limits={"concurrency": 16},
        behaviour=lambda number, request, now: REFUSED if request.size == size_of[0] else 2.0,
    )
    bad = int(share * 200)
    played = stage.play([size_of[0]] * bad + [size_of[1]] * (200 - bad))
    assert all(isinstance(outcome, Scored) for outcome in played.outcomes[bad:])
    assert {outcome.reason for outcome in played.outcomes[:bad]} == {"no_source"}
    assert all("403" in outcome.detail and outcome.attempts == 1 for outcome in played.outcomes[:bad])
    assert played.finished_at < 2 * (200 * 2.0 / 16)
    assert stage.upstreams["a"].state(played.finished_at) == "up"


def test_what_is_blocked_at_one_source_is_tried_at_the_other(stage):
    stage.add("a", behaviour=lambda number, request, now: REFUSED if request.size == 13 else 1.0)
    stage.add("b", behaviour=lambda *_: 1.0)
    played = stage.play([13] * (REFUSED_TO_OPEN - 1) + [10] * 20)
    assert played.all_scored


PROVOKED = {
    **{f"{status}": SourceUnusable(f"answered {status}", status=status) for status in (301, 401, 402, 403, 404, 405)},
    **{f"{status}": PermanentError(f"answered {status}", status=status) for status in (400, 413, 422, 451)},
    **{f"{status}": TransientError(f"answered {status}", status=status) for status in (408, 500, 502, 503)},
    "HTML": TransientError("answered 200 with text/html that is not a JSON object", status=200),
    "TLS": SourceUnusable("the server's certificate does not verify"),
    "hang": HANGS,
    "garbage": None,
}


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(sorted(PROVOKED)),
    others=st.integers(1, 60),
    position=st.integers(0, 60),
    size=st.sampled_from([1, 50, 5000]),
    concurrency=st.integers(1, 16),
    arrives_s=st.sampled_from([0.0, 0.3, 3.0]),
    latency_s=st.sampled_from([0.05, 1.0, 2.5, 5.0, 30.0]),
    # A filter in front of the judge may answer the poisoned one at once.
    at_once=st.booleans(),
)
@example(kind="garbage", others=6, position=0, size=5000, concurrency=6, arrives_s=0.0, latency_s=5.0, at_once=False)
@example(kind="garbage", others=13, position=12, size=5000, concurrency=14, arrives_s=0.0, latency_s=5.0, at_once=False)
@example(kind="garbage", others=33, position=0, size=1, concurrency=14, arrives_s=3.0, latency_s=20.0, at_once=True)
def test_nothing_that_one_response_provokes_takes_the_source_from_the_others(
    new_stage, kind, others, position, size, concurrency, arrives_s, latency_s, at_once
):
    """P11: one poisoned sample among many, at the only source, handed in together or one by one."""
    stage = new_stage()
    fault = PROVOKED[kind]
    limit_s = 60.0
    fault_s = 0.01 if at_once else latency_s
    stage.add(
        "a",
        timeout_s=limit_s,
        limits={"concurrency": concurrency},
        behaviour=lambda number, request, now: (
            latency_s if request.size != size else fault_s if fault is None else fault
        ),
        answer=lambda request: Reply(text="bad" if request.size == size else "1"),
    )

    async def main():
        dispatcher = stage.dispatcher()
        futures = []
        for number in range(others + 1):
            sample = stage.sample(size if number == min(position, others) else 100 + number)
            futures.append(dispatcher.score(sample, stage.judge, deadline_s=4000))
            await asyncio.sleep(arrives_s)
        innocent = [future for number, future in enumerate(futures) if number != min(position, others)]
        outcomes = await asyncio.gather(*innocent)
        await dispatcher.aclose()
        return outcomes

    outcomes = run(main())
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert {outcome.verdict.attempts for outcome in outcomes} <= {1, 2}
    # They wait for one another and for the place that the poisoned one holds, never for the source to be trusted again.
    waited_s = max(outcome.verdict.latency_s for outcome in outcomes)
    # What hangs holds one place for its time limit, again and again; where there is only one, for all of its tries.
    places = min(concurrency, others + 1)
    hang_s = 0.0
    if kind == "hang":
        places, hang_s = (places - 1, 0.0) if places > 1 else (1, 7 * limit_s)
    assert waited_s <= (others + 8) * latency_s / places + latency_s + hang_s + 1.0


def test_pairs_of_probes_of_a_source_that_hangs_are_apart(stage):
    source = stage.add("a", limits={"concurrency": 8}, timeout_s=LIMIT_S, behaviour=lambda *_: HANGS)
    stage.knows("a", 0.1)
    stage.play([10] * 64, deadline_s=100)
    probes = [at for at in source.arrivals if at > 6]
    assert 7 <= len(probes) <= 25
    assert all(later - earlier >= 2 for earlier, later in itertools.pairwise(probes))
