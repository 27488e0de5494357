"""Turns outcomes into verl's `reward_extra_info`, with the same keys for every sample.

Where verl collects rows, it uses the keys of the first row for all, over all processes (verl 0.9:
experimental/agent_loop/agent_loop.py, reward_loop.py, and protocol.py for batches). So every sample has all keys that
are known before the first one is scored: the facts, the components that the configuration names, and the keys that
verl's configuration reads. What else a reward function returns is sent as one JSON text, which `metrics` unpacks
under the names that it has with verl's `naive` manager.

A value that a sample does not have is NaN: verl calls float() on the metric of a group filter, and until 0.9.0 its
validation ends the run at None. `metrics` fills these values in. No key is a column of verl's own, which it would
replace.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from qreward_plugins import (
    BatchReport,
    Cause,
    Config,
    ConfigurationError,
    EnginePortal,
    Failed,
    Mistake,
    Outcome,
    RewardEngine,
    Sample,
    Scored,
)
from qreward_plugins.adapters import (
    VALUE,
    fits_float32,
    judge_kind_of,
    judges_in_charge,
    parts_of,
    source_kind_of,
    sources_of,
)

from .trainers import estimator_of

Told = dict[str, Any]
"""What verl is told of a sample: what `QRewardManager.run_single` returns."""

PREFIX = "qreward/"

MISSING = "qreward/missing"
"""1.0 for a failed sample: its score is a stand-in, from which nothing is learned."""

REWARD = "qreward/reward"
"""The reward of a training sample. A validation has it in a column of verl's own."""

SAMPLE = "qreward/sample"
"""The id of the sample in the journal."""

CAUSE = "qreward/cause"
"""Why a sample failed, or why its score is a floor."""

WAITED = "qreward/waited"
"""What the batch that ended with this sample waited for: JSON, seconds by name; empty if none ended."""

DENSE = "qreward/dense"
"""Pairs of token and number to add to the rewards of tokens (`ResponseTokens.placed`), as JSON; "" for none. A key with
`dense` only.
"""

RETURNED = "qreward/returned"
"""What a reward function returned besides its score, as JSON."""

_ITSELF = ("reward", "score")
"""Names under which a group filter reads the score itself. verl has the first one by itself only since 0.9.1."""
_RESERVED = frozenset(
    (*_ITSELF, "input", "output", "gts", "step", "uid", "request_id", "data_source", "reward_model", "extra_info")
)
"""Names of verl's own columns, in batches, validations and the files of both (`_write_generations`)."""


