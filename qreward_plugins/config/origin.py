"""Remembers where a configuration was read, so that it can be read again while the engine runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError
from .yaml_file import read_yaml

if TYPE_CHECKING:
    from .models import Config


class Origin:
    """The file of a configuration, and how to read it again. `make` makes a configuration of the plain values of the
    file, and raises `ConfigurationError`.

    What it holds may contain keys, so its repr names the file only. Two configurations may be equal whatever their
    origins are, so all origins are equal.
    """

    def __init__(self, file: str | os.PathLike[str], make: Callable[[Any], Config]) -> None:
        self.file = os.path.abspath(os.path.expanduser(os.fspath(file)))
        self._make = make

    def read(self) -> Config:
        """Return the configuration as it is now. It has this origin, too. Raises `ConfigurationError`."""
        return with_origin(self._make(read_yaml(self.file, origin=self.file)), self)

    def then(self, step: Callable[[Config], Config]) -> Origin:
        """Return the origin of what `step` makes of the configuration."""
        return Origin(self.file, partial(_made, self._make, step))

    def __repr__(self) -> str:
        return f"Origin({self.file!r})"

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, Origin)

    def __hash__(self) -> int:
        return 0


def _made(make: Callable[[Any], Config], step: Callable[[Config], Config], tree: Any) -> Config:
    return step(make(tree))


def with_origin(config: Config, origin: Origin | None) -> Config:
    """Return `config` with another origin."""
    config = config.model_copy()
    config._origin = origin
    return config


def adapted(config: Config, step: Callable[[Config], Config]) -> Config:
    """Return what `step` makes of `config`. When the configuration is read again, `step` is applied again."""
    origin, changed = config._origin, step(config)
    return changed if origin is None else with_origin(changed, origin.then(step))


def origin_of(config: Config) -> Origin | None:
    """Return where `config` was read; None if it was not read from a file."""
    return config._origin


def located(error: ConfigurationError, config: Config) -> ConfigurationError:
    """Return an error about what was opened with `config`, with the name of its file."""
    if config._origin is None or error.origin != "configuration":
        return error
    return ConfigurationError(error.mistakes, origin=config._origin.file)
