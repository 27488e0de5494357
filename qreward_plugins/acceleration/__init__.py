"""`accelerate`: a decorator that gives any function limits, retries, hedges, a circuit breaker and batches.

It uses the quotas, pauses and circuit breakers of the engine, and not its scheduler (`limiter` says why). The package
has another name than the decorator, because `qreward_plugins.accelerate` is the decorator.
"""

from .decorator import accelerate as accelerate
from .functions import AsyncFunction as AsyncFunction
from .functions import SyncFunction as SyncFunction
from .generators import AsyncGeneratorFunction as AsyncGeneratorFunction
from .generators import GeneratorFunction as GeneratorFunction
from .options import Options as Options
from .statistics import FunctionStatistics as FunctionStatistics
