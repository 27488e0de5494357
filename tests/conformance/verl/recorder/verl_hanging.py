"""A reward function that never returns for one response in `every`, whichever process calls it and however often."""

from __future__ import annotations

import fcntl
import os
import threading
import zlib


def score(data_source, solution_str, ground_truth, extra_info, every):
    """1 for a short response, 0 for a long one. A call that hangs is noted in the file that VERL_HUNG names."""
    if _place(f"{extra_info} {solution_str}") % every == every // 2:
        with open(os.environ["VERL_HUNG"], "a") as file:
            file.write(f"{os.getpid()}\n")
        threading.Event().wait()
    return float(len(solution_str) < 200)


def _place(response):
    """How many other responses any process was asked for before this one."""
    with open(os.environ["VERL_HUNG"] + ".asked", "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = file.read().split()
        name = f"{zlib.crc32(response.encode()):08x}"
        if name not in known:
            file.write(f"{name}\n")
            known.append(name)
        return known.index(name)
