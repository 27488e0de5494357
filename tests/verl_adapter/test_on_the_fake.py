"""Our manager in `FakeVerlTrainer`: whole steps and validations of both trainers, nothing of the adapter mocked."""

from __future__ import annotations

import math
import os
import sys
import time

import numpy as np
import pytest

from qreward_plugins import ConfigurationError
from qreward_plugins.testing import FakeVerlTrainer, Faults, JudgeServer, Latency

GRPO = "algorithm.adv_estimator=grpo"
BOTH = pytest.mark.parametrize("trainer", ["trainer.use_v1=True", "trainer.use_v1=False"], ids=["v1", "legacy"])
ROWS = [{"prompt": "What is 2 + 2?", "ground_truth": "4"}, {"prompt": "What is 3 + 3?", "ground_truth": "6"}]


def play(server, *overrides, **named):
    tree = [
        "reward.reward_manager.name=qreward",
        "reward.num_workers=2",
        "+qreward.sources.judge.kind=openai",
        f"+qreward.sources.judge.base_url={server.base_url}",
        "+qreward.sources.judge.model=judge",
        "+qreward.judges.quality.kind=llm",
        "+qreward.judges.quality.correct_at=0.5",
        "+qreward.judges.quality.invalid_retries=0",
        "+qreward.engine.max_attempts=1",
        "+qreward.engine.deadline_s=10",
        "+qreward.groups.wait_s=10",
    ]
    return FakeVerlTrainer([*tree, GRPO, *overrides], **named)


def one_in_four(number):
    return "error_422" if number % 4 == 0 else None


@BOTH
def test_a_failed_sample_is_neutral_to_its_group(trainer):
    with JudgeServer(faults=Faults(script=one_in_four)) as server, play(server, trainer) as fake:
        step = fake.step()
    failed = [info["qreward/missing"] == 1.0 for info in step.extra_info]
    assert 0 < sum(failed) < 16
    for place, is_failed in enumerate(failed):
        if is_failed:
            siblings = [
                step.scores[other] for other in range(16) if step.uids[other] == step.uids[place] and not failed[other]
            ]
            assert step.advantages[place] == 0.0
            assert step.scores[place] == pytest.approx(math.fsum(siblings) / len(siblings), abs=1e-6)
    assert step.metrics["qreward/samples"] == 16
    assert step.metrics["qreward/failed_rate"] == step.metrics["qreward/imputed_rate"] == sum(failed) / 16
    assert not step.poisoned


@pytest.fixture
def reads(monkeypatch):
    """How often the queue of a trainer is asked for the extra info of samples, from now on."""

    def reads():
        counted = []
        queue = sys.modules["transfer_queue"]
        get = queue.kv_batch_get

        def counting(keys, partition_id, select_fields):
            counted.append(len(keys))
            return get(keys=keys, partition_id=partition_id, select_fields=select_fields)

        monkeypatch.setattr(queue, "kv_batch_get", counting)
        return counted

    return reads


@BOTH
def test_the_advantage_of_an_imputed_sample_is_exactly_zero(trainer):
    """Where the mean of its group is no float32, verl's own advantage of it is some 1e-7."""
    texts = ("0.1", "0.7", "0.9", "0.1", "0.1", "none", "none", "none")
    overrides = [trainer, "actor_rollout_ref.rollout.n=8", "+qreward.engine.max_attempts=1"]
    named = {"reward": lambda **row: float(row["solution_str"]), "respond": lambda draft, _: texts[draft.number]}
    with functions(*overrides, **named) as fake:
        step = fake.step()
    for name in ("advantages", "returns"):
        tokens = np.asarray(step.batch.batch[name]).reshape(4, 8, -1)
        assert (tokens[:, 5:] == 0).all()
        assert (tokens[:, :5].sum(axis=-1) != 0).all()


def test_the_queue_of_v1_is_asked_only_once_a_sample_was_imputed(reads):
    fails = [False]
    named = {"reward": lambda **_: float("x" if fails[0] else "1"), "respond": lambda draft, _: "so it is"}
    with functions("+qreward.engine.max_attempts=1", **named) as fake:
        counted = reads()
        fake.step()
        assert counted == []
        fails[0] = True
        assert set(fake.step().advantages) == {0.0}
        assert counted == [16]


