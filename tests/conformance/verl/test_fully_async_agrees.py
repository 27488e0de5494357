"""The fully asynchronous trainer of `FakeVerlTrainer` against verl's own classes: the same events, the same decisions,
the same batches, metrics and errors. Nothing is generated and no Ray is started.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import functools
import importlib
import importlib.util
import random
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl", reason="verl is not installed (pip install 'qreward-plugins[demo]')")
torch = pytest.importorskip("torch")

from qreward_plugins.testing import FakeVerlTrainer  # noqa: E402
from qreward_plugins.testing.tokenizer import WordTokenizer  # noqa: E402
from qreward_plugins.testing.verl import fully_async, rollout_samples  # noqa: E402
from qreward_plugins.testing.verl.agent_loop import AgentLoops, postprocess  # noqa: E402
from qreward_plugins.testing.verl.aggregated_metrics import MetricsAggregator  # noqa: E402
from qreward_plugins.testing.verl.base import Setup  # noqa: E402
from qreward_plugins.testing.verl.configuration import compose_config  # noqa: E402
from qreward_plugins.testing.verl.data import DEFAULT_ROWS, VerlDataset, collate  # noqa: E402
from qreward_plugins.testing.verl.engine import AgentOutput  # noqa: E402

from .agreement import VERLS_WARNINGS, PaddingTokenizer, as_real, both, of_worker, real_output, same  # noqa: E402

pytestmark = VERLS_WARNINGS

NAME = "fully_async_ppo_trainer"
HOME = "verl.experimental.fully_async_policy"
SMALL = [
    "actor_rollout_ref.hybrid_engine=False",
    "data.train_batch_size=0",
    "data.gen_batch_size=1",
    "data.shuffle=False",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
]


def actor_class(module, name):
    """The class that Ray made actors of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(f"{HOME}.{module}"), name).__ray_metadata__.modified_class


@functools.cache
def defaults():
    """verl's configuration, and that of the fake."""
    from hydra import compose, initialize_config_dir

    home = Path(importlib.util.find_spec(HOME).submodule_search_locations[0]) / "config"
    with initialize_config_dir(str(home), version_base=None):
        real = compose(NAME, overrides=["hydra.searchpath=[pkg://verl.trainer.config]", *SMALL])
    return real, compose_config(SMALL, NAME)


@functools.cache
def composed(*overrides):
    """Both with these changes: to look at only, because laying them over anew would take most of a test's time."""
    return [OmegaConf.merge(config, OmegaConf.from_dotlist(list(overrides))) for config in defaults()]


def real_columns(number):
    """What verl's data loader gives: the rows of one prompt."""
    columns = collate([VerlDataset(DEFAULT_ROWS)[number]])
    return {**columns, "dummy_tensor": torch.zeros((1, 1), dtype=torch.uint8)}


SHORT = ("data.max_prompt_length=6", "data.max_response_length=5")


class Generation:
    """Responses that are finished, or fail, when the test says so."""

    def __init__(self):
        self.begun = []
        self.open = {}

    async def generate_sequences_single(self, batch):
        columns = batch.non_tensor_batch
        uid = columns["uid"][0]
        self.begun.append(
            (uid, len(batch), sorted(columns), [columns[name].tolist() for name in ("uid", "raw_prompt")])
        )
        self.open[uid] = asyncio.get_running_loop().create_future()
        await self.open[uid]
        return batch

    def end(self, uid, error=None):
        ticket = self.open.pop(uid)
        if error is None:
            ticket.set_result(None)
        else:
            ticket.set_exception(error)


