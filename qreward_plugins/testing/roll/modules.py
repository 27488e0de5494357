"""The few names that reward code imports from ROLL, for use without ROLL.

Workers and loops import a base class, a decorator, the data protocol and a few helpers. ROLL itself needs Ray, vLLM and
Megatron and is on no package index, so without stand-ins a file with such an import could be tested only on a GPU
machine.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any

from ..fake_trainer import load
from ..stand_in_modules import stand_in_modules
from ..tensors import TORCH
from .estimates import reduce_metrics
from .protocol import RollDataProto
from .rollout_loop import (
    UserDefinedRolloutLoop,
    expand_requests,
    expand_responses,
    postprocess_output_data,
    query_filter,
)
from .scheduler import RolloutContext
from .trajectories import FakeTrajEnvManager, RolloutCache
from .workers import Dispatch, Worker, register


def default_tokenizer_provider(model_args: Any, model_name_or_path: str | None = None) -> Any:
    """The tokenizer of the trainer with this configuration."""
    return model_args.qreward_tokenizer


def safe_import_class(class_path: str) -> Any:
    """The class of a dotted path; None, with a log line, if it cannot be imported."""
    try:
        return load(class_path)
    except Exception as error:
        get_logger().error("Failed to import class %s: %s", class_path, error)
        return None


def get_logger() -> logging.Logger:
    return logging.getLogger("qreward_plugins.testing.roll")


_SCHEDULER = "roll.distributed.scheduler"
_ENV_MANAGER = "roll.pipeline.agentic.env_manager"
_NAMES: dict[str, dict[str, Any]] = {
    "roll.distributed.executor.worker": {"Worker": Worker},
    f"{_SCHEDULER}.decorator": {"Dispatch": Dispatch, "register": register},
    f"{_SCHEDULER}.generate_scheduler": {
        "RolloutContext": RolloutContext,
        "expand_requests": expand_requests,
        "expand_responses": expand_responses,
    },
    f"{_SCHEDULER}.protocol": {"DataProto": RollDataProto},
    f"{_SCHEDULER}.user_defined_rollout_loop": {
        "UserDefinedRolloutLoop": UserDefinedRolloutLoop,
        "expand_requests": expand_requests,
        "postprocess_output_data": postprocess_output_data,
        "query_filter": query_filter,
    },
    "roll.models.model_providers": {"default_tokenizer_provider": default_tokenizer_provider},
    f"{_ENV_MANAGER}.base_env_manager": {"RolloutCache": RolloutCache},
    f"{_ENV_MANAGER}.traj_env_manager": {"TrajEnvManager": FakeTrajEnvManager},
    "roll.utils.functionals": {"reduce_metrics": reduce_metrics},
    "roll.utils.import_utils": {"safe_import_class": safe_import_class},
    "roll.utils.logging": {"get_logger": get_logger},
}


def roll_stand_in(*, over_installed: bool = False) -> AbstractContextManager[bool]:
    """Let workers and loops import a few of ROLL's names, for a `FakeRollTrainer`.

    They are `Worker`, `Dispatch`, `register`, `DataProto`, `default_tokenizer_provider`,
    `UserDefinedRolloutLoop` and its helpers, `expand_requests`, `expand_responses`, `RolloutContext`, `reduce_metrics`,
    `safe_import_class`, `get_logger`, and for agentic code `TrajEnvManager` and `RolloutCache`; and without torch a
    `torch` with `tensor`, `zeros`, `ones`, `full_like`, `zeros_like`, `ones_like`, `cat`, `arange` and a few types, on
    numpy. Anything else under `roll` is a `ModuleNotFoundError`.

    It yields False if ROLL is installed, whose own names are used then. Those need Ray, so `FakeRollTrainer` refuses
    workers that use them; with `over_installed` the stand-ins replace an installed ROLL.

    For a whole test suite, enter it in a session fixture or in `conftest.py`, before the first import of a worker.
    Leaving it removes the modules; classes imported before keep their names. For one thread at a time.
    """
    contents = _NAMES if find_spec("torch") is not None else {**_NAMES, "torch": TORCH}
    return stand_in_modules(contents, proof="roll.distributed.executor.worker", over_installed=over_installed)
