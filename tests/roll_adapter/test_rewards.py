"""Outcomes in ROLL's terms: three tensors, the metrics and their names, and word of what failed."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from qreward_plugins import RewardEngine
from qreward_plugins.testing.roll.generation import torch

MODES = [pytest.param({"is_num_return_sequences_expand": True}, id="single"), pytest.param({}, id="group")]


@pytest.fixture
def answer_of(train, words):
    """What a worker answers itself: the calls that ROLL makes of it, with their results."""

    def answers(respond, **flags):
        from roll_adapter import QRewardWorker

        told = []

        class Watched(QRewardWorker):
            async def compute_rewards(self, data):
                result = await super().compute_rewards(data)
                told.append(result)
                return result

        reward = {"worker_cls": Watched, **flags.pop("reward", {})}
        train(respond, reward=reward, **flags).step()
        return told

    return answers


LISTED = set(re.findall(r"`([^`\n]+)`", (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()))


@pytest.mark.parametrize("mode", [*MODES, pytest.param({"generate_opt_level": 0}, id="batch")])
def test_a_call_gives_exactly_three_tensors_and_the_metrics_of_the_documentation(answer_of, words, mode) -> None:
    for result in answer_of(words("1", "break", "nan", "4"), **mode):
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
