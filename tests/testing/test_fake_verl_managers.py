"""verl's reward managers on the stand-in: those of 0.9, and those of 0.4 to 0.7 that get a whole batch."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins.testing import FakeVerlTrainer

GRPO = "algorithm.adv_estimator=grpo"
OVERLONG = [
    "+reward.reward_kwargs.max_resp_len=6",
    "+reward.reward_kwargs.overlong_buffer_cfg={enable: true, len: 4, penalty_factor: 1.0, log: true}",
]
OLD = "reward_model.reward_manager"


def length(data_source, solution_str, ground_truth, extra_info):
    if "fail" in solution_str:
        raise ValueError("no such answer")
    return {"score": float(len(solution_str.split())), "words": solution_str, "told": " ".join(extra_info)}


def saying(*words):
    return lambda draft, rng: words[draft.number % len(words)]


def test_dapo_takes_a_penalty_off_long_responses():
    overrides = [GRPO, "reward.reward_manager.name=dapo", *OVERLONG]
    with FakeVerlTrainer(overrides, reward=length, respond=saying("one", "one two three", "a b c d e")) as fake:
        step = fake.step()
    # 2, 4 and 6 tokens; from the third on a quarter each.
    assert step.scores[:3] == [1.0, 3 - 0.5, 5 - 1.0]
    assert [info["overlong"] for info in step.extra_info[:3]] == [False, True, True]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (OVERLONG[1:], "max_resp_len must be provided"),
        ([OVERLONG[0].replace("6", "3"), OVERLONG[1]], "must be larger than overlong_buffer.len"),
        ([OVERLONG[0], OVERLONG[1].replace("len: 4", "len: 0")], "overlong_buffer.len must be positive"),
    ],
)
def test_a_penalty_that_cannot_be_does_not_start(changes, match):
    with pytest.raises(AssertionError, match=match):
        FakeVerlTrainer(["reward.reward_manager.name=dapo", *changes], reward=length)


def test_gdpo_tells_the_function_the_experiment():
    overrides = [GRPO, "reward.reward_manager.name=gdpo", "trainer.experiment_name=mine"]
    with FakeVerlTrainer(overrides, reward=length) as fake:
        told = fake.step().extra_info[0]["told"]
    assert "experiment_name" in told
    assert "num_turns" not in told


def test_rate_limited_calls_a_failure_zero_and_keeps_to_its_limit():
    running, most = [], []

    async def reward(data_source, solution_str, ground_truth, extra_info):
        running.append(1)
        most.append(len(running))
        await asyncio.sleep(0.001)
        running.pop()
        if "hang" in solution_str:
            await asyncio.Event().wait()
        return length(data_source, solution_str, ground_truth, extra_info)

    overrides = [
        *(GRPO, "trainer.use_v1=False", "reward.reward_manager.name=rate_limited", "reward.num_workers=1"),
        *("+reward.max_concurrent=2", "+reward.timeout=0.2", "+reward.max_rpm=600000", "data.train_batch_size=2"),
    ]
    with FakeVerlTrainer(overrides, reward=reward, respond=saying("fail")) as fake:
        step = fake.step()
    assert step.scores == [0.0] * 8
    assert {info["error"] for info in step.extra_info} == {"no such answer"}
    assert max(most) <= 2
    with FakeVerlTrainer(overrides, reward=reward, respond=saying("hang")) as fake:
        assert {info["timeout"] for info in fake.step().extra_info} == {True}


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
