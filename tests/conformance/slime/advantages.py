"""What slime's trainer makes of a step's train data: its own `compute_advantages_and_returns`, on one rank.

The model is taken to be worth nothing, as `FakeSlimeTrainer` takes it: log-probabilities and the critic's values are
zero, so that the advantages depend on rewards and masks only.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed


def token_advantages(args: Namespace, data: Mapping[str, Any]) -> list[list[float]]:
    """For each sample one number a token. Raises what ends slime's training."""
    from slime.backends.megatron_utils.loss import compute_advantages_and_returns

    _join_group_of_one()
    zeros = [torch.zeros(length) for length in data["response_lengths"]]
    batch: dict[str, Any] = {
        "rewards": data["rewards"],
        "response_lengths": data["response_lengths"],
        "total_lengths": [len(tokens) for tokens in data["tokens"]],
        "loss_masks": [torch.tensor(mask, dtype=torch.int) for mask in data["loss_masks"]],
        "log_probs": zeros,
        "values": [zero.clone() for zero in zeros],
    }
    compute_advantages_and_returns(args, batch)
    return [advantages.tolist() for advantages in batch["advantages"]]


def _join_group_of_one() -> None:
    if not torch.distributed.is_initialized():
        store = torch.distributed.FileStore(str(Path(tempfile.mkdtemp()) / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
