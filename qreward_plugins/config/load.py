"""Reads configurations: a file, a mapping, a trainer's DictConfig, or a trainer's tree over a file. `Origin` remembers
where one was read, so that it can be read again while the engine runs.

What a configuration asks of a training framework is filled in by the framework's adapter, before it opens the engine:
the addresses of the framework's servers (`base_url: framework://reward`), and its reward phases (`colocated: true`).

Errors are raised outside of `except` blocks, so that they have no `__context__`: exceptions of pydantic and OmegaConf
hold the input with its keys, and some loggers print `__context__` even if Python does not.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from ..errors import ConfigurationError, Mistake
from .check import START, check
from .findings import Finding, Path, path_text
from .models import Config
from .names import with_each_key
from .resolve import resolve
from .source_models import FRAMEWORK_SCHEME, EndpointConfig, SourceConfig, is_framework_url
from .yaml_file import FileTree, read_yaml

_log = logging.getLogger("qreward_plugins.config")

ENVIRONMENT = "QREWARD_CONFIG"
"""The environment variable with the path of the file, used if the framework's configuration has no `config`."""


class Origin:
    """The file of a configuration, and how to read it again. `make` makes a configuration of the plain values of the
    file, and raises `ConfigurationError`.

    What it holds may contain keys, so its repr names the file only. Two configurations may be equal whatever their
    origins are, so all origins are equal.
    """

    def __init__(self, file: str | os.PathLike[str], make: Callable[[Any], Config]) -> None:
        self.file = os.path.abspath(os.path.expanduser(os.fspath(file)))
        self.make = make

    def read(self) -> Config:
        """Return the configuration as it is now. It has this origin, too. Raises `ConfigurationError`."""
        return with_origin(self.make(read_yaml(self.file, origin=self.file)), self)

    def __repr__(self) -> str:
        return f"Origin({self.file!r})"

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, Origin)

    def __reduce__(self) -> tuple[type[Origin], tuple[str, Callable[[Any], Config]]]:
        # A function of `make` may be one that no other process has (`qreward plan` simulates in several).
        return Origin, (self.file, load_config)


def with_origin(config: Config, origin: Origin | None) -> Config:
    """Return `config` with another origin."""
    config = config.model_copy()
    config._origin = origin
    return config


def origin_of(config: Config) -> Origin | None:
    """Return where `config` was read; None if it was not read from a file."""
    return config._origin


def located(error: ConfigurationError, config: Config) -> ConfigurationError:
    """Return an error about what was opened with `config`, with the name of its file."""
    if config._origin is None or error.origin != "configuration":
        return error
    return ConfigurationError(error.mistakes, origin=config._origin.file)


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any] | DictConfig | Config, *, origin: str | None = None
) -> Config:
    """Read and check a configuration.

    `source` is the path of a YAML file (a leading `~` is the home directory), the same tree as a mapping, or a
    DictConfig, which may be a node of a trainer's tree. It is never changed. A single top-level key `qreward` is
    unwrapped first, so interpolations name keys without it. Interpolations are OmegaConf's: `${oc.env:NAME}`,
    `${oc.env:NAME,default}`, `${key.of.the.tree}`. A source with several keys becomes one source for each key
    (`with_each_key`). A `Config` is not checked again.

    `origin` is the name of the source in messages; default: the path.

    Raises `ConfigurationError` with every mistake, its path and its line in the file. It shows no text of the
    configuration but names that are near an allowed one, and has no cause and no context.
    """
    if isinstance(source, (str, os.PathLike)):
        path, origin = _path(source, origin)
        return with_origin(_read(read_yaml(path, origin=origin), origin), Origin(path, partial(_read, origin=origin)))
    return _read(source, origin or "configuration")


