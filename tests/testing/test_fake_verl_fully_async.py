"""The fully asynchronous trainer of `FakeVerlTrainer`: generation that goes on, staleness, and how a run ends."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins.testing import FakeVerlTrainer

GRPO = "algorithm.adv_estimator=grpo"
EVERY_STEP = "async_training.trigger_parameter_sync_step=1"
IN_ORDER = "data.shuffle=False"


def fully_async(*overrides, reward=lambda **_: 1.0, **named):
    return FakeVerlTrainer([GRPO, EVERY_STEP, *overrides], experimental="fully_async", reward=reward, **named)


def prompts(step):
    """The numbers of the prompts of a batch, by row."""
    return [int(uid.rsplit("_", 1)[1]) for uid in step.uids]


def versions(step, name="max_global_steps"):
    return step.batch.non_tensor_batch[name].tolist()


def right(data_source, solution_str, ground_truth, extra_info):
    return float(ground_truth in solution_str)


def test_a_batch_is_made_of_the_groups_that_are_finished_first():
    wrong_by_turns = lambda draft, rng: f"It is {draft.ground_truth if draft.number % 2 else 'nothing'}"  # noqa: E731
    with fully_async(reward=right, respond=wrong_by_turns) as fake:
        first, second = fake.step(), fake.step()
    assert prompts(first) == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    assert sorted(set(prompts(second))) == [5, 6, 7, 8]
    for step in (first, second):
        assert step.scores == [0.0, 1.0] * 8
        assert step.advantages == pytest.approx([-0.866, 0.866] * 8, abs=1e-3)
        assert step.sessions == [0, 1, 2, 3] * 4
        assert [info["acc"] for info in step.extra_info] == step.scores
    assert (first.global_step, second.global_step) == (1, 2)


def test_the_same_seed_gives_the_same_responses():
    def play(seed):
        with fully_async(val_rows=["a", "b"], seed=seed) as fake:
            written = {}
            for _ in range(3):
                step = fake.step()
                written |= dict(zip(zip(step.uids, step.sessions, strict=True), step.responses, strict=True))
            return written, fake.validate().responses

    (first, validated), (again, validated_again), (other, _) = play(1), play(1), play(2)
    both = first.keys() & again.keys()
    assert len(both) >= 40
    assert all(first[key] == again[key] for key in both)
    assert validated == validated_again
    assert first != other


def test_generation_pauses_at_the_staleness_that_is_allowed():
    seen = []

    def respond(draft, rng):
        seen.append(draft.uid)
        return "so"

    with fully_async("async_training.staleness_threshold=0.5", respond=respond, timeout_s=20) as fake:
        rollouter = fake._trainer.rollouter
        assert rollouter.max_required_samples == 6
        fake.step()
        fake._loop.run(until(lambda: rollouter.paused))
        assert len(set(seen)) <= 10, "four that were trained, and six ahead"
        assert rollouter.staleness_samples == 6
        for _ in range(3):
            fake.step()
    assert len(set(seen)) <= 4 * 4 + 6


async def until(condition):
    """Wait for what no event tells of, on the loop on which it happens."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


def step_with(prompt, fake):
    """The step that trains on this prompt. Generation is at most two batches ahead in these tests."""
    return next(step for step in (fake.step() for _ in range(4)) if prompt in prompts(step))


def test_a_response_that_spans_new_weights_goes_on_and_tells():
    slow = lambda draft: draft.uid == "uid_sample_0_2" and draft.number == 0  # noqa: E731
    with fully_async("async_training.staleness_threshold=1", IN_ORDER, hold=slow) as fake:
        assert set(prompts(fake.step())) == {1, 3, 4, 5}
        assert set(prompts(fake.step())) == {6, 7, 8, 9}
        assert fake.release() == 1
        late = step_with(2, fake)
        after = fake.step()
    row = prompts(late).index(2)
    assert versions(late)[row] - versions(late, "min_global_steps")[row] == 2
    assert late.responses[row], "it was not cut"
    assert after.metrics["fully_async/partial/max_partial_span"] == 2.0