class ExtraInfo:
    """Turns outcomes of an engine into `reward_extra_info`.

    `trainer`: verl's configuration, which names the keys that verl itself reads in training. Raises
    `ConfigurationError` for keys that verl reads and no judge provides.
    """

    def __init__(
        self,
        engine: RewardEngine | EnginePortal,
        *,
        trainer: DictConfig | None = None,
    ) -> None:
        self._config = engine.config
        self._facts = engine.facts()
        self._declared = self._facts.components
        self._last_batch = engine.last_batch
        self._told: BatchReport | None = None
        """The last batch of which a sample has told."""
        self.functions = frozenset(_of_functions(self._config))
        """The judges that ask only functions."""
        trainer = OmegaConf.create() if trainer is None else trainer
        parts = OmegaConf.select(trainer, "algorithm.gdpo_reward_keys") if estimator_of(trainer) == "gdpo" else None
        self._parts = tuple(map(str, parts or ()))
        """The rewards that `gdpo` adds up."""
        filters = OmegaConf.select(trainer, "algorithm.filter_groups.enable")
        self._metric = str(OmegaConf.select(trainer, "algorithm.filter_groups.metric")) if filters else None
        """The key that groups are filtered by."""
        read = dict.fromkeys(self._parts, "algorithm.gdpo_reward_keys")
        if self._metric is not None and self._metric not in _ITSELF:
            read[self._metric] = "algorithm.filter_groups.metric"
        judges = [judge for name, judge in self._config.judges.items() if name in self.functions]
        named = [key for judge in judges for key in getattr(judge, "components", ()) if key not in _RESERVED]
        self._named = dict.fromkeys(named)
        """The keys of functions' return values that the configuration names, and those that verl reads."""
        self._refuse_unknown_keys(read)
        self._named |= dict.fromkeys(read)

    def of(self, outcome: Outcome, sample: Sample, *, reward: float | None = None, dense: str = "") -> dict[str, Any]:
        """The extra info of one outcome. `reward`: the number that verl gets in training; None in a validation.
        `dense`: see `DENSE`.
        """
        info = self._info(outcome, sample.data_source)
        info |= {SAMPLE: sample.id or "", WAITED: self._waited()}
        if self._config.dense:
            info[DENSE] = dense
        if reward is None:
            return {key: value for key, value in info.items() if key not in _RESERVED and key != REWARD}
        if outcome.reward is None and not isinstance(self._config.on_failure, str):
            info |= dict.fromkeys(self._parts, self._config.on_failure.constant)
        if self._metric in _ITSELF:
            info[self._metric] = reward
        return info

    def checked(self, outcome: Outcome) -> Outcome:
        """The outcome, or a failure if its verdict lacks one of the rewards of `gdpo`, because NaN would train."""
        if not isinstance(outcome, Scored) or not self._parts:
            return outcome
        info = self._info(outcome)
        for part in self._parts:
            if not isinstance(info.get(part), (int, float)) or is_absent(info[part]):
                detail = f"the verdict has no number {part!r}, which algorithm.gdpo_reward_keys names"
                verdict = outcome.verdict
                return Failed(Cause.VERDICT, "invalid", detail, judge=verdict.judge, source=verdict.source)
        return outcome

    def _info(self, outcome: Outcome, data_source: object = None) -> dict[str, Any]:
        own = self._own(outcome)
        facts = self._facts.of(outcome, data_source)
        info: dict[str, Any] = {
            PREFIX + key: value for key, value in facts.items() if key != "acc" and not key.startswith("score/")
        }
        info |= {f"{PREFIX}score/{name}": facts[f"score/{name}"] for name in self._declared}
        info |= {MISSING: float(outcome.reward is None), "acc": own.get("acc", facts.get("acc"))}
        info |= {name: own.get(name) for name in self._named if name not in info}
        rest = {key: value for key, value in own.items() if key not in info}
        info[RETURNED] = json.dumps(rest) if rest else ""
        return {key: math.nan if value is None else value for key, value in info.items()}

    def _waited(self) -> str:
        before, self._told = self._told, self._last_batch()
        return "" if self._told is None or self._told is before else json.dumps(self._told.metrics())

    def _refuse_unknown_keys(self, read: Mapping[str, str]) -> None:
        """Raise `ConfigurationError` for keys that verl reads and no judge provides. `read`: their settings, by key."""
        in_charge = judges_in_charge(self._config)
        asked = {name for judge in in_charge for name in (judge, *parts_of(self._config, judge))}
        if not in_charge or asked & self.functions:
            return  # a function may return anything, and so may the judges of a reward server
        known = self._info(Failed(Cause.INFRA, "none")).keys() - (set() if self._facts.defines_correct else {"acc"})
        remedy = "A criterion is called qreward/score/NAME; for `acc`, give a judge `correct_at`."
        mistakes = [
            Mistake(path, f"no judge provides {key!r}.", remedy) for key, path in read.items() if key not in known
        ]
        if mistakes:
            raise ConfigurationError(mistakes, origin="verl's configuration")

    def _own(self, outcome: Outcome) -> dict[str, Any]:
        """The extra info that verl's `naive` manager would make from the reward function's value."""
        if not isinstance(outcome, Scored) or outcome.verdict.basis == "floor":
            return {}
        verdict = outcome.verdict
        own: dict[str, Any] = {
            f"{PREFIX}score/{name}": value for name, value in verdict.components.items() if name not in self._declared
        }
        is_function = verdict.judge in self.functions
        returned = verdict.returned
        if is_function and returned is None and verdict.components:
            returned = {"score": verdict.score, **verdict.components}  # what the journal kept of a mapping
        own |= {
            key: plain_or_none(value)
            for key, value in (returned or {}).items()
            if not key.startswith(PREFIX) and key not in _RESERVED.difference(self._parts)
        }
        if getattr(self._config.judges.get(verdict.judge), "correct_at", None) is not None:
            own["acc"] = None if verdict.correct is None else float(verdict.correct)
        elif is_function and returned is None:
            own["acc"] = verdict.score
        return own


def is_absent(value: Any) -> bool:
    """Whether a value of the extra info stands for none."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def unpacked(columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Columns of extra info, with the JSON texts of `RETURNED` as columns of their own, and without `WAITED` and
    `DENSE`.
    """
    found = {name: values for name, values in columns.items() if name not in (RETURNED, WAITED, DENSE)}
    rows = [json.loads(text) if isinstance(text, str) and text else {} for text in columns.get(RETURNED) or ()]
    for name in dict.fromkeys(name for row in rows for name in row):
        found.setdefault(name, [row.get(name) for row in rows])
    return found


def _of_functions(config: Config) -> Iterable[str]:
    """The judges that ask only functions."""
    for name, judge in config.judges.items():
        if judge_kind_of(judge).asks == VALUE and all(
            source_kind_of(config.sources[source]).local for source in sources_of(config, name)
        ):
            yield name


def plain(value: Any) -> Any:
    """A scalar of numpy or torch as a Python value; any other value unchanged."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def plain_or_none(value: Any) -> Any:
    """A value as a plain Python one; None for NaN and numbers beyond float32, which would spoil every mean."""
    value = plain(value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return None if is_number and not fits_float32(value) else value