def load_layers(
    inline: Any,
    *,
    default: Mapping[str, Any] | None = None,
    origin: str = "qreward",
    printed_by: str | None = None,
) -> Config:
    """Load and check the configuration of a training run: the tree in the framework's own configuration, or a file that
    its key `config` or the variable `QREWARD_CONFIG` names, or both. Keys of the tree override those of the file.

    Args:
        inline: the tree in the framework's configuration (a mapping or DictConfig), the path of a file, or None.
        default: a tree that is merged below a configuration without judges.
        origin: the name of the inline tree in messages.
        printed_by: the framework that prints and uploads the inline tree; API keys in that tree cause a warning.

    Raises `ConfigurationError` with every mistake.
    """
    inline = {} if inline is None else {"config": inline} if isinstance(inline, (str, os.PathLike)) else inline
    if not isinstance(inline, (Mapping, DictConfig)):
        raise ConfigurationError([Mistake(origin, f"must be a mapping or a path, not {type(inline).__name__}.")])
    if printed_by:
        _warn_of_printed_keys(inline, origin, printed_by)
    path = inline.get("config") or os.environ.get(ENVIRONMENT)
    if not path:
        if "config" not in inline and (_is_whole(inline) or default is None):
            return load_config(inline, origin=origin)
        return load_config(_merged({}, inline, default or {}), origin=origin)
    named = "" if inline.get("config") else f", which {ENVIRONMENT} names"
    file = read_yaml(os.path.expanduser(path), origin=f"{path}{named}")
    over = _plain(inline)
    keys = ", ".join(f"{origin}.{key}" for key in over if key != "config")

    def read(file: Any) -> Config:
        return _read(_merged(file, over, default or {}), f"{path} with {keys}" if keys else str(path))

    return with_origin(read(file), Origin(path, read))


def _merged(file: Any, inline: Mapping[str, Any] | DictConfig, default: Mapping[str, Any]) -> Any:
    file = _unwrapped(file)
    if not isinstance(file, dict):
        return file
    over = {key: value for key, value in _plain(inline).items() if key != "config"}
    merged = _over({} if any(map(_is_whole, (file, over))) else default, _over(file, over))
    if not isinstance(file, FileTree):
        return merged
    inline_lines = {path: 0 for path, value in _items(over) if not isinstance(value, Mapping)}
    return FileTree(merged, {**file.lines, **inline_lines}, file.duplicates)


def _unwrapped(tree: Any) -> Any:
    """Return what stands below the key `qreward` of a tree that has no other key."""
    plain = OmegaConf.to_container(tree, resolve=False) if isinstance(tree, DictConfig) else tree
    if not isinstance(plain, Mapping) or list(plain) != ["qreward"]:
        return tree
    if isinstance(tree, FileTree):
        return tree.below("qreward")
    # A node that is an interpolation, or has no value, is left to `resolve`.
    return tree["qreward"] if plain is tree or isinstance(plain["qreward"], dict) else tree


def _over(below: Any, above: Any) -> Any:
    """Return `above` over `below`. OmegaConf's own `merge` stops at the first interpolation that it cannot read."""
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    return {**below, **{key: _over(below.get(key), value) for key, value in above.items()}}


def _plain(inline: Mapping[str, Any] | DictConfig) -> Mapping[str, Any]:
    plain = OmegaConf.to_container(inline, resolve=False) if isinstance(inline, DictConfig) else inline
    assert isinstance(plain, Mapping)
    return {str(key): value for key, value in plain.items()}


def _is_whole(tree: Mapping[str, Any] | DictConfig) -> bool:
    """Whether a tree has judges, or a server that has some."""
    engine = tree.get("engine")
    return "judges" in tree or (isinstance(engine, (Mapping, DictConfig)) and bool(engine.get("server")))


def _warn_of_printed_keys(inline: Mapping[str, Any] | DictConfig, origin: str, framework: str) -> None:
    sources = inline.get("sources")
    for name, source in sources.items() if isinstance(sources, (Mapping, DictConfig)) else ():
        if isinstance(source, (Mapping, DictConfig)) and source.get("api_key"):
            _log.warning(
                "%s.sources.%s.api_key is in the configuration of %s, and %s prints and uploads that with all values "
                "resolved. Use api_key_env, or keep the tree in a file that QREWARD_CONFIG names.",
                *(origin, name, framework, framework),
            )


def _path(source: str | os.PathLike[str], origin: str | None) -> tuple[str, str]:
    path, problem, remedy = os.fsdecode(source), "", ""
    if not path.strip():
        problem = "the path of the file is empty."
    elif "\n" in path or ("{" in path and ":" in path and not os.path.exists(path)):
        problem = "a text must be the path of a YAML file, but this text looks like YAML."
        remedy = "Write it to a file, or pass the tree as a dict."
    if problem:
        raise ConfigurationError([Mistake("", problem, remedy)], origin=origin or "configuration")
    return os.path.expanduser(path), origin or path


def _read(source: Any, origin: str) -> Config:
    config, mistakes = (source, []) if isinstance(source, Config) else _resolved_and_checked(_unwrapped(source))
    if config is None or mistakes:
        raise ConfigurationError(mistakes, origin=origin)
    return with_each_key(config)


