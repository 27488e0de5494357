"""A barrier over processes: with an actor that works, one that dies, one that hangs, and none."""

from __future__ import annotations

import asyncio
import gc
import random
import threading

import pytest

from qreward_plugins.engine.barrier_actor import BarrierActor, Report
from qreward_plugins.engine.group_barrier import GroupBarrier

KEY = ("u1", "5")
LONG_S = 60.0


class Spy:
    """An actor that lets through what it is told to; `lost` makes it raise, `stuck` hold its answers."""

    def __init__(self):
        self.actor = BarrierActor()
        self.lost = False
        self.stuck = False
        self.calls = []
        self.parked = asyncio.Event()
        self._end = asyncio.Event()

    async def send(self, things):
        self.calls.append(list(things))
        await self._let_through()
        return await self.actor.send(things)

    async def mean(self, key):
        await self._let_through()
        self.parked.set()
        mean = asyncio.ensure_future(self.actor.mean(key))
        end = asyncio.ensure_future(self._end.wait())
        try:
            await asyncio.wait({mean, end}, return_when=asyncio.FIRST_COMPLETED)
            if self.lost:
                raise ConnectionError("the actor died")
            return mean.result()
        finally:
            mean.cancel()
            end.cancel()

    async def end(self, start):
        if start != self.actor._start:
            return
        await self._end.wait()
        raise ConnectionError("the actor died")

    async def _let_through(self):
        if self.stuck:
            await self._end.wait()
        if self.lost:
            raise ConnectionError("the actor died")

    def die(self):
        """Lose everything; calls that are parked here fail, as those of an actor do."""
        self.lost = True
        self._end.set()

    def start_anew(self):
        self.actor = BarrierActor()
        self.lost = False
        self._end = asyncio.Event()
        self.parked = asyncio.Event()


def scored(sample, reward, size=4, key=KEY):
    return Report(key, sample, reward, size)


def failed(sample, size=4, key=KEY):
    return Report(key, sample, None, size, "train", "infra")


@pytest.fixture
def play():
    """Run an async function with a spied actor, and barriers of it; nothing may be left of them in the end."""

    def play(scenario, clients=1, **settings):
        async def main():
            spy = Spy()
            made = [
                GroupBarrier(**{"wait_s": LONG_S, "answer_s": LONG_S, "connect": lambda: spy, **settings})
                for _ in range(clients)
            ]
            try:
                return await scenario(spy, *made)
            finally:
                for client in made:
                    await client.aclose()
                assert asyncio.all_tasks() == {asyncio.current_task()}

        result = asyncio.run(main())
        gc.collect()
        return result

    return play


async def until(condition):
    while not condition():  # noqa: ASYNC110 (what is waited for has no event)
        await asyncio.sleep(0)


def test_the_longest_batch_after_a_number_is_told_to_each_that_asks():
    async def main():
        actor = BarrierActor()

        async def ended(*seconds):
            await actor.send([Report(None, "", 1.0, waited=(("queue", one), ("service", 1.0))) for one in seconds])

        await actor.send([Report(None, "", 1.0)])
        nothing = await actor.waited("", 0)
        assert (nothing.number, nothing.parts) == (0, {})
        await ended(3.0, 7.0, 5.0)
        first = await actor.waited("", 0)
        assert (first.number, first.parts) == (3, {"queue": 7.0, "service": 1.0})
        assert (await actor.waited(first.start, first.number)).parts == {}
        await ended(2.0, 1.0, 1.5)
        assert (await actor.waited(first.start, first.number)).parts["queue"] == 2.0
        assert (await actor.waited(first.start, 4)).parts["queue"] == 1.5
        assert (await actor.waited(first.start, 0)).parts["queue"] == 7.0
        assert (await actor.waited("of another start", 6)).parts["queue"] == 7.0
        await ended(*range(5_000, 0, -1))
        assert len(actor._longest) == 1_000

    asyncio.run(main())


def test_siblings_meet_although_each_is_scored_by_another_worker(play):
    async def scenario(spy, *workers):
        first = asyncio.create_task(workers[0].settle(failed("0")))
        await spy.parked.wait()
        assert await workers[1].settle(scored("1", 0.2)) is None
        assert await workers[2].settle(scored("2", 0.6)) is None
        assert not first.done()
        assert await workers[3].settle(failed("3")) == pytest.approx(0.4)
        assert await first == pytest.approx(0.4)
        assert [worker.waiting for worker in workers] == [0] * 4

    play(scenario, clients=4)


def test_without_a_time_to_lose_the_group_closes_early_and_the_late_get_its_mean(play):
    async def scenario(spy, first, second):
        assert await first.settle(scored("0", 0.5)) is None
        assert await first.settle(failed("1")) == 0.5
        assert await second.settle(scored("2", 1.0)) == 0.5
        assert await second.settle(failed("3")) == 0.5

    play(scenario, clients=2, wait_s=0.01)


