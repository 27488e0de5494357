"""ROLL itself, on a CPU: its clusters, schedulers and pipeline on a small Ray, with everything of a GPU stood in for.

ROLL is not on the package index, and its pins fit no environment with current frameworks, so these tests run where
`QREWARD_ROLL_SRC` names a checkout and ROLL's packages are installed (`environment.sh` makes such an environment and
runs them there). Elsewhere they are skipped, but for what `FakeRollTrainer` plays, which needs torch only. ROLL and Ray
run in a process of their own (`player`), which the tests talk to (`trainers`) and whose reward is judged by servers in
the test process. What is played is told in `scenarios`, which knows nothing of ROLL, so that the fake plays the same.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def stand_in_for_vllm() -> None:
    """Stand in for the one function of vLLM's side that ROLL's router calls, so that prompts can be routed to workers
    without vLLM. Every process of Ray does so at its start, long before most of them need ROLL.
    """
    module = ModuleType("roll.distributed.strategy.vllm_strategy")
    module.create_sampling_params_for_vllm = _sampling_params  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module


def _sampling_params(generation_config: dict[str, Any], collect_unfinished: bool = False) -> dict[str, Any]:
    return {"n": generation_config["num_return_sequences"]}
