"""A source behind an OpenAI-compatible `/chat/completions`.

Everything that can be wrong with the configuration alone is found when the source is made, all mistakes at once; `send`
then only encodes, posts (`http`) and understands (`replies`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson
from yarl import URL

from ..errors import ConfigurationError, Mistake, PermanentError, SourceError
from .base import Reply, Request
from .http import HTTPClient, proxy_for
from .replicas import Replicas
from .replies import Answer

if TYPE_CHECKING:
    from ..config import models

_OURS = ("content-length", "transfer-encoding", "content-encoding", "connection", "host")
_PATH = "/chat/completions"


class OpenAISource:
    """Asks one model over HTTP, at one or several base URLs.

    `name` is its name in the configuration. The proxies of the environment are used (`HTTPS_PROXY`, `HTTP_PROXY`,
    `NO_PROXY`); `~/.netrc` is not read.

    Raises ConfigurationError with all mistakes that only the environment shows: an unset variable for the key, a URL
    or header that cannot be sent, parameters that this source cannot serve.
    """

    def __init__(self, name: str, config: models.OpenAISource) -> None:
        self._name = name
        self._config = config
        mistakes: list[Mistake] = []
        headers = _headers(f"sources.{name}", config, mistakes)
        self._urls = _urls(f"sources.{name}", config, mistakes)
        if config.parameters.get("stream"):
            path = f"sources.{name}.parameters.stream"
            mistakes.append(Mistake(path, "replies are not read as a stream.", "Leave it out."))
        if mistakes:
            raise ConfigurationError(mistakes)
        self._replicas = Replicas(config.base_url)
        self._http = HTTPClient(
            name,
            tuple(self._urls.values()),
            headers,
            verify_tls=config.verify_tls,
            connect_s=config.timeouts.connect_s,
        )

    @property
    def name(self) -> str:
        return self._name

    @property
    def model(self) -> str:
        return self._config.model

    @property
    def slots(self) -> int | None:
        """None: how much it takes at once is a matter of its limits."""
        return None

    async def send(self, request: Request, *, on_sent: Callable[[], None]) -> Reply:
        """Ask once.

        Cancelling closes the connection, so that the server can stop working on the answer.

        Raises a SourceError, or InvalidVerdict when the model or a content filter refused.
        """
        loop = asyncio.get_running_loop()
        body = self._encode(request)
        with self._replicas.borrow(loop.time()) as replica:
            url = self._urls[replica.base_url]
            try:
                http = await self._http.post(url, body, on_sent=on_sent, max_reply_bytes=self._config.max_reply_bytes)
            except SourceError:
                replica.failed(loop.time())
                raise
            if http.status >= 500:
                replica.failed(loop.time())
            else:
                replica.answered()
        return Answer(self._name, url, self._config.model, http, self._http.excerpts).reply()

    async def aclose(self) -> None:
        """Close all connections. Idempotent; a closed source answers no more."""
        await self._http.aclose()

    def _encode(self, request: Request) -> bytes:
        body = {
            "model": self._config.model,
            "messages": request.messages,
            **request.parameters,
            **self._config.parameters,
        }
        try:
            return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
        except TypeError:
            # Rare enough not to look for on every request: half a surrogate pair, which a policy's tokens can make.
            pass
        try:
            return orjson.dumps(_mended(body), option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
        except (TypeError, RecursionError) as error:
            reason = self._http.excerpts.of(str(error))
        raise PermanentError(f"source {self._name!r}: the request cannot be written as JSON ({reason})")

    def __repr__(self) -> str:
        return f"OpenAISource({self._name!r}, {', '.join(self._config.base_url)})"


def _urls(path: str, config: models.OpenAISource, mistakes: list[Mistake]) -> dict[str, URL]:
    urls: dict[str, URL] = {}
    for base_url in config.base_url:
        try:
            url = URL(base_url + _PATH)
            if not url.host:
                raise ValueError("it names no host")
        except ValueError as error:
            mistakes.append(Mistake(f"{path}.base_url", f"{base_url!r} is not a URL: {error}."))
            continue
        try:
            proxy_for(url)
        except ValueError:
            # The value may hold a password, so it is not shown.
            mistakes.append(Mistake(f"{path}.base_url", f"the environment's proxy for {url.scheme} is not a URL."))
        urls[base_url] = url
    return urls


def _headers(path: str, config: models.OpenAISource, mistakes: list[Mistake]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, secret in config.headers.items():
        value = secret.get_secret_value().strip()
        where = f"{path}.headers.{name}"
        if not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
            mistakes.append(Mistake(where, "this is not the name of a header."))
        elif name.lower() in _OURS:
            mistakes.append(Mistake(where, "this header follows from the request.", "Leave it out."))
        elif not _can_be_sent(value):
            mistakes.append(Mistake(where, "the value holds characters that cannot be sent."))
        else:
            headers[name] = value
    key, where = _key(path, config, mistakes)
    if key and any(name.lower() == "authorization" for name in headers):
        mistakes.append(Mistake(where, "headers has an Authorization too.", "Give one of them."))
    elif key and not _can_be_sent(key):
        mistakes.append(Mistake(where, "the key holds characters that cannot be sent."))
    elif key:
        headers["Authorization"] = f"Bearer {key}"
    return headers


def _key(path: str, config: models.OpenAISource, mistakes: list[Mistake]) -> tuple[str, str]:
    if config.api_key is not None:
        return config.api_key.get_secret_value().strip(), f"{path}.api_key"
    where = f"{path}.api_key_env"
    if config.api_key_env is None:
        return "", where
    key = os.environ.get(config.api_key_env, "").strip()
    if not key:
        problem = f"the environment variable {config.api_key_env!r} is not set, or empty."
        mistakes.append(Mistake(where, problem, "Set it where this process runs, workers of Ray included."))
    return key, where


def _can_be_sent(value: str) -> bool:
    return value.isprintable() and value.isascii()


def _mended(value: Any) -> Any:
    """Return `value` with every half of a surrogate pair replaced by U+FFFD; whole pairs become their character."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, dict):
        return {_mended(key): _mended(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mended(item) for item in value]
    return value