class RealRollouter:
    """verl's rollouter on this event loop, with a queue of verl's and generation by the test."""

    def __init__(self, monkeypatch, config):
        module = importlib.import_module(f"{HOME}.fully_async_rollouter")
        cls = actor_class("fully_async_rollouter", "FullyAsyncRollouter")
        for name in ("create_rl_dataset", "create_rl_sampler"):
            monkeypatch.setattr(module, name, lambda *_, **__: None)
        loader = [real_columns(number) for number in range(len(DEFAULT_ROWS))]
        monkeypatch.setattr(cls, "_create_dataloader", lambda self, *_: setattr(self, "train_dataloader", loader))
        self.config = config
        self.own = cls(config, WordTokenizer())
        self.generation = self.own.async_rollout_manager = Generation()
        self.error = None

    async def start(self):
        self.own._init_async_objects()
        servers = fully_async._servers(self.config)
        self.own.llm_server_manager = SimpleNamespace(get_active_server_count=lambda: servers)
        await self.own.set_max_required_samples()
        queue = actor_class("message_queue", "MessageQueue")
        self.queue = queue(self.config, self.own.max_queue_size)
        await self.own.set_message_queue_client(self.queue)
        self.running = asyncio.ensure_future(self.own._streaming_generation_main())
        self.running.add_done_callback(lambda done: setattr(self, "error", done.exception()))

    async def take(self):
        data, _ = await self.queue.get_sample()
        return None if data is None else importlib.import_module("ray").cloudpickle.loads(data)

    async def reset(self):
        told = await self.own.reset_staleness()
        return {name: value for name, value in told.items() if "generated" in name}

    async def state(self):
        return len(self.queue.queue), self.own.paused, await self.own.get_statistics()


class FakeRollouter:
    """The same of the fake trainer."""

    def __init__(self, config):
        setup = Setup(SimpleNamespace(tokenizer=WordTokenizer()), DEFAULT_ROWS, (), None, 0)
        self.own = fully_async.FullyAsyncRollouter(config, setup)
        self.generation = self.own.agent_loops = Generation()

    @property
    def error(self):
        return self.own.error

    async def start(self):
        self.queue = self.own.queue
        await self.own.begin()

    async def take(self):
        return await self.queue.get_sample()

    async def reset(self):
        return await self.own.reset_staleness()

    async def state(self):
        return len(self.queue), self.own.paused, self.own.statistics()


async def settled():
    for _ in range(60):
        await asyncio.sleep(0)


async def play(rollouters, seed):
    """The same random events for both; both decide the same after each. How many prompts were begun, and the error."""
    rng = random.Random(seed)
    fails = rng.random() < 0.5
    for each in rollouters:
        await each.start()
    resets = []
    for _ in range(rng.randrange(20, 120)):
        await settled()
        (real, fake) = [await each.state() for each in rollouters]
        assert fake == real
        one, other = (each.generation for each in rollouters)
        assert other.begun == one.begun
        assert [done.done() for done in resets[0::2]] == [done.done() for done in resets[1::2]]
        events = ["end"] * 3 * bool(one.open) + ["take"] * bool(real[0]) + ["reset"] * (rng.random() < 0.2)
        if not events:
            events = ["reset"]
        event = rng.choice(events)
        if event == "end":
            uid = rng.choice(sorted(one.open))
            error = ValueError(f"{uid} has no reward") if fails and rng.random() < 0.2 else None
            for each in rollouters:
                each.generation.end(uid, error)
        elif event == "reset":
            resets += [asyncio.ensure_future(each.reset()) for each in rollouters]
        else:
            samples = [await each.take() for each in rollouters]
            if samples[0] is None:
                assert samples[1] is None
                break
            told = [(sample.sample_id, sample.epoch, sample.rollout_status) for sample in samples]
            assert told[0] == told[1]
    await settled()
    for done in resets:
        done.cancel()
    results = await asyncio.gather(*resets, return_exceptions=True)
    assert [str(result) for result in results[0::2]] == [str(result) for result in results[1::2]]
    errors = [each.error for each in rollouters]
    assert repr(errors[0]) == repr(errors[1])
    running = rollouters[0].running
    running.cancel()
    await asyncio.gather(running, rollouters[1].own.aclose(), return_exceptions=True)
    for task in rollouters[0].own.active_tasks:
        task.cancel()
    return len(rollouters[0].generation.begun), errors[0]


