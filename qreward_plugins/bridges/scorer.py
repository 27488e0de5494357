"""Scores with one configuration in this process, for libraries that say nothing of their processes and phases.

The engine is that of `process_portal`, so all bridges of a process with the same configuration share its limits. It
opens with the bridge, because a missing key or a wrong setting is to be an error before the first rollout.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ..adapters import (
    Image,
    name_or_unreadable,
    number_of,
    read_or_unreadable,
    refuse_comparing,
    refuse_parts,
    without_colocated,
)
from ..config import Config, load_config
from ..engine.portal import EnginePortal
from ..engine.process_portals import process_portal
from ..errors import InputError, RewardMissing
from ..samples import Failed, Message, Sample

ConfigLike: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | Config
"""The path of a file, the tree of a configuration, or a `Config`."""


class Scorer:
    """A configuration and its engine. It can be pickled; another process opens an engine of its own.

    `library` is the name for messages. `compares`: the library hands over whole groups; `turns`: the messages of a
    response. Raises `ConfigurationError` with all mistakes, for judges that compare siblings without `compares`, for
    judges of turns without `turns`, and for judges on the trainer's devices.
    """

    def __init__(self, config: ConfigLike, library: str, *, compares: bool = False, turns: bool = False) -> None:
        self.config = without_colocated(
            load_config(config),
            f"{library} does not tell when it trains.",
            remedy="Give the judge devices of its own, and remove the key.",
        )
        if not compares:
            refuse_comparing(self.config, f"{library} asks for one reward at a time.", remedy="Take another judge.")
        one_text = "" if turns else f"{library} hands over one text of a response."
        refuse_parts(self.config, turns=one_text, dense=f"{library} takes one reward of a sample.")
        _ = self.portal

    @property
    def portal(self) -> EnginePortal:
        """The engine of this process; it is opened once."""
        return process_portal(self.config, processes=_processes())

    async def score(self, sample: Sample) -> tuple[float, dict[str, float]]:
        """Return the reward of a sample, and its components by name.

        Raises `RewardMissing` for a sample without a reward, unless `on_failure` gives it a constant. Returns within
        `engine.deadline_s`; cancelling the call cancels its attempts.
        """
        outcome = await asyncio.wrap_future(self.portal.submit(sample))
        number = number_of(outcome, self.config.on_failure)
        if number is None:
            raise RewardMissing(outcome)
        return number, {} if isinstance(outcome, Failed) else dict(outcome.verdict.components)

    async def score_all(self, samples: Sequence[Sample]) -> tuple[list[float | None], list[dict[str, Any]]]:
        """Return the rewards of samples, None for one without, and their facts (`Facts.of`). Otherwise as `score`;
        raises `RewardMissing` with `on_failure: raise` only.
        """
        outcomes = await asyncio.wrap_future(self.portal.submit_all(samples))
        of = self.portal.facts().of
        facts = [of(outcome, sample.data_source) for outcome, sample in zip(outcomes, samples, strict=True)]
        return [number_of(outcome, self.config.on_failure) for outcome in outcomes], facts

    def score_now(self, samples: Sequence[Sample]) -> list[float | None]:
        """Return the rewards of samples, None for one without. Blocks the calling thread. Otherwise as `score_all`."""
        return [number_of(outcome, self.config.on_failure) for outcome in self.portal.score_all(samples)]


def sample_of(
    row: dict[str, Any], messages: Callable[[], Sequence[Message]], response: Any, *, ground_truth: str, **known: Any
) -> Sample:
    """The sample of a row of a data set. `ground_truth` is the column with the ground truth, which may be missing;
    `data_source` selects the judge, and all columns but the ground truth are extras. `known` are further fields of the
    sample. Without a group, the samples of one prompt and ground truth are one.
    """
    asked, truth = read_or_unreadable(messages), row.pop(ground_truth, None)
    group = known.pop("group_id", None) or read_or_unreadable(lambda: group_of(asked, truth))
    source = name_or_unreadable(row.get("data_source"))
    return Sample(asked, response, truth, source, group, extras=row, **known)


def group_of(messages: Any, ground_truth: Any) -> str:
    """Name the samples of one prompt, the same in every process, for libraries that pass no identifier: a hash of the
    prompt and the ground truth. Raises what `json.dumps` raises for a value that contains itself.
    """
    written = json.dumps([messages, ground_truth], default=_digest, skipkeys=True)
    return hashlib.sha256(written.encode()).hexdigest()[:16]


def _digest(value: Any) -> str:
    try:
        return Image.of(value).digest
    except InputError:
        return type(value).__name__


def _processes() -> int:
    """The number of processes that share the limits, where no keeper of one machine can: torchrun tells in
    `LOCAL_WORLD_SIZE` how many of the `WORLD_SIZE` processes are on this machine. Otherwise 1, and the keeper counts.
    """
    total = int(os.environ.get("WORLD_SIZE", 1))
    return total if total > int(os.environ.get("LOCAL_WORLD_SIZE", total)) else 1
