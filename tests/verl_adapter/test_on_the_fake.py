"""Our manager in `FakeVerlTrainer`: whole steps and validations of both trainers, nothing of the adapter mocked."""

from __future__ import annotations

import math

import pytest

from qreward_plugins import ConfigurationError, JudgeUnavailable
from qreward_plugins.journal import TrainingLog
from qreward_plugins.journal.stories import Stories, Wanted
from qreward_plugins.testing import FakeVerlTrainer, Faults, JudgeServer, Latency, VerlOutput
from verl_adapter.metrics import RewardLog, with_means

from .conftest import judged_by

GRPO = "algorithm.adv_estimator=grpo"
BOTH = pytest.mark.parametrize("trainer", ["trainer.use_v1=True", "trainer.use_v1=False"], ids=["v1", "legacy"])
ROWS = [{"prompt": "What is 2 + 2?", "ground_truth": "4"}, {"prompt": "What is 3 + 3?", "ground_truth": "6"}]


def play(server, *overrides, **named):
    tree = [
        *judged_by(judge=server),
        "reward.num_workers=2",
        "+qreward.judges.quality.correct_at=0.5",
        "+qreward.judges.quality.invalid_retries=0",
        "+qreward.engine.max_attempts=1",
        "+qreward.engine.deadline_s=10",
        # On a busy machine a hedge would shift which request the server fails.
        "+qreward.engine.scheduling.hedge=False",
    ]
    return FakeVerlTrainer([*tree, GRPO, *overrides], **named)


def one_in_four(number):
    return "error_422" if number % 4 == 0 else None


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
        fake.step()
        with pytest.raises(JudgeUnavailable, match="3 steps in a row trained on nothing"):
            fake.step()


@pytest.mark.parametrize("metric", ["acc", "score"])
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


@pytest.mark.parametrize(
    ("policy", "rewarded", "evicted"),
    [("auto", 0, True), ("{constant: 0.0}", 0, False), ("auto", 2, False)],
    ids=["equal without the failed one", "a constant differs", "an agent loop has rewarded two"],
)
def test_a_filter_of_groups_looks_at_the_rows_that_train(policy, rewarded, evicted):
    """The judge gives equal rewards to the first group but for its last sample, which fails."""
    filters = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=reward", "trainer.use_v1=True"]
    overrides = [*filters, "actor_rollout_ref.rollout.n=4", "data.train_batch_size=1", f"+qreward.on_failure={policy}"]
    texts = {"first": ["10", "10", "10", "no verdict"], "second": ["10", "0", "10", "10"]}

    def respond(draft, rng):
        text = texts[draft.ground_truth][draft.number]
        return VerlOutput([text], reward_score=0.0) if draft.number < rewarded else text

    def verdict(call):
        text = call.blocks["response"]
        return float(text) if text.isdigit() else text

    rows = [{"prompt": "What is 2 + 2?", "ground_truth": which} for which in texts]
    with JudgeServer(verdict) as server, play(server, *overrides, rows=rows, respond=respond, timeout_s=30) as fake:
        assert bool(fake.step().evicted) is evicted


def test_a_validation_with_rows_that_an_agent_loop_has_rewarded_itself():
    def respond(draft, rng):
        return VerlOutput(["It is 6"], reward_score=0.5) if draft.ground_truth == "6" else "It is 4"

    with JudgeServer() as server, play(server, "trainer.use_v1=True", val_rows=ROWS, respond=respond) as fake:
        assert fake.validate().metrics["qreward/val/samples"] == 1


RANKED = ["+qreward.judges.reward.kind=rank", "+qreward.judges.reward.judge=quality"]


@pytest.mark.parametrize(
    "override",
    ["algorithm.adv_estimator=remax", "algorithm.adv_estimator=gdpo", "algorithm.filter_groups.enable=true"],
)
def test_what_needs_rewards_before_the_siblings_are_there_is_refused(override):
    legacy = "trainer.use_v1=" + ("False" if "remax" in override else "True")
    problem = r"judges\.reward: .*(`remax`|`gdpo`|algorithm\.filter_groups) needs"
    with JudgeServer() as server, pytest.raises(ConfigurationError, match=problem):
        play(server, legacy, *RANKED, f"++{override}")


