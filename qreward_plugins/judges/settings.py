"""What judges of every kind do with their configuration: check its numbers, answer for floors, take its fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import orjson

from ..config.models import FunctionJudge, LLMJudge
from ..errors import Mistake
from ..samples import Cause

Interval = tuple[float, float]

_VERSION = 1
"""Version of how requests are built and verdicts read. Raise it with any change that lets a judge answer otherwise."""

_NOT_WHAT_IT_SAYS = {"sources", "floor", "on_invalid", "invalid_retries"}
"""Keys that say whom a judge asks and what becomes of its failures, and nothing about its verdicts."""


def floor_of(config: LLMJudge | FunctionJudge, cause: Cause) -> float | None:
    """The score that stands in for a failure of this cause; None where no number does, as for infrastructure."""
    if cause is Cause.POLICY or (cause is Cause.VERDICT and config.on_invalid == "floor"):
        if config.floor is not None:
            return config.floor
        return config.reward_range[0] if config.reward_range is not None else None
    return None


def number_mistakes(name: str, config: LLMJudge | FunctionJudge) -> list[Mistake]:
    """Find numbers of the configuration that contradict each other."""
    mistakes: list[Mistake] = []
    if config.reward_range is not None:
        low, high = config.reward_range
        for key, value in (("floor", config.floor), ("correct_at", config.correct_at)):
            if value is not None and not low <= value <= high:
                mistakes.append(
                    Mistake(
                        f"judges.{name}.{key}",
                        f"{value:g} is outside the reward range {low:g} to {high:g}.",
                        "It is compared with rewards, not with the judge's scores.",
                    )
                )
    elif config.on_invalid == "floor" and config.floor is None:
        mistakes.append(
            Mistake(
                f"judges.{name}.on_invalid", "there is no floor.", "Give `floor`, or `reward_range` for its low end."
            )
        )
    return mistakes


def fingerprint(config: LLMJudge | FunctionJudge, models: Iterable[str], *built_in: str) -> str:
    """Hash everything that changes what a judge says: its configuration, its models, the texts of ours that it uses.

    32 hex digits (BLAKE2b, RFC 7693). The order of the models plays no part, that of the criteria does.
    """
    said: dict[str, Any] = config.model_dump(mode="json", exclude=_NOT_WHAT_IT_SAYS)
    if isinstance(config, LLMJudge):
        said["criteria"] = list(config.criteria.items())
    canonical = orjson.dumps([_VERSION, said, sorted(set(models)), built_in], option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()
