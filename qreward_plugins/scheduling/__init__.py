"""When and where requests are sent: the dispatcher, the planner behind it, and each source's upstream and breaker."""

from .batches import Batch, Batches, Cutoff, Member
from .breaker import Breaker
from .calls import Answer, Call, Caller, CallFailed, Unanswered
from .dispatcher import Dispatcher
from .jobs import Job
from .queue import ReadyQueue
from .rules import FAILED, OPEN, ErrorShare, Rules
from .speed import Speed
from .upstream import Upstream
from .upstreams import Moves, Upstreams, open_upstreams

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
    "ErrorShare",
    "FAILED",
    "Job",
    "Moves",
    "Upstream",
    "Upstreams",
    "Member",
    "OPEN",
    "ReadyQueue",
    "Rules",
    "Speed",
    "Unanswered",
    "open_upstreams",
]
