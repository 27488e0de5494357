"""Detects which of verl's trainers a run uses, and what it does with a sample without a reward (verl 0.9.1):

| trainer (`Trainer`) | a reward manager raises in training | it raises in validation | keys of extra info |
|---|---|---|---|
| `v1` (main_ppo, `use_v1`), sync | the sample is left out of its group | left out; `acc` counts it as 0 | any |
| `v1`, colocate_async and separate_async | its group is replaced | the same | any |
| `legacy` (main_ppo without `use_v1`) | the run ends | the run ends | those of sample 0 |
| `one_step_off` | the run ends | the run ends | those of sample 0 |
| `fully_async` | generation stops; the run ends early, without an error | the run ends | those of sample 0 |
| any of them, colocated reward model | the run ends | the run ends | those of sample 0 |

A score of None ends all of them, because there are no `rm_scores` then; NaN trains. The experimental trainers derive
from the legacy one and inherit `trainer.use_v1: true`, so that key says nothing about them. So when verl starts its
reward workers, `trainer_hooks` looks which trainer is calling, and writes it into their configuration. If it is not
written there, the other keys tell the trainer.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf, open_dict

LEGACY_MODULE = "verl.trainer.ppo.ray_trainer"
V1_MODULE = "verl.trainer.ppo.v1.trainer_base"

Name = Literal["v1", "legacy", "one_step_off", "fully_async"]

_KEY = "qreward_trainer"
_LEGACY_SUBCLASSES: tuple[tuple[str, Name], ...] = (
    ("verl.experimental.fully_async_policy.", "fully_async"),
    ("verl.experimental.one_step_off_policy.", "one_step_off"),
)


@dataclass(frozen=True)
class Trainer:
    """The trainer of a run.

    `marks_validation`: it marks the rows of a validation, so that rows without a mark are training rows. None: unknown.
    `tells_phases`: it tells reward workers when it asks for rewards and when it trains (`phases`).
    """

    name: Name
    marks_validation: bool | None = None
    tells_phases: bool = False

    @property
    def leaves_out(self) -> bool:
        """Whether a sample is left out when its reward manager raises. All other trainers end the run."""
        return self.name == "v1"


def trainer_of(config: DictConfig) -> Trainer:
    """The trainer of the run whose verl configuration is `config`."""
    noted = config.get(_KEY)
    if noted is not None:
        return Trainer(noted.name, noted.marks_validation, bool(noted.get("tells_phases")))
    if config.get("async_training") is not None:
        return Trainer("fully_async")
    # Only the configuration of one_step_off has a top-level `rollout` with a number of nodes.
    if OmegaConf.select(config, "rollout.nnodes") is not None:
        return Trainer("one_step_off")
    return Trainer("v1" if OmegaConf.select(config, "trainer.use_v1") else "legacy")


def with_trainer(config: DictConfig, trainer: Trainer) -> DictConfig:
    """A copy of verl's configuration that names the trainer, for reward workers."""
    copied = copy.deepcopy(config)
    with open_dict(copied):
        copied[_KEY] = {
            "name": trainer.name,
            "marks_validation": trainer.marks_validation,
            **({"tells_phases": True} if trainer.tells_phases else {}),
        }
    return copied


def calling_trainer() -> Name | None:
    """The trainer whose method is on the call stack, by its class; None if no known trainer is."""
    v1 = getattr(sys.modules.get(V1_MODULE), "PPOTrainer", None)
    legacy = getattr(sys.modules.get(LEGACY_MODULE), "RayPPOTrainer", None)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = _name_of(frame.f_locals.get("self"), v1, legacy)
        if name is not None:
            return name
        frame = frame.f_back
    return None


def _name_of(owner: Any, v1: type[Any] | None, legacy: type[Any] | None) -> Name | None:
    if v1 is not None and isinstance(owner, v1):
        return "v1"
    if legacy is None or not isinstance(owner, legacy):
        return None
    for cls in type(owner).__mro__:
        for module, name in _LEGACY_SUBCLASSES:
            if cls.__module__.startswith(module):
                return name
    return "legacy"