@BOTH
def test_validation_leaves_the_failed_out(trainer):
    workers = "actor_rollout_ref.rollout.agent.num_workers=2"
    faults = Faults(script=lambda number: "error_422" if number in (0, 1, 2) else None)
    named = {"val_rows": ROWS, "respond": lambda draft, rng: f"It is {draft.ground_truth}"}
    with (
        JudgeServer(lambda call: 10.0, faults=faults) as server,
        play(server, trainer, workers, "actor_rollout_ref.rollout.val_kwargs.n=4", **named) as fake,
    ):
        validation = fake.validate()
    metrics = validation.metrics
    assert sum(validation.extra_info["qreward/missing"]) == 3.0
    for name in ("reward", "acc"):
        means = [value for key, value in metrics.items() if f"/{name}/mean@" in key]
        assert means
        assert set(means) == {1.0}
    assert metrics["qreward/val/samples"] == 8
    assert metrics["qreward/val/failed_rate"] == 3 / 8
    assert "qreward/samples" not in metrics


@pytest.mark.parametrize("fails", [False, True])
def test_rows_that_fill_up_a_validation_are_neither_judged_nor_counted(fails):
    """verl fills the batch up with copies of its first rows and drops their scores."""
    rows = [{"prompt": f"What is {n} + {n}?", "ground_truth": str(2 * n)} for n in range(3)]
    workers = "actor_rollout_ref.rollout.agent.num_workers=8"
    faults = Faults(script=lambda number: "error_422" if fails else None)
    with (
        JudgeServer(lambda call: 10.0, faults=faults) as server,
        play(server, "trainer.use_v1=False", workers, val_rows=rows) as fake,
    ):
        validation = fake.validate()
        assert server.report().requests == 3
    assert validation.metrics["qreward/val/samples"] == 3
    assert validation.metrics["qreward/val/failed_rate"] == float(fails)
    assert validation.metrics["val-aux/num_turns/mean"] == 2
    assert len(validation.scores) == 3


def test_rows_that_fill_up_a_batch_are_no_siblings(tmp_path):
    """A colocated reward model: the batch is scored at once, and dealt to the reward workers in equal parts."""
    path = tmp_path / "mine.py"
    path.write_text("def compute_score(solution_str, **_):\n    return float(solution_str)\n")
    overrides = [
        "trainer.use_v1=False",
        "reward.reward_model.enable=True",
        f"reward.custom_reward_function.path={path}",
        "data.train_batch_size=1",
        "reward.num_workers=3",
        "actor_rollout_ref.rollout.agent.num_workers=4",
        "+qreward.groups.wait_s=5",
    ]
    texts = ("1", "0", "none", "0.5")
    with functions(*overrides, reward=None, respond=lambda draft, rng: texts[draft.number]) as fake:
        step = fake.step()
    assert step.scores == [1.0, 0.0, 0.5, 0.5], "the first two rows are copied, and would be in the mean"
    assert step.metrics["qreward/samples"] == 4
    assert step.metrics["qreward/failed_rate"] == 1 / 4


@pytest.fixture
def colocated(tmp_path):
    """Overrides of a run whose reward model shares the GPUs with the rollout, with a function."""
    path = tmp_path / "mine.py"
    path.write_text(
        "def compute_score(solution_str, ground_truth, **_):\n    return float(solution_str == ground_truth)\n"
    )
    return (
        "reward.reward_model.enable=True",
        f"reward.custom_reward_function.path={path}",
        "reward.num_workers=1",
        "+qreward.on_failure.constant=0",
    )


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ((), "judges.compute_score: "),
        (
            (
                "+qreward.sources.compute_score={kind: function, function: 'verl_adapter:compute_score'}",
                "+qreward.judges={rule: {kind: function, sources: [compute_score]}}",
                "+qreward.routes={fake/data: rule}",
            ),
            r"judges.rule: [^\n]*\n.*routes.fake/data: ",
        ),
    ],
)
def test_a_function_that_gets_no_ground_truth_ends_the_run_at_the_first_sample(colocated, more, place):
    """V1 passes prompts and responses only to a colocated reward model. All right answers would be scored 0."""
    right = {"respond": lambda draft, rng: str(draft.ground_truth)}
    remedy = r"no ground truth .*enable_resource_pool=True, or trainer\.use_v1=False"
    with (
        functions(*colocated, *more, reward=None, **right) as fake,
        pytest.raises(ConfigurationError, match=f"{place}.*{remedy}"),
    ):
        fake.step()
    with functions(*colocated, *more, "trainer.use_v1=False", reward=None, **right) as fake:
        assert set(fake.step().scores) == {1.0}


@BOTH
def test_a_judge_that_gets_no_reference_is_warned_of_once(trainer, colocated, caplog):
    seen = []
    with (
        JudgeServer(lambda call: seen.append("reference" in call.blocks) or 10.0) as server,
        play(server, trainer, *colocated) as fake,
    ):
        assert set(fake.step().scores) == {1.0}
    told = "no judge sees a reference answer: verl's V1 trainer passes no ground truth"
    is_v1 = trainer.endswith("True")
    assert set(seen) == {not is_v1}
    assert caplog.text.count(told) == is_v1


