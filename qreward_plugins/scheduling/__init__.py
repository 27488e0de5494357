"""When and where requests are sent: the dispatcher, the planner behind it, and each source's upstream and breaker."""

from .batches import Batch, Batches, Cutoff, Member
from .breaker import Breaker
from .calls import Answer, Call, Caller, CallFailed, Unanswered
from .dispatcher import Dispatcher
from .jobs import Job
from .latency import Speed
from .queue import ReadyQueue
from .rules import FAILED, OPEN, ErrorShare, Rules
from .upstream import Upstream
from .upstreams import Moves, Upstreams, open_upstreams

__all__ = [
    "FAILED",
    "OPEN",
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
    "Job",
    "Member",
    "Moves",
    "ReadyQueue",
    "Rules",
    "Speed",
    "Unanswered",
    "Upstream",
    "Upstreams",
    "open_upstreams",
]
