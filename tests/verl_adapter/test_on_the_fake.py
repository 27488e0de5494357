"""Our manager in `FakeVerlTrainer`: whole steps and validations of both trainers, nothing of the adapter mocked."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from qreward_plugins import ConfigurationError, InputError, JudgeUnavailable
from qreward_plugins.journal import TrainingLog
from qreward_plugins.journal.stories import Stories, Wanted
from qreward_plugins.testing import FakeVerlTrainer, Faults, JudgeServer, Latency, VerlOutput
from qreward_plugins.testing.verl.replay_buffer import TransferQueue

from ..kit import threads_left

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
        siblings = [row for row in range(16) if step.uids[row] == step.uids[place] and not failed[row]]
        if is_failed or len(siblings) < 2:
            assert step.advantages[place] == 0.0
            continue
        # What GRPO makes of those that were scored.
        scores = np.array([step.scores[row] for row in siblings])
        expected = (step.scores[place] - scores.mean()) / (scores.std(ddof=1) + 1e-6)
        assert step.advantages[place] == pytest.approx(expected, abs=1e-5)
    assert step.metrics["qreward/samples"] == 16
    assert step.metrics["qreward/failed_rate"] == sum(failed) / 16
    assert step.metrics["qreward/failed/infra"] == sum(failed)
    scores = [score for score, is_failed in zip(step.scores, failed, strict=True) if not is_failed]
    assert step.metrics["qreward/reward/mean"] == pytest.approx(np.mean(scores))
    assert step.metrics["qreward/data/fake/data/reward"] == pytest.approx(np.mean(scores))
    assert 0.0 <= step.metrics["qreward/flat_rate"] < 1.0
    assert not step.poisoned


@BOTH
def test_ppo_goes_on_where_a_judge_is_down_for_a_step_and_ends_where_it_stays_down(trainer):
    """Nothing is learned of a failed sample, by the critic neither."""
    down = [True]
    faults = Faults(script=lambda number: "error_422" if down[0] else None)
    ppo = ["algorithm.adv_estimator=gae", "+qreward.groups.give_up_after=2", trainer]
    marks = lambda call: 10.0 * (len(call.blocks["response"]) % 2)  # noqa: E731
    with JudgeServer(marks, faults=faults) as server, play(server, *ppo) as fake:
        step = fake.step()
        assert set(step.advantages) == {0.0}
        assert (step.batch.batch["returns"] == step.batch.batch["values"]).all()
        down[0] = False
        assert any(fake.step().advantages)
        down[0] = True
        fake.step()
        with pytest.raises(JudgeUnavailable, match="2 steps in a row trained on nothing"):
            fake.step()


@BOTH
def test_gdpo_adds_up_the_single_rewards_of_those_that_have_them(trainer):
    """verl's V1 trainer passes an estimator no columns but `uid`; ours are there while it computes."""

    def parts(solution_str, **_):
        return {"score": 1.0, "a": float(solution_str), "b": 0.0}

    gdpo = ["algorithm.adv_estimator=gdpo", "+algorithm.gdpo_reward_keys=[a,b]", trainer]
    texts = ("none", "0", "1", "1")
    with functions(*gdpo, reward=parts, respond=lambda draft, rng: texts[draft.number]) as fake:
        step = fake.step()
    assert step.advantages[::4] == [0.0] * 4
    assert max(step.advantages[1::4]) < 0.0 < min(step.advantages[2::4])
    assert step.advantages[2::4] == step.advantages[3::4]


def test_gdpo_of_v1_tells_of_a_sample_that_an_agent_loop_has_rewarded_itself():
    gdpo = ["algorithm.adv_estimator=gdpo", "+algorithm.gdpo_reward_keys=[a]"]
    reward, own = (lambda **_: {"score": 1.0, "a": 1.0}), VerlOutput(["1"], reward_score=0.5)
    with (
        functions(*gdpo, reward=reward, respond=lambda draft, rng: own if draft.number else "1") as fake,
        pytest.raises(InputError, match="gdpo_reward_keys: a sample has no 'a'"),
    ):
        fake.step()


def test_a_prompt_whose_greedy_response_failed_has_nothing_to_be_compared_with():
    """verl subtracts the reward of the greedy response, whose extra info it drops."""
    fails = [True]

    def respond(draft, rng):
        first = draft.columns["prompt"] == [{"role": "user", "content": ROWS[0]["prompt"]}]
        return "none" if draft.greedy and first and fails[0] else str(draft.number % 2)

    remax = ["algorithm.adv_estimator=remax", "trainer.use_v1=False", "data.train_batch_size=2", "data.shuffle=False"]
    remax += ["actor_rollout_ref.rollout.agent.num_workers=2"]
    named = {"reward": lambda solution_str, **_: float(solution_str), "rows": ROWS, "respond": respond}
    with functions(*remax, **named) as fake:
        assert fake.step().advantages == [0.0] * 4 + [0.0, 1.0] * 2
        fails[0] = False
        assert fake.step().advantages == [0.0, 1.0] * 4


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
    path.write_text(
        "def compute_score(solution_str, **_):\n"
        f"    with open({str(tmp_path / 'asked')!r}, 'a') as file:\n"
        "        file.write('.')\n"
        "    return float(solution_str)\n"
    )
    overrides = [
        "trainer.use_v1=False",
        "+qreward.engine.max_attempts=1",
        "reward.reward_model.enable=True",
        f"reward.custom_reward_function.path={path}",
        "data.train_batch_size=1",
        "reward.num_workers=3",
        "actor_rollout_ref.rollout.agent.num_workers=4",
    ]
    texts = ("1", "0", "none", "0.5")
    with functions(*overrides, reward=None, respond=lambda draft, rng: texts[draft.number]) as fake:
        step = fake.step()
    assert step.scores[:2] + step.scores[3:] == [1.0, 0.0, 0.5]
    assert step.advantages == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-5), "the first two rows were copied"
    assert step.metrics["qreward/samples"] == 4
    assert step.metrics["qreward/failed_rate"] == 1 / 4
    assert len((tmp_path / "asked").read_text()) == 4, "and not judged"


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