@pytest.mark.parametrize("stale", [0, 0.5, 2])
@pytest.mark.parametrize("every", [1, 3])
def test_how_far_generation_goes_ahead(monkeypatch, stale, every):
    """Pauses, their ends, limits, the end of the data and errors, in 60 random courses of events."""
    begun, errors = [], []
    for seed in range(10):
        at_once, total = [(1, 9), (2, 30), (16, "null")][seed % 3]
        overrides = [
            f"async_training.staleness_threshold={stale}",
            f"async_training.trigger_parameter_sync_step={every}",
            f"async_training.concurrent_samples_per_replica={at_once}",
            f"rollout.total_rollout_steps={total}",
            "trainer.total_epochs=2",
        ]
        real, fake = composed(*overrides)
        rollouters = RealRollouter(monkeypatch, real), FakeRollouter(fake)
        count, error = asyncio.run(play(rollouters, f"{stale}/{every}/{seed}"))
        begun.append(count)
        errors.append(error)
    assert max(begun) > 9
    assert any(errors)
    assert not all(errors)


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.hybrid_engine=True",
        "data.train_batch_size=4",
        "data.gen_batch_size=4",
        "async_training.staleness_threshold=-1",
        "async_training.trigger_parameter_sync_step=0",
        "actor_rollout_ref.rollout.calculate_log_probs=False",
        "reward.reward_model.enable=True",
    ],
)
def test_what_it_does_not_start_with(monkeypatch, override):
    real, fake = composed(override)
    one, other = both(lambda: RealRollouter(monkeypatch, real), lambda: FakeRollouter(fake))
    assert isinstance(one, str)
    assert other == one


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("split", [1, 2, 4])
def test_engines(nodes, split):
    servers = importlib.import_module("verl.workers.rollout.llm_server")
    overrides = [f"rollout.nnodes={nodes}", f"actor_rollout_ref.rollout.tensor_model_parallel_size={split}"]
    config, fake = copy.deepcopy(composed(*overrides))
    rollout = config.actor_rollout_ref.rollout
    rollout.nnodes, rollout.n_gpus_per_node = config.rollout.nnodes, config.rollout.n_gpus_per_node

    class Replica:
        _server_handle = _server_address = None

        def __init__(self, **_):
            pass

        async def init_standalone(self):
            """Nothing to start."""

    manager = SimpleNamespace(
        rollout_config=rollout, worker_group=None, model_config=None, rollout_replica_class=Replica, start_rank=0
    )
    asyncio.run(servers.LLMServerManager._initialize_llm_servers(manager))
    assert len(manager.rollout_replicas) == fully_async._servers(fake)


def finished_group(number, *, infos, versions=(3, 3), scores=(1.0, 0.0)):
    """A group as agent loops return it, for the fake."""
    _, config = composed(*SHORT)
    outputs = []
    for row, (score, info) in enumerate(zip(scores, infos, strict=True)):
        output = AgentOutput([5, 6, 7 + number], [8, 9][: 1 + row], [1, 1][: 1 + row], 2, reward_score=score)
        told = dict(zip(("min_global_steps", "max_global_steps"), versions, strict=True))
        output.extra_fields = {"turn_scores": [], "raw_prompt": ["p"], "reward_extra_info": info, **told}
        outputs.append(output)
    sample = rollout_samples.RolloutSample(postprocess(config, outputs, {}, streamed=True), f"sample_0_{number}", 0)
    sample.set_uid()
    sample.rollout_status = {"count/staleness_samples": number}
    return sample


def real_group(sample):
    """The same for verl."""
    detach = importlib.import_module(f"{HOME}.detach_utils")
    batch = as_real(sample.full_batch)
    batch.non_tensor_batch = dict(batch.non_tensor_batch)
    seconds = [{"generate_sequences": 0.0, "tool_calls": 0.0}] * len(batch)
    batch.meta_info = {"metrics": seconds, **copy.deepcopy(sample.full_batch.meta_info)}
    return detach.RolloutSample(batch, sample.sample_id, sample.epoch, dict(sample.rollout_status))


