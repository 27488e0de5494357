"""Playing the same on verl and on `FakeVerlTrainer`, and comparing what comes of it."""

from __future__ import annotations

import copy
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest

VERLS_WARNINGS = [
    pytest.mark.filterwarnings("ignore"),
    *(
        pytest.mark.filterwarnings(f"error:::{package}")
        for package in ("qreward_plugins", "verl_adapter", "slime_adapter", "roll_adapter", "hydra_plugins")
    ),
]
"""Marks for a module that calls verl: its own warnings are ignored, those of our packages stay errors."""


NEEDS_VERL = [
    pytest.mark.trainer,
    pytest.mark.skipif(not os.environ.get("QREWARD_VERL"), reason="set QREWARD_VERL=1 to train with the real verl"),
]
"""Marks for what trains with the real verl; it needs the fixture `verl_and_tasks`, too."""


def same(real, fake):
    return np.array_equal(np.asarray(real), np.asarray(fake), equal_nan=True)


seconds: dict[str, dict[str, float]] = {}
"""How long each scenario took in each player, "verl" and "fake"; the summary of a test run prints it."""


def note(name, player, took):
    """Add to how long a scenario took."""
    cells = seconds.setdefault(name, {})
    cells[player] = cells.get(player, 0.0) + took


def both(real, fake):
    """The results, or the texts of the errors. A test's name without its parameters is the name of the scenario."""
    name = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition("::")[2].split(" ")[0].split("[")[0]
    results = []
    for player, play in (("verl", real), ("fake", fake)):
        before = time.perf_counter()
        try:
            results.append(play())
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
        note(name.removeprefix("test_").replace("_", " "), player, time.perf_counter() - before)
    return results


def as_real(data):
    """The same rows as verl's `DataProto`."""
    import torch
    from tensordict import TensorDict
    from verl import DataProto

    tensors = {name: torch.tensor(np.array(values)) for name, values in data.batch.items()}
    return DataProto(
        batch=TensorDict(tensors, batch_size=len(data)), non_tensor_batch=data.non_tensor_batch, meta_info={}
    )


def real_output(output):
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    return AgentLoopOutput(
        prompt_ids=output.prompt_ids,
        response_ids=output.response_ids,
        response_mask=output.response_mask,
        num_turns=output.num_turns,
        metrics=AgentLoopMetrics(),
        extra_fields=copy.deepcopy(output.extra_fields),
    )


def of_worker(*names, **more):
    """An object with these methods of verl's agent loop worker."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    worker = SimpleNamespace(processor=None, distillation_enabled=False, **more)
    for name in names:
        setattr(worker, name, getattr(AgentLoopWorker, name).__get__(worker))
    return worker
