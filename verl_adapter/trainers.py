"""Finds out which of verl's trainers a run uses, and what it does with a sample without a reward (verl 0.9.1):

| trainer (`Trainer`) | a reward manager raises in training | it raises in validation | keys of extra info |
|---|---|---|---|
| `v1` (main_ppo, `use_v1`), sync | the sample is left out of its group | left out; `acc` counts it as 0 | any |
| `v1`, colocate_async and separate_async | its group is replaced | the same | any |
| `legacy` (main_ppo without `use_v1`) | the run ends | the run ends | those of sample 0 |
| `one_step_off` | the run ends | the run ends | those of sample 0 |
| `fully_async` | generation stops; the run ends early, without an error | the run ends | those of sample 0 |
| any of them, colocated reward model | the run ends | the run ends | those of sample 0 |

A score of None ends all of them (there are no `rm_scores` then); NaN trains. The experimental trainers derive from the
legacy one and inherit `trainer.use_v1: true`, so that key says nothing about them. Therefore `trainer` looks at the
calling trainer when verl's reward workers are started, and writes it into their configuration; without this note, the
trainer is read off the other keys.
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

_TOLD = "qreward_trainer"
_MADE_OF_LEGACY: tuple[tuple[str, Name], ...] = (
    ("verl.experimental.fully_async_policy.", "fully_async"),
    ("verl.experimental.one_step_off_policy.", "one_step_off"),
)


@dataclass(frozen=True)
class Trainer:
    """The trainer of a run.

    `marks_validation`: it marks the rows of a validation, so that rows without a mark are of training; None: unknown.
    """

    name: Name
    marks_validation: bool | None = None

    @property
    def leaves_out(self) -> bool:
        """Whether a sample is left out when its reward manager raises. All other trainers end the run."""
        return self.name == "v1"


def trainer_of(config: DictConfig) -> Trainer:
    """The trainer of the run whose verl configuration is `config`."""
    told = config.get(_TOLD)
    if told is not None:
        return Trainer(told.name, told.marks_validation)
    if config.get("async_training") is not None:
        return Trainer("fully_async")
    # Only the configuration of one_step_off has a node `rollout` at the top, with nodes of its own for the rollout.
    if OmegaConf.select(config, "rollout.nnodes") is not None:
        return Trainer("one_step_off")
    return Trainer("v1" if OmegaConf.select(config, "trainer.use_v1") else "legacy")


def telling(config: DictConfig, trainer: Trainer) -> DictConfig:
    """A copy of verl's configuration that tells a reward worker its trainer."""
    told = copy.deepcopy(config)
    with open_dict(told):
        told[_TOLD] = {"name": trainer.name, "marks_validation": trainer.marks_validation}
    return told


def calling_trainer() -> Name | None:
    """The trainer whose method is on the call stack, by its class; None if there is none that is known here."""
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
        for module, name in _MADE_OF_LEGACY:
            if cls.__module__.startswith(module):
                return name
    return "legacy"
