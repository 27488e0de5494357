"""Reward managers of verl 0.4 to 0.7 on the stand-in, which get a whole batch; and those that are not played."""

from __future__ import annotations

import pytest

from qreward_plugins.testing import FakeVerlTrainer

GRPO = "algorithm.adv_estimator=grpo"
OLD = "reward_model.reward_manager"


def length(data_source, solution_str, ground_truth, extra_info):
    if "fail" in solution_str:
        raise ValueError("no such answer")
    return {"score": float(len(solution_str.split())), "words": solution_str, "told": " ".join(extra_info)}


def saying(*words):
    return lambda draft, rng: words[draft.number % len(words)]


@pytest.mark.parametrize(
    ("override", "version", "error", "match"),
    [
        ("reward.reward_manager.name=remote", "0.9", NotImplementedError, "`remote` is not played"),
        (f"{OLD}=prime", "0.5", NotImplementedError, "`prime` is not played"),
        (f"{OLD}=mine", "0.5", ValueError, "Unknown reward manager: mine"),
        ("reward.reward_manager.name=batch", "0.9", ValueError, "Unknown reward manager: batch"),
    ],
)
def test_what_is_not_played_is_said(override, version, error, match):
    with pytest.raises(error, match=match):
        FakeVerlTrainer([override], reward=length, version=version)


@pytest.mark.parametrize("version", ["0.4", "0.7"])
def test_the_naive_manager_of_older_versions_gets_a_whole_batch(version):
    rows = [{"prompt": "a", "ground_truth": "1"}, {"prompt": "b", "ground_truth": "2"}]
    overrides = [GRPO, "actor_rollout_ref.rollout.val_kwargs.n=2"]
    texts = saying("one", "one two", "a b c")
    with FakeVerlTrainer(overrides, reward=length, respond=texts, val_rows=rows, version=version) as fake:
        step, validation = fake.step(), fake.validate()
    assert step.scores == [1.0, 2.0, 3.0, 1.0] * 4
    assert step.reward_calls == 1
    assert step.extra_info[1]["words"] == "one two"
    assert "acc" not in step.extra_info[0]
    assert step.advantages[0] == pytest.approx(-0.783, abs=1e-3)
    assert validation.scores == [1.0, 2.0] * 2
    assert validation.metrics["val-core/fake/data/reward/mean@2"] == 1.5


def test_a_batch_function_gets_all_rows():
    seen = []

    def reward(data_sources, solution_strs, ground_truths, extra_infos, scale):
        seen.append(len(solution_strs))
        return [scale * len(text.split()) for text in solution_strs]

    overrides = [GRPO, f"{OLD}=batch", "+reward_model.reward_kwargs.scale=0.5"]
    with FakeVerlTrainer(overrides, reward=reward, respond=saying("one", "one two"), version="0.5") as fake:
        assert fake.step().scores == [0.5, 1.0] * 8
    assert seen == [16]


def test_an_older_manager_that_raises_is_asked_twice_and_then_ends_the_run():
    calls = []

    def reward(data_source, solution_str, ground_truth, extra_info):
        calls.append(1)
        raise ValueError("no such answer")

    with FakeVerlTrainer([GRPO], reward=reward, version="0.5") as fake:
        with pytest.raises(ValueError, match="no such answer"):
            fake.step()
        assert len(calls) == 2
        with pytest.raises(RuntimeError, match="the run has ended"):
            fake.step()


def test_the_version_is_one_that_is_played():
    with pytest.raises(ValueError, match=r"0\.4, 0\.5, 0\.6, 0\.7"):
        FakeVerlTrainer(version="0.3")
    with pytest.raises(ValueError, match="one_step_off"):
        FakeVerlTrainer(version="0.5", experimental="one_step_off")
