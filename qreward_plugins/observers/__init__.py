"""Events of an engine, and their observers: statistics, logs, and those of the user.

`events.py` defines all events. `statistics.py` counts them: a new metric is a field and a line there.
"""

from .base import BugLog as BugLog
from .base import FailureLog as FailureLog
from .base import Observer as Observer
from .base import Observers as Observers
from .base import load_observers as load_observers
from .base import with_names as with_names
from .events import AttemptEnded as AttemptEnded
from .events import AttemptStarted as AttemptStarted
from .events import BatchEnded as BatchEnded
from .events import CallEnded as CallEnded
from .events import EngineClosed as EngineClosed
from .events import Event as Event
from .events import ReplicaChanged as ReplicaChanged
from .events import RequestBatchSent as RequestBatchSent
from .events import SampleDropped as SampleDropped
from .events import SampleEnded as SampleEnded
from .events import SampleSubmitted as SampleSubmitted
from .events import SourceStateChanged as SourceStateChanged
from .statistics import EngineStatistics as EngineStatistics
from .statistics import SourceGauges as SourceGauges
from .statistics import SourceStatistics as SourceStatistics
from .statistics import Statistics as Statistics
