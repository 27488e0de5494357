"""Batches: whose samples go first, when one is cut off, and which samples that come one by one belong together."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from qreward_plugins.errors import TransientError
from qreward_plugins.samples import Cause, Failed, Scored
from qreward_plugins.scheduling import Batch, Cutoff
from qreward_plugins.simulation import run
from qreward_plugins.sources.base import Reply


def reasons(outcomes):
    return [outcome.reason if isinstance(outcome, Failed) else "scored" for outcome in outcomes]


# Which batch goes first


def in_turn(stage, *batches):
    """Hand batches in, each (at, priority, sizes), to a source; return when each of them was done."""

    async def main():
        dispatcher = stage.dispatcher()

        async def hand_in(at, priority, sizes):
            await asyncio.sleep(at)
            samples = [stage.sample(size) for size in sizes]
            batch = dispatcher.batches.new([each.group_id for each in samples], priority=priority)
            futures = [dispatcher.score(sample, stage.judge, deadline_s=300, batch=batch) for sample in samples]
            outcomes = await asyncio.gather(*futures)
            assert all(isinstance(outcome, Scored) for outcome in outcomes)
            done_at = dispatcher.now()
            dispatcher.batches.seal(batch)
            return done_at

        ends = await asyncio.gather(*[hand_in(*batch) for batch in batches])
        await dispatcher.aclose()
        return ends

    return run(main())


@pytest.fixture
def one_place(stage):
    stage.add("a", limits={"concurrency": 1})
    return stage


def test_of_two_batches_the_one_that_came_first_ends_first(one_place):
    assert in_turn(one_place, (0.0, 0, [10] * 10), (0.5, 0, [99] * 10)) == pytest.approx([10.0, 20.0])


def test_a_batch_of_higher_priority_goes_first_whatever_came_earlier(one_place):
    assert in_turn(one_place, (0.0, 0, [10] * 10), (3.5, 1, [5] * 4)) == pytest.approx([14.0, 8.0])


def test_priorities_are_strict(one_place):
    ends = in_turn(one_place, (0.0, -1, [99] * 3), (0.5, 2, [1] * 3), (0.5, 1, [50] * 3), (0.5, 0, [50] * 3))
    assert ends == pytest.approx([12.0, 4.0, 7.0, 10.0])


def test_retries_go_before_the_rest_of_their_batch_and_after_a_higher_priority(stage):
    def behaviour(number, request, now):
        return TransientError("reset") if number == 0 else 1.0

    stage.add("a", limits={"concurrency": 1}, behaviour=behaviour)
    in_turn(stage, (0.0, 0, [9, 8, 7, 6]), (0.5, 1, [1]))
    assert [sent.size for sent in stage.sent] == [9, 8, 1, 9, 7, 6]


def test_samples_of_a_higher_priority_that_come_one_by_one_go_first(one_place):
    async def main():
        dispatcher = one_place.dispatcher()
        usual = [dispatcher.score(one_place.sample(), one_place.judge, deadline_s=300) for _ in range(10)]
        await asyncio.sleep(0.5)
        urgent = dispatcher.batches.of_singles(5)
        first = dispatcher.score(one_place.sample(), one_place.judge, deadline_s=300, batch=urgent)
        await first
        assert dispatcher.now() == pytest.approx(2.0)
        await asyncio.gather(*usual)
        assert urgent is not dispatcher.batches.of_singles()
        await dispatcher.aclose()

    run(main())


def test_no_batch_is_kept_of_a_priority_that_nothing_is_scored_with_any_more(one_place):
    gc.collect()  # what other tests left

    async def main():
        dispatcher = one_place.dispatcher()
        batches = dispatcher.batches
        for priority in range(500):
            future = dispatcher.score(
                one_place.sample(), one_place.judge, deadline_s=300, batch=batches.of_singles(priority)
            )
            batches.of_singles(-priority)  # of which nothing is asked
            await future
        kept = [each for each in gc.get_objects() if type(each) is Batch]
        await dispatcher.aclose()
        return len(kept)

    assert run(main()) < 5


# The cut-off


def some_hang(stage, hang, *, seconds=1.0, places=100):
    """Requests of the sizes in `hang` are never answered."""
    stage.add(
        "a",
        limits={"concurrency": places},
        behaviour=lambda number, request, now: 1e6 if request.size in hang else seconds,
        timeout_s=1e5,
    )


@pytest.mark.parametrize("changes", [{"after_s": -1}, {"after_s": float("nan")}, {"quorum": 1.01}, {"quorum": -0.1}])
def test_a_cutoff_that_makes_no_sense_is_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        Cutoff(**{"after_s": 1.0, **changes})


def test_at_its_cutoff_a_batch_fails_what_is_missing(stage):
    some_hang(stage, {13})
    played = stage.play([10] * 9 + [13], cutoff=Cutoff(5.0, quorum=0.9))
    assert reasons(played.outcomes) == ["scored"] * 9 + ["cutoff"]
    last = played.outcomes[-1]
    assert (last.cause, last.reward, played.finished_at) == (Cause.INFRA, None, 5.0)
    assert "5.0 s" in last.detail
    assert (played.report.scored, played.report.failed) == (9, 1)


def test_a_batch_that_is_complete_does_not_wait_for_its_cutoff(stage):
    some_hang(stage, set())
    assert stage.play([10] * 10, cutoff=Cutoff(50.0)).finished_at == pytest.approx(1.0)


def test_after_the_cutoff_the_batch_ends_as_soon_as_its_quorum_is_in(stage):
    some_hang(stage, {13}, places=2)
    # One place is taken by what hangs, the other gives a verdict a second: nine of ten take 9 s.
    played = stage.play([13] + [10] * 9, cutoff=Cutoff(3.0, quorum=0.8))
    assert played.finished_at == pytest.approx(8.0)
    assert reasons(played.outcomes).count("scored") == 8


def test_the_quorum_holds_for_every_group(stage):
    some_hang(stage, {13})
    # Of the whole batch 90 % are in at 1 s, but only half of group b.
    played = stage.play(
        [10] * 18 + [10, 13], groups=["a"] * 18 + ["b"] * 2, cutoff=Cutoff(2.0, quorum=0.8), deadline_s=30
    )
    assert (played.finished_at, reasons(played.outcomes)[-1]) == (30.0, "deadline")


def test_groups_that_are_in_let_it_end(stage, new_stage):
    sizes = [10, 10, 10, 13] * 3
    for groups, finished_at in ((["a"] * 4 + ["b"] * 4 + ["c"] * 4, 4.0), (["a"] * 4 + ["b"] * 4 + [None] * 4, 4.0)):
        stage = new_stage()
        some_hang(stage, {13})
        played = stage.play(sizes, groups=groups, cutoff=Cutoff(4.0, quorum=0.75))
        assert played.finished_at == finished_at
        assert reasons(played.outcomes) == ["scored", "scored", "scored", "cutoff"] * 3


@pytest.mark.parametrize(("quorum", "finished_at"), [(0.0, 2.0), (0.5, 2.0), (0.51, 30.0), (1.0, 30.0)])
def test_a_share_of_a_group_is_rounded_up(stage, quorum, finished_at):
    some_hang(stage, {13})
    played = stage.play([10, 10, 13, 13], cutoff=Cutoff(2.0, quorum=quorum), deadline_s=30)
    assert played.finished_at == finished_at


def test_failed_samples_are_no_verdicts(stage):
    some_hang(stage, {13})
    stage.sources["a"].answer = lambda request: Reply(text="bad" if request.size == 11 else "1")
    # One of four has a verdict, two are invalid: of those that may still have one it is a half.
    played = stage.play([10, 11, 11, 13], cutoff=Cutoff(5.0, quorum=0.75), deadline_s=30)
    assert (played.finished_at, reasons(played.outcomes)[-1]) == (30.0, "deadline")


def test_samples_that_failed_are_not_waited_for(stage):
    some_hang(stage, {13})
    stage.sources["a"].answer = lambda request: Reply(text="bad" if request.size == 11 else "1")
    sizes = [10] * 8 + [11, 13]
    # Eight of the nine that may still have a verdict.
    played = stage.play(sizes, cutoff=Cutoff(5.0, quorum=0.85), deadline_s=30)
    assert (played.finished_at, reasons(played.outcomes)[-2:]) == (5.0, ["invalid", "cutoff"])


def test_a_large_batch_is_cut_off_as_a_whole(stage):
    some_hang(stage, {3}, places=50)
    played = stage.play([10] * 50 + [3] * 1000, cutoff=Cutoff(5.0, quorum=0.0))
    assert played.finished_at == 5.0
    assert reasons(played.outcomes).count("cutoff") == 1000


def test_what_was_sent_for_a_batch_that_is_cut_off_is_cancelled(stage):
    some_hang(stage, {13}, places=5)
    stage.play([13] * 20, cutoff=Cutoff(5.0, quorum=0.0))
    assert stage.sources["a"].cancelled == 5


def test_other_batches_are_not_cut_off(stage):
    some_hang(stage, set(), seconds=10.0)

    async def main():
        dispatcher = stage.dispatcher()
        samples = [stage.sample()]
        cut = dispatcher.batches.new([each.group_id for each in samples], cutoff=Cutoff(5.0, quorum=0.0))
        whole = dispatcher.batches.new([each.group_id for each in samples])
        futures = [
            dispatcher.score(samples[0], stage.judge, deadline_s=300, batch=batch) for batch in (cut, whole, None)
        ]
        outcomes = await asyncio.gather(*futures)
        await dispatcher.aclose()
        return reasons(outcomes)

    assert run(main()) == ["cutoff", "scored", "scored"]


@pytest.mark.parametrize("ending", ["complete", "cut", "closed"])
def test_no_timer_of_a_batch_outlives_it(stage, ending):
    some_hang(stage, {13})
    batches = []

    async def main():
        loop = asyncio.get_running_loop()
        dispatcher = stage.dispatcher()
        samples = [stage.sample(10 if ending == "complete" else 13)]
        batch = dispatcher.batches.new(
            [each.group_id for each in samples], cutoff=Cutoff(5.0 if ending == "cut" else 1e6, quorum=0.0)
        )
        batches.append(weakref.ref(batch))
        future = dispatcher.score(samples[0], stage.judge, deadline_s=1e5, batch=batch)
        if ending == "closed":
            await asyncio.sleep(1)
            await dispatcher.aclose()
        else:
            await future
            dispatcher.batches.seal(batch)
        left = [repr(timer) for timer in loop._scheduled if not timer.cancelled()]
        await dispatcher.aclose()
        assert not any("_check" in timer for timer in left)
        await asyncio.sleep(1e5 + 1)

    run(main())
    gc.collect()
    assert batches[0]() is None


# Several calls of one member


def joined(stage, sizes, *, scored, cutoff=None, deadline_s=30.0):
    """Make calls of these sizes as one member, which leaves scored or not as `scored` says of the outcomes.

    Returns the outcomes, whether the batch was done before the member left, and its report.
    """

    async def main():
        dispatcher = stage.dispatcher()
        batch = dispatcher.batches.new(["g"], cutoff=cutoff)
        member = dispatcher.batches.join(batch, "g")
        jobs = [
            dispatcher.score(stage.sample(size), stage.judge, deadline_s=deadline_s, member=member) for size in sizes
        ]
        dispatcher.batches.seal(batch)
        outcomes = await asyncio.gather(*jobs)
        done = batch.done, stage.statistics.last_batch
        dispatcher.batches.leave(member, scored=scored(outcomes))
        assert batch.done
        report = stage.statistics.last_batch
        await dispatcher.aclose()
        return outcomes, done, report

    return run(main())


def test_a_member_is_one_sample_and_its_batch_is_not_done_before_it_leaves(stage):
    stage.add("a", behaviour=lambda number, request, now: 1.0 + number)
    _, done, report = joined(stage, [10, 11, 12], scored=lambda _: True)
    assert done == (False, None)
    assert (report.samples, report.scored, report.failed, report.attempts) == (1, 1, 0, 3)
    assert report.makespan_s == pytest.approx(3.0)


def test_a_member_counts_as_it_leaves_and_not_as_its_calls_end(stage):
    stage.add("a")
    _, _, report = joined(stage, [10, 11], scored=lambda _: False)
    assert (report.samples, report.scored, report.failed) == (1, 0, 1)


def test_a_quorum_waits_for_the_member_and_not_for_its_calls(stage):
    some_hang(stage, {13})
    # One of two jobs is in long before the cut-off; the sample is not.
    outcomes, *_ = joined(stage, [10, 13], scored=lambda _: False, cutoff=Cutoff(5.0, quorum=1.0))
    assert reasons(outcomes) == ["scored", "deadline"]
    outcomes, *_ = joined(stage, [10, 13], scored=lambda _: False, cutoff=Cutoff(5.0, quorum=0.0))
    assert reasons(outcomes) == ["scored", "cutoff"]


def test_a_member_that_leaves_may_be_what_its_batch_waited_for(stage):
    some_hang(stage, {13})

    async def main():
        dispatcher = stage.dispatcher()
        samples = [stage.sample(13), stage.sample(10)]
        batch = dispatcher.batches.new([each.group_id for each in samples], cutoff=Cutoff(2.0, quorum=0.5))
        hangs = dispatcher.score(samples[0], stage.judge, deadline_s=60, batch=batch)
        member = dispatcher.batches.join(batch, samples[1].group_id)
        await dispatcher.score(samples[1], stage.judge, deadline_s=60, member=member)
        await asyncio.sleep(6)
        assert not hangs.done()
        dispatcher.batches.leave(member, scored=True)
        assert hangs.result().reason == "cutoff"
        await dispatcher.aclose()

    run(main())


def test_a_member_that_makes_no_call_leaves_no_trace(stage):
    stage.add("a")
    _, _, report = joined(stage, [], scored=lambda _: True)
    assert report is None


def test_a_stream_of_members_is_quiet_when_none_came_for_long(stage):
    stage.add("a", limits={"concurrency": 100})

    async def main():
        dispatcher = stage.dispatcher()
        batch = dispatcher.batches.of_singles()
        for _ in range(60):
            member = dispatcher.batches.join(batch)
            for size in (10, 11, 12):
                dispatcher.score(stage.sample(size), stage.judge, deadline_s=300, member=member)
            await asyncio.sleep(0.5)
        # Samples come twice a second, so 4 s without one are not long, and 6 s are.
        quiet = batch.quiet(dispatcher.now() + 3.5), batch.quiet(dispatcher.now() + 5.5)
        counts = batch.samples, batch.jobs
        await dispatcher.aclose()
        return quiet, counts

    assert run(main()) == ((False, True), (60, 180))


# One by one


def trickle(stage, *submissions, seconds=1.0):
    """Submit samples at these times; return the batches that they belonged to, and the reports, by when they came."""
    stage.add("a", behaviour=lambda *_: seconds, limits={"concurrency": 50})
    batches, reports = [], []

    async def main():
        dispatcher = stage.dispatcher()
        futures = []
        for at in submissions:
            await asyncio.sleep(at - dispatcher.now())
            futures.append(dispatcher.score(stage.sample(), stage.judge, deadline_s=300))
            batches.append(dispatcher.batches.of_singles())
        while not reports or reports[-1] is not stage.statistics.last_batch:
            if stage.statistics.last_batch is not None:
                reports.append(stage.statistics.last_batch)
            await asyncio.sleep(0.1)
        await asyncio.gather(*futures)
        await asyncio.sleep(0)
        reports.append(stage.statistics.last_batch)
        await dispatcher.aclose()

    run(main())
    return batches, reports


def test_samples_that_overlap_are_one_batch(stage):
    batches, reports = trickle(stage, 0.0, 0.5, 1.2, 2.0)
    assert len(set(batches)) == 1
    report = reports[-1]
    assert (report.samples, report.scored, report.makespan_s) == (4, 4, pytest.approx(3.0))


def test_after_a_pause_a_new_batch_begins(stage):
    batches, reports = trickle(stage, 0.0, 0.5, 10.0, 10.2)
    assert [batches.index(batch) for batch in batches] == [0, 0, 2, 2]
    assert (reports[-1].samples, reports[-1].makespan_s) == (2, pytest.approx(1.2))


def test_a_batch_nobody_joined_does_not_begin_before_its_first_sample(stage):
    stage.add("a")

    async def main():
        dispatcher = stage.dispatcher()
        dispatcher.batches.of_singles()
        await asyncio.sleep(100)
        await dispatcher.score(stage.sample(), stage.judge, deadline_s=300, batch=dispatcher.batches.of_singles())
        await asyncio.sleep(0)
        await dispatcher.aclose()
        return stage.statistics.last_batch

    report = run(main())
    assert report.makespan_s == pytest.approx(1.0)


def test_priorities_have_batches_of_their_own(stage):
    stage.add("a", limits={"concurrency": 5})

    async def main():
        dispatcher = stage.dispatcher()
        batches, futures = [], []
        for priority in (0, 1, 0, 1):
            batches.append(dispatcher.batches.of_singles(priority))
            futures.append(dispatcher.score(stage.sample(), stage.judge, deadline_s=9, batch=batches[-1]))
        await asyncio.gather(*futures)
        await dispatcher.aclose()
        return batches

    batches = run(main())
    assert [batches.index(batch) for batch in batches] == [0, 1, 0, 1]
    assert [batch.priority for batch in batches[:2]] == [0, 1]


def test_a_cancelled_sample_is_neither_scored_nor_failed_and_its_batch_still_ends(stage):
    stage.add("a", behaviour=lambda *_: 5.0)

    async def main():
        dispatcher = stage.dispatcher()
        samples = [stage.sample(), stage.sample()]
        batch = dispatcher.batches.new([each.group_id for each in samples])
        kept, dropped = (dispatcher.score(each, stage.judge, deadline_s=300, batch=batch) for each in samples)
        await asyncio.sleep(1)
        dropped.cancel()
        await kept
        dispatcher.batches.seal(batch)
        await dispatcher.aclose()
        return batch, stage.statistics.last_batch

    batch, report = run(main())
    assert batch.done
    assert (report.scored, report.makespan_s) == (1, 5.0)


def test_a_batch_counts_and_does_not_keep_its_jobs(stage):
    stage.add("a", limits={"concurrency": 10})

    async def main():
        dispatcher = stage.dispatcher()
        refs = []
        for _ in range(50):
            future = dispatcher.score(stage.sample(), stage.judge, deadline_s=300)
            batch = dispatcher.batches.of_singles()
            refs.append(weakref.ref(future))
            await asyncio.sleep(0.5)
            del future
        gc.collect()
        left = sum(ref() is not None for ref in refs)
        assert batch.samples == 50
        await asyncio.sleep(5)
        await dispatcher.aclose()
        return left

    assert run(main()) < 8


@pytest.mark.parametrize(("gap_s", "later_s", "quiet"), [(0.05, 0.7, False), (0.2, 2.5, True), (2.0, 10.0, False)])
def test_a_stream_is_quiet_when_nothing_came_for_long(stage, gap_s, later_s, quiet):
    stage.add("a")

    async def main():
        loop = asyncio.get_running_loop()
        batch = Batch(0, 0.0, together=False)
        for _ in range(60):
            await asyncio.sleep(gap_s)
            stage.job(batch=batch)
        return batch.quiet(loop.time() + later_s), Batch(0, loop.time()).quiet(loop.time())

    assert run(main()) == (quiet, True)
