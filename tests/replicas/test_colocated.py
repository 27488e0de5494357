"""Judges on the trainer's GPUs sleep unless rewards are asked for: in engines, and in stand-ins for the frameworks."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from itertools import groupby

import pytest
import yaml
from omegaconf import OmegaConf

from qreward_plugins import ConfigurationError, ReplicasNotChanged, ReplicasNotStarted, RewardEngine
from qreward_plugins.testing import FakeRollTrainer, FakeSlimeTrainer, FakeVerlTrainer, roll_stand_in
from tests.kit import comes, make_samples
from verl_adapter import QRewardBatchManager
from verl_adapter.trainers import problem_of_phases

from .conftest import said, states

pytestmark = pytest.mark.anyio
AWAKE, ASLEEP = {"up"}, {"asleep"}


# In engines: they take calls in reward phases only


@pytest.fixture
def colocated(stand_ins):
    """Make the tree of judges on the trainer's GPUs. Its options are those of the stand-in servers."""
    return partial(stand_ins.tree, colocated=True, sleep_mode=True)


def states_of(engine):
    return set(states(engine))


@pytest.mark.parametrize("sleep_mode", [True, False])
async def test_servers_run_in_reward_phases_only(colocated, stand_ins, sleep_mode):
    async with RewardEngine(colocated(sleep_mode=sleep_mode)) as engine:
        assert engine.colocated == ("own",)
        await engine.end_rewards()
        assert stand_ins.living() == [], "nothing was started, so nothing sleeps"
        for step in range(2):
            await engine.begin_rewards()
            await engine.begin_rewards()
            assert states(engine) == ["up", "up"]
            said(await engine.score_all(make_samples(4, step=step)))
            await engine.end_rewards()
            await engine.end_rewards()
            assert states_of(engine) == ASLEEP
            assert len(stand_ins.living()) == (2 if sleep_mode else 0)
        # What comes meanwhile waits for the next phase, and its deadline goes on.
        waiting = asyncio.ensure_future(engine.score_all(make_samples(4), deadline_s=300))
        (late,) = await engine.score_all(make_samples(1), deadline_s=0.05)
        assert late.reason == "deadline"
        assert late.detail.endswith(" s: no source could take it in time; own: it sleeps")
        assert not waiting.done()
        assert states_of(engine) == ASLEEP
        await engine.begin_rewards()
        said(await waiting)
        assert engine.upstreams["own"].breaker.closed
    assert stand_ins.living() == []


async def test_the_end_waits_for_what_is_under_way_but_no_longer_once_another_process_has_ended_the_phase(colocated):
    config = colocated("delay=0.05", limits={"concurrency": 1})
    async with RewardEngine(config) as engine, RewardEngine(config) as other:
        await engine.begin_rewards()
        scoring = asyncio.ensure_future(engine.score_all(make_samples(4), deadline_s=300))
        await comes(lambda: engine.statistics().scored >= 1)
        await engine.end_rewards()
        assert states_of(engine) == ASLEEP
        assert engine.statistics().scored == 4
        said(await scoring)
        await engine.begin_rewards()
        await other.begin_rewards()
        scoring = asyncio.ensure_future(other.score_all(make_samples(40), deadline_s=300))
        await comes(lambda: other.statistics().scored >= 1)
        await engine.end_rewards()
        await asyncio.wait_for(other.end_rewards(), 120)
        assert states_of(other) == ASLEEP
        assert not scoring.done()
        await other.begin_rewards()
        said(await scoring)


async def test_processes_that_all_settle_first_have_their_outcomes_when_one_ends_the_phase(colocated):
    config = colocated("delay=0.05", limits={"concurrency": 1})
    async with RewardEngine(config) as engine, RewardEngine(config) as other:
        scoring = [asyncio.ensure_future(each.score_all(make_samples(4), deadline_s=300)) for each in (engine, other)]
        await comes(lambda: other.statistics().submitted == 4)
        await asyncio.gather(engine.settle_rewards(), other.settle_rewards())
        assert states_of(engine) == AWAKE, "settling ends no phase"
        assert [each.statistics().scored for each in (engine, other)] == [4, 4]
        await engine.end_rewards()
        assert states_of(engine) == ASLEEP
        said([outcome for each in scoring for outcome in await each])


async def test_the_end_waits_for_samples_that_wait_until_the_servers_have_started(colocated):
    async with RewardEngine(colocated()) as engine:
        scoring = asyncio.ensure_future(engine.score_all(make_samples(4), deadline_s=300))
        await comes(lambda: {"starting", "up"} & set(states(engine)))
        await engine.end_rewards()
        assert states_of(engine) == ASLEEP
        assert engine.statistics().scored == 4
        said(await asyncio.wait_for(scoring, 120))


