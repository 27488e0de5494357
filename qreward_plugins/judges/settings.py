"""What judges of every kind do with their configuration: check its numbers, answer for floors, take its fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import orjson

from ..config.models import AskingJudge, FunctionSource, LLMJudge, Source
from ..errors import Mistake
from ..samples import Cause

Interval = tuple[float, float]

_VERSION = 2
"""Version of how requests are built and verdicts read. Raise it with any change that lets a judge answer otherwise."""

_NOT_WHAT_IT_SAYS = {"sources", "floor", "on_invalid", "invalid_retries"}
"""Keys that say whom a judge asks and what becomes of its failures, and nothing about its verdicts."""


def floor_of(config: AskingJudge, cause: Cause) -> float | None:
    """The score that stands in for a failure of this cause; None where no number does, as for infrastructure."""
    if cause is Cause.POLICY or (cause is Cause.VERDICT and config.on_invalid == "floor"):
        if config.floor is not None:
            return config.floor
        return config.reward_range[0] if config.reward_range is not None else None
    return None


def number_mistakes(name: str, config: AskingJudge) -> list[Mistake]:
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


def fingerprint(config: AskingJudge, models: Iterable[str], *built_in: str) -> str:
    """Hash everything that changes what a judge says: its configuration, its models, the texts of ours that it uses.

    32 hex digits (BLAKE2b, RFC 7693). The order of the models plays no part, that of the criteria does. What stands for
    a model that is asked with further parameters is `answering`'s matter.
    """
    said: dict[str, Any] = config.model_dump(mode="json", exclude=_NOT_WHAT_IT_SAYS)
    if isinstance(config, LLMJudge):
        said["criteria"] = list(config.criteria.items())
    canonical = orjson.dumps([_VERSION, said, sorted(set(models)), built_in], option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()


def answering(model: str, source: Source) -> str:
    """What answers at `source`, for a judge's fingerprint: `model`, and how the configuration has it asked.

    The same model at another temperature, or the same function with other arguments, says something else. Of those
    parameters only a digest stands here (there may be keys among them), and nothing where there are none. Keys and
    headers that are configured as such say who asks, and play no part.
    """
    asked = source.kwargs if isinstance(source, FunctionSource) else source.parameters
    if not asked:
        return model
    # Arguments of functions are anybody's objects; one that looks different in every process is never found again.
    canonical = json.dumps(_sortable(asked), sort_keys=True, default=repr)
    return f"{model}?{hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()}"


def _sortable(value: Any) -> Any:
    """`value` with keys that can be sorted, and that tell 1 from "1"."""
    if isinstance(value, dict):
        return {repr(key): _sortable(item) for key, item in value.items()}
    return [_sortable(item) for item in value] if isinstance(value, (list, tuple)) else value
