"""What the samples of one prompt share: their mean, the gate, and the barrier at which they meet.

- `group_means`, `mean_of`, `Mean`: the mean of a group, for who has all of its rewards at hand.
- `number_of`: the number that an outcome trains as; None where its group's mean is to be imputed.
- `RunningMeans`: the means of groups that one process scores sample by sample, without waiting.
- `GroupBarrier`: a failed sample waits for its siblings, which other processes may score, `groups.wait_s` at most.
- `GroupGate`: which groups are worth training, and when to give up.
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
