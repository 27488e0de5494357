"""Groups, the samples of one prompt: their mean, the gate, and the barrier.

- `group_means`, `mean_of`, `Mean`: the mean of a group whose rewards are all known.
- `number_of`: the number that an outcome trains as; None if its group's mean is to be imputed.
- `RunningMeans`: the means of groups that one process scores sample by sample, without waiting.
- `GroupBarrier`: lets a failed sample wait for its siblings in other processes, at most `groups.wait_s`.
- `GroupGate`: decides which groups are trained, and when to give up.
"""

from ._actor import Report, barrier_actor
from ._barrier import MAX_WAITING, GroupBarrier
from ._gate import GroupGate
from ._means import UNSCORED, Mean, RunningMeans, group_means, mean_of, number_of
from ._state import GroupKey

__all__ = [
    "MAX_WAITING",
    "UNSCORED",
    "GroupBarrier",
    "GroupGate",
    "GroupKey",
    "Mean",
    "Report",
    "RunningMeans",
    "barrier_actor",
    "group_means",
    "mean_of",
    "number_of",
]
