"""From rewards to what would train: normalisation, masks, advantages, as ROLL's pipeline computes them.

That the arithmetic is ROLL's was checked against ROLL itself; the numbers here are worked out by hand.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from qreward_plugins.testing import RollDataProto
from qreward_plugins.testing.roll.arguments import DEFAULTS, GeneratingArguments
from qreward_plugins.testing.roll.estimates import normalised, reduce_metrics, train_batch
from qreward_plugins.testing.roll.protocol import torch
from qreward_plugins.testing.roll.rollout_loop import query_filter, response_batch
from tests.kit import each_of

ROOM = 4


def prepared(
    rewards: Sequence[float],
    lengths: Sequence[int] | None = None,
    *,
    masked: Sequence[int] = (),
    domains: Sequence[str] | None = None,
    size: int = 2,
    **flags: Any,
) -> tuple[RollDataProto, dict[str, Any]]:
    count = len(rewards)
    mask = torch.tensor([[1, 1]] * count)
    prompts = RollDataProto.from_dict({"input_ids": mask * 7, "attention_mask": mask})
    tokens = [[9] * length for length in lengths or [2] * count]
    batch = response_batch(prompts, tokens, sequence_length=2 + ROOM, pad_token_id=0)
    for row in masked:
        batch["response_mask"][row] = 0
    told = torch.tensor(rewards)
    batch |= {"response_level_rewards": told, "scores": told, "token_level_rewards": torch.zeros(count, ROOM)}
    sampling = GeneratingArguments(num_return_sequences=size)
    config = Namespace(**{**DEFAULTS, **flags}, actor_infer=Namespace(generating_args=sampling))
    return train_batch(RollDataProto.from_dict(batch, {"domain": domains or ["d"] * count}), config)


def advantages(batch: RollDataProto) -> list[list[float]]:
    return [
        [round(value, 4) for value in row[mask.bool()].tolist()]
        for row, mask in zip(batch.batch["advantages"], batch.batch["response_mask"][:, 1:], strict=True)
    ]


def test_grpo_gives_every_token_the_normalised_reward() -> None:
    batch, metrics = prepared([0.0, 1.0, 3.0, 3.0], adv_estimator="grpo")
    assert advantages(batch) == [[-0.7071] * 2, [0.7071] * 2, [0.0] * 2, [0.0] * 2]
    assert metrics["d/critic/rewards/mean"] == pytest.approx(0.0)
    assert batch.batch["token_level_scores"].sum() == 0
    assert "prompt_id" not in batch.batch


def test_gae_discounts_the_reward_from_the_last_token() -> None:
    batch, _ = prepared([1.0, 0.0], [3, 1])
    assert advantages(batch) == [[0.9025, 0.95, 1.0], [0.0]]
    batch, _ = prepared([1.0, 0.0], [3, 1], adv_estimator="reinforce", gamma=0.5)
    assert advantages(batch) == [[0.25, 0.5, 1.0], [0.0]]


def test_one_nan_poisons_its_group_and_with_a_batch_norm_everything() -> None:
    def spoilt(**flags: Any) -> list[bool]:
        batch, _ = prepared([math.nan, 1.0, 0.0, 1.0], **flags)
        return np.isnan(np.asarray(batch.batch["advantages"])).any(-1).tolist()

    assert spoilt(adv_estimator="grpo") == [True, True, False, False]
    assert spoilt(norm_mean_type="batch", norm_std_type="batch") == [True] * 4


def test_a_mask_keeps_a_sample_out_of_the_loss_and_in_the_norm() -> None:
    batch, _ = prepared([0.0, 1.0, 0.5, 0.5], masked=[1], adv_estimator="grpo")
    assert batch.batch["final_response_mask"].sum(-1).tolist() == [2, 0, 2, 2]
    assert batch.batch["advantages"][1].tolist() == [0.0] * 5
    assert advantages(batch)[0] == [-0.7071] * 2


def test_masks_of_samples() -> None:
    batch, metrics = prepared([1.0, 0.0, 1.0, 0.0], [ROOM, 1, 2, 2], max_len_mask=True)
    assert batch.batch["final_response_mask"].sum(-1).tolist() == [0, 1, 2, 2]
    assert metrics["d/actor/max_len_mask_ratio"] == metrics["d/actor/final_mask_ratio"] == 0.75
    batch, _ = prepared([1.0, 1.0, 1.0, 0.0], difficulty_mask=True)
    assert batch.batch["final_response_mask"].sum(-1).tolist() == [0, 0, 2, 2]


def test_domains_are_normalised_apart_and_come_back_in_order() -> None:
    batch, metrics = prepared(
        [0.0, 1.0, 0.0, 8.0], domains=["a", "a", "b", "b"], norm_mean_type="batch", adv_estimator="reinforce"
    )
    assert [row[0] for row in advantages(batch)] == [-0.5, 0.5, -4.0, 4.0]
    assert (metrics["a/critic/score/mean"], metrics["b/critic/score/mean"]) == (0.5, 4.0)


@each_of(
    ("kinds", "expected"),
    [
        ((None, None), [0.0, 2.0, 4.0, 6.0]),
        (("batch", None), [-3.0, -1.0, 1.0, 3.0]),
        (("group", None), [-1.0, 1.0, -1.0, 1.0]),
        (("batch", "batch"), [-1.1619, -0.3873, 0.3873, 1.1619]),
        (("group", "batch"), [-0.3873, 0.3873, -0.3873, 0.3873]),
        (("group", "group"), [-0.7071, 0.7071, -0.7071, 0.7071]),
    ],
)
def test_norms(kinds: tuple[str | None, str | None], expected: list[float]) -> None:
    rewards = np.array([0.0, 2.0, 4.0, 6.0])
    assert normalised(rewards, 2, *kinds).tolist() == pytest.approx(expected, abs=1e-4)


def test_a_group_of_one_has_no_deviation() -> None:
    assert np.isnan(normalised(np.array([0.0, 2.0]), 1, "group", "group")).all()


def test_metrics_are_reduced_by_the_ends_of_their_names() -> None:
    told = {"a_sum": [1, 2], "b@max": [1, 5], "c": [1, 2], "d": 3, "e_std": [1.0, 3.0], "f@p50": (1, 2, 9), "g": []}
    assert reduce_metrics(told) == {
        "a_sum": 3.0,
        "b@max": 5.0,
        "c": 1.5,
        "d": 3,
        "e_std": 1.0,
        "f@p50": 2.0,
        "g": [],
    }
    with pytest.raises(ValueError, match="Unknown reducer tag 'most'"):
        reduce_metrics({"a@most": [1]})


@each_of(
    ("kind", "options", "rewards", "kept"),
    [
        ("no_filter", {}, [1.0, 1.0], True),
        ("mean_filter", {"threshold_up": 0.9}, [1.0, 1.0], False),
        ("mean_filter", {"threshold_down": 0.0}, [0.0, 0.0], False),
        ("mean_filter", {}, [0.0, 1.0], True),
        ("std_filter", {"std_threshold": 0.0}, [1.0, 1.0], False),
        ("std_filter", {"std_threshold": 0.0}, [1.0, 0.0], True),
        ("std_filter", {"std_threshold": 0.0}, [1.0, math.nan], True),
        ("std_filter", {"std_threshold": 0.0}, [1.0], True),
    ],
)
def test_query_filters(kind: str, options: dict[str, float], rewards: list[float], kept: bool) -> None:
    config = Namespace(rewards={"d": Namespace(query_filter_config=Namespace(type=kind, filter_args=options))})
    group = [
        RollDataProto.from_dict({"response_level_rewards": torch.tensor([reward])}, {"domain": ["d"]})
        for reward in rewards
    ]
    assert query_filter(group, config) is kept
