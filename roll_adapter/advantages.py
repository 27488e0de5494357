"""Records the advantages of ROLL's RLVR pipeline in the journal.

ROLL has no hook there: the pipeline calls `compute_advantage`, a name of its own module, for each domain of a step, in
the driver. The driver imports our worker when it creates the domain's cluster (executor/cluster.py), so it is then that
the name is wrapped. Actors import the worker, too, but no pipeline.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

from qreward_plugins.adapters import Trained, TrainingLog

from .rollouts import prompt_of
from .settings import load_settings

_log = logging.getLogger("roll_adapter")

PIPELINES = ("roll.pipeline.rlvr.rlvr_pipeline", "roll.pipeline.rlvr.rlvr_vlm_pipeline")


def record_advantages(is_ours: Callable[[Any], bool]) -> None:
    """Wrap `compute_advantage` of the pipelines that this process has imported, if any.

    `is_ours`: whether a domain's configuration has our workers; the others are left alone.
    """
    for pipeline in map(sys.modules.get, PIPELINES):
        compute = getattr(pipeline, "compute_advantage", None)
        if compute is not None:
            pipeline.compute_advantage = _recorded(compute, is_ours)  # type: ignore[union-attr]


def _recorded(compute: Callable[..., Any], is_ours: Callable[[Any], bool]) -> Callable[..., Any]:
    """`compute_advantage`, which also records what it returns. What cannot be recorded costs the record only."""
    logs: dict[str, tuple[Any, TrainingLog | None]] = {}

    @functools.wraps(compute)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        data = compute(*args, **kwargs)
        try:
            domain = str(data.non_tensor_batch["domain"][0])
            config = kwargs["pipeline_config"].rewards[domain]
            if domain not in logs or logs[domain][0] is not config:  # a process may run several pipelines
                logs[domain] = config, _log_of(domain, config) if is_ours(config) else None
            log = logs[domain][1]
            # Without a rollout loop the samples of a prompt have one id together.
            if log is not None and "rollout_id" in data.non_tensor_batch:
                log.add(list(_trained(data, kwargs["response_mask"])))
        except Exception as error:  # nothing here may end a training
            _log.warning("advantages are not recorded: %s: %s", type(error).__name__, error)
        return data

    return recorded


def _log_of(domain: str, config: Any) -> TrainingLog | None:
    journal = load_settings(config, domain=domain).engine.journal
    return None if journal is None else TrainingLog(journal.path)


def _trained(data: Any, mask: Any) -> Iterator[Trained]:
    sums, counts = (data.batch["advantages"] * mask).sum(-1).tolist(), mask.sum(-1).tolist()
    rewards = data.batch["response_level_rewards"].tolist()
    for row, (name, reward) in enumerate(zip(data.non_tensor_batch["rollout_id"], rewards, strict=True)):
        advantage = sums[row] / counts[row] if counts[row] else None
        # No step: ROLL may train on a sample in a later step than it was judged in.
        yield Trained(str(name), prompt_of(data, row), None, reward, advantage, not counts[row])
