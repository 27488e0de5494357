"""`accelerate`: a decorator that gives any function limits, retries, hedges, a circuit breaker and batches.

It is a door: the scheduler of the engine does all of it (`qreward_plugins.scheduling`). The room has another name than
the decorator, because `qreward_plugins.accelerate` is the decorator.
"""

from .decorator import accelerate
from .functions import AsyncFunction, SyncFunction
from .generators import AsyncGeneratorFunction, GeneratorFunction
from .options import Options
from .statistics import FunctionStatistics

__all__ = [
    "AsyncFunction",
    "AsyncGeneratorFunction",
    "FunctionStatistics",
    "GeneratorFunction",
    "Options",
    "SyncFunction",
    "accelerate",
]
