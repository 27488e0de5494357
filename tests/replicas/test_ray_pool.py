"""A real local Ray: pools that are placed, shared by name, lost and ended, and methods of named actors as functions."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
import yaml

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'qreward-plugins[ray]')")

import psutil  # noqa: E402

from qreward_plugins import ConfigurationError, ReplicasNotStarted, RewardEngine, Sample  # noqa: E402
from tests.kit import comes, each_of, lives, make_samples  # noqa: E402

from .conftest import configured, guard_of, kill, replicas, said  # noqa: E402

# Ray leaves sockets and log files of its own to the garbage collector.
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*Tip.*"),
]


def test_without_ray_the_start_says_what_to_do():
    with pytest.raises(
        ConfigurationError, match=r"sources\.rm\.function: .*needs Ray, which is .*call ray\.init\(\) first"
    ):
        RewardEngine(calling("ray:judge.score"))


@pytest.fixture(scope="module")
def cluster():
    """Its GPUs are numbers. As verl recommends for large servers, the job keeps Ray from choosing devices."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors cannot import this file
        ray.init(num_cpus=3, num_gpus=4, namespace="job", include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


def tree(servers, **more):
    own = {"placement": "ray", "start_within_s": 180.0, "platform": "auto", **servers, **more}
    return configured(own, engine={"seed": 7, "shared": "off"})


async def rewards(engine, count=10):
    outcomes = await engine.score_all(make_samples(count), deadline_s=180)
    said(outcomes)
    return outcomes


def groups():
    return [row for row in ray.util.placement_group_table().values() if row["state"] != "REMOVED"]


def actors(name):
    """The processes of the actors of this class."""
    return [
        each.pid
        for each in psutil.process_iter(["cmdline"])
        if "".join(each.info["cmdline"] or []).startswith(f"ray::{name}")
    ]


async def test_a_pool_on_ray(cluster, stand_ins, tmp_path):
    second, seen = stand_ins.weights("second"), tmp_path / "seen"
    shell = ["sh", "-c", f'echo "$CUDA_VISIBLE_DEVICES" >> {seen}; exec "$@"', "sh"]
    servers = {"server": "vllm", "program": [*shell, *stand_ins.program()], "model": str(stand_ins.weights("first"))}
    own = tree(servers, weight_updates="in_place", data_parallel=2, tensor_parallel=2)
    async with RewardEngine(own) as first, RewardEngine(own) as other:
        await asyncio.gather(rewards(first), rewards(other))
        assert {state.url for state in replicas(first)} == {state.url for state in replicas(other)}
        assert len(stand_ins.living()) == 2
        assert [row["bundles"][0]["GPU"] for row in groups()] == [2.0, 2.0]
        # Each replica has its own devices.
        devices = [device for line in seen.read_text().split() for device in line.split(",")]
        assert sorted(devices) == ["0", "1", "2", "3"]

        # A replica whose actor is lost is placed and started again, and its processes are gone.
        before = stand_ins.living()
        kill(actors("ReplicaActor")[0])
        await comes(lambda: any(state.restarts and state.url for state in replicas(first)))
        assert len(stand_ins.living()) == 2
        assert len(set(stand_ins.living()) - set(before)) == 1
        await rewards(first)

        # All engines of the job see an update.
        await other.update_weights("own", path=second, version="step-1")
        outcomes = await rewards(first)
        assert {outcome.verdict.rationale for outcome in outcomes} == {"second"}
        assert {outcome.verdict.weight_version for outcome in outcomes} == {"step-1"}
    await comes(lambda: not stand_ins.living() and not groups())


async def test_a_pool_of_a_node_survives_the_loss_of_its_owner(cluster, stand_ins):
    """With `placement: local` its owner is an actor of the node. No sample is lost, and no server is left."""
    servers = {"server": "vllm", "program": stand_ins.program("delay=0.05"), "model": str(stand_ins.weights("first"))}
    own = tree(servers, placement="local", platform="cpu", weight_updates="in_place")
    async with RewardEngine(own) as first, RewardEngine(own) as other:
        await asyncio.gather(rewards(first), rewards(other))
        assert len(stand_ins.living()) == 1
        await other.update_weights("own", path=stand_ins.weights("second"), version="step-1")
        before = stand_ins.living()
        guard = guard_of(before[0])
        owners = actors("PoolActor")  # those of other tests have no pool any more
        scoring = [asyncio.ensure_future(rewards(engine, 50)) for engine in (first, other)]
        await comes(lambda: first.statistics().scored > 15)
        kill(*owners)
        outcomes = [outcome for group in await asyncio.gather(*scoring) for outcome in group]
        assert {outcome.verdict.weight_version for outcome in outcomes} == {"step-1"}
        assert {outcome.verdict.rationale for outcome in outcomes} == {"second"}
        await comes(lambda: not lives(before[0]) and not lives(guard))
        await comes(lambda: len(stand_ins.living()) == 1)  # all may have been scored before the owner was back
    await comes(lambda: not stand_ins.living())


async def test_a_shell_joins_the_cluster_and_starts_servers_there(cluster, stand_ins, tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree({"command": stand_ins.command()}, platform="cpu")))
    words = ("-m", "qreward_plugins.cli", "serve-judge", str(tmp_path / "config.yaml"))
    env = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    shell = await asyncio.create_subprocess_exec(sys.executable, *words, env=env, stdout=subprocess.PIPE)
    while (line := await shell.stdout.readline()) and b"stop them with Ctrl-C" not in line:
        pass
    assert len(stand_ins.living()) == len(groups()) == 1
    shell.terminate()
    assert b"stopping the servers" in await shell.stdout.read()
    assert await shell.wait() == 0
    await comes(lambda: not stand_ins.living() and not groups())