@BOTH
def test_a_colocated_reward_model_is_no_exception(trainer, any_function):
    """It shares the GPUs with the rollout, so a batch is scored at once. V1 puts the extra info into fields of their
    own, where its validation does not look.
    """
    more = [any_function, "reward.reward_model.enable=True", "reward.num_workers=1"]
    more += ["actor_rollout_ref.rollout.val_kwargs.n=4"]
    with (
        JudgeServer(lambda call: 10.0, faults=Faults(script=one_in_four)) as server,
        play(server, trainer, *more, val_rows=ROWS) as fake,
    ):
        step, validation = fake.step(), fake.validate()
    assert step.metrics["qreward/failed_rate"] == 1 / 4
    assert set(step.advantages) == {0.0}
    core = [value for key, value in validation.metrics.items() if key.startswith("val-core") and "/acc/mean@4" in key]
    assert core == [1.0]
    assert (validation.metrics["qreward/val/samples"], validation.metrics["qreward/val/failed_rate"]) == (8, 1 / 4)
    assert "qreward/samples" not in validation.metrics


@BOTH
def test_the_journal_has_what_the_trainer_made_of_each_sample(trainer, tmp_path, monkeypatch):
    """The metrics tell what the rewards waited for."""
    added, add = [], TrainingLog.add
    monkeypatch.setattr(TrainingLog, "add", lambda log, samples: added.append(log) or add(log, samples))
    path = tmp_path / "journal.sqlite"
    more = [f"+qreward.engine.journal.path={path}", "+qreward.sources.judge.limits.concurrency=1"]
    with (
        JudgeServer(latency=Latency(median_s=0.02), faults=Faults(script=one_in_four)) as server,
        play(server, trainer, *more, val_rows=ROWS) as fake,
    ):
        step, validation = fake.step(), fake.validate()
    added[0].flush()
    blame = {name: value for name, value in step.metrics.items() if name.startswith("qreward/blame_s/")}
    assert min(blame["qreward/blame_s/judge/queue"], blame["qreward/blame_s/judge/service"]) > 0
    assert sum(blame.values()) > 4 * 0.02, "16 samples in two workers, one at a time"
    assert not any("blame_s" in name for name in validation.metrics)
    with Stories([str(path)]) as stories:
        found, _ = stories.find(Wanted(), 99)
    told = {story.entries[0].sample_id: story.trained for story in found if story.trained}
    assert told.keys() == {info["qreward/sample"] for info in step.extra_info}
    assert step.metrics["qreward/samples"] == len(told)
    for row, info in enumerate(step.extra_info):
        trained = told[info["qreward/sample"]][info["qreward/sample"]]
        assert (trained.group_id, trained.advantage) == (step.uids[row], pytest.approx(step.advantages[row], abs=1e-6))
        assert trained.masked == bool(info["qreward/missing"])
        assert trained.masked or trained.reward == pytest.approx(step.scores[row])


# Validations: what becomes of failed samples in the means of a prompt


def verdict(call):
    return "no verdict" if "break" in call.blocks["response"] else float(call.blocks["response"])


