"""Opens a judge: makes an instance of its kind from its part of the configuration."""

from __future__ import annotations

from typing import Any

from ..config.judge_models import JudgeConfig
from ..errors import ConfigurationError, Mistake
from ..redaction import described_error
from ..registry import judges, kind_or_mistake
from .base import Judge, Opening


def kind_of(config: JudgeConfig) -> type[Judge]:
    """Return the kind of judge that `config` is for. Raises ConfigurationError if it cannot be loaded."""
    return kind_or_mistake(judges, config.kind)


def open_judge(name: str, config: JudgeConfig, opening: Opening) -> Judge:
    """Make the judge `name` of the configuration.

    Raises ConfigurationError with the mistakes that the kind finds, and if a kind of another package raises any error.
    """
    kind = kind_of(config)
    try:
        judge: Any = kind.open(name, config, opening)
        if isinstance(judge, Judge) and judge.name == name:
            return judge
        said = "it has another name; its `__init__` must call `super().__init__(name)`"
    except ConfigurationError:
        raise
    except Exception as error:
        said = described_error(error)
    # Raised outside the `except`, so that it has no `__context__`: the text of the foreign error may hold secrets.
    origin = judges.registrations(config.kind)[0].origin
    raise ConfigurationError([Mistake(f"judges.{name}", f"{origin} cannot open the judge: {said}.")])