def test_a_group_of_unknown_size_is_closed_by_time(play):
    async def scenario(spy, client):
        assert await client.settle(scored("0", 0.5, size=None)) is None
        assert await client.settle(failed("1", size=None)) == 0.5

    play(scenario, wait_s=0.01)


def test_one_too_many_that_waits_closes_the_group_that_waits_longest(play):
    async def scenario(spy, client):
        keys = [(f"u{number}", "5") for number in range(4)]
        await client.settle(scored("0", 0.25, key=keys[0]))
        waiting = [asyncio.create_task(client.settle(failed("1", key=key))) for key in keys[:3]]
        await until(lambda: client.waiting == 3)
        assert not any(task.done() for task in waiting)
        waiting.append(asyncio.create_task(client.settle(failed("1", key=keys[3]))))
        assert await waiting[0] == 0.25
        await until(lambda: client.waiting == 3)
        assert [task.done() for task in waiting] == [True, False, False, False]
        for number, key in enumerate(keys[1:], start=1):
            for sample in ("0", "2", "3"):
                await client.settle(scored(sample, float(number), key=key))
        assert await asyncio.gather(*waiting) == [0.25, 1.0, 2.0, 3.0]

    play(scenario, max_waiting=3)


def test_however_many_fail_no_more_than_allowed_wait_and_all_end(play):
    async def scenario(spy, client):
        most = 0
        tasks = []
        for number in range(400):
            key = (f"u{number % 200}", "5")
            tasks.append(asyncio.create_task(client.settle(failed(str(number), key=key))))
            await asyncio.sleep(0)
            most = max(most, client.waiting)
        await until(lambda: client.waiting <= 20)
        assert most <= 20
        held = sum(not task.done() for task in tasks)
        assert held < 400
        await client.aclose()
        assert await asyncio.gather(*tasks) == [0.0] * 400

    play(scenario, max_waiting=20)


def test_an_actor_that_is_started_anew_is_told_everything_and_who_waits_gets_the_mean(play):
    async def scenario(spy, first, second):
        await first.settle(scored("0", 0.2))
        await second.settle(scored("1", 0.6))
        waiting = asyncio.create_task(first.settle(failed("2")))
        await spy.parked.wait()
        spy.die()
        await until(lambda: first._link is None and second._link is None)
        spy.start_anew()
        await spy.parked.wait()
        assert await second.settle(scored("3", 0.4)) is None
        assert await waiting == pytest.approx(0.4)

    play(scenario, clients=2)


def test_an_actor_that_was_started_anew_unnoticed_is_found_out_by_the_next_answer(play):
    async def scenario(spy, client):
        await client.settle(scored("0", 0.2))
        await client.settle(scored("1", 0.6))
        spy.actor = BarrierActor()
        await client.settle(scored("2", 0.4))
        assert await client.settle(failed("3")) == pytest.approx(0.4)

    play(scenario)


def test_a_mean_that_was_given_out_outlives_the_actor(play):
    async def scenario(spy, client):
        await client.settle(scored("0", 0.5))
        spy.stuck = True
        assert await client.settle(failed("1")) == 0.5
        spy.stuck = False
        spy.die()
        spy.start_anew()
        other = GroupBarrier(wait_s=LONG_S, answer_s=LONG_S, connect=lambda: spy)
        await until(lambda: client._link is not None)
        assert await other.settle(scored("2", 0.9)) == 0.5
        await other.aclose()

    play(scenario, wait_s=0.01, answer_s=0.05)


@pytest.mark.parametrize("trouble", ["lost", "stuck"])
def test_without_an_actor_the_scored_keep_their_rewards_and_the_failed_get_what_is_known_here(play, trouble):
    async def scenario(spy, client):
        setattr(spy, trouble, True)
        assert await client.settle(scored("0", 0.2)) is None
        assert await client.settle(scored("1", 0.6)) is None
        assert await client.settle(failed("2")) == pytest.approx(0.4)
        assert await client.settle(scored("3", 9.0)) == pytest.approx(0.4), "the group is closed here"
        assert await client.settle(failed("0", key=("u2", "5"))) == 0.0
        assert await client.settle(Report(None, "", 1.0)) is None
        spy.die()

    play(scenario, wait_s=0.02, answer_s=0.02)


def test_an_actor_that_cannot_be_found_is_no_actor(play):
    called = threading.Event()

    def connect():
        called.set()
        raise RuntimeError("Ray is gone")

    async def scenario(spy, client):
        assert await client.settle(scored("0", 0.2)) is None
        assert await client.settle(failed("1")) == 0.2

    play(scenario, wait_s=0.02, answer_s=0.02, connect=connect)
    assert called.is_set()


def test_finding_the_actor_may_take_for_ever(play):
    release = threading.Event()

    async def scenario(spy, client):
        assert await client.settle(scored("0", 0.2)) is None
        assert await client.settle(failed("1")) == 0.2

    try:
        play(scenario, wait_s=0.02, answer_s=0.02, connect=release.wait)
    finally:
        release.set()


