"""The few names that reward code imports from ROLL, for use without ROLL.

Workers and loops import a base class, a decorator, the data protocol and a few helpers. ROLL itself needs Ray, vLLM and
Megatron and is on no package index, so without stand-ins a file with such an import could be tested only on a GPU
machine.
"""

from __future__ import annotations

import importlib
import logging
from contextlib import AbstractContextManager
from typing import Any

from ..stand_in_modules import stand_in_modules
from . import rollout_loop
from .context import RolloutContext
from .metrics import reduce_metrics
from .protocol import RollDataProto
from .trajectories import FakeTrajEnvManager, RolloutCache
from .workers import Dispatch, Execute, RankInfo, Worker, register


def default_tokenizer_provider(model_args: Any, model_name_or_path: str | None = None) -> Any:
    """The tokenizer of the trainer with this configuration."""
    return model_args.qreward_tokenizer


def safe_import_class(class_path: str) -> Any:
    """The class of a dotted path; None, with a log line, if it cannot be imported."""
    module, _, name = class_path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        get_logger().error("Failed to import class %s: %s", class_path, error)
        return None


def get_logger() -> logging.Logger:
    return logging.getLogger("qreward_plugins.testing.roll")


def _contents() -> dict[str, dict[str, Any]]:
    loop = {
        name: getattr(rollout_loop, name)
        for name in (
            "UserDefinedRolloutLoop",
            "is_report_data_finished",
            "postprocess_output_data",
            "postprocess_paused_data",
            "query_filter",
            "response_filter",
        )
    }
    expand = {"expand_requests": rollout_loop.expand_requests, "expand_responses": rollout_loop.expand_responses}
    env_manager = "roll.pipeline.agentic.env_manager"
    return {
        "roll": {},
        "roll.distributed": {},
        "roll.distributed.executor": {},
        "roll.distributed.executor.worker": {"RankInfo": RankInfo, "Worker": Worker},
        "roll.distributed.scheduler": {},
        "roll.distributed.scheduler.decorator": {"Dispatch": Dispatch, "Execute": Execute, "register": register},
        "roll.distributed.scheduler.generate_scheduler": {"RolloutContext": RolloutContext, **expand},
        "roll.distributed.scheduler.protocol": {"DataProto": RollDataProto},
        "roll.distributed.scheduler.user_defined_rollout_loop": {**loop, "expand_requests": expand["expand_requests"]},
        "roll.models": {},
        "roll.models.model_providers": {"default_tokenizer_provider": default_tokenizer_provider},
        "roll.pipeline": {},
        "roll.pipeline.agentic": {},
        env_manager: {},
        f"{env_manager}.base_env_manager": {"RolloutCache": RolloutCache},
        f"{env_manager}.traj_env_manager": {"TrajEnvManager": FakeTrajEnvManager},
        "roll.utils": {},
        "roll.utils.functionals": {"reduce_metrics": reduce_metrics},
        "roll.utils.import_utils": {"safe_import_class": safe_import_class},
        "roll.utils.logging": {"get_logger": get_logger},
    }


def roll_stand_in(*, over_installed: bool = False) -> AbstractContextManager[bool]:
    """Let workers and loops import a few of ROLL's names, for a `FakeRollTrainer`.

    They are `Worker`, `RankInfo`, `Dispatch`, `Execute`, `register`, `DataProto`, `default_tokenizer_provider`,
    `UserDefinedRolloutLoop` and its helpers, `expand_requests`, `expand_responses`, `RolloutContext`, `reduce_metrics`,
    `safe_import_class`, `get_logger`, and for agentic code `TrajEnvManager` and `RolloutCache`. Anything else under
    `roll` is a `ModuleNotFoundError`.

    It yields False if ROLL is installed, whose own names are used then. Those need Ray, so `FakeRollTrainer` refuses
    workers that use them; with `over_installed` the stand-ins replace an installed ROLL.

    For a whole test suite, enter it in a session fixture or in `conftest.py`, before the first import of a worker.
    Leaving it removes the modules; classes imported before keep their names. For one thread at a time.
    """
    return stand_in_modules(_contents(), proof="roll.distributed.executor.worker", over_installed=over_installed)