async def test_no_reload_adds_or_removes_such_servers(colocated, stand_ins):
    own = colocated()
    other = {**own, "sources": {"hosted": {"kind": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "judge"}}}
    # Its servers would end at some time after the phase, or start with the next sample, while the trainer trains.
    for before, after in ((own, other), (other, own)):
        async with RewardEngine(before) as engine:
            await engine.begin_rewards()
            with pytest.raises(ConfigurationError, match=r"sources\.own: this change needs a restart"):
                await engine.reload(after)
    async with RewardEngine(stand_ins.tree()) as engine:
        assert [change.restart for change in (await engine.reload(other)).changes] == [False, False]


# In stand-ins for the frameworks


@pytest.fixture
def judges(colocated, tmp_path):
    """The same as a file, with one server."""

    def judges(*options, **more):
        config = colocated(*options, engine={"deadline_s": 30}, **{"data_parallel": 1, **more})
        file = tmp_path / "judges.yaml"
        file.write_text(yaml.safe_dump(json.loads(json.dumps(config))))
        return file

    return judges


# verl

MODES = {"v1": [], "legacy": ["trainer.use_v1=False"]}
ROWS = [{"prompt": f"What is 2 + {n}?", "ground_truth": str(2 + n), "tag": "math"} for n in range(12)]


def verl(file, *overrides, **named):
    tree = ["reward.reward_manager.name=qreward", "reward.num_workers=2", f"+qreward.config={file}"]
    return FakeVerlTrainer([*tree, *overrides], **named)


def engines_of(trainer):
    return [manager.engine for manager in trainer.reward_managers]


@pytest.mark.parametrize("mode", MODES)
def test_verl(mode, judges, stand_ins):
    seen = []

    def values(batch):  # the critic's, computed on the GPUs
        seen.append([states_of(engine) for engine in engines_of(trainer)])
        return 0.0

    critic = ["algorithm.adv_estimator=gae", "critic.enable=True", "+qreward.on_failure=raise"]
    with verl(judges(), *critic, *MODES[mode], rows=ROWS[:8], val_rows=ROWS[:2], values=values) as trainer:
        assert [states_of(engine) for engine in engines_of(trainer)] == [AWAKE, AWAKE], "before the first rollout"
        for number in range(2):
            step = trainer.step()
            assert seen == [[ASLEEP, ASLEEP]] * (number + 1)
            assert step.metrics["qreward/failed_rate"] == 0
            assert {round(score, 6) for score in step.scores} == {0.7}
            trainer.validate()
        assert stand_ins.events("/sleep", "/wake_up") == ["/sleep", "/wake_up"] * 2
    assert stand_ins.living() == []


def test_verl_that_scores_whole_batches_asks_for_rewards_only_then(judges, stand_ins, tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def compute_score(**_):\n    return 0.0\n")
    model = [
        "reward.reward_model.enable=True",
        f"reward.custom_reward_function.path={own}",
        "+qreward.on_failure=raise",
        "algorithm.adv_estimator=grpo",
    ]
    with verl(judges(), *model, rows=ROWS[:8], val_rows=ROWS[:2]) as trainer:
        assert stand_ins.living() == []
        for _ in range(2):
            assert {round(score, 6) for score in trainer.step().scores} == {0.7}
            assert [states_of(engine) for engine in engines_of(trainer)] == [ASLEEP, ASLEEP]
        trainer.validate()
        assert [states_of(engine) for engine in engines_of(trainer)] == [ASLEEP, ASLEEP]


def test_verl_is_refused_where_its_phases_are_not_known(judges, stand_ins):
    with pytest.raises(ConfigurationError, match=r"checkpoint_manager_class=mine\.Manager, it is not known"):
        verl(judges(), "+actor_rollout_ref.rollout.checkpoint_manager_class=mine.Manager")
    assert stand_ins.living() == []
    for trainer in ("one_step_off", "fully_async"):
        assert f"{trainer} asks for rewards while it trains" in problem_of_phases(OmegaConf.create(), trainer)


def test_older_verl_is_refused(judges):
    with pytest.raises(ConfigurationError, match="may score a batch while it trains"):
        QRewardBatchManager(None, qreward={"config": str(judges())})


def test_verl_ends_with_the_error_of_servers_that_do_not_start_or_wake(judges, stand_ins):
    with pytest.raises(ReplicasNotStarted, match="no memory for the weights"):
        verl(judges("exit=3"))
    assert stand_ins.living() == []
    with verl(judges(sleep_mode=False), "algorithm.adv_estimator=grpo") as trainer:
        weights = stand_ins.weights("first") / "weights.bin"
        hook = sys.modules["verl.checkpoint_engine"].CheckpointEngineManager
        sleep = hook.sleep_replicas

        def lose(self):
            sleep(self)
            weights.rename(weights.with_name("gone"))

        hook.sleep_replicas = lose
        with pytest.raises(ReplicasNotChanged, match="source 'own'"):
            trainer.step()
        with pytest.raises(RuntimeError, match="the run has ended"):
            trainer.step()


# slime

HOOK = {"custom_reward_post_process_path": "slime_adapter.post_process"}
LOG = {"custom_rollout_log_function_path": "slime_adapter.log_rollout"}
HOOKS = {**HOOK, **LOG}


def slime(file, **flags):
    given = {"colocate": True, "qreward": {"config": str(file)}, "custom_rm_path": "slime_adapter.reward", **flags}
    return FakeSlimeTrainer(**given)


@pytest.fixture
def slime_engine():
    import slime_adapter
    from slime_adapter.settings import adapter_of

    yield lambda trainer: adapter_of(trainer.args).portal._engine
    slime_adapter.close()


@pytest.mark.parametrize("hook", [HOOK, LOG], ids=["post_process", "log_rollout"])
def test_slime(hook, judges, stand_ins, slime_engine):
    held_out = {"held_out": [{"prompt": "Why?", "label": "so"}]}
    with slime(judges(), eval_datasets=held_out, **hook) as trainer:
        evaluation = trainer.evaluate()
        assert evaluation.data["held_out"]["rewards"] == [0.7]
        assert states_of(slime_engine(trainer)) == AWAKE, "slime generates next"
        for _ in range(2):
            step = trainer.rollout()
            assert {sample.reward for sample in step.samples} == {0.7}
            assert states_of(slime_engine(trainer)) == ASLEEP
        trainer.evaluate()
        assert states_of(slime_engine(trainer)) == AWAKE
        assert stand_ins.events("/sleep", "/wake_up") == ["/sleep", "/wake_up", "/sleep", "/wake_up"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"colocate": False}, "without --colocate, slime may ask for rewards while it trains"),
        ({}, "no hook of this run tells when its last reward is in"),
    ],
)
def test_slime_is_refused_where_its_phases_are_not_known(flags, problem, judges, stand_ins, slime_engine):
    with slime(judges(), **flags) as trainer, pytest.raises(ConfigurationError, match=problem):
        trainer.rollout()
    assert stand_ins.living() == []


