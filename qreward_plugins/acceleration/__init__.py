"""`accelerate`: a decorator that gives any function limits, retries, hedges, a circuit breaker and batches.

It uses the quotas, pauses and circuit breakers of the engine, and not its scheduler (`limiter` says why). The package
has another name than the decorator, because `qreward_plugins.accelerate` is the decorator.
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
