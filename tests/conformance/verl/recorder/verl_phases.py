"""Notes when a real verl trainer uses its devices, one line each in the file that VERL_PHASES names.

The servers of the judges note there when they sleep and wake up, so the order of the lines is that of the events.
"""

from __future__ import annotations

import functools
import os
import sys

from verl.utils.tracking import Tracking

_USES = ("_compute_old_log_prob", "_update_actor")
_TRAINERS = (("verl.trainer.ppo.ray_trainer", "RayPPOTrainer"), ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer"))


def _noting(use):
    @functools.wraps(use)
    def noted(*args, **kwargs):
        with open(os.environ["VERL_PHASES"], "a") as file:
            file.write(f"trainer /{use.__name__}\n")
        return use(*args, **kwargs)

    return noted


_start = Tracking.__init__


@functools.wraps(_start)
def _start_and_note(self, *args, **kwargs):
    _start(self, *args, **kwargs)
    for module, name in _TRAINERS:
        trainer = getattr(sys.modules.get(module), name, None)
        if trainer is not None:
            for use in _USES:
                setattr(trainer, use, _noting(getattr(trainer, use)))


Tracking.__init__ = _start_and_note
