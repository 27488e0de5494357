"""When and where requests are sent: the dispatcher, the planner behind it, and each source's lane and breaker."""

from .batches import Batch, Batches, Bundle, Cutoff
from .breaker import Breaker
from .dispatcher import Dispatcher
from .jobs import Job
from .lane import Lane
from .opening import open_lanes
from .queue import ReadyQueue
from .speed import Speed

__all__ = [
    "Batch",
    "Batches",
    "Breaker",
    "Bundle",
    "Cutoff",
    "Dispatcher",
    "Job",
    "Lane",
    "ReadyQueue",
    "Speed",
    "open_lanes",
]