@BOTH
def test_a_step_tells_what_its_rewards_waited_for(trainer):
    one_at_a_time = "+qreward.sources.judge.limits.concurrency=1"
    with (
        JudgeServer(latency=Latency(median_s=0.02)) as server,
        play(server, trainer, one_at_a_time, val_rows=ROWS) as fake,
    ):
        validation = fake.validate()
        steps = [fake.step() for _ in range(2)]
    assert not any("blame_s" in name for name in validation.metrics)
    for step in steps:
        parts = {name: value for name, value in step.metrics.items() if name.startswith("qreward/blame_s/")}
        assert parts["qreward/blame_s/judge/queue"] > 0
        assert parts["qreward/blame_s/judge/service"] > 0
        # 16 samples in two workers, one at a time.
        assert sum(parts.values()) > 4 * 0.02


@pytest.mark.parametrize("trainer", ["one_step_off", "fully_async"])
def test_the_experimental_trainers_are_told_from_v1(trainer):
    """Finding 6: they inherit `use_v1: true`, and one failed sample would end their run."""
    named = {"experimental": trainer, "val_rows": ROWS}
    workers = "actor_rollout_ref.rollout.agent.num_workers=2"
    with JudgeServer(faults=Faults(script=one_in_four)) as server, play(server, workers, **named) as fake:
        steps = [fake.step() for _ in range(5)]
        validation = fake.validate()
    for step in steps:
        imputed = [info["qreward/imputed"] for info in step.extra_info]
        assert imputed == [info["qreward/missing"] for info in step.extra_info]
        assert all(step.advantages[row] == 0.0 for row, value in enumerate(imputed) if value)
    counted = {name for _, metrics in fake.tracked for name in metrics if metrics.get("qreward/failed_rate")}
    assert "qreward/failed_rate" in counted
    assert validation.metrics["qreward/val/samples"] == 2
    assert validation.metrics["qreward/val/failed_rate"] in (0.0, 0.5, 1.0)
    with JudgeServer() as server, pytest.raises(ConfigurationError, match=trainer):
        play(server, "algorithm.adv_estimator=gae", **named)


def test_the_first_sample_that_fails_has_the_keys_of_all_others():
    """Finding 7: the legacy trainer takes the keys of the first sample for all."""
    style = "+qreward.judges.quality.criteria.style='is it well written?'"
    faults = Faults(script=lambda number: "error_422" if number < 4 else None)
    with JudgeServer(faults=faults) as server, play(server, "trainer.use_v1=False", style) as fake:
        step = fake.step()
    assert len({frozenset(info) for info in step.extra_info}) == 1
    assert "qreward/score/style" in step.extra_info[0]


def functions(*overrides, reward, **named):
    return FakeVerlTrainer(
        ["+reward_manager=qreward", GRPO, "reward.num_workers=2", *overrides], reward=reward, **named
    )


@BOTH
def test_a_function_is_used_as_naive_uses_it(trainer):
    """Finding 10: a number is `acc`, and what a mapping has keeps its names."""

    def number(data_source, solution_str, ground_truth, extra_info):
        return float(ground_truth in solution_str)

    def mapping(data_source, solution_str, ground_truth, extra_info):
        return {"score": float(ground_truth in solution_str), "length": len(solution_str)}

    def play(manager, reward):
        overrides = [f"reward.reward_manager.name={manager}", GRPO, trainer]
        with FakeVerlTrainer(overrides, reward=reward, val_rows=ROWS) as fake:
            return fake.step(), fake.validate()

    for reward in (number, mapping):
        (ours, our_validation), (naive, validation) = play("qreward", reward), play("naive", reward)
        assert ours.scores == naive.scores
        assert ours.advantages == naive.advantages
        for name, value in validation.metrics.items():
            # `score` is a column of verl's own, so a function's is left to it; `reward` is the same.
            if not name.startswith("val-aux/num_turns") and "/score/" not in name:
                assert our_validation.metrics[name] == value, name