def test_slime_waits_for_verdicts_of_a_partial_rollout(judges, slime_engine):
    file = judges("delay=0.1", limits={"concurrency": 2})
    with slime(file, partial_rollout=True, over_sampling_batch_size=8, **LOG) as trainer:
        trainer.rollout()
        engine = slime_engine(trainer)
        assert states_of(engine) == ASLEEP
        counts = engine.statistics()
        assert counts.submitted == counts.scored


def test_the_error_of_a_server_that_does_not_start_ends_slime(judges, slime_engine):
    with slime(judges("exit=3"), **HOOKS) as trainer, pytest.raises(ReplicasNotStarted, match="no memory"):
        trainer.rollout()


# ROLL


@pytest.fixture
def roll(stand_ins):
    trainers = []

    def roll(file, **flags):
        worker = {"worker_cls": "roll_adapter.QRewardWorker", "reward_manager_config": [{"config": str(file)}]}
        trainer = FakeRollTrainer({"math": {**worker, "world_size": 2}}, adv_estimator="grpo", **flags)
        trainers.append(trainer)
        return trainer

    with roll_stand_in():
        yield roll
        for trainer in trainers:
            trainer.close()


def roll_states(trainer):
    return [states_of(worker.engine) for worker in trainer.workers]


@pytest.mark.parametrize("level", [0, 1])
def test_roll(level, roll, judges, stand_ins):
    trainer = roll(judges("questions"), rows=ROWS, val_rows=ROWS[:2], generate_opt_level=level)
    assert stand_ins.living() == []
    for _ in range(2):
        step = trainer.step()
        assert {round(reward, 6) for reward in step.raw_rewards} == {0.7}
        assert roll_states(trainer) == [ASLEEP, ASLEEP]
    trainer.validate()
    assert roll_states(trainer) == [AWAKE, AWAKE], "ROLL generates next"
    events = [event for event, _ in groupby(stand_ins.events())]
    # So it is with the real ROLL (tests/conformance/roll/test_pipelines.py).
    assert events == ["/start", "/ask", "/sleep", "/wake_up", "/ask", "/sleep", "/wake_up", "/ask"]


def test_the_error_of_a_server_that_does_not_start_ends_roll(roll, judges):
    trainer = roll(judges("exit=3"))
    with pytest.raises(ReplicasNotStarted, match="no memory for the weights"):
        trainer.step()


def test_environments_of_roll_are_refused(roll, judges):
    roll(judges())
    from roll_adapter.trajectories import _settings_of

    with pytest.raises(ConfigurationError, match="does not tell its environments when it trains"):
        _settings_of(str(judges()), "maze")
