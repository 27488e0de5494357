"""Priorities of the configuration, by route, judge and split; what a small urgent batch gains among many samples."""

from __future__ import annotations

import asyncio
import random

import pytest

from qreward_plugins import ConfigurationError
from qreward_plugins.config import load_config
from qreward_plugins.errors import TransientError
from qreward_plugins.sources.base import Reply

from ..kit import Stage, each_of, make_sample, now


def tree(*, routes=None, judges=None, limits=None, names="a", **engine):
    return {
        "sources": {name: {"kind": "function", "function": "rewards:score", "limits": limits or {}} for name in names},
        "judges": judges or {"right": {"kind": "function"}},
        "routes": routes or {},
        "engine": {"seed": 7, **engine},
    }


def rewarded(request):
    return Reply(value=1.0)


def asked_in_order(config, ask):
    """The ids of samples in the order in which their one source was asked; the first one takes its only place."""
    stage = Stage(answer=rewarded, tree=config)

    async def main(engine):
        first = asyncio.ensure_future(engine.score(make_sample(id="first", data_source="plain"), priority=100))
        await asyncio.sleep(0.5)
        await ask(engine)
        await first

    stage.run(main)
    assert stage.sent[0].id == "first"
    return [each.id for each in stage.sent[1:]]


ONE_PLACE = {"concurrency": 1}
TWO_JUDGES = {"right": {"kind": "function"}, "style": {"kind": "function", "priority": "low"}}


@pytest.mark.parametrize("one_by_one", [False, True])
@each_of(
    ("routes", "judges", "engine", "expected"),
    [
        ({}, None, {}, "tuv"),
        ({}, None, {"priority": {"validation": "high"}}, "v tu"),
        ({}, None, {"priority": {"validation": "low"}}, "tu v"),
        ({}, None, {"priority": {"train": -3, "validation": -2}}, "v tu"),
        # A route comes before the judge, the judge before the split.
        ({"u": "style", "*": "right"}, TWO_JUDGES, {"priority": {"validation": "high"}}, "v t u"),
        ({"v": "style", "*": "right"}, TWO_JUDGES, {"priority": {"validation": "high"}}, "tu v"),
        ({"u": {"judge": "style", "priority": "high"}, "*": "right"}, TWO_JUDGES, {}, "u tv"),
        ({"v": {"judge": "right", "priority": 7}, "*": {"judge": "right", "priority": 8}}, None, {}, "tu v"),
    ],
)
def test_what_goes_first(routes, judges, engine, expected, one_by_one):
    """Of equal priorities, any may go first."""
    given = [make_sample(id=name, data_source=name, split={"t": "train", "v": "val"}.get(name)) for name in "tvu"]

    async def ask(engine):
        await (asyncio.gather(*map(engine.score, given)) if one_by_one else engine.score_all(given))

    order = iter(asked_in_order(tree(routes=routes, judges=judges, limits=ONE_PLACE, **engine), ask))
    assert ["".join(sorted(next(order) for _ in equal)) for equal in expected.split()] == expected.split()


def test_the_priority_of_a_call_comes_before_all():
    async def ask(engine):
        await asyncio.gather(
            engine.score(make_sample(id="v", split="val")),
            engine.score(make_sample(id="t", split="train"), priority=11),
            engine.score_all([make_sample(id="z", split="val")], priority=-1),
        )

    assert asked_in_order(tree(limits=ONE_PLACE, priority={"validation": "high"}), ask) == ["t", "v", "z"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"engine": {"priority": {"validation": "urgent"}}}, "must be `high`, `normal`, `low`, or a whole number"),
        ({"engine": {"priority": {"validation": True}}}, "must be `high`, `normal`, `low`, or a whole number"),
        ({"engine": {"priority": {"validation": 0.5}}}, "must be `high`, `normal`, `low`, or a whole number"),
        ({"engine": {"priority": {"test": "high"}}}, "unknown key"),
        ({"routes": {"*": {"judge": "rihgt"}}}, "there is no judge `rihgt`. Did you mean `right`?"),
        ({"routes": {"*": {"priority": "high"}}}, "the key is missing"),
        ({"routes": {"*": {"judge": "right", "urgent": True}}}, "unknown key"),
        ({"routes": {"*": {"judge": "right", "latency_sensitive": 3}}}, "must be true or false"),
    ],
)
def test_mistakes(wrong, said):
    with pytest.raises(ConfigurationError) as error:
        load_config({**tree(), **wrong})
    assert said in str(error.value)


def test_a_retry_keeps_its_priority():
    order = []

    def behaviour(number, request, now):
        order.append(request.sample.id)
        return TransientError("busy") if order.count("urgent") == 1 and request.sample.id == "urgent" else 1.0

    options = {"limits": {"a": {"concurrency": 1}}, "engine": {"seed": 7, "scheduling": {"hedge": False}}}
    stage = Stage({"a": behaviour}, options=options)

    async def main(engine):
        waiting = asyncio.ensure_future(engine.score_all([make_sample(id=f"later {n}") for n in range(40)]))
        await asyncio.sleep(0.5)
        await engine.score(make_sample(id="urgent"), priority=5)
        retried = order.index("urgent", order.index("urgent") + 1)
        await waiting
        return retried

    assert stage.run(main) < 10


# A small urgent batch among many samples

FEW, PLACES = 64, 64


def makespan_of_the_few(*, many, priority="normal", latency_sensitive=False, seed=1):
    """Seconds until the 64 have their rewards. They come 20 s after the many.

    Two sources with 32 places each take 2 s in the median; one attempt of 20 takes ten times as long.
    """
    rng = random.Random(seed)

    def behaviour(number, request, at):
        return rng.lognormvariate(0.7, 0.25) * (10 if rng.random() < 0.05 else 1)

    config = tree(
        names="ab",
        limits={"concurrency": PLACES // 2},
        routes={
            "few": {"judge": "right", "priority": priority, "latency_sensitive": latency_sensitive},
            "*": "right",
        },
        deadline_s=3600,
    )

    async def main(engine):
        many_samples = [make_sample(number, data_source="many") for number in range(many)]
        others = asyncio.ensure_future(engine.score_all(many_samples))
        await asyncio.sleep(20)
        began_at = now()
        outcomes = await engine.score_all(make_sample(number, data_source="few") for number in range(FEW))
        took_s = now() - began_at
        assert all(outcome.reward == 1.0 for outcome in [*outcomes, *await others])
        return took_s

    return Stage(dict.fromkeys("ab", behaviour), answer=rewarded, tree=config).run(main)


def test_a_small_urgent_batch_among_many_samples():
    """The figures for 4,096 are in docs/concepts.md; `python -m pytest -s` prints those for 2,048."""
    alone_s = makespan_of_the_few(many=0)
    plain_s = makespan_of_the_few(many=2_048)
    high_s = makespan_of_the_few(many=2_048, priority="high")
    sensitive_s = makespan_of_the_few(many=2_048, priority="high", latency_sensitive=True)
    print(f"alone {alone_s:.1f} s, normal {plain_s:.1f} s, high {high_s:.1f} s, and sensitive {sensitive_s:.1f} s")
    assert high_s < 0.6 * plain_s
    assert sensitive_s < 0.6 * high_s
    assert sensitive_s < 1.5 * alone_s
