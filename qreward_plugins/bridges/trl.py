"""A reward function for the trainers of TRL: `GRPOTrainer`, `RLOOTrainer`, and those built on them.

TRL awaits it with the rollouts of one generation of one process (trl/trainer/grpo_trainer.py: `_calculate_rewards`). It
turns None into NaN, and a row in which every function returned NaN counts in no mean and no standard deviation and has
the advantage 0. Before 1.6 such a row was trained with the reward 0, and before 1.14 TRL did not await an object. So an
older version is refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..adapters import ResponseTurn, Unreadable, messages_of, read_or_unreadable, summary
from ..errors import ConfigurationError, InputError, Mistake
from ..samples import Sample
from .scorer import ConfigLike, Scorer, sample_of

_log = logging.getLogger("qreward_plugins.bridges")

OLDEST = (1, 14)
"""The oldest version of TRL that awaits an object and leaves a missing reward out."""

NO_EXTRAS = {"completion_ids", "environments", "image", "images"}
"""What TRL passes beside the columns of a data set, and the columns whose images it has put into the prompts."""


class TrlReward:
    """What `reward` returns. It can be pickled, as `AsyncGRPOTrainer` does."""

    def __init__(self, config: ConfigLike, ground_truth: str | None, name: str) -> None:
        self.__name__ = name
        self._ground_truth = ground_truth
        self._warned = False
        self._scorer = Scorer(config, "TRL", compares=True, turns=True)
        # TRL cannot show a column of completions that only some batches have.
        self._shown = ["cause", *(f"score/{component}" for component in self._scorer.portal.facts().components)]

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        trainer_state: Any = None,
        log_extra: Callable[[str, list[Any]], Any] | None = None,
        log_metric: Callable[[str, float], Any] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return a reward for each completion; None for one without.

        Logs the metrics of `summary` as `NAME/...`, and per completion `NAME/cause` and each component. Cancelling the
        call cancels its attempts. Raises `InputError` if the column that `ground_truth` names is missing, and
        `RewardMissing` with `on_failure: raise`.
        """
        wanted, has = self._ground_truth or "ground_truth", ", ".join(sorted(columns.keys() - NO_EXTRAS)) or "none"
        if wanted not in columns and self._ground_truth is not None:
            raise InputError(f"the data set has no column {wanted!r}; it has {has}")
        if wanted not in columns and not self._warned:
            self._warned = True
            _log.warning(
                "the data set has no column 'ground_truth' (it has %s), so judges see no ground truth; if another "
                "column has it, write reward(..., ground_truth=NAME)",
                has,
            )
        rows = {
            name: values
            for name, values in columns.items()
            if name not in NO_EXTRAS and isinstance(values, list) and len(values) == len(completions)
        }
        samples = [
            self._sample(prompt, completion, {name: values[number] for name, values in rows.items()}, trainer_state)
            for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]
        rewards, facts = await self._scorer.score_all(samples)
        if log_metric is not None:
            for metric, value in summary(facts, [sample.group_id for sample in samples]).items():
                log_metric(f"{self.__name__}/{metric}", value)
        if log_extra is not None:
            for key in self._shown:
                log_extra(f"{self.__name__}/{key}", [fact.get(key) for fact in facts])
        return rewards

    def _sample(self, prompt: Any, completion: Any, row: dict[str, Any], trainer_state: Any) -> Sample:
        said = read_or_unreadable(lambda: _said(completion))
        response, turns = (said, ()) if isinstance(said, Unreadable) else said
        known: dict[str, Any] = {"step": getattr(trainer_state, "global_step", None), "prompt": prompt, "turns": turns}
        wanted = self._ground_truth or "ground_truth"
        return sample_of(row, lambda: messages_of(prompt), response, ground_truth=wanted, **known)


def reward(config: ConfigLike, *, ground_truth: str | None = None, name: str = "qreward") -> TrlReward:
    """Return a function for `GRPOTrainer(reward_funcs=[...])` that scores with a configuration, the path of a file or
    its tree.

    `ground_truth` names the column of the data set with the ground truth; default: `ground_truth`, if there is such a
    column. `data_source` selects the judge, and all other columns are extras. `name` is the name of the reward, and of
    the metrics in TRL's logs.

    Samples with the same prompt and ground truth are a group. The split is not known, because TRL does not tell a
    reward function whether it evaluates. Raises `ConfigurationError` with all mistakes, and for an older TRL.
    """
    with suppress(PackageNotFoundError):
        numbers = [int(digits) for digits in re.findall(r"\d+", version("trl"))[:2]]
        if tuple(numbers) < OLDEST:
            problem = f"version {version('trl')} does not await this, or trains a sample without a reward as a 0."
            raise ConfigurationError([Mistake("trl", problem, "Install trl>={}.{}.".format(*OLDEST))], origin="TRL")
    return TrlReward(config, ground_truth, name)


def _said(completion: Any) -> tuple[Any, Sequence[ResponseTurn]]:
    """The text of a completion, of a conversation the texts of its messages; and its turns, if there are several.
    Raises `InputError`.
    """
    if isinstance(completion, str):
        return completion, ()
    response, turns = "", list[ResponseTurn]()
    for message in messages_of(completion):
        text = message["content"]
        if not isinstance(text, str):
            raise InputError("holds an image, which a completion of TRL cannot pass on")
        response += ("\n\n" if response and text else "") + text
        turns.append(ResponseTurn(role=message["role"], content=text, end=len(response)))
    return response, turns if len(turns) > 1 else ()
