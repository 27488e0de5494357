"""Names the run that a journal's rows belong to.

A run is one training job with all its processes. A process id cannot tell runs apart: in a container the same ones come
again with each start. And a job has several processes, which share the answers of a step.

No process has to tell the others: each finds out the same from what they share. Without such a thing each engine is a
run of its own, because two runs that are taken for one would count a repeated step twice.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from typing import Final

from ..system.processes import ProcessMark, boot_id
from ..system.ray_actors import job_name

VARIABLE: Final = "QREWARD_RUN_ID"
"""The environment variable that names the run, before anything else does."""

_DIGITS: Final = 8


def current_run() -> str:
    """Return the id of the run that this process belongs to. Raises nothing.

    It is the first of these: the value of `QREWARD_RUN_ID`; the job of Ray; the start of the workers by torchrun, or by
    what uses it; a new id at each call. All but the first have 8 hexadecimal digits.
    """
    named = os.environ.get(VARIABLE, "").strip()
    if named:
        return named
    shared = job_name() or _launched()
    if shared is None:
        return uuid.uuid4().hex[:_DIGITS]
    return hashlib.blake2b(shared.encode(), digest_size=_DIGITS // 2).hexdigest()


def _launched() -> str | None:
    """Return the process that has launched the workers of this machine, and how often; None if none has."""
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return None
    boot, launcher = boot_id(), ProcessMark.of(os.getppid())
    if not boot or launcher is None:
        return None
    return f"launcher {boot} {launcher.pid} {launcher.started} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


__all__ = ["VARIABLE", "current_run"]
