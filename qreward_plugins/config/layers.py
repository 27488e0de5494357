"""Loads the configuration of a training run from the framework's own configuration, a file, or both.

The tree may be inline in the framework's configuration, or in a file that its key `config` or the environment variable
`QREWARD_CONFIG` names, or in both. Inline keys override the file. The two are merged before any check, so that each
mistake is reported once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ..errors import ConfigurationError, Mistake
from .environment import environment, environment_of
from .findings import nearest
from .loading import load_config
from .models import Config
from .origin import Origin, with_origin
from .served import names_server
from .yaml_file import read_yaml

_log = logging.getLogger("qreward_plugins.config")

ENVIRONMENT = "QREWARD_CONFIG"
"""The environment variable with the path of the file, used if the framework's configuration has no `config`."""


def load_layers(
    inline: Any,
    *,
    default: Mapping[str, Any] | None = None,
    origin: str = "qreward",
    printed_by: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> Config:
    """Load and check the configuration of a training run.

    Args:
        inline: the tree in the framework's configuration (a mapping or DictConfig), the path of a file, or None.
        default: a tree that is merged below a configuration without judges.
        origin: the name of the inline tree in messages.
        printed_by: the framework that prints and uploads the inline tree; API keys in that tree cause a warning.
        variables: the environment variables to read it with; default: those of this process.

    Raises `ConfigurationError` with every mistake.
    """
    inline = {} if inline is None else {"config": inline} if isinstance(inline, (str, os.PathLike)) else inline
    if not isinstance(inline, (Mapping, DictConfig)):
        raise ConfigurationError([Mistake(origin, f"must be a mapping or a path, not {type(inline).__name__}.")])
    if printed_by:
        _warn_of_printed_keys(inline, origin, printed_by)
    with environment_of(variables):
        path = inline.get("config") or environment().get(ENVIRONMENT)
        if not path:
            return _loaded(inline, default, origin)
        _check_config_key(inline, origin)
        named = "" if inline.get("config") else f", which {ENVIRONMENT} names"
        file = read_yaml(path, origin=f"{path}{named}")
        config = _over_file(file, inline, default, path)
    again = partial(_read_again, inline=_plain(inline), default=default, path=path, variables=variables)
    return with_origin(config, Origin(path, again, file))


def _read_again(
    file: Any,
    *,
    inline: Mapping[str, Any],
    default: Mapping[str, Any] | None,
    path: Any,
    variables: Mapping[str, str] | None,
) -> Config:
    with environment_of(variables):
        return _over_file(file, inline, default, path)


def _plain(inline: Mapping[str, Any] | DictConfig) -> Mapping[str, Any]:
    plain = OmegaConf.to_container(inline, resolve=False) if isinstance(inline, DictConfig) else inline
    assert isinstance(plain, Mapping)
    return {str(key): value for key, value in plain.items()}


def _loaded(inline: Mapping[str, Any] | DictConfig, default: Mapping[str, Any] | None, origin: str) -> Config:
    _check_config_key(inline, origin)
    if "config" not in inline and (_is_whole(inline) or default is None):
        return load_config(inline, origin=origin)
    return load_config(_merged({}, inline, default or {}), origin=origin)


def _over_file(
    file: Any, inline: Mapping[str, Any] | DictConfig, default: Mapping[str, Any] | None, path: Any
) -> Config:
    return load_config(_merged(file, inline, default or {}), origin=str(path))


def _check_config_key(inline: Mapping[str, Any] | DictConfig, origin: str) -> None:
    known = ["config", *Config.model_fields]
    for key in map(str, inline):
        if key not in known and nearest(key, known) == "config":
            raise ConfigurationError([Mistake(key, "unknown key.", "Did you mean `config`?")], origin=origin)


def _merged(file: Any, inline: Mapping[str, Any] | DictConfig, default: Mapping[str, Any]) -> Any:
    if not isinstance(file, dict):
        return file
    if list(file) == ["qreward"] and isinstance(file["qreward"], dict):
        file = file["qreward"]
    over = {key: value for key, value in _plain(inline).items() if key != "config"}
    return OmegaConf.merge({} if any(map(_is_whole, (file, over))) else default, file, over)


def _is_whole(tree: Mapping[str, Any] | DictConfig) -> bool:
    """Whether a tree has judges, or a server that has some."""
    return "judges" in tree or names_server(tree)


def _warn_of_printed_keys(inline: Mapping[str, Any] | DictConfig, origin: str, framework: str) -> None:
    sources = inline.get("sources")
    for name, source in sources.items() if isinstance(sources, (Mapping, DictConfig)) else ():
        if isinstance(source, (Mapping, DictConfig)) and (source.get("api_key") or source.get("api_keys")):
            _log.warning(
                "%s.sources.%s.%s is in the configuration of %s, and %s prints and uploads that with all values "
                "resolved. Use api_key_env, or keep the tree in a file that QREWARD_CONFIG names.",
                origin,
                name,
                "api_key" if source.get("api_key") else "api_keys",
                framework,
                framework,
            )
