"""The adapter on ROLL's rollout side, played: judges that are up, flaky, down, and ones that say nonsense; workers of
others, whose NaN it takes for what it is; and outcomes in ROLL's terms.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest

from qreward_plugins import ConfigurationError, JudgeUnavailable, RewardEngine
from qreward_plugins.testing import RollDataProto
from qreward_plugins.testing.roll.generation import torch
from qreward_plugins.testing.roll.workers import Worker

SINGLE = pytest.param({"is_num_return_sequences_expand": True}, id="single")
GROUP = pytest.param({}, id="group")
BATCH = pytest.param({"generate_opt_level": 0}, id="batch")
STREAMED = [SINGLE, GROUP]
MODES = [SINGLE, GROUP, BATCH]

HASTY = {"engine": {"max_attempts": 1, "seed": 1, "deadline_s": 1.0}}
"""For a judge that is down: samples wait for it until their deadline once it has failed often enough."""


CORRECT = {"judges": {"quality": {"kind": "llm", "correct_at": 0.6}}}
SCREEN = {"kind": "screen", "judge": "quality", "monitor": "watch", "at": 0.9}
SCREENED = {
    "judges": {"quality": {"kind": "llm"}, "watch": {"kind": "llm"}, "screen": SCREEN},
    "on_failure": {"constant": -1.0},
}
FLOOR = {"judges": {"quality": {"kind": "llm", "on_invalid": "floor", "floor": 0.05, "invalid_retries": 0}}}


def finite(step: Any) -> bool:
    return not step.poisoned and all(map(math.isfinite, [*step.raw_rewards, *step.scores, *step.rewards]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("said", "tree", "raw", "masked", "told"),
    [
        (["1", "2", "3", "10"], {}, [0.1, 0.2, 0.3, 1.0], [], {"failed_sum": 0, "source/judge_sum": 8}),
        (
            ["2", "break", "6", "4"],
            {},
            [0.2, 0.4, 0.6, 0.4],
            [1],
            {"samples_sum": 8, "failed_sum": 2, "failed/infra_sum": 2, "failed_rate": 0.25, "attempts_mean": 1},
        ),
        (["2", "nan", "6", "4"], {}, [0.2, 0.4, 0.6, 0.4], [1], {"failed/verdict_sum": 2}),
        (["2", "nonsense", "6", "4"], {}, [0.2, 0.4, 0.6, 0.4], [1], {"failed/verdict_sum": 2}),
        (["2", "nonsense", "6", "4"], FLOOR, [0.2, 0.05, 0.6, 0.4], [], {"failed_sum": 0}),
        (["2", "break", "6", "4"], {"on_failure": {"constant": -1.0}}, [0.2, -1.0, 0.6, 0.4], [], {"failed_sum": 2}),
        (
            ["2", "9", "4", "break"],
            SCREENED,
            [0.2, (0.2 + 0.4 - 1) / 3, 0.4, -1.0],
            [1],
            {"failed_rate": 0.25, "screened_rate": 0.25},
        ),
    ],
    ids=["up", "break", "nan", "nonsense", "floor", "constant", "screened"],
)
def test_rewards_are_the_judges(train, words, caplog, mode, said, tree, raw, masked, told) -> None:
    """A sample without a reward gets the mean of its group and is not trained. The batch path can mask nothing."""
    with caplog.at_level(logging.WARNING, "roll_adapter"):
        step = train(words(*said), tree=tree, **mode).step()
    assert step.raw_rewards == pytest.approx(raw * 2)
    assert step.scores == step.raw_rewards
    assert finite(step)
    assert step.dropped == []
    batch = "generate_opt_level" in mode
    assert step.trained_tokens == [0 if place in masked and not batch else 2 for place in range(4)] * 2
    for place in masked:
        assert step.rewards[place] == pytest.approx(0.0, abs=1e-6) or "screen" in tree.get("judges", {})
        assert (step.advantages[place] is None) is not batch
    if batch:
        assert ("and generate_opt_level: 1, to keep such samples" in caplog.text) == bool(masked)
    else:
        assert {name: step.metrics[f"judged/qreward/{name}"] for name in told} == pytest.approx(told)
        assert not {name for name in step.batch.meta_info if name.startswith("qreward")}


def test_the_batch_path_cuts_groups_between_workers(train, words) -> None:
    trainer = train(words("2", "break", "6", "4"), generate_opt_level=0, reward={"world_size": 3})
    step = trainer.step()
    # 3, 3 and 2 rows: each worker knows the siblings that it got itself.
    assert step.raw_rewards == pytest.approx([0.2, 0.4, 0.6, 0.4, 0.2, 0.2, 0.6, 0.4])
    assert finite(step)


def test_groups_with_too_few_rewards_are_replaced(train) -> None:
    def respond(draft: Any, rng: Any) -> str:
        return "break" if int(draft.columns["id"]) % 2 == 0 and draft.number else str(draft.number)

    for least, dropped in ((2, {0}), (1, set())):
        step = train(respond, tree={"groups": {"min_scored": least}}).step()
        assert {int(prompt.id) % 2 for prompt in step.dropped} == dropped
        assert not dropped & {int(identity) % 2 for identity in step.column("id")}


def test_a_dead_judge_ends_the_step_knowingly(train, words, judge) -> None:
    judge.stop()
    trainer = train(words("1", "2"), tree={**HASTY, "groups": {"give_up_after": 2}})
    with pytest.raises(JudgeUnavailable, match=r"2 groups in a row.*The last failure: .*could not connect"):
        trainer.step()


VALIDATED = [
    {"prompt": f"p{n}", "ground_truth": text, "tag": "sums"} for n, text in enumerate(["10", "break", "10", "0"])
]


def held_out(draft: Any, rng: Any) -> str:
    """What the rows of the validation say, and 3 in training."""
    return str(draft.ground_truth) if draft.columns["tag"] == "sums" else "3"


@pytest.mark.parametrize("mode", STREAMED)
@pytest.mark.parametrize("on_failure", ["auto", {"constant": 1.0}], ids=["auto", "constant"])
def test_a_failed_sample_of_a_validation_is_left_out_of_its_tag_and_told_of(train, caplog, mode, on_failure) -> None:
    tree = {**CORRECT, "on_failure": on_failure, "groups": {"min_scored": "all", "give_up_after": 1}}
    trainer = train(held_out, tree=tree, val_rows=VALIDATED, **mode)
    before = trainer.step()
    assert not any("qreward/val/" in name for name in before.metrics)
    with caplog.at_level("WARNING", "roll_adapter"):
        validation = trainer.validate()
    # ROLL's own mean over all counts what has no score.
    assert validation.val_correct == {"all": 0.5, "sums": pytest.approx(2 / 3), "sums/qreward_failed": 0.0}
    (said,) = [record.getMessage() for record in caplog.records if record.name == "roll_adapter"]
    assert "the domain judged has no reward in this validation" in said
    assert "roll_adapter.QRewardRolloutLoop leaves it out of the means of the tags" in said
    for _ in range(2):
        metrics = trainer.step().metrics
        told = {name.removeprefix("judged/qreward/val/"): value for name, value in metrics.items() if "/val/" in name}
        assert (told["samples"], told["failed_rate"], told["acc"]) == (4.0, 0.25, pytest.approx(2 / 3))
        assert (told["reward/mean"], told["data/sums/failed_rate"]) == (pytest.approx(2 / 3), 0.25)


def test_a_validation_that_reads_0_for_want_of_a_threshold_is_told_once(train, words, caplog) -> None:
    trainer = train(words("7"), val_rows=VALIDATED)
    with caplog.at_level("WARNING", "roll_adapter"):
        assert trainer.validate().val_correct["all"] == 0.0
        trainer.validate()
    (said,) = [record.getMessage() for record in caplog.records if record.name == "roll_adapter"]
    assert "Set correct_at in the judge" in said
    assert "the domain judged" in said


def test_a_variable_that_is_missing_is_told_with_its_domain(train, words, make_tree, monkeypatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    tree = make_tree()
    tree["sources"]["judge"]["api_key_env"] = "JUDGE_KEY"
    with pytest.raises(ConfigurationError, match=r"(?s)in rewards.judged:.*JUDGE_KEY.*is not set"):
        train(words("1"), tree=tree).step()


@pytest.mark.parametrize("mode", STREAMED)
def test_a_step_tells_of_rewards_by_data_source_of_groups_without_variance_and_of_waiting(train, mode) -> None:
    texts = {"a": ("2", "4", "break", "6"), "b": ("5", "5", "5", "break"), "c": ("3", "break", "1", "2")}
    means = {"a": 0.4, "b": 0.5, "c": 0.2}
    rows = [{"prompt": name, "tag": name} for name in texts]
    trainer = train(lambda draft, rng: texts[draft.columns["tag"]][draft.number % 4], rows=rows, **mode)
    metrics = trainer.step().metrics
    told = {name.removeprefix("judged/qreward/"): value for name, value in metrics.items() if "/qreward/" in name}
    seen = [name for name in texts if f"data/{name}/reward_mean" in told]
    assert len(seen) == 2
    assert told["flat_rate"] == ("b" in seen) / 2
    assert [told[f"data/{name}/reward_mean"] for name in seen] == pytest.approx([means[name] for name in seen])
    assert [told[f"data/{name}/failed_rate_mean"] for name in seen] == [0.25, 0.25]
    assert told["reward_mean"] == pytest.approx(sum(means[name] for name in seen) / 2)
    assert told["blame_s/judge/service_max"] > 0


# The rollout loop with workers of others


class Spoilt(Worker):
    """Rewards by the place in the group; what is no number stays none."""

    rewards = (0.0, math.nan, 1.0, 0.5)
    scores = rewards

    def initialize(self, pipeline_config: Any) -> None:
        super().initialize(pipeline_config)
        self.tokenizer = pipeline_config.actor_train.model_args.qreward_tokenizer

    async def compute_rewards(self, data: Any) -> Any:
        places = [int(text) for text in self.tokenizer.batch_decode(data.batch["responses"], skip_special_tokens=True)]
        tensors = {
            "token_level_rewards": torch.zeros(len(data), data.batch["responses"].shape[-1]),
            "response_level_rewards": torch.tensor([self.rewards[place] for place in places]),
            "scores": torch.tensor([self.scores[place] for place in places]),
        }
        return RollDataProto.from_dict(tensors, meta_info={"metrics": {}})


def number(draft: Any, rng: Any) -> str:
    return str(draft.number)


@pytest.mark.parametrize("mode", STREAMED)
@pytest.mark.parametrize(
    ("rewards", "scores", "expected", "masked"),
    [
        ((0.0, math.nan, 1.0, 0.5), (0.0, math.nan, 1.0, 0.5), [0.0, 0.5, 1.0, 0.5], [1]),
        ((0.0, math.inf, 1.0, 0.5), (0.0, 1.0, math.nan, 0.5), [0.0, 0.25, 0.25, 0.5], [1, 2]),
    ],
)
def test_what_is_no_number_of_another_worker_is_masked_and_poisons_nothing(
    train, mode, rewards, scores, expected, masked
) -> None:
    worker = type("Worker", (Spoilt,), {"rewards": rewards, "scores": scores})
    step = train(number, reward={"worker_cls": worker}, **mode).step()
    assert not step.poisoned
    assert step.raw_rewards == pytest.approx(expected * 2)
    assert step.scores == pytest.approx(expected * 2)
    assert step.trained_tokens == [0 if place in masked else 2 for place in range(4)] * 2
    assert not [name for name in step.metrics if "qreward" in name], "these rewards are not ours"


def test_rolls_own_filter_sees_the_neutral_rewards(train) -> None:
    flat = {"type": "std_filter", "filter_args": {"std_threshold": 0.0}}
    calls = 0

    class Once(Spoilt):
        async def compute_rewards(self, data: Any) -> Any:
            nonlocal calls
            calls += 1
            self.rewards = self.scores = (0.0, math.nan, 1.0, 0.5) if calls > 2 else (0.5, math.nan, 0.5, 0.5)
            return await super().compute_rewards(data)

    step = train(number, reward={"worker_cls": Once, "query_filter_config": flat}).step()
    assert len(step.dropped) == 2
    assert step.raw_rewards == pytest.approx([0.0, 0.5, 1.0, 0.5] * 2)


# Outcomes in ROLL's terms: three tensors, the metrics and their names, and word of what failed


LISTED = set(re.findall(r"`([^`\n]+)`", (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()))


@pytest.mark.parametrize("mode", MODES)
def test_a_call_gives_exactly_three_tensors_and_the_metrics_of_the_documentation(train, words, mode) -> None:
    from roll_adapter import QRewardWorker

    results = []

    class Watched(QRewardWorker):
        async def compute_rewards(self, data):
            results.append(await super().compute_rewards(data))
            return results[-1]

    train(words("1", "break", "nan", "4"), reward={"worker_cls": Watched}, **mode).step()
    for result in results:
        assert result.batch.keys() == {"token_level_rewards", "response_level_rewards", "scores"}
        assert {tensor.dtype for tensor in result.batch.values()} == {torch.float32}
        assert result.batch["token_level_rewards"].shape == (len(result), 64)
        assert result.batch["token_level_rewards"].sum() == 0
        assert result.non_tensor_batch == {}
        metrics = result.meta_info["metrics"]
        told = {
            name.removeprefix("qreward/").replace("judged", "DATA_SOURCE") for name in metrics if "blame" not in name
        }
        assert {name.replace("source/judge", "source/SOURCE") for name in told} <= LISTED
        assert {"samples_sum", "failed/infra_sum", "latency_s_p99", "source/judge_sum", "screened_rate"} <= told
        assert ("reward_mean" in told) == (metrics["qreward/failed_rate"] < 1.0)
        assert all(type(value) in (int, float) for value in metrics.values())


def test_a_response_that_is_not_judged_yet_when_roll_offloads_is_cancelled(train, words, monkeypatch) -> None:
    """Else it would be asked while the judge sleeps, and judged for nobody in the next phase."""
    from roll_adapter import QRewardWorker

    monkeypatch.setattr(RewardEngine, "colocated", ("judge",))
    ends = []

    class Offloaded(QRewardWorker):
        async def compute_rewards(self, data):
            late = asyncio.ensure_future(super().compute_rewards(data))
            await asyncio.sleep(0)
            await self.offload_states()
            ends.extend(await asyncio.gather(late, return_exceptions=True))
            return await super().compute_rewards(data)

    train(words("1", "2", "3", "4"), reward={"worker_cls": Offloaded}).step()
    assert {type(end) for end in ends} == {asyncio.CancelledError}
