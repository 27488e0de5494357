"""When and where requests are sent: the dispatcher, the planner behind it, and each source's upstream and breaker."""

from .batches import Batch, Batches, Cutoff, Member
from .breaker import Breaker
from .calls import Answer, Call, CallFailed, Unanswered
from .dispatcher import Dispatcher
from .jobs import Job
from .latency import Speed, Tail
from .pauses import Pauses
from .upstream import Upstream
from .upstreams import Upstreams, open_upstreams

__all__ = [
    "Answer",
    "Batch",
    "Batches",
    "Breaker",
    "Call",
    "CallFailed",
    "Cutoff",
    "Dispatcher",
    "Job",
    "Member",
    "Pauses",
    "Speed",
    "Tail",
    "Unanswered",
    "Upstream",
    "Upstreams",
    "open_upstreams",
]
