"""Which sample goes where, and when: size, windows, priorities, deadlines, speeds, strategies and cost; and hedges."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from qreward_plugins import InvalidReply, Scored, TransientError, Usage
from qreward_plugins.scheduling.hedging import LEAST_HEDGES, OVERDUE_AT, SOFT_AT
from qreward_plugins.scheduling.jobs import MAX_HEDGES
from qreward_plugins.simulation import SimulatedSource
from qreward_plugins.sources import Reply

from ..kit import (
    NEVER_S,
    MemoryJournal,
    Stage,
    each_of,
    fails,
    make_config,
    make_sample,
    make_samples,
    now,
    scored_text,
    takes,
)

STRATEGIES = ("earliest_finish", "round_robin", "weighted", "least_requests")


def calm(limits=None, *, source=None, **scheduling):
    """Options without hedges, and with time. `limits` are by source."""
    engine = {"scheduling": {"hedge": False, **scheduling}, "deadline_s": 3000.0}
    return {"engine": engine, "total_s": 600, "limits": limits or {}, "source": source or {}}


def places(count, names="a"):
    return {name: {"concurrency": count} for name in names}


def sized(*sizes):
    return [make_sample(number, response="x" * size) for number, size in enumerate(sizes)]


def by_size(seconds_per_kb):
    return lambda number, request, now: seconds_per_kb * len(request.sample.response) / 1000


def order_of(stage):
    return [int(each.id.removeprefix("sample-")) for each in stage.sent]


def test_a_batch_goes_longest_first_and_retries_before_the_rest():
    for behaviour, order in ((1.0, [1, 3, 2, 0]), (fails(InvalidReply("no verdict"), times=1), [1, 1, 3, 2, 0])):
        stage = Stage({"a": behaviour}, options=calm(places(1)))
        assert stage.play(sized(100, 400, 200, 300)).all_scored
        assert order_of(stage) == order


def test_a_batch_of_several_windows_begins_each_with_short_samples():
    """A slot that is used early in a window is free early in the next one."""
    stage = Stage(dict.fromkeys("ab", by_size(2.0)), options=calm({name: {"requests_per_minute": 20} for name in "ab"}))
    played = stage.play(sized(*range(100, 5100, 100)))
    assert played.all_scored
    assert max(order_of(stage)[:5]) < 30
    assert order_of(stage).index(49) >= 5
    assert played.finished_s < 60 + 10


def test_samples_one_by_one_keep_their_order_whatever_their_size():
    stage = Stage(options=calm(places(1)))

    async def main(engine):
        tasks = []
        for sample in sized(*(1 + number % 7 * 500 for number in range(30))):
            tasks.append(asyncio.ensure_future(engine.score(sample)))
            await asyncio.sleep(0.5)
        await asyncio.gather(*tasks)

    stage.run(main)
    assert order_of(stage)[:15] == list(range(15))  # while more came


def until(died_at, behaviour):
    """The same behaviour until the source refuses everything from a time on."""
    return lambda number, request, at: TransientError("503") if at > died_at else behaviour(number, request, at)


@each_of(
    ("sources", "limits", "deadline_s"),
    [
        ({"a": by_size(1.0)}, places(2), 80.0),
        ({"a": by_size(2.0)}, places(60), 8.0),
        ({"a": by_size(1.0)}, {"a": {"requests_per_minute": 60}}, 130.0),
        ({"a": by_size(1.0), "b": by_size(6.0)}, places(2, "ab"), 80.0),
        # The batch could end in time until a source dies.
        ({"a": by_size(1.0), "b": until(40.0, by_size(1.0))}, places(2, "ab"), 100.0),
    ],
)
@pytest.mark.parametrize("one_by_one", [False, True])
def test_of_a_batch_that_cannot_end_in_time_samples_of_all_sizes_are_missing(sources, limits, deadline_s, one_by_one):
    sizes = [200 + 20 * (number * 7 % 90) for number in range(270)]

    async def main(engine):
        await engine.score_all(sized(1010, *[1000] * 12))  # it gets to know the sources
        if one_by_one:
            return await asyncio.gather(*(engine.score(sample, deadline_s=deadline_s) for sample in sized(*sizes)))
        return await engine.score_all(sized(*sizes), deadline_s=deadline_s)

    outcomes = Stage(sources, options=calm(limits)).run(main)
    scored = [size for size, outcome in zip(sizes, outcomes, strict=True) if outcome.reward is not None]
    thirds = [sum(low <= size < low + 600 for size in scored) / len(scored) for low in (200, 800, 1400)]
    assert 90 < len(scored) < 250
    assert 0.255 < min(thirds) <= max(thirds) < 0.43


def test_a_slow_source_takes_short_samples_and_idles_when_it_would_end_last():
    sizes = [500 + 50 * (number * 7 % 40) for number in range(120)]
    stage = Stage({"fast": by_size(1.0), "slow": by_size(6.0)}, options=calm(places(4, ("fast", "slow"))))

    async def main(engine):
        await engine.score_all(sized(*sizes))
        del stage.sent[:]
        began = now()
        await engine.score_all(sized(*sizes))
        return now() - began

    assert stage.run(main) < 1.15 * sum(sizes) / 1000 / 4 / (1 + 1 / 6)
    sent = {name: [sizes[int(each.id[7:])] for each in stage.sent if each.source == name] for name in ("fast", "slow")}
    assert 8 <= len(sent["slow"]) <= 40
    assert sum(sent["slow"]) / len(sent["slow"]) < sum(sent["fast"]) / len(sent["fast"])


def test_a_large_sample_is_not_overtaken_for_its_tokens_for_ever():
    def answer(request):
        return Reply(text=scored_text(request).text, usage=Usage(request.size // 4, 50), model="m")

    async def main(engine):
        async def small():
            for number in itertools.count(1):
                await engine.score(make_sample(number, response="x" * 2000))

        busy = [asyncio.ensure_future(small()) for _ in range(4)]
        await asyncio.sleep(90.0)
        began = now()
        await engine.score(make_sample(0, response="x" * 16_000))
        took_s = now() - began
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        return took_s

    assert Stage({"a": 0.5}, answer=answer, options=calm({"a": {"tokens_per_minute": 20_000}})).run(main) < 130.0


# Strategies and cost


@each_of("strategy", STRATEGIES)
def test_no_strategy_leaves_a_source_idle_and_what_is_too_large_for_one_goes_to_the_other(strategy):
    if strategy != "earliest_finish":
        played = Stage({"a": 1.0, "b": 4.0}, options=calm(places(8, "ab"), strategy=strategy)).play(make_samples(200))
        assert played.shares["b"] <= 50
        assert played.finished_s < 24.0
    limits = {"small": {"tokens_per_minute": 2000}, "large": {"tokens_per_minute": 200_000}}
    stage = Stage({"small": 1.0, "large": 1.0}, options=calm(limits, strategy=strategy))
    played = stage.play(sized(30_000, 30, 30))
    assert played.all_scored
    assert [each.source for each in stage.sent if each.id == "sample-0"] == ["large"]
    assert played.finished_s < 70


def shares(nodes, *, behaviours=(1.0, 1.0), concurrency=100, deadline_s=None, **scheduling):
    """How many of 60 samples each of two sources scored."""
    stage = Stage(dict(zip("ab", behaviours, strict=True)), options=calm(places(concurrency, "ab"), **scheduling))
    tree = stage.engine().config.model_dump()
    for name, node in nodes.items():
        tree["sources"][name] |= node
    stage.tree = tree
    played = stage.play(make_samples(60), deadline_s=deadline_s)
    assert played.all_scored
    return [played.shares["a"], played.shares["b"]]


def test_a_strategy_and_weights_are_taken_from_the_configuration():
    nodes = {"a": {"weight": 3.0}}
    assert shares(nodes, strategy="round_robin") == [30, 30]
    for strategy in ("weighted", "least_requests"):
        assert shares(nodes, strategy=strategy) == [45, 15]


def test_prefer_cost_is_taken_from_the_configuration():
    """A batch that has time waits for the cheap source; others help one that has none."""
    nodes = {"a": {"price": {"per_request": 0.1}}, "b": {"price": {"per_request": 0.2}}}
    assert shares(nodes, prefer="cost") == [60, 0]
    assert min(shares(nodes, prefer="speed")) > 0
    assert shares(nodes, prefer="cost", concurrency=2, deadline_s=600.0) == [60, 0]
    assert shares(nodes, prefer="cost", concurrency=2, deadline_s=40.0)[1] >= 10
    late = lambda number, request, now: 2.5 if number == 20 else 1.0  # noqa: E731
    assert shares(nodes, prefer="cost", behaviours=(late, 1.0), hedge=True, deadline_s=600.0) == [60, 0]
    down = fails(TransientError("503"))
    assert shares(nodes, prefer="cost", behaviours=(down, 1.0), concurrency=2, deadline_s=600.0) == [0, 60]


# Priorities


@pytest.mark.parametrize("journal", [None, MemoryJournal()], ids=["", "journal"])
@pytest.mark.parametrize("how", [{"priority": 1}, {"deadline_s": 10.0}], ids=str)
def test_one_sample_may_go_before_a_batch(journal, how):
    async def main(engine):
        batch = asyncio.ensure_future(engine.score_all(make_samples(60)))
        await asyncio.sleep(5.5)
        outcome = await engine.score(make_sample(99), **how)
        at = now()
        await batch
        return outcome.reward, at

    reward, at = Stage(options=calm(places(1)), journal=journal).run(main)
    assert reward == 0.5
    assert at <= (7.1 if "priority" in how else 15.5)


def test_with_the_same_time_single_samples_and_batches_go_in_the_order_of_their_submission():
    stage = Stage({"a": 30.0}, options=calm(places(1)))

    async def main(engine):
        tasks = []
        for names in ("abc", "d", "ef", "g", "h"):
            given = [make_sample(id=name) for name in names]
            tasks.append(asyncio.ensure_future(engine.score_all(given) if len(names) > 1 else engine.score(given[0])))
            await asyncio.sleep(12.0)
        await asyncio.gather(*tasks)

    stage.run(main)
    order = [each.id for each in stage.sent]
    assert [*sorted(order[:3]), order[3], *sorted(order[4:6]), *order[6:]] == list("abcdefgh")


@pytest.mark.parametrize("load", [1.1, 1.5])
def test_under_more_load_than_the_limits_allow_places_go_to_samples_that_can_still_end_in_time(load):
    async def main(engine):
        tasks = []
        for _ in range(int(240 * load)):
            tasks.append(asyncio.ensure_future(engine.score(make_sample(len(tasks)), deadline_s=20.0)))
            await asyncio.sleep(0.5 / load)
        return await asyncio.gather(*tasks)

    outcomes = Stage({"a": 5.0}, options=calm(places(10))).run(main)
    assert sum(outcome.reward is not None for outcome in outcomes) > 0.8 * 240


STYLE = {"quality": {"kind": "llm"}, "style": {"kind": "llm", "priority": "low"}}


@pytest.mark.parametrize("one_by_one", [False, True])
@each_of(
    ("routes", "judges", "priority", "expected"),
    [
        (None, None, {}, "tuv"),
        (None, None, {"validation": "high"}, "v tu"),
        (None, None, {"train": -3, "validation": -2}, "v tu"),
        # A route comes before the judge, the judge before the split.
        ({"u": "style", "*": "quality"}, STYLE, {"validation": "high"}, "v t u"),
        ({"u": {"judge": "style", "priority": "high"}, "*": "quality"}, STYLE, {}, "u tv"),
        ({"v": {"judge": "quality", "priority": 7}, "*": {"judge": "quality", "priority": 8}}, None, {}, "tu v"),
    ],
)
def test_what_goes_first(routes, judges, priority, expected, one_by_one):
    """Of equal priorities, any may go first."""
    given = [make_sample(id=name, data_source=name, split={"t": "train", "v": "val"}.get(name)) for name in "tvu"]
    options = calm(places(1))
    options["engine"]["priority"] = priority
    stage = Stage(options=options)
    tree = stage.engine().config.model_dump()
    stage.tree = {**tree, "judges": judges or tree["judges"], "routes": routes or {"*": "quality"}}

    async def main(engine):
        first = asyncio.ensure_future(engine.score(make_sample(id="first", data_source="plain"), priority=100))
        await asyncio.sleep(0.5)  # it takes the only place
        await (asyncio.gather(*map(engine.score, given)) if one_by_one else engine.score_all(given))
        await first

    stage.run(main)
    order = iter([each.id for each in stage.sent][1:])
    assert ["".join(sorted(next(order) for _ in equal)) for equal in expected.split()] == expected.split()


def makespan_of_the_few(*, many, **route):
    """Seconds until 64 samples, which come 20 s after the many, have their rewards.

    Two sources with 32 places each take 2 s in the median; one attempt of 20 takes ten times as long.
    """
    rng = random.Random(1)

    def behaviour(number, request, at):
        return rng.lognormvariate(0.7, 0.25) * (10 if rng.random() < 0.05 else 1)

    options = {"limits": places(32, "ab"), "engine": {"deadline_s": 3600}, "total_s": 120}
    stage = Stage(dict.fromkeys("ab", behaviour), options=options)
    stage.options["routes"] = {"few": {"judge": "quality", **route}, "*": "quality"}

    async def main(engine):
        others = asyncio.ensure_future(engine.score_all(make_samples(many, data_source="many")))
        await asyncio.sleep(20)
        began_at = now()
        outcomes = await engine.score_all(make_samples(64, data_source="few"))
        took_s = now() - began_at
        assert all(outcome.reward is not None for outcome in [*outcomes, *await others])
        return took_s

    return stage.run(main)


def test_a_small_urgent_batch_among_many_samples():
    """The figures for 4,096 are in docs/concepts.md; `python -m pytest -s` prints those for 1,024."""
    alone_s, plain_s = makespan_of_the_few(many=0), makespan_of_the_few(many=1_024)
    high_s = makespan_of_the_few(many=1_024, priority="high")
    sensitive_s = makespan_of_the_few(many=1_024, priority="high", latency_sensitive=True)
    print(f"alone {alone_s:.1f} s, normal {plain_s:.1f} s, high {high_s:.1f} s, and sensitive {sensitive_s:.1f} s")
    assert high_s < 0.75 * plain_s
    assert sensitive_s < 0.6 * high_s
    assert sensitive_s < 1.5 * alone_s


# Hedges: when a second attempt is started, where, how many of them, and what becomes of the one that loses


USUAL_S = 2.0


class Hedged:
    """Sources known to take `USUAL_S`; `straggler(name, sample, now)` says what takes how long instead."""

    def __init__(self, straggler=lambda name, sample, now: None, *, names="ab", places=4, budget=0.25, **options):
        def behaviour(name):
            def takes(number, request, now):
                special = straggler(name, request.sample.id, now) if self.known else None
                return USUAL_S if special is None else special

            return takes

        self.known = False
        self.began = 0.0
        scheduling = {"hedge_budget": budget, **options}
        self.stage = Stage(
            {name: behaviour(name) for name in names},
            options={
                "engine": {"deadline_s": 900.0, "scheduling": scheduling},
                "limits": {name: {"concurrency": places} for name in names},
                "total_s": 300,
            },
        )

    def play(self, count):
        """Score a batch after the sources are known. Return its outcomes, its seconds and its number of hedges."""

        async def main(engine):
            await engine.score_all(make_samples(24))
            await asyncio.sleep(10.0)
            del self.stage.sent[:]
            self.known, self.began = True, asyncio.get_running_loop().time()
            outcomes = await engine.score_all([make_sample(100 + number) for number in range(count)])
            return outcomes, asyncio.get_running_loop().time() - self.began, engine.last_batch().hedges

        return self.stage.run(main)

    def attempts(self, number):
        """(source, seconds since the batch began) of the attempts of a sample."""
        return [(each.source, each.at - self.began) for each in self.stage.sent if each.id == f"sample-{number}"]


def once(*numbers, seconds):
    """The first attempt of each of these samples takes so long."""
    seen = set()

    def straggler(name, sample, now):
        number = int(sample.removeprefix("sample-"))
        if number in numbers and number not in seen:
            seen.add(number)
            return seconds
        return None

    return straggler


def test_where_nothing_waits_an_attempt_is_hedged_elsewhere_before_it_is_overdue():
    hedged = Hedged(once(100, seconds=50.0))
    (outcome,), took_s, hedges = hedged.play(1)
    (first, _), (second, at) = hedged.attempts(100)
    assert first != second
    assert SOFT_AT * USUAL_S <= at < OVERDUE_AT * USUAL_S
    assert took_s == pytest.approx(at + USUAL_S)
    assert (hedges, outcome.verdict.attempts) == (1, 2)
    cancelled = hedged.stage.simulated[first].cancelled
    assert cancelled == 1  # the loser


def test_while_samples_wait_only_what_is_overdue_is_hedged():
    hedged = Hedged(once(100, seconds=200.0))
    outcomes, took_s, hedges = hedged.play(45)
    (_, began), (_, at) = hedged.attempts(100)
    assert at - began >= OVERDUE_AT * USUAL_S
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert took_s < 16.0
    assert 1 <= hedges <= 4


def test_the_only_source_is_asked_again_when_an_attempt_hangs():
    _, took_s, hedges = Hedged(once(100, seconds=NEVER_S), names="a").play(3)
    assert took_s < 20.0
    assert hedges == 1


def test_a_hedge_that_fails_does_not_end_the_attempt_beside_it():
    seen = []

    def straggler(name, sample, now):
        seen.append(name)
        return 9.0 if len(seen) == 1 else TransientError("503")

    hedged = Hedged(straggler)
    hedged.stage.options["engine"]["max_attempts"] = 1
    (outcome,), took_s, _ = hedged.play(1)
    assert isinstance(outcome, Scored)
    assert took_s == pytest.approx(9.0)
    assert 1 < len(seen) <= 1 + MAX_HEDGES


def test_the_budget_of_a_batch_and_of_a_sample_is_kept():
    for budget in (0.1, 0.5):
        hedged = Hedged(lambda name, sample, now: NEVER_S if int(sample[7:]) % 2 else None, budget=budget, places=100)
        _, _, hedges = hedged.play(100)
        assert 4 <= hedges <= max(LEAST_HEDGES, budget * 100)
    hedged = Hedged(lambda name, sample, now: NEVER_S if sample == "sample-100" else None, names="abcdefgh")
    _, _, hedges = hedged.play(1)
    assert 1 <= hedges <= MAX_HEDGES


def test_a_fast_function_does_not_make_a_model_look_slow():
    """A rule answers in a millisecond; that says nothing of a model that has not answered yet."""
    tree = make_config(["rule", "model"], total_s=120, limits={"model": {"concurrency": 256}})
    tree["judges"] = {
        "right": {"kind": "llm", "sources": "rule"},
        "quality": {"kind": "llm", "sources": "model"},
        "reward": {"kind": "gate", "when": "right", "at_least": 0.5, "then": "quality"},
    }
    rule = SimulatedSource("rule", behaviour=takes(0.001), answer=scored_text, model="m", local=True)
    stage = Stage({"rule": rule, "model": 4.0}, tree={**tree, "routes": {"*": "reward"}})
    assert stage.play(make_samples(64)).all_scored
    assert stage.sent_by_source == {"rule": 64, "model": 64}
