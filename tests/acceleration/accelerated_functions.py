"""Functions that worker processes import."""

from __future__ import annotations

import os
import time

from qreward_plugins import accelerate


@accelerate(mode="process", timeout_s=0.5, concurrency=1)
def work(what):
    if what == "hang":
        time.sleep(60)
    if what == "raise":
        raise KeyError("from the worker")
    if what == "die":
        os._exit(3)
    return os.getpid()


@accelerate(retries=1)
async def double(x):
    return 2 * x


class Grader:
    def __init__(self, bonus):
        self.bonus = bonus

    @accelerate
    def grade(self, x):
        return x + self.bonus

    @classmethod
    @accelerate
    def of_class(cls, x):
        return cls.__name__, x

    @staticmethod
    @accelerate(key=lambda x: x)
    def static(x):
        return x
