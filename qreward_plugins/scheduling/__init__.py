"""When and where requests are sent: the dispatcher, the planner behind it, and each source's upstream and breaker."""

from .batches import Batch, Batches, Cutoff, Member
from .breaker import Breaker
from .calls import Answer, Call, Caller, CallFailed, Unanswered
from .dispatcher import Dispatcher
from .jobs import Job
from .latency import Speed, Tail
from .pauses import Pauses
from .queue import ReadyQueue
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
    "Job",
    "Member",
    "Moves",
    "Pauses",
    "ReadyQueue",
    "Speed",
    "Tail",
    "Unanswered",
    "Upstream",
    "Upstreams",
    "open_upstreams",
]