async def test_a_pool_that_the_cluster_cannot_place(cluster, stand_ins):
    own = tree({"command": stand_ins.command()}, platform="cpu", tensor_parallel=4, start_within_s=4.0)
    async with RewardEngine(own) as engine:
        with pytest.raises(
            ReplicasNotStarted, match=r"it asks for 4 CPU on one node; free on all nodes together: 3 CPU"
        ):
            await engine.score_all(make_samples(1))
    await comes(lambda: not groups())


# Methods of named actors as functions of a source


class Judge:
    def score(self, data_source, solution_str, ground_truth, extra_info):
        if solution_str == "raise":
            raise ValueError("no such answer")
        if solution_str == "die":
            os._exit(1)
        return {"score": float(len(solution_str)), "gpus": len(ray.get_gpu_ids())}


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


def started(cls, name, **options):
    return ray.remote(cls).options(name=name, num_cpus=0, **options).remote()


def calling(function, **source):
    node = {"kind": "function", "function": function, "timeouts": {"total_s": 60}, **source}
    judges = {"j": {"kind": "function", "reward_range": [0, 100]}}
    return {"sources": {"rm": node}, "judges": judges, "engine": {"deadline_s": 120, "seed": 1}}


def samples(*responses):
    return [Sample([{"role": "user", "content": "?"}], response) for response in responses]


async def test_an_actor_of_another_namespace_scores_on_the_gpu_that_ray_gave_it(cluster):
    actor = started(Judge, "own.judge", namespace="models", num_gpus=0.25)
    async with RewardEngine(calling("ray:models/own.judge.score")) as engine:
        fine, raised = await engine.score_all(samples("abc", "raise"))
    assert (fine.reward, fine.verdict.components["gpus"]) == (3.0, 1)
    assert raised.reason == "raised"
    assert "raised ValueError: no such answer" in raised.detail
    del actor


async def test_a_call_that_takes_too_long_is_cancelled_in_the_actor(cluster):
    actor = started(AsyncJudge, "slow")
    await actor.__ray_ready__.remote()
    own = calling("ray:slow.score", arguments="sample", timeouts={"total_s": 1})
    async with RewardEngine(own) as engine:
        (hung,) = await engine.score_all(samples("hang"))
        (after,) = await engine.score_all(samples("fine"))
    assert hung.reason == "hung"
    assert after.reward == 1.0
    del actor


@each_of(
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
        RewardEngine(calling(function))
    del actor


async def test_a_sample_that_kills_its_actor_costs_no_other_one(cluster):
    actor = started(Judge, "mortal", max_restarts=-1)
    async with RewardEngine(calling("ray:mortal.score")) as engine:
        outcomes = await engine.score_all(samples(*"abcdef", "die"))
    *healthy, dead = outcomes
    assert [outcome.reward for outcome in healthy] == [1.0] * 6
    assert (dead.label, dead.spent.attempts) == ("infra/crashed", 2)
    del actor
