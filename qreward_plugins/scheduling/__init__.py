"""When and where requests are sent: the dispatcher, the planner behind it, and each source's lane and breaker."""

from .batches import Batch, Batches, Cutoff, Member
from .breaker import Breaker
from .calls import Answer, Call, Caller, CallFailed, Unanswered
from .dispatcher import Dispatcher
from .jobs import Job
from .lane import Lane
from .opening import open_lanes
from .queue import ReadyQueue
from .speed import Speed

__all__ = [
    "Answer",
    "Batch",
    "Batches",
    "Breaker",
    "Call",
    "CallFailed",
    "Caller",
    "Cutoff",
    "Dispatcher",
    "Job",
    "Lane",
    "Member",
    "ReadyQueue",
    "Speed",
    "Unanswered",
    "open_lanes",
]