def _resolved_and_checked(source: Any) -> tuple[Config | None, list[Mistake]]:
    config, tree, problem = None, None, ""
    findings: list[Finding] = []
    lines = source.lines if isinstance(source, FileTree) else {}
    if isinstance(source, (Mapping, DictConfig)):
        try:
            tree, findings = resolve(source)
        except RecursionError:
            problem = "the configuration contains itself, or is nested too deeply"
        findings += source.duplicates if isinstance(source, FileTree) else []
    elif source:
        kind = "a list" if isinstance(source, (list, tuple, ListConfig)) else f"of type {type(source).__name__}"
        problem = f"the configuration must be a mapping, but it is {kind}"
    order = {path: n for n, (path, _) in enumerate(_items(tree))}
    if isinstance(tree, dict) and tree:
        config, found = check(tree)
        # Of a file that is no configuration nothing else is said.
        findings = found if [finding.path for finding in found] == [()] else [*findings, *found]
    elif not findings:
        problem = problem or f"the configuration {'must be a mapping' if tree else 'is empty'}"
        findings = [Finding((), problem, START)]
    findings.sort(key=lambda finding: _nearest_above(finding.path, order) or 0)
    placed = [(finding, _nearest_above(finding.path, lines) or None) for finding in findings]
    return config, [Mistake(path_text(path), f"{problem}.", remedy, line) for (path, problem, remedy), line in placed]


def _items(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield everything in a tree with its path, in its order."""
    yield path, tree
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, Mapping):
        items = tree.items()
    elif isinstance(tree, list):
        items = enumerate(tree)
    for key, below in items:
        yield from _items(below, (*path, key))


def _nearest_above(path: Path, known: Mapping[Path, int]) -> int | None:
    """Return what is known of `path`, or of the nearest mapping or list above it."""
    return next((known[path[:n]] for n in range(len(path), -1, -1) if path[:n] in known), None)


def with_framework(
    config: Config, addresses: Mapping[str, str], *, framework: str, remedy: str = "Write the URL of the server."
) -> Config:
    """Return `config` with each `framework://NAME` replaced by the address of that server. A path after the name
    is kept (`framework://reward/v1`).

    `addresses` are the URLs of the framework's servers by name, without a slash at the end. `framework` is its name for
    messages, and `remedy` says how its user gets a server that is missing. When the configuration is read again, they
    are filled in again. Raises `ConfigurationError` for a name that is not in `addresses`.
    """
    known = ", ".join(f"{FRAMEWORK_SCHEME}{name}" for name in sorted(addresses)) or "none"

    def filled(config: Config) -> Config:
        mistakes: list[Mistake] = []
        sources: dict[str, SourceConfig] = {}
        for name, source in config.sources.items():
            if not isinstance(source, EndpointConfig) or not any(map(is_framework_url, source.urls)):
                continue
            urls = []
            for url in source.urls:
                server, slash, path = url.removeprefix(FRAMEWORK_SCHEME).partition("/")
                if is_framework_url(url) and server not in addresses:
                    problem = f"{framework} has no server {server!r} (it has {known})."
                    mistakes.append(Mistake(f"sources.{name}.{source.URL_KEY}", problem, remedy))
                    continue
                urls.append(addresses[server].rstrip("/") + slash + path if is_framework_url(url) else url)
            sources[name] = source.model_copy(update={source.URL_KEY: tuple(urls)})
        if mistakes:
            raise ConfigurationError(mistakes)
        return config.model_copy(update={"sources": {**config.sources, **sources}}) if sources else config

    origin, changed = config._origin, filled(config)
    if origin is None:
        return changed
    return with_origin(changed, Origin(origin.file, lambda tree: filled(origin.make(tree))))


def without_colocated(config: Config, why: str, *, remedy: str) -> Config:
    """Return `config` unchanged. Refuse a source with `colocated: true`, because the caller does not know when its
    trainer asks for rewards and when it trains. A reload adds none (`engine.difference`).

    `why` is the reason, as a sentence. Raises `ConfigurationError`.
    """
    if found := colocated_sources(config):
        raise ConfigurationError([Mistake(f"sources.{name}.colocated", why, remedy) for name in found])
    return config


def colocated_sources(config: Config) -> tuple[str, ...]:
    """Return the names of the sources whose servers use the trainer's devices."""
    return tuple(name for name, source in config.sources.items() if getattr(source, "colocated", False))
