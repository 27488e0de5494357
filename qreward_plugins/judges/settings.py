"""Checks the numbers in the configuration of a judge, and hashes how a judge reads replies."""

from __future__ import annotations

import hashlib
from typing import Any

import orjson

from ..config.judge_models import AskingConfig
from ..errors import Mistake

Interval = tuple[float, float]

_VERSION = 3
"""Version of how replies are read. Raise it with every change after which a judge reads another number or none."""


def number_mistakes(name: str, config: AskingConfig) -> list[Mistake]:
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
                f"judges.{name}.on_invalid", "there is no floor.", "Set `floor`, or `reward_range` for its low end."
            )
        )
    return mistakes


def fingerprint(*reading: Any) -> str:
    """Hash how a judge reads replies. `reading` holds all settings that change which numbers it finds in a reply.

    Returns 32 hex digits (BLAKE2b, RFC 7693). Settings that only map the numbers (reward range, `correct_at`, floor)
    are not part of it.
    """
    canonical = orjson.dumps([_VERSION, *reading])
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()