@pytest.fixture
def validate(judge_overrides):
    """Validate two answers to each prompt."""

    def validate(answers, *overrides):
        rows = [{"prompt": f"{number}?", "data_source": "math"} for number in range(len(answers) // 2)]
        ours = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.agent.num_workers=1"]
        ours += ["actor_rollout_ref.rollout.val_kwargs.n=2", "+qreward.judges.quality.invalid_retries=0", *overrides]

        def respond(draft, rng):
            return answers[2 * int(draft.columns["prompt"][0]["content"][:-1]) + draft.number]

        with (
            JudgeServer(verdict) as server,
            FakeVerlTrainer([*judge_overrides(a=server), *ours], val_rows=rows, respond=respond) as fake,
        ):
            return fake.validate()

    return validate


@pytest.mark.parametrize(
    ("trainer", "failing", "correct"),
    [
        ("trainer.use_v1=True", True, True),
        ("trainer.use_v1=False", True, False),
        ("trainer.use_v1=True", False, False),
    ],
)
def test_a_validation_of_judged_samples(validate, trainer, correct, failing):
    answers = ["10", "break" if failing else "0", "10", "4"]
    style = "+qreward.judges.quality.criteria.style='is it well written?'"
    more = ["+qreward.judges.quality.correct_at=0.5"] if correct else []
    validation = validate(answers, trainer, style, *more)
    metrics = validation.metrics
    assert all(math.isfinite(value) for value in metrics.values())
    assert validation.extra_info["qreward/missing"] == [0.0, float(failing), 0.0, 0.0]
    core = "acc" if correct else "reward"
    # The failed one takes the mean of its prompt, so it stays a prompt of two answers.
    expected = {("acc", True): [1, 0.5], ("acc", False): [0.5, 0.5], ("reward", True): [1.0, 0.7]}
    by_prompt = expected.get((core, failing), [0.5, 0.7])
    assert metrics[f"val-core/math/{core}/mean@2"] == pytest.approx(sum(by_prompt) / 2)
    assert not any("mean@1" in name for name in metrics)
    assert metrics["val-aux/math/qreward/missing/mean@2"] == failing / 4
    assert metrics["qreward/val/samples"] == 4
    assert metrics["qreward/val/failed_rate"] == metrics["qreward/val/data/math/failed_rate"] == failing / 4
    assert metrics["qreward/val/reward/mean"] == pytest.approx(0.8 if failing else 0.6), "without the failed ones"
    assert not any("/qreward/reward/" in name for name in metrics if name.startswith("val-"))
    assert "qreward/samples" not in metrics
    assert correct or not any("/acc/" in name for name in metrics)


@BOTH
def test_a_prompt_of_which_every_sample_failed_is_left_out_and_counted(validate, trainer):
    answers = ["10", "0", "break", "break", "10", "10"]
    metrics = validate(answers, trainer, "+qreward.judges.quality.correct_at=0.5").metrics
    assert metrics["val-core/math/acc/mean@2"] == 0.75
    assert metrics["val-aux/math/reward/mean@2"] == 0.75
    assert metrics["val-aux/math/qreward/missing/mean@2"] == pytest.approx(1 / 3)
    assert (metrics["qreward/val/unscored_prompts"], metrics["qreward/val/samples"]) == (1, 6)


def test_a_data_source_without_correctness_gets_none_by_prompts_that_are_lost():
    """verl counts the sessions of a prompt that ended in errors as wrong, where the data source has `acc`."""
    infos = {"acc": [1.0, math.nan, math.nan], "qreward/missing": [0.0, 1.0, 0.0]}
    expected = {("s", "u"): 2, ("s", "lost"): 2, ("t", "w"): 1, ("t", "lost"): 1}
    seen = {}
    process = lambda sources, uids, part, **more: seen.update(part, **more) or {}  # noqa: E731
    with_means(RewardLog(), process, ["s", "s", "t"], ["u", "u", "w"], infos, expected_acc_counts=expected)
    assert seen["acc"] == [1.0, 1.0, ""]
    assert seen["expected_acc_counts"] == {("s", "u"): 2, ("s", "lost"): 2}


def test_a_row_without_a_value_takes_the_mean_of_its_prompt_and_a_text_the_first():
    """Of a key that a prompt does not have, its rows have empty texts, of which verl makes no mean."""
    infos = {
        "acc": [1.0, True, 0.0, math.nan, 1.0, 1.0],
        "pred": ["a", "a", "b", math.nan, "c", "c"],
        "only": [0.5, None, None, math.nan, None, None],
        "reward": [1.0, 1.0, 0.0, 0.25, 1.0, 1.0],  # the failed one's is a stand-in
        "qreward/missing": [0.0, 0.0, 0.0, 1.0, 0.0, 0.0],
        "qreward/latency_s": [1.0, 1.0, 1.0, 5.0, 2.0, 2.0],
    }
    seen = {}
    with_means(
        RewardLog(), lambda sources, uids, part: seen.update(part) or {}, ["s"] * 6, ["u"] * 4 + ["w"] * 2, infos
    )
    assert seen["acc"] == seen["reward"] == pytest.approx([1.0, 1.0, 0.0, 2 / 3, 1.0, 1.0])
    assert seen["pred"] == ["a", "a", "b", "a", "c", "c"]
    assert seen["only"] == [*[0.5] * 4, "", ""]
    assert seen["qreward/latency_s"] == infos["qreward/latency_s"]
