"""Opens the engine of a configuration for a command: a shell has not joined Ray."""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from ..config import Config, load_config
from ..engine import RewardEngine
from ..errors import ConfigurationError, InputError, Mistake
from ..sources.ray_methods import is_ray_method
from ..system.ray_actors import join_cluster
from .console import ERRORS, say


def load_own(path: Path) -> Config:
    """Load a configuration with sources of its own.

    Raises `ConfigurationError`, and for a configuration that names a reward server, too.
    """
    config = load_config(path)
    if config.engine.server is not None:
        problem = "this command needs sources and judges, and a reward server has them."
        remedy = "Run it with the file of the server."
        raise ConfigurationError([Mistake("engine.server", problem, remedy)], origin=str(path))
    return config


def open_engine(config: Config, path: Path) -> RewardEngine:
    """Open the engine of a configuration, on the Ray cluster that runs if a source is placed there.

    Errors name `path`, the file of the configuration. Raises `InputError` if a cluster is needed and none runs.
    """
    try:
        with ended_by_a_signal():
            join_ray(config, path)
            return RewardEngine(config)
    except ConfigurationError as error:
        raise ConfigurationError(error.mistakes, origin=str(path)) from None


def join_ray(config: Config, path: Path, names: Collection[str] = ()) -> None:
    """Join the Ray cluster that runs if one of the sources `names` (default: all) has its servers or an actor there.

    A user of a shell cannot call `ray.init()`. Raises `InputError` if no cluster can be joined.
    """
    placed = (
        name
        for name, source in config.sources.items()
        if (getattr(source, "placement", "") == "ray" or is_ray_method(str(getattr(source, "function", ""))))
        and (not names or name in names)
    )
    name = next(placed, None)
    if name is None:
        return
    say(ERRORS, f"joining the Ray cluster of source {name!r} (RAY_ADDRESS, or that of this machine) ...")
    try:
        # In the main thread Ray would take the handling of SIGTERM.
        with ThreadPoolExecutor(1, "qreward-ray") as thread:
            thread.submit(join_cluster).result()
    except ConnectionError as error:
        raise InputError(f"{path}: source {name!r} runs on Ray, and {error}") from None


@contextmanager
def ended_by_a_signal() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the process at once.

    A user's module that hangs during its import blocks the event loop, which could not handle the signals. Nothing has
    been started yet that would need to clean up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
