"""The same data twice, as ROLL's `DataProto` and as the fake's, and where two such differ. For ROLL's process."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from qreward_plugins.testing.roll.data import collate, encode_row
from roll.distributed.scheduler.protocol import DataProto

from qreward_plugins.testing.roll.protocol import RollDataProto
from qreward_plugins.testing.tokenizer import WordTokenizer

KINDS = (DataProto, RollDataProto)
PROMPTS = 6
PROMPT_LENGTH = 32
SEQUENCE_LENGTH = 48

_META = {"step": 1, "metrics": {"took": 1.0}}


def _collated() -> dict[str, Any]:
    tokenizer = WordTokenizer()
    rows = [
        encode_row(
            {"messages": [{"role": "user", "content": "word " * number}], "length": number},
            number,
            domain="ab"[number % 2],
            tag="tag",
            tokenizer=tokenizer,
            prompt_length=PROMPT_LENGTH,
        )
        for number in range(1, PROMPTS + 1)
    ]
    return collate(rows, pad_token_id=0, length=PROMPT_LENGTH)


def prompts(kind: type, meta_info: Mapping[str, Any] = _META) -> Any:
    """Six prompts of two domains, each longer than the one before."""
    return kind.from_single_dict(_collated(), meta_info=copy.deepcopy(dict(meta_info)))


def difference(real: Any, fake: Any) -> str:
    """What the fake's data has otherwise than ROLL's; empty where it has all alike."""
    return (
        _tensors(dict(real.batch.items()), dict(fake.batch.items()))
        or _columns(dict(real.non_tensor_batch.items()), dict(fake.non_tensor_batch.items()))
        or ("" if real.meta_info == fake.meta_info else f"meta_info: {fake.meta_info}, not {real.meta_info}")
    )


def _tensors(real: Mapping[str, torch.Tensor], fake: Mapping[str, torch.Tensor]) -> str:
    if set(real) != set(fake):
        return f"tensors: {sorted(fake)}, not {sorted(real)}"
    for name, wanted in real.items():
        found = fake[name]
        if found.shape != wanted.shape:
            return f"{name}: the shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
        if found.dtype != wanted.dtype:
            return f"{name}: {found.dtype}, not {wanted.dtype}"
        if not torch.allclose(found.double(), wanted.double(), atol=1e-6, equal_nan=True):
            return f"{name}: {found.tolist()}, not {wanted.tolist()}"
    return ""


def _columns(real: Mapping[str, np.ndarray], fake: Mapping[str, np.ndarray]) -> str:
    if set(real) != set(fake):
        return f"columns: {sorted(fake)}, not {sorted(real)}"
    return next(
        (
            f"{name}: {list(fake[name])}, not {list(values)}"
            for name, values in real.items()
            if list(values) != list(fake[name])
        ),
        "",
    )


def number_difference(real: Mapping[str, Any], fake: Mapping[str, Any]) -> str:
    """As `difference`, of named numbers."""
    if set(real) != set(fake):
        return f"names: {sorted(set(real) ^ set(fake))} on one side only"
    return "; ".join(
        f"{name}: {fake[name]}, not {wanted}" for name, wanted in real.items() if not _alike(wanted, fake[name])
    )


def _alike(real: Any, fake: Any) -> bool:
    if isinstance(real, list) or isinstance(fake, list):
        return bool(real == fake)
    real, fake = float(real), float(fake)
    return (math.isnan(real) and math.isnan(fake)) or math.isclose(real, fake, rel_tol=1e-6, abs_tol=1e-6)
