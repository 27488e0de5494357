"""The few names that reward code imports from slime, for use without slime.

Hooks import a type, a result or a log function: `slime.utils.types.Sample`, `DynamicFilterOutput`, `logging_utils.log`.
slime itself needs SGLang and Megatron and is on no package index, so without stand-ins a file with such an import could
be tested only on a GPU machine. An installed slime is not changed.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from contextlib import AbstractContextManager
from typing import Any

from ..fake_trainer import load
from ..stand_in_modules import stand_in_modules
from .samples import DynamicFilterOutput, SlimeSample
from .trainer import SlimeEvalOutput, SlimeRolloutOutput


def _log(args: Namespace, metrics: dict[str, Any], step_key: str) -> None:
    args.qreward_log(args, metrics, step_key)


def _generate_rollout(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    return args.qreward_generate_rollout(args, rollout_id, data_source, evaluation=evaluation)


def _data_source(args: Namespace) -> Any:
    return args.qreward_data_source(args)


def _check_spread(args: Namespace, samples: list[SlimeSample], **_: Any) -> DynamicFilterOutput:
    rewards = [sample.get_reward_value(args) for sample in samples]
    keep = len(rewards) > 1 and statistics.stdev(map(float, rewards)) > 1e-6
    return DynamicFilterOutput(keep, reason=None if keep else f"zero_std_{round(rewards[0], 1)}")


def _names() -> dict[str, dict[str, Any]]:
    logging_utils = {"log": _log}
    metric_utils = {"compute_rollout_step": lambda args, rollout_id: rollout_id}
    outputs = {"RolloutFnEvalOutput": SlimeEvalOutput, "RolloutFnTrainOutput": SlimeRolloutOutput}
    return {
        # The place on slime's main branch of what v0.3.1 has in slime.utils.
        "slime.observability.logging_utils": logging_utils,
        "slime.observability.metric_utils": metric_utils,
        "slime.rollout.base_types": outputs,
        "slime.rollout.data_source": {"RolloutDataSourceWithBuffer": _data_source},
        "slime.rollout.filter_hub.base_types": {"DynamicFilterOutput": DynamicFilterOutput},
        "slime.rollout.filter_hub.dynamic_sampling_filters": {"check_reward_nonzero_std": _check_spread},
        "slime.rollout.sglang_rollout": {"generate_rollout": _generate_rollout},
        "slime.utils.logging_utils": logging_utils,
        "slime.utils.metric_utils": metric_utils,
        "slime.utils.misc": {"load_function": load},
        "slime.utils.types": {"Sample": SlimeSample},
    }


def slime_stand_in() -> AbstractContextManager[bool]:
    """Let hooks import a few of slime's names, which a `FakeSlimeTrainer` backs.

    They are `Sample`, `DynamicFilterOutput`, `RolloutFnTrainOutput`, `RolloutFnEvalOutput`, `load_function`,
    `check_reward_nonzero_std`, `generate_rollout`, `RolloutDataSourceWithBuffer`, `compute_rollout_step`, and `log`,
    whose metrics are in the trainer's result. Anything else under `slime` stays a `ModuleNotFoundError`.

    It yields False if slime is installed, whose own names are used then. For a whole test suite, enter it in a session
    fixture or in `conftest.py`, before the first import of a hook. Leaving it removes the modules; hooks imported
    before keep their names. For one thread at a time.
    """
    return stand_in_modules(_names(), proof="slime.utils.types")