@BOTH
def test_a_colocated_reward_model_is_no_exception(trainer, colocated):
    """V1 puts the extra info into fields of their own, where its validation does not look."""
    faults = Faults(script=one_in_four)
    with (
        JudgeServer(lambda call: 10.0, faults=faults) as server,
        play(server, trainer, *colocated, "actor_rollout_ref.rollout.val_kwargs.n=4", val_rows=ROWS) as fake,
    ):
        step, validation = fake.step(), fake.validate()
    assert step.metrics["qreward/failed_rate"] == 1 / 4
    assert set(step.advantages) == {0.0}
    core = [value for key, value in validation.metrics.items() if key.startswith("val-core") and "/acc/mean@4" in key]
    assert core == [1.0]
    assert (validation.metrics["qreward/val/samples"], validation.metrics["qreward/val/failed_rate"]) == (8, 1 / 4)
    assert "qreward/samples" not in validation.metrics


def test_what_an_agent_loop_has_noted_of_a_trajectory_stays_beside_its_extra_info(monkeypatch):
    from verl_adapter import queue

    stored = TransferQueue()
    stored.rows["val"] = {"a_0_0": {"extra_fields": {"turns": [1]}}, "a_1_0": {"extra_fields": {"turns": []}}}
    monkeypatch.setattr(queue, "_queue", lambda: stored)
    monkeypatch.setattr(queue, "_table", dict)
    infos = [{"qreward/missing": 1.0, "acc": 0.5}, {"qreward/missing": 0.0, "acc": 1.0}]
    trainer = SimpleNamespace(reward_loop_manager=SimpleNamespace(qreward_infos=infos))
    batch = SimpleNamespace(keys=list(stored.rows["val"]), partition_id="val")
    queue.with_extra_info(lambda self, batch: batch)(trainer, batch)
    assert queue.extra_info(batch.keys, "val") == infos
    assert [row["extra_fields"]["turns"] for row in stored.rows["val"].values()] == [[1], []]


@pytest.mark.parametrize("trainer", ["one_step_off", "fully_async"])
def test_the_experimental_trainers_are_told_from_v1(trainer):
    """They inherit `use_v1: true`, and one failed sample would end their run."""
    named = {"experimental": trainer, "val_rows": ROWS}
    workers = "actor_rollout_ref.rollout.agent.num_workers=2"
    with JudgeServer(faults=Faults(script=one_in_four)) as server, play(server, workers, **named) as fake:
        steps = [fake.step() for _ in range(5)]
        validation = fake.validate()
    for step in steps:
        assert all(step.advantages[row] == 0 for row, info in enumerate(step.extra_info) if info["qreward/missing"])
    counted = {name for _, metrics in fake.tracked for name in metrics if metrics.get("qreward/failed_rate")}
    assert "qreward/failed_rate" in counted
    assert validation.metrics["qreward/val/samples"] == 2
    assert validation.metrics["qreward/val/failed_rate"] in (0.0, 0.5, 1.0)


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
        assert not any("qreward/" in name for name in [*naive.metrics, *validation.metrics])
        for name, value in validation.metrics.items():
            # `score` is a column of verl's own, so a function's is left to it; `reward` is the same.
            if not name.startswith("val-aux/num_turns") and "/score/" not in name:
                assert our_validation.metrics[name] == value, name


@pytest.mark.parametrize("metric", ["reward", "acc"])
def test_a_filter_of_groups_does_not_replace_groups_for_ever_while_the_judge_is_down(metric):
    """All samples of such a group have one score, which is nobody's; verl would replace it, and the next one."""
    filters = ["algorithm.filter_groups.enable=True", f"algorithm.filter_groups.metric={metric}"]
    down = [True]
    faults = Faults(script=lambda number: "error_422" if down[0] else None)
    marks = lambda call: 10.0 * (call.blocks["response"].endswith("0"))  # noqa: E731
    texts = lambda draft, rng: f"about {'0111'[draft.number]}"  # noqa: E731
    with JudgeServer(marks, faults=faults) as server, play(server, *filters, respond=texts, timeout_s=30) as fake:
        step = fake.step()
        assert step.evicted == []
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
    told = [(score, info["qreward/missing"]) for score, info in zip(step.scores, step.extra_info, strict=True)]
    assert {score for score, missing in told if not missing} == {0.0, 1.0}
    assert sum(missing for _, missing in told) == 4, "of each group one, in each that is left"


