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
from contextlib import suppress
from pathlib import Path
from typing import Final

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
    launcher = os.getppid()
    with suppress(OSError):  # only Linux tells
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The system gives a process id to another process later, so the start, the 22nd field, tells them apart. The
        # name of a program may hold blanks and parentheses.
        started = Path(f"/proc/{launcher}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
        return f"launcher {boot} {launcher} {started} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return None


__all__ = ["VARIABLE", "current_run"]
