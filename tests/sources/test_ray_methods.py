"""Methods of named actors of a real local Ray as functions of a source."""

from __future__ import annotations

import asyncio
import os
import sys
import time

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'qreward-plugins[ray]')")

from qreward_plugins import ConfigurationError, RewardEngine, Sample  # noqa: E402

# Ray leaves sockets and log files of its own to the garbage collector.
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*Tip.*"),
]
PATIENCE_S = 30.0


class Judge:
    def score(self, data_source, solution_str, ground_truth, extra_info):
        if solution_str == "raise":
            raise ValueError("no such answer")
        if solution_str == "die":
            os._exit(1)
        return {"score": float(len(solution_str)), "gpus": len(ray.get_gpu_ids())}

    def each(self, samples):
        return [float(len(samples)) for _ in samples]


class AsyncJudge:
    def __init__(self):
        self.cancelled = asyncio.Event()

    async def score(self, sample):
        if sample.response == "hang":
            try:
                await asyncio.sleep(1000)
            finally:
                self.cancelled.set()
        await self.cancelled.wait()
        return 1.0


@pytest.fixture(scope="module")
def cluster():
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors cannot import this file
    ray.init(num_cpus=2, num_gpus=1, namespace="job", include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def started(cls, name, **options):
    return ray.remote(cls).options(name=name, num_cpus=0, **options).remote()


def tree(function, **source):
    node = {"kind": "function", "function": function, "timeouts": {"total_s": 60}, **source}
    judges = {"j": {"kind": "function", "reward_range": [0, 100]}}
    return {"sources": {"rm": node}, "judges": judges, "engine": {"deadline_s": 120, "seed": 1}}


def samples(*responses):
    return [Sample([{"role": "user", "content": "?"}], response) for response in responses]


def test_without_ray_the_start_says_what_to_do():
    with pytest.raises(
        ConfigurationError, match=r"sources\.rm\.function: .*needs Ray, which is .*call ray\.init\(\) first"
    ):
        RewardEngine(tree("ray:judge.score"))


async def test_an_actor_of_another_namespace_scores_on_the_gpu_that_ray_gave_it(cluster):
    actor = started(Judge, "own.judge", namespace="models", num_gpus=0.25)
    async with RewardEngine(tree("ray:models/own.judge.score")) as engine:
        fine, raised = await engine.score_all(samples("abc", "raise"))
    assert (fine.reward, fine.verdict.components["gpus"]) == (3.0, 1)
    assert raised.reason == "raised"
    assert "raised ValueError: no such answer" in raised.detail
    del actor


async def test_a_call_may_carry_several_samples(cluster):
    actor = started(Judge, "lists")
    async with RewardEngine(tree("ray:lists.each", arguments="sample", batch={"max_size": 4})) as engine:
        outcomes = await engine.score_all(samples(*"abcdefgh"))
    assert [outcome.reward for outcome in outcomes] == [4.0] * 8
    del actor


async def test_a_call_that_takes_too_long_is_cancelled_in_the_actor(cluster):
    actor = started(AsyncJudge, "slow")
    await actor.__ray_ready__.remote()
    own = tree("ray:slow.score", arguments="sample", timeouts={"total_s": 1})
    async with RewardEngine(own) as engine:
        (hung,) = await engine.score_all(samples("hang"))
        (after,) = await engine.score_all(samples("fine"))
    assert hung.reason == "hung"
    assert after.reward == 1.0
    del actor


async def test_an_actor_that_is_gone_is_looked_for_again_by_its_name(cluster):
    actor = started(Judge, "mortal")
    async with RewardEngine(tree("ray:mortal.score")) as engine:
        assert [outcome.reward for outcome in await engine.score_all(samples("a"))] == [1.0]
        ray.kill(actor)
        deadline = time.monotonic() + PATIENCE_S
        while any(each["name"] == "mortal" for each in ray.util.list_named_actors(all_namespaces=True)):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        scoring = asyncio.ensure_future(engine.score_all(samples("bb")))
        while not engine.statistics().sources["rm"].transient:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        actor = started(Judge, "mortal")
        assert [outcome.reward for outcome in await scoring] == [2.0]


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("ray:nobody.score", r"no actor 'nobody' runs in the namespace 'job' \(named actors: .*job/known"),
        (
            "ray:elsewhere/known.score",
            r"no actor 'known' runs .*'elsewhere' \(named actors: .*job/known.*or name its namespace",
        ),
        ("ray:known.scor", "the actor 'known' has no 'scor'; did you mean 'score'?"),
    ],
)
def test_a_method_that_is_not_there_is_refused(cluster, function, problem):
    actor = started(Judge, "known")
    with pytest.raises(ConfigurationError, match=rf"sources\.rm\.function: the function cannot be loaded: {problem}"):
        RewardEngine(tree(function))
    del actor


def test_devices_are_those_that_ray_gives():
    with pytest.raises(ConfigurationError, match=r"sources\.rm\.devices: Ray gives an actor its devices"):
        RewardEngine(tree("ray:judge.score", devices=[0]))


async def test_a_sample_that_kills_its_actor_costs_no_other_one(cluster):
    actor = started(Judge, "mortal", max_restarts=-1)
    async with RewardEngine(tree("ray:mortal.score")) as engine:
        outcomes = await engine.score_all(samples(*"abcdef", "die"))
    *healthy, dead = outcomes
    assert [outcome.reward for outcome in healthy] == [1.0] * 6
    assert (dead.label, dead.spent.attempts) == ("infra/crashed", 2)
    del actor
