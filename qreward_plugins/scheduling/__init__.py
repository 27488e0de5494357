"""When and where requests are sent: the dispatcher, its queue, and each source's lane and breaker."""

from .breaker import Breaker
from .dispatcher import Dispatcher
from .jobs import Job, ReadyQueue
from .lane import Lane

__all__ = ["Breaker", "Dispatcher", "Job", "Lane", "ReadyQueue"]
