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
from .protocol import RollDataProto
from .scheduler import UserDefinedRolloutLoop, expand_requests, postprocess_output_data, query_filter
from .workers import Dispatch, Worker, register


def default_tokenizer_provider(model_args: Any, model_name_or_path: str | None = None) -> Any:
    """The tokenizer of the trainer with this configuration."""
    return model_args.qreward_tokenizer


def safe_import_class(class_path: str) -> Any:
    """The class of a dotted path; None, with a log line, if it cannot be imported."""
    try:
        return load(class_path)
    except Exception as error:
        logging.getLogger("qreward_plugins.testing.roll").error("Failed to import class %s: %s", class_path, error)
        return None


_SCHEDULER = "roll.distributed.scheduler"
_NAMES: dict[str, dict[str, Any]] = {
    "roll.distributed.executor.worker": {"Worker": Worker},
    f"{_SCHEDULER}.decorator": {"Dispatch": Dispatch, "register": register},
    f"{_SCHEDULER}.generate_scheduler": {"expand_requests": expand_requests},
    f"{_SCHEDULER}.protocol": {"DataProto": RollDataProto},
    f"{_SCHEDULER}.user_defined_rollout_loop": {
        "UserDefinedRolloutLoop": UserDefinedRolloutLoop,
        "expand_requests": expand_requests,
        "postprocess_output_data": postprocess_output_data,
        "query_filter": query_filter,
    },
    "roll.models.model_providers": {"default_tokenizer_provider": default_tokenizer_provider},
    "roll.utils.import_utils": {"safe_import_class": safe_import_class},
}


def roll_stand_in(*, over_installed: bool = False) -> AbstractContextManager[bool]:
    """Let workers and loops import a few of ROLL's names, for a `FakeRollTrainer`.

    They are `Worker`, `Dispatch`, `register`, `DataProto`, `default_tokenizer_provider`, `UserDefinedRolloutLoop` and
    its helpers, and `safe_import_class`; and without torch a `torch` with `tensor`, `zeros`, `ones`, `full_like`,
    `zeros_like`, `ones_like`, `cat`, `arange` and a few types, on numpy. Anything else under `roll`, such as its
    agentic pipelines, is a `ModuleNotFoundError`.

    It yields False if ROLL is installed, whose own names are used then. Those need Ray, so `FakeRollTrainer` refuses
    workers that use them; with `over_installed` the stand-ins replace an installed ROLL.

    For a whole test suite, enter it in a session fixture or in `conftest.py`, before the first import of a worker.
    Leaving it removes the modules; classes imported before keep their names. For one thread at a time.
    """
    contents = _NAMES if find_spec("torch") is not None else {**_NAMES, "torch": TORCH}
    return stand_in_modules(contents, proof="roll.distributed.executor.worker", over_installed=over_installed)
