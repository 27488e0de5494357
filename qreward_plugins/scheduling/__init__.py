"""When and where requests are sent: the dispatcher, the planner behind it, and each source's upstream and breaker."""

from .batches import Batch, Batches, Cutoff, Member
from .breaker import Breaker
from .calls import Answer, Call, Caller, CallFailed, Unanswered
from .dispatcher import Dispatcher
from .jobs import Job
from .queue import ReadyQueue
from .speed import Speed
from .upstream import Upstream, open_upstreams

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
    "Upstream",
    "Member",
    "ReadyQueue",
    "Speed",
    "Unanswered",
    "open_upstreams",
]
