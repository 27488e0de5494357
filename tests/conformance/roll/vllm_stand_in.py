"""The one function of vLLM's side that ROLL's router calls, so that prompts can be routed to workers without vLLM.

In a module of its own because every process of Ray runs it at its start, long before most of them need ROLL.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

MODULE = "roll.distributed.strategy.vllm_strategy"


def install() -> None:
    module = ModuleType(MODULE)
    module.create_sampling_params_for_vllm = _sampling_params  # type: ignore[attr-defined]
    sys.modules[MODULE] = module


def _sampling_params(generation_config: dict[str, Any], collect_unfinished: bool = False) -> dict[str, Any]:
    return {"n": generation_config["num_return_sequences"]}