def test_without_ray_the_samples_meet_in_this_process():
    async def main():
        barrier = GroupBarrier(wait_s=LONG_S)
        waiting = asyncio.create_task(barrier.settle(failed("0", size=2)))
        assert await barrier.settle(scored("1", 0.75, size=2)) is None
        assert await waiting == 0.75
        await barrier.aclose()

    asyncio.run(main())


def test_what_gathers_while_a_call_is_under_way_goes_out_in_one(play):
    async def scenario(spy, client):
        await asyncio.gather(*(client.settle(scored("0", 1.0, key=(str(number), "5"))) for number in range(500)))
        assert sum(map(len, spy.calls)) == 500
        assert len(spy.calls) <= 4

    play(scenario)


def test_a_cancelled_wait_leaves_nothing_behind_and_its_report_counts(play):
    async def scenario(spy, client):
        waiting = asyncio.create_task(client.settle(failed("0", size=2)))
        await spy.parked.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert client.waiting == 0
        await until(lambda: not spy.actor._waiting)
        assert await client.settle(failed("1", size=2)) == 0.0

    play(scenario)


def test_closing_ends_all_waiting_with_what_is_known(play):
    async def scenario(spy, client):
        await client.settle(scored("0", 0.5))
        waiting = asyncio.create_task(client.settle(failed("1")))
        await spy.parked.wait()
        await client.aclose()
        assert await waiting == 0.5
        assert await client.settle(failed("2")) == 0.5
        assert await client.settle(scored("3", 1.0)) == 0.5
        assert await client.settle(scored("0", 1.0, key=("u2", "5"))) is None

    play(scenario)


def test_memory_is_bounded_while_there_is_no_actor(play, monkeypatch):
    monkeypatch.setattr("qreward_plugins.engine.group_barrier._BATCH", 10)
    monkeypatch.setattr("qreward_plugins.engine.group_barrier.RECENT", 50)

    async def scenario(spy, client):
        spy.lost = True
        for number in range(12):
            task = asyncio.create_task(client.settle(scored("0", 1.0, key=(str(number), "5"))))
            await asyncio.sleep(0)
            task.cancel()
        assert len(client._unsent) <= 20
        assert len(client._recent) <= 50

    play(scenario)


def test_outcomes_are_counted_once(play):
    async def scenario(spy, client):
        await client.settle(scored("0", 1.0))
        await client.settle(scored("0", 1.0))
        task = asyncio.create_task(client.settle(failed("1", size=4)))
        await spy.parked.wait()
        await client.settle(scored("2", 0.0))
        await client.settle(scored("3", 0.5))
        assert await task == 0.5
        assert await client.settle(scored("4", 9.0)) == 0.5
        await client.settle(Report(None, "", None, None, "val", "verdict"))
        await client.settle(Report(None, "", 1.0, None, "val", cut=True))
        return (await spy.actor.counts())[1]

    assert play(scenario) == {
        "train/samples": 5,
        "train/failed": 1,
        "train/failed/infra": 1,
        "train/imputed": 2,
        "val/samples": 2,
        "val/failed": 1,
        "val/failed/verdict": 1,
        "val/cut": 1,
    }


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused_and_spoils_no_group(play, reward):
    async def scenario(spy, client):
        with pytest.raises(ValueError, match="finite"):
            await client.settle(scored("0", reward))
        await client.settle(scored("1", 0.5, size=2))
        assert await client.settle(failed("2", size=2)) == 0.5

    play(scenario)


@pytest.mark.parametrize("seed", range(12))
def test_however_often_the_actor_dies_every_failed_sample_gets_the_mean_of_its_group(play, seed):
    rng = random.Random(seed)
    troubled = seed % 3 != 0

    async def scenario(spy, *workers):
        outcomes = {
            (f"u{group}", "5"): [None if rng.random() < 0.4 else rng.random() for _ in range(6)] for group in range(12)
        }
        jobs = [(key, str(number), outcome) for key, group in outcomes.items() for number, outcome in enumerate(group)]
        rng.shuffle(jobs)
        tasks = {}
        for key, sample, outcome in jobs:
            worker = rng.choice(workers)
            tasks[key, sample] = asyncio.create_task(worker.settle(Report(key, sample, outcome, 6)))
            for _ in range(rng.randint(0, 5)):
                await asyncio.sleep(0)
            if troubled and rng.random() < 0.1:
                spy.die()
            if spy.lost and rng.random() < 0.5:
                spy.start_anew()
        if spy.lost:
            spy.start_anew()
        answers = dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
        for key, group in outcomes.items():
            given_out = [
                outcome if answers[key, str(number)] is None else answers[key, str(number)]
                for number, outcome in enumerate(group)
            ]
            assert None not in given_out
            means = {given for given, outcome in zip(given_out, group, strict=True) if outcome is None}
            assert len(means) <= 1
            if means:
                assert sum(given_out) / len(given_out) == pytest.approx(means.pop())

    play(scenario, clients=3, max_waiting=1000)
