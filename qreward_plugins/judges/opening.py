"""Opening a judge: from its part of the configuration to an instance of its kind."""

from __future__ import annotations

from typing import Any

from ..config.judge_models import JudgeConfig
from ..errors import ConfigurationError, Mistake
from ..registry import described_error, judges, kind_or_mistake
from .base import Judge, Opening


def kind_of(config: JudgeConfig) -> type[Judge]:
    """The kind of judge that `config` is for. Raises ConfigurationError if it cannot be had."""
    return kind_or_mistake(judges, config.kind)


def open_judge(name: str, config: JudgeConfig, opening: Opening) -> Judge:
    """Make the judge `name` of the configuration.

    Raises ConfigurationError for a kind of another package that does not open, and whatever mistakes the kind finds.
    """
    kind = kind_of(config)
    try:
        judge: Any = kind.open(name, config, opening)
        if isinstance(judge, Judge) and judge.name == name:
            return judge
        said = "it has another name; let `__init__` call `super().__init__(name)`"
    except ConfigurationError:
        raise
    except Exception as error:
        said = described_error(error)
    # Raised outside the `except`, so that it does not carry the foreign error, whose text may hold secrets.
    origin = judges.registrations(config.kind)[0].origin
    raise ConfigurationError([Mistake(f"judges.{name}", f"{origin} cannot open the judge: {said}.")])