def test_without_partial_rollouts_new_weights_end_what_is_being_written():
    slow = lambda draft: draft.uid == "uid_sample_0_2" and draft.number == 0  # noqa: E731
    overrides = ("async_training.staleness_threshold=1", "async_training.partial_rollout=False", IN_ORDER)
    with fully_async(*overrides, hold=slow, respond=lambda draft, rng: "one two three four five") as fake:
        late = step_with(2, fake)
    row = prompts(late).index(2)
    assert late.responses[row] == "one two three"
    assert versions(late)[row] == versions(late, "min_global_steps")[row] == 0


def test_an_exception_stops_generation_and_the_run_ends_without_an_error_of_its_own():
    def reward(data_source, solution_str, ground_truth, extra_info):
        if ground_truth == "13":  # the sixth prompt
            raise ValueError("no score for thirteen")
        return 1.0

    with fully_async(IN_ORDER, reward=reward) as fake:
        assert set(prompts(fake.step())) == {1, 2, 3, 4}
        with pytest.raises(Exception, match="queue returned None") as stopped:
            fake.step()
        assert type(stopped.value).__name__ == "TrainingStopException"
        assert isinstance(stopped.value.__cause__, ValueError)
        with pytest.raises(RuntimeError, match="the run has ended"):
            fake.step()


def test_the_run_ends_where_all_prompts_were_generated():
    with fully_async("rollout.total_rollout_steps=10") as fake:
        assert sorted(prompts(fake.step()) + prompts(fake.step())) == sorted(4 * list(range(1, 9)))
        with pytest.raises(Exception, match="queue returned None") as stopped:
            fake.step()
    assert stopped.value.__cause__ is None, "two prompts make no batch"


def test_the_tracker_counts_versions_and_gets_the_metrics_of_a_step_with_later_weights():
    with fully_async("async_training.trigger_parameter_sync_step=2", reward=right) as fake:
        steps = [fake.step() for _ in range(4)]
    assert [bool(step.metrics) for step in steps] == [False, True, False, True]
    assert [step for step, _ in fake.tracked] == [0, 1, 1, 2, 2]
    assert steps[1].metrics["training/global_step"] == 1.0
    assert steps[3].metrics["training/global_step"] == 3.0
    means = [sum(step.scores) / 16 for step in steps]
    assert steps[1].metrics["critic/score/mean"] == pytest.approx(means[0])
    assert steps[3].metrics["critic/score/mean"] == pytest.approx((means[1] + means[2]) / 2)


def test_validation_runs_beside_generation_and_begins_no_prompt():
    begun = []

    def respond(draft, rng):
        begun.append((draft.validate, draft.global_step))
        return f"It is {draft.ground_truth}"

    named = {"val_rows": [{"prompt": "What is 2 + 2?", "ground_truth": "4"}], "respond": respond}
    with fully_async(reward=right, **named) as fake:
        fake.step()
        validation = fake.validate()
    assert validation.scores == [1.0]
    assert validation.global_step == 1, "the version of the weights"
    assert (True, 1) not in begun
    assert all(step == -1 for validate, step in begun if not validate), "verl says no step while it generates ahead"


def test_an_exception_in_validation_ends_the_run():
    def reward(data_source, solution_str, ground_truth, extra_info):
        if ground_truth == "4":
            raise ValueError("no score for four")
        return 1.0

    with fully_async(reward=reward, val_rows=[{"prompt": "What is 2 + 2?", "ground_truth": "4"}]) as fake:
        fake.step()
        with pytest.raises(ValueError, match="no score for four"):
            fake.validate()
        with pytest.raises(RuntimeError, match="the run has ended"):
            fake.step()


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("data.train_batch_size=8", "train_batch_size must be zero"),
        ("data.gen_batch_size=2", "gen_batch_size must be one"),
        ("reward.reward_model.enable=True", "requires standalone mode"),
        ("actor_rollout_ref.rollout.calculate_log_probs=False", "must rollout calculate log_probs"),
    ],
)
def test_it_does_not_start_where_verl_does_not(override, error):
    with pytest.raises(AssertionError, match=error):
        fully_async(override)


def test_its_keys_are_those_of_its_own_configuration():
    from hydra.errors import HydraException

    with pytest.raises(HydraException, match="staleness"):
        FakeVerlTrainer(["async_training.staleness=1"], experimental="fully_async")
    with pytest.raises(HydraException, match="async_training"):
        FakeVerlTrainer(["async_training.staleness_threshold=1"])
    with pytest.raises(ValueError, match="one_step_off"):
        FakeVerlTrainer(experimental="two_steps_off")