@BOTH
def test_the_journal_has_what_the_trainer_made_of_each_sample(trainer, tmp_path, monkeypatch):
    added = []
    add = TrainingLog.add
    monkeypatch.setattr(TrainingLog, "add", lambda log, samples: added.append(log) or add(log, samples))
    path = tmp_path / "journal.sqlite"
    journal = f"+qreward.engine.journal.path={path}"
    with JudgeServer(faults=Faults(script=one_in_four)) as server, play(server, trainer, journal) as fake:
        step = fake.step()
    (log,) = added
    log.flush()
    told = {}
    with Stories([str(path)]) as stories:
        found, count = stories.find(Wanted(), 99)
    assert count == 16
    for story in found:
        (entry,) = story.entries
        told[entry.sample_id] = story.trained[entry.sample_id]
        assert story.trained.keys() == {sibling.sample_id for sibling in story.siblings}
    for info, uid, advantage, score in zip(step.extra_info, step.uids, step.advantages, step.scores, strict=True):
        trained = told[info["qreward/sample"]]
        assert (trained.group_id, trained.advantage) == (uid, pytest.approx(advantage, abs=1e-6))
        if not info["qreward/missing"]:
            assert trained.reward == pytest.approx(score)
        else:
            assert (trained.masked, trained.advantage) == (True, 0.0)


def test_a_validation_with_rows_that_an_agent_loop_has_rewarded_itself():
    def respond(draft, rng):
        return VerlOutput(["It is 6"], reward_score=0.5) if draft.ground_truth == "6" else "It is 4"

    with JudgeServer() as server, play(server, "trainer.use_v1=True", val_rows=ROWS, respond=respond) as fake:
        assert fake.validate().metrics["qreward/val/samples"] == 1


def test_rows_that_fill_up_a_batch_are_not_recorded_as_trained(tmp_path, monkeypatch):
    path, added = tmp_path / "journal.sqlite", []
    add = TrainingLog.add
    monkeypatch.setattr(TrainingLog, "add", lambda log, samples: added.append(samples) or add(log, samples))
    changes = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=3"]
    changes += ["trainer.use_v1=True", f"+qreward.engine.journal.path={path}"]
    with JudgeServer() as server, play(server, *changes) as fake:
        fake.step()
    ((*samples,),) = added
    assert len(samples) == len({each.sample_id for each in samples}) > 0
    assert not any(each.group_id.startswith("pad") for each in samples)


RANKED = [
    "+qreward.judges.reward.kind=rank",
    "+qreward.judges.reward.judge=quality",
    "+qreward.engine.seed=3",
]


@BOTH
def test_a_group_is_compared_although_its_samples_come_one_by_one(trainer):
    """Every fourth comparison fails, which costs its group the step. A validation is judged one by one."""
    with (
        JudgeServer(faults=Faults(script=one_in_four)) as server,
        play(server, trainer, *RANKED, val_rows=ROWS) as fake,
    ):
        step = fake.step()
        compared = server.report().requests
        validation = fake.validate()
        assert server.report().requests == compared + validation.metrics["qreward/val/samples"]
    groups = {}
    for row, uid in enumerate(step.uids):
        groups.setdefault(uid, []).append(row)
    assert compared == len(groups)
    failed = {uid for uid, rows in groups.items() if step.extra_info[rows[0]]["qreward/missing"]}
    assert 0 < len(failed) < len(groups)
    for uid, rows in groups.items():
        infos = [step.extra_info[row] for row in rows]
        scores = np.array([step.scores[row] for row in rows])
        if uid in failed:
            assert all(info["qreward/cause"].startswith("infra/") for info in infos)
            expected = np.zeros(len(rows))
        else:
            assert {info["qreward/score/siblings"] for info in infos} == {len(rows)}
            assert scores.mean() == pytest.approx(0.5)
            expected = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)
        assert [step.advantages[row] for row in rows] == pytest.approx(expected, abs=1e-5)
    assert step.metrics["qreward/samples"] == 16
    assert step.metrics["critic/score/mean"] == pytest.approx(np.mean(step.scores))


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("algorithm.adv_estimator=remax", "`remax` needs rewards before the siblings"),
        ("algorithm.filter_groups.enable=true", "algorithm.filter_groups needs rewards before"),
    ],
)
def test_what_needs_rewards_before_the_siblings_are_there_is_refused(override, problem):
    legacy = "trainer.use_v1=" + ("False" if "remax" in override else "True")
    with (
        JudgeServer() as server,
        pytest.raises(ConfigurationError, match=problem) as refused,
        play(server, legacy, *RANKED, f"++{override}"),
    ):
        pass
    assert "judges.reward" in str(refused.value)


def test_comparing_leaves_no_engine_behind():
    before = set(threading.enumerate())
    with JudgeServer() as server, play(server, *RANKED) as fake:
        fake.step()
    assert threads_left(before) == []