def test_a_filter_by_acc_works_with_a_function_that_returns_a_number():
    filters = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc"]

    def reward(data_source, solution_str, ground_truth, extra_info):
        return float(ground_truth in solution_str)

    respond = lambda draft, rng: f"It is {draft.ground_truth if draft.number else 'nothing'}"  # noqa: E731
    with functions(*filters, reward=reward, respond=respond) as fake:
        assert fake.step().scores == [0.0, 1.0, 1.0, 1.0] * 4


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
@pytest.mark.parametrize("metric", ["reward", "acc"])
def test_a_filter_of_groups_does_not_replace_groups_for_ever_while_the_judge_is_down(reads, metric, mode):
    """All samples of such a group have one score, which is nobody's; verl would replace it, and the next one."""
    filters = ["algorithm.filter_groups.enable=True", f"algorithm.filter_groups.metric={metric}"]
    down = [True]
    faults = Faults(script=lambda number: "error_422" if down[0] else None)
    marks = lambda call: 10.0 * (call.blocks["response"].endswith("0"))  # noqa: E731
    texts = lambda draft, rng: f"about {'0111'[draft.number]}"  # noqa: E731
    tree = [f"trainer.v1.trainer_mode={mode}", *filters]
    with JudgeServer(marks, faults=faults) as server, play(server, *tree, respond=texts, timeout_s=30) as fake:
        counted = reads()
        step = fake.step()
        assert step.evicted == []
        assert counted.count(4) <= 8, "its siblings are looked up once a group"
        assert set(step.advantages) == {0.0}
        assert step.metrics["qreward/failed_rate"] == 1.0
        down[0] = False
        assert 1.0 in [score for _ in range(3) for score in fake.step().scores]


def test_a_filter_of_groups_still_replaces_those_of_equal_rewards():
    filters = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=reward"]
    # Of each group one sample fails; in every second one the others are of one reward.
    groups: dict[str, int] = {}

    def respond(draft, rng):
        place = groups.setdefault(str(draft.uid), len(groups))
        return ("none", "1", "1", "0" if place % 2 else "1")[draft.number]

    named = {"reward": lambda **row: float(row["solution_str"]), "respond": respond}
    with functions(*filters, "+qreward.engine.max_attempts=1", **named) as fake:
        step = fake.step()
    assert step.evicted
    assert {round(score, 4) for score in step.scores} == {0.0, 1.0, round(2 / 3, 4)}


@BOTH
def test_no_score_is_too_large_for_float32(trainer):
    """Finding 15."""
    texts = ("1e39", "1", "0", "0.5")
    named = {"reward": lambda **row: float(row["solution_str"]), "respond": lambda draft, _: texts[draft.number]}
    with functions(trainer, **named) as fake:
        step = fake.step()
    assert all(math.isfinite(score) for score in step.scores)
    assert sum(info["qreward/missing"] for info in step.extra_info) == 4
    assert not step.poisoned


def test_a_reward_model_that_bypasses_managers_ends_the_run_before_it_begins():
    """Finding 16."""
    with pytest.raises(ConfigurationError, match=r"reward\.reward_model\.enable"):
        functions("reward.reward_model.enable=True", reward=lambda **_: 1.0)


def test_a_failed_sample_waits_for_its_siblings_no_longer_than_groups_wait():
    """The sibling that comes after the deadline trains on the mean that its group was closed at."""
    named = {
        "reward": lambda **row: float(row["solution_str"]),
        "respond": lambda draft, _: ("none", "1", "0", "0.5")[draft.number],
        "hold": lambda draft: draft.number == 3,
    }
    overrides = ["data.train_batch_size=1", "+qreward.groups.wait_s=0.3", "+qreward.engine.max_attempts=1"]
    with functions(*overrides, **named) as fake:
        step = fake.start_step()
        fake.wait_until_held(1)
        while 0.5 not in [own.mean for each in fake.reward_managers for own in each._barrier._recent.values()]:
            time.sleep(0.01)
        fake.release()
        scores = step.result(20).scores
    assert scores == [0.5, 1.0, 0.0, 0.5]
    assert [info["qreward/imputed"] for info in step.result().extra_info] == [1.0, 0.0, 0.0, 1.0]


def test_a_function_in_a_file_runs_in_worker_processes_that_have_no_verl(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import os\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):\n"
        "    return {'score': float(ground_truth in solution_str) + bonus, 'process': os.getpid()}\n"
    )
    overrides = [
        f"reward.custom_reward_function.path={path}",
        "+reward.custom_reward_function.reward_kwargs.bonus=0.25",
        "data.train_batch_size=1",
        "reward.num_workers=1",
        "+qreward.sources.compute_score={kind: function, function: 'verl_adapter:compute_score', workers: 1}",
        "+qreward.judges.compute_score={kind: function, sources: [compute_score]}",
    ]
    with functions(*overrides, reward=None, respond=lambda draft, rng: str(draft.ground_truth)) as fake:
        step = fake.step()
    assert step.scores == [1.25] * 4
    assert {info["process"] for info in step.extra_info} != {os.getpid()}
