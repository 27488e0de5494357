"""Opens the reward server that a configuration names: its address, its token and its facts."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..config.framework import is_framework_url
from ..config.models import ServerConfig
from ..config.served import server_token
from ..errors import ConfigurationError, Mistake, RewardServerError
from .facts import ServerFacts, ask_facts

_PATH = "engine.server"


@dataclass(frozen=True)
class RemoteServer:
    """A reward server, and its first facts. Times are in seconds."""

    url: str
    facts: ServerFacts
    connect_s: float
    judges_may_change: bool
    token: str | None = field(default=None, repr=False)


def open_server(config: ServerConfig) -> RemoteServer:
    """Ask the server for its facts. Blocks for `config.start_s` at most, while the server may still be starting.

    Raises `ConfigurationError` if the token is not set, or the server cannot be reached or refuses.
    """
    url = config.url.rstrip("/")
    if is_framework_url(url):
        remedy = "Write the URL of `qreward serve`."
        raise ConfigurationError([Mistake(_PATH, "a training framework starts no reward server.", remedy)])
    token = _token(config)
    problem, remedy = "", ""
    try:
        facts = ask_facts(url, token, within_s=config.start_s)
    except RewardServerError as error:
        problem = f"the reward server at {url}: {error}"
        remedy = "" if error.status else "Start it with `qreward serve`."
    if problem:
        # Raised outside the `except`: the context of an error of urllib holds the request with its token.
        raise ConfigurationError([Mistake(_PATH, f"{problem}.", remedy)])
    return RemoteServer(url, facts, config.connect_s, config.judges_may_change, token)


def _token(config: ServerConfig) -> str | None:
    if config.token is not None:
        return config.token.get_secret_value().strip()
    return server_token(config.token_env, _PATH)
