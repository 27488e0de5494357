"""A reward for ms-swift: an ORM, in a file of `--external_plugins`.

    from swift.rewards import orms
    from qreward_plugins.bridges.ms_swift import SwiftReward

    orms["qreward"] = SwiftReward          # and --reward_funcs qreward

ms-swift makes it without arguments of ours, so the configuration is the file that `QREWARD_CONFIG` names. It calls it
with completions and columns, and makes NaN of None (swift/rewards/orm.py, rl_core/grpo_algorithm.py at 3602360), which
it leaves out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ..adapters import messages_of
from ..errors import ConfigurationError, Mistake
from ..samples import Sample
from .scorer import Scorer, sample_of

VARIABLE = "QREWARD_CONFIG"


class SwiftReward:
    """Scores with the configuration in the file that `QREWARD_CONFIG` names.

    Raises `ConfigurationError` without it, and with all mistakes in it.

    `ground_truth` is the column that holds the ground truth; a subclass may name another one. `data_source` selects the
    judge. All columns with a value for each completion are extras.
    """

    ground_truth = "solution"

    def __init__(self, args: Any = None, **_: Any) -> None:
        self.args = args
        path = os.environ.get(VARIABLE)
        if not path:
            raise ConfigurationError([Mistake(VARIABLE, "the environment variable is not set.", "Name a file in it.")])
        self._scorer = Scorer(path, "ms-swift", compares=True)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Return the rewards; None for a sample without one. Raises `RewardMissing` with `on_failure: raise`."""
        rows = {name: values for name, values in columns.items() if _is_column(values, len(completions))}
        step = getattr(columns.get("trainer_state"), "global_step", None)
        samples = [
            self._sample({name: values[number] for name, values in rows.items()}, completion, step)
            for number, completion in enumerate(completions)
        ]
        return self._scorer.score_now(samples)

    def _sample(self, row: dict[str, Any], completion: Any, step: int | None) -> Sample:
        turns = row.pop("messages", None) or []

        def before() -> list[Any]:
            # The last message of a row is the completion.
            return messages_of(turns[:-1] if turns and turns[-1].get("role") == "assistant" else turns)

        return sample_of(row, before, completion, ground_truth=self.ground_truth, step=step)


def _is_column(values: Any, count: int) -> bool:
    return isinstance(values, (list, tuple)) and len(values) == count
