"""Lets judges on the trainer's GPUs sleep while slime trains, and wakes them with the first reward of a rollout.

With `--colocate`, slime's training actors are offloaded while its `RolloutManager` generates, in one process for all
rewards. A rollout asks for no reward any more when its samples are logged and post-processed; only then does `train.py`
load the training actors (slime/ray/rollout.py: `RolloutManager.generate`). So the two hooks that run there end the
phase. An evaluation ends none, because slime generates next.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

from qreward_plugins import EnginePortal

_HOOKS = {
    "custom_reward_post_process_path": "post_process",
    "custom_rollout_log_function_path": "log_rollout",
}
_FLAGS = " or ".join(f"--{flag.replace('_', '-')} slime_adapter.{name}" for flag, name in _HOOKS.items())


def problem_of(args: Any) -> tuple[str, str]:
    """Why judges cannot share the GPUs of this run, as a sentence, and the remedy; two empty texts if they can."""
    if getattr(args, "debug_rollout_only", False):
        return "", ""
    if not getattr(args, "colocate", False):
        problem = "without --colocate, slime may ask for rewards while it trains; no time is left for the judge."
        return problem, "Set --colocate, or give the judge devices of its own, and remove the key."
    # --colocate implies --offload-train, and --release-train replaces it.
    if getattr(args, "offload_train", None) is False and not getattr(args, "release_train", False):
        problem = "with --no-offload-train, slime's training actors keep their GPUs while it asks for rewards."
        return problem, "Remove that flag, or give the judge devices of its own, and remove the key."
    ends = [flag for flag, name in _HOOKS.items() if getattr(args, flag, None) == f"slime_adapter.{name}"]
    if getattr(args, "custom_convert_samples_to_train_data_path", None) is not None:
        # slime then calls no post-processing.
        ends = [flag for flag in ends if flag != "custom_reward_post_process_path"]
    if not ends:
        return "no hook of this run tells when its last reward is in, so the judge would not sleep.", f"Set {_FLAGS}."
    return "", ""


class Phases:
    """The reward phases of one engine. `begin` runs in slime's event loops, `end` in the thread of its hooks."""

    def __init__(self, portal: EnginePortal) -> None:
        self._portal = portal
        # It stays so: no reload adds or removes such a source.
        self._needed = bool(portal.colocated)
        self._lock = threading.Lock()
        self._begun: Future[None] | None = None
        self._ending = False

    async def begin(self) -> None:
        """Wait until judges on the trainer's GPUs take calls. See `RewardEngine.begin_rewards` for what it raises.

        A reward that is asked for while the phase ends wakes nothing, because training comes next. Its call waits for
        the next rollout, until its deadline.
        """
        if not self._needed:
            return
        with self._lock:
            if self._ending:
                return
            if self._begun is None:
                self._begun = self._portal.begin_rewards()
            begun = self._begun
        # Others wait for it, too, so cancelling this call must not cancel it.
        await asyncio.shield(asyncio.wrap_future(begun))

    def end(self) -> None:
        """Let them sleep, and wait for that. A second call does nothing. See `RewardEngine.end_rewards`."""
        with self._lock:
            begun, self._begun = self._begun, None
            self._ending = begun is not None
        if begun is None:
            return
        try:
            self._portal.end_rewards()
        finally:
            with self._lock:
                self._ending = False
