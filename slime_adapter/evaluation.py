"""Evaluation for runs with `--group-rm`.

slime asserts that `group_rm` is off in evaluation, which has no groups (slime/rollout/sglang_rollout.py), so such a run
ends at its first evaluation. The reward function takes single samples, too. So this runs slime's evaluation with that
flag off.
"""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any


def eval_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = True) -> Any:
    """slime's `--eval-function-path`: slime's own evaluation, sample by sample. Returns its `RolloutFnEvalOutput`."""
    single = copy.copy(args)
    single.group_rm = False
    rollout = import_module("slime.rollout.sglang_rollout")
    return rollout.generate_rollout(single, rollout_id, data_source, evaluation=evaluation)
