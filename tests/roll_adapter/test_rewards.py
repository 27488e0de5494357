"""Outcomes in ROLL's terms: three tensors, the metrics and their names, and word of what failed."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

import pytest

from qreward_plugins import RewardEngine
from qreward_plugins.testing.roll.protocol import torch

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


EXPECTED = {
    *("samples_sum", "failed_sum", "failed_rate", "failed/infra_sum", "failed/verdict_sum", "failed/policy_sum"),
    *("attempts_mean", "latency_s_mean", "latency_s_p50", "latency_s_p99", "latency_s_max"),
    *("tokens_sum", "cost_usd_sum", "data/DATA_SOURCE/failed_rate_mean"),
    *("floor/verdict_sum", "floor/policy_sum"),
    *("floor_rate", "screened_rate", "cached_rate", "cut_rate", "source/judge_sum"),
}


OF_SCORED = {
    *(f"reward_{of}" for of in ("mean", "std", "min", "p50", "max")),
    *("data/DATA_SOURCE/reward_mean", "data/DATA_SOURCE/acc_mean", "acc_mean"),
}
"""Names that a call has if a sample of it has a reward."""


def test_the_documentation_lists_them() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    listed = set(re.findall(r"`([^`\n]+)`", text))
    assert {name.replace("source/judge", "source/SOURCE") for name in EXPECTED | OF_SCORED} | {"flat_rate"} <= listed


@pytest.mark.parametrize("mode", [*MODES, pytest.param({"generate_opt_level": 0}, id="batch")])
def test_a_call_gives_exactly_three_tensors_and_metrics_of_the_same_names(answer_of, words, mode) -> None:
    for result in answer_of(words("1", "break", "nan", "4"), **mode):
        assert result.batch.keys() == {"token_level_rewards", "response_level_rewards", "scores"}
        assert {tensor.dtype for tensor in result.batch.values()} == {torch.float32}
        assert result.batch["token_level_rewards"].shape == (len(result), 64)
        assert result.batch["token_level_rewards"].sum() == 0
        assert result.non_tensor_batch == {}
        metrics = result.meta_info["metrics"]
        told = {
            name.removeprefix("qreward/").replace("data/judged/", "data/DATA_SOURCE/")
            for name in metrics
            if not name.startswith("qreward/blame_s/")
        }
        assert told - OF_SCORED == EXPECTED
        assert ("reward_mean" in told) == (metrics["qreward/failed_rate"] < 1.0)
        assert all(type(value) in (int, float) for value in metrics.values())


def test_a_response_that_is_still_decoded_when_roll_offloads_is_cancelled_too(train, words, monkeypatch) -> None:
    """Else it would be asked while the judge sleeps, and judged for nobody in the next phase."""
    from roll_adapter import QRewardWorker

    monkeypatch.setattr(RewardEngine, "colocated", ("judge",))
    begun, ends = [], []

    class Offloaded(QRewardWorker):
        async def compute_rewards(self, data):
            if not begun:
                begun.append(data)
                free = threading.Event()
                self._decoder.submit(free.wait)
                late = asyncio.ensure_future(super().compute_rewards(data))
                await asyncio.sleep(0)
                await self.offload_states()
                free.set()
                ends.extend(await asyncio.gather(late, return_exceptions=True))
            return await super().compute_rewards(data)

    train(words("1", "2", "3", "4"), reward={"worker_cls": Offloaded}).step()
    assert [type(end) for end in ends] == [asyncio.CancelledError]