SECONDS = (
    "processing_time",
    "wait_time",
    "tool_calls",
    "timing_",
    "idle_ratio",
    "perf/",
    "utilization",
    "train_",
    "mq_size",
)
"""Parts of the names of metrics that are made of seconds, or of how far generation is at one instant."""


@pytest.mark.parametrize(
    "infos",
    [
        [[{"acc": 1.0}, {"acc": 0.0}]] * 3,
        [[{"acc": 1.0}, {"acc": 0.0}], [{"acc": 1.0, "more": 2}] * 2],
        [[{"acc": 1.0, "more": 2}] * 2, [{"acc": 1.0}, {"acc": 0.0}]],
        [[{"acc": 1.0, "more": 2}] * 2, [{"more": 2, "acc": 1.0}] * 2],
        [[{}, {}], [{"acc": 1.0}, {"acc": 0.0}]],
    ],
    ids=["same keys", "more later", "fewer later", "another order", "none first"],
)
@pytest.mark.parametrize("scores", [(1.0, 0.0), (1.0, None)], ids=["scored", "not scored"])
def test_a_batch_of_groups(infos, scores):
    assemble = importlib.import_module(f"{HOME}.detach_utils").assemble_batch_from_rollout_samples
    config, _ = composed()
    # The groups of one batch may have been finished by other weights, and some by several.
    groups = [
        finished_group(number, infos=info, versions=(3 - number % 2, 3 + number // 2), scores=scores)
        for number, info in enumerate(infos)
    ]
    one, other = both(
        lambda: assemble([real_group(group) for group in groups], None, config),
        lambda: rollout_samples.assemble_batch(groups),
    )
    if isinstance(one, str):
        assert other == one
        return
    assert set(one.batch.keys()) == set(other.batch)
    assert all(same(one.batch[name], values) for name, values in other.batch.items())
    of_seconds = {"processing_times", "tool_calls_times"}
    assert set(one.non_tensor_batch) - of_seconds == set(other.non_tensor_batch)
    for name, values in other.non_tensor_batch.items():
        assert one.non_tensor_batch[name].tolist() == values.tolist(), name
    told = {name: value for name, value in one.meta_info.items() if not any(part in name for part in SECONDS)}
    assert set(told) == set(other.meta_info)
    assert {name: np.asarray(value).tolist() for name, value in told.items()} == {
        name: np.asarray(value).tolist() for name, value in other.meta_info.items()
    }


def test_metrics_of_several_steps():
    aggregator = importlib.import_module(f"{HOME}.detach_utils").MetricsAggregator
    rng = np.random.default_rng(19)
    names = ["critic/score/mean", "critic/score/max", "critic/score/min", "training/global_step", "actor/lr"]
    names += ["fully_async/count/total_generated_samples", "fully_async/partial/total_partial_num", "timing_s/step"]
    names += ["fully_async/static/max_required_samples", "dynamic_resource/mq_size", "response/aborted_ratio", "Sum"]
    names += ["timing_s/agent_loop/tool_calls/max", "dynamic_resource/train_compute_time_s", "perf/time_per_step"]
    for _ in range(20):
        real, fake = aggregator(total_gpus=8), MetricsAggregator()
        for _ in range(int(rng.integers(1, 6))):
            metrics = {name: rng.normal() for name in names if rng.random() < 0.9}
            metrics |= {
                "text": "no number",
                "none": None,
                "yes": True,
                "count": int(rng.integers(9)),
                "f": np.float32(1),
            }
            real.add_step_metrics(metrics, sample_count=int(rng.integers(1, 9)))
            fake.add_step_metrics(metrics)
        told = {name: value for name, value in real.get_aggregated_metrics().items() if "resource_util" not in name}
        assert fake.get_aggregated_metrics() == told
        fake.reset()
        assert fake.get_aggregated_metrics() == {}


def test_what_run_single_gets_and_what_becomes_of_a_group(monkeypatch):
    from verl.experimental.agent_loop import agent_loop as real_loop

    real_config, config = composed(*SHORT)
    outputs = [AgentOutput([5, 6, 7], [8, 9], [1, 1], 2), AgentOutput([5, 6], [9, 9, 3], [1, 0, 1], 4)]
    for version, output in enumerate(outputs):
        output.extra_fields = {"turn_scores": [], "min_global_steps": 1, "max_global_steps": 1 + version}
    seen = {"real": [], "fake": []}

    def worker(name):
        async def remote(data):
            seen[name].append(copy.deepcopy(data))
            return {"reward_score": 0.5 * len(seen[name]), "reward_extra_info": {"acc": 1.0, "place": len(seen[name])}}

        return SimpleNamespace(compute_score=SimpleNamespace(remote=remote))

    real = of_worker(
        *("generate_sequences", "_agent_loop_postprocess", "_pad_token_ids", "_compute_position_ids", "_postprocess"),
        *("_compute_multi_modal_inputs", "_compute_score", "_compute_teacher_logprobs"),
        reward_loop_worker_handles=[worker("real")],
        rollout_config=real_config.actor_rollout_ref.rollout,
        tokenizer=PaddingTokenizer(),
    )
    real._get_mm_processor_kwargs = lambda audio: {}
    rows = iter(outputs)

    async def run(sampling_params, trajectory, *, agent_name, trace, **kwargs):
        assert agent_name == "single_turn_agent"
        assert (trajectory["step"], trajectory["validate"]) == (-1, False), "verl says no step here"
        return await real._agent_loop_postprocess(real_output(next(rows)), trajectory["validate"], **kwargs)

    real._run_agent_loop = run
    prepare = importlib.import_module(f"{HOME}.detach_utils").prepare_single_generation_data
    asked = prepare(real_columns(3), real_config)
    asked.non_tensor_batch["uid"] = np.array(["uid_sample_0_4"] * 2, dtype=object)
    monkeypatch.setattr(
        real_loop.RolloutTraceConfig, "get_instance", lambda: SimpleNamespace(max_samples_per_step_per_worker=None)
    )
    made = asyncio.run(real.generate_sequences(asked))

    class Engine:
        async def run(self, columns, **named):
            assert (named["global_step"], named["validate"]) == (-1, False)
            return [copy.deepcopy(outputs[named["number"]])]

    sample = rollout_samples.RolloutSample(
        rollout_samples.prompt_batch(collate([VerlDataset(DEFAULT_ROWS)[3]]), config), "sample_0_4", 0
    )
    sample.set_uid()
    loops = AgentLoops(config, Engine(), [worker("fake")], random.Random(0))
    fake = asyncio.run(loops.generate_sequences_single(sample.full_batch))
    for one, other in [*zip(seen["real"], seen["fake"], strict=True), (made, fake)]:
        assert set(one.batch.keys()) == set(other.batch)
        assert all(same(one.batch[name], values) for name, values in other.batch.items())
        assert set(one.non_tensor_batch) - {"multi_modal_inputs"} == set(other.non_tensor_batch)
        for name, values in other.non_tensor_batch.items():
            assert one.non_tensor_batch[name].tolist() == values.tolist(), name
    assert made.meta_info["reward_extra_keys"] == fake.meta_info["reward_extra_keys"]
    assert len(seen["fake"]) == 2


def played(overrides, steps):
    """The groups that the fake trained on, its steps, and what its tracker got."""
    groups, made = [], []

    def reward(data_source, solution_str, ground_truth, extra_info):
        return {"score": len(solution_str) % 7 / 3, "acc": float(ground_truth in solution_str)}

    with FakeVerlTrainer([*SMALL, *overrides], experimental="fully_async", reward=reward) as fake:
        queue = fake._trainer.rollouter.queue
        take = queue.get_sample

        async def take_and_note():
            sample = await take()
            groups.append(copy.deepcopy(sample))
            return sample

        queue.get_sample = take_and_note
        for _ in range(steps):
            made.append(fake.step())
        with pytest.raises(fully_async.TrainingStopException, match="queue returned None"):
            fake.step()
        return groups, made, fake.tracked


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("estimator", "frequency"), [("grpo", -1), ("rloo", 7)])
def test_steps_and_what_the_tracker_gets(monkeypatch, every, estimator, frequency):
    """No version of the weights is validated here, but a frequency decides whether the last one is logged."""
    overrides = [
        f"trainer.test_freq={frequency}",
        f"async_training.trigger_parameter_sync_step={every}",
        f"algorithm.adv_estimator={estimator}",
        "rollout.total_rollout_steps=22",
        "trainer.balance_batch=False",
    ]
    groups, steps, tracked = played(overrides, 5)
    module = importlib.import_module(f"{HOME}.fully_async_trainer")
    cls = actor_class("fully_async_trainer", "FullyAsyncTrainer")
    lines, trained = [], []
    cloudpickle = module.ray.cloudpickle
    monkeypatch.setattr(module, "ray", SimpleNamespace(get=lambda refs: [0, 0], cloudpickle=cloudpickle))
    log = lambda data, step: lines.append((step, dict(data)))  # noqa: E731
    monkeypatch.setattr(module, "Tracking", lambda **_: SimpleNamespace(log=log))
    config, _ = composed(*overrides)
    generated = iter(data for _, data in tracked if set(data) == {"fully_async/rollouter/step_generated_samples"})
    samples = iter(groups)

    def reset():
        done = concurrent.futures.Future()
        done.set_result({**next(generated), "dynamic_resource/rollout_resource_utilization": 0.0})
        return SimpleNamespace(future=lambda: done)

    async def take():
        sample = next(samples)
        return None if sample is None else cloudpickle.dumps(real_group(sample)), 0

    async def nothing(**_):
        pass

    def train(batch):
        trained.append(copy.deepcopy(batch))
        return batch

    async def main():
        own = cls(config, WordTokenizer(), {}, SimpleNamespace(get_n_gpus=lambda: 8))
        own.message_queue_client = SimpleNamespace(get_sample=take, get_queue_size_sync=lambda: 0)
        own.rollouter = SimpleNamespace(
            get_total_produced_samples=SimpleNamespace(remote=int),
            get_completed_steps=SimpleNamespace(remote=int),
            reset_staleness=SimpleNamespace(remote=reset),
        )
        own.checkpoint_manager = SimpleNamespace(update_weights=nothing)
        own.progress_bar = SimpleNamespace(update=lambda _: None, close=lambda: None)
        own._start_profiling = own._stop_profiling = lambda _: None
        own._fit_compute_log_prob = lambda batch: batch
        own._fit_update_actor = train
        await own._fit_update_weights()
        await own.fit()

    asyncio.run(main())
    for real, step in zip(trained, steps, strict=True):
        for name in (
            "responses",
            "response_mask",
            "token_level_scores",
            "token_level_rewards",
            "advantages",
            "returns",
        ):
            assert same(real.batch[name], step.batch.batch[name]), name
        for name in ("uid", "acc", "max_global_steps"):
            assert real.non_tensor_batch[name].tolist() == step.batch.non_tensor_batch[name].tolist()
    told = [
        (step, {name: data[name] for name in data if not any(part in name for part in SECONDS)}) for step, data in lines
    ]
    seen = [(step, {name: data[name] for name in data if "mq_size" not in name}) for step, data in tracked]
    assert [step for step, _ in told] == [step for step, _ in seen]
    for (_, real), (_, fake) in zip(told, seen, strict=True):
        assert set(fake) == set(real)
        assert fake == pytest.approx(real, rel=0, abs=0, nan_ok=True)
    assert any("critic/score/mean" in data for _, data in seen)
