"""A reward function that never returns for one response in `every`, whichever process calls it and however often."""

from __future__ import annotations

import os
import threading
import zlib


def score(data_source, solution_str, ground_truth, extra_info, every):
    """1 for a short response, 0 for a long one. A call that hangs is noted in the file that VERL_HUNG names."""
    if zlib.crc32(f"{extra_info} {solution_str}".encode()) % every == 0:
        with open(os.environ["VERL_HUNG"], "a") as file:
            file.write(f"{os.getpid()}\n")
        threading.Event().wait()
    return float(len(solution_str) < 200)
