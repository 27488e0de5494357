"""`accelerate`: a decorator that gives any function limits, retries, hedges, a circuit breaker and batches.

It uses the quotas, pauses and circuit breakers of the engine, and not its scheduler (`limiter` says why). The package
has another name than the decorator, because `qreward_plugins.accelerate` is the decorator.
"""

from .calls import FunctionStatistics as FunctionStatistics
from .decorator import accelerate as accelerate
from .functions import AsyncFunction as AsyncFunction
from .functions import AsyncGeneratorFunction as AsyncGeneratorFunction
from .functions import GeneratorFunction as GeneratorFunction
from .functions import SyncFunction as SyncFunction
from .options import Options as Options
