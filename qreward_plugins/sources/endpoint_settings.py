"""Reads the settings of an endpoint that depend on the environment (URLs, headers with the key, parameters), and opens
its HTTP client: the one over aiohttp, or the one over httpx with its options.

Everything that can be wrong is reported when the source is opened, with the path of its key. Each function that reads
adds what is wrong to `mistakes`, so that one error reports everything.
"""

from __future__ import annotations

import importlib.util
import os
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from yarl import URL

from ..config.findings import path_text
from ..config.source_models import OUTSIDE, EndpointConfig, HttpxOptions, is_framework_url
from ..errors import ConfigurationError, InputError, Mistake
from ..samples.json_values import as_json
from ..secrets import without_secrets
from ..system.functions import PathLoader, load
from .aiohttp_client import AiohttpClient
from .bodies import with_parameters
from .http import Connecting, HTTPClient, proxy_for
from .kind import key_of
from .passed_requests import can_be_sent

_SET_BY_CLIENT = ("content-length", "transfer-encoding", "content-encoding", "connection", "expect", "host")


def read_urls(where: str, configured: Sequence[str], path: str, mistakes: list[Mistake]) -> dict[str, URL]:
    """Return the URL that requests are posted to, with `path`, for each configured text."""
    urls: dict[str, URL] = {}
    for text in configured:
        if is_framework_url(text):
            mistakes.append(Mistake(where, *OUTSIDE))
            continue
        try:
            url = URL(text + path)
            if not url.host:
                raise ValueError("it has no host")
        except ValueError as error:
            mistakes.append(Mistake(where, f"{text!r} is not a URL: {error}."))
            continue
        try:
            proxy_for(url)
        except ValueError:
            # The value may hold a password, so it is not shown.
            mistakes.append(Mistake(where, f"the environment's proxy for {url.scheme} is not a URL."))
        urls[text] = url
    return urls


def read_headers(
    path: str, config: EndpointConfig, key_header: tuple[str, str], mistakes: list[Mistake]
) -> dict[str, str]:
    """Return the configured headers and the one that carries the key. `key_header` is its name, and the text before
    the key.
    """
    headers: dict[str, str] = {}
    for name, secret in config.headers.items():
        value = secret.get_secret_value().strip()
        where = f"{path}.{path_text(('headers', name))}"
        if not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
            mistakes.append(Mistake(where, "this is not a valid header name."))
        elif name.lower() in _SET_BY_CLIENT:
            mistakes.append(Mistake(where, "the HTTP client sets this header.", "Leave it out."))
        elif not can_be_sent(value):
            mistakes.append(Mistake(where, "the value holds characters that a header cannot carry."))
        else:
            headers[name] = value
    key, where = key_of(config, os.environ), f"{path}.api_key" if config.api_key is not None else f"{path}.api_key_env"
    carrier, before = key_header
    if isinstance(config.api_key_env, tuple):
        mistakes.append(Mistake(where, "a source that is opened alone has one key.", "Use load_config, or one key."))
    elif key is None:
        problem = f"the environment variable {config.api_key_env!r} is not set or empty."
        mistakes.append(Mistake(where, problem, "Set it for every process that scores, Ray workers included."))
    elif key and key.startswith("$"):
        remedy = "Write api_key: ${oc.env:NAME}, or api_key_env: NAME."
        mistakes.append(Mistake(where, "this is the name of a variable, which is not read here.", remedy))
    elif key and has_header(headers, carrier):
        article = "an" if carrier[0] in "AEIOUaeiou" else "a"
        mistakes.append(Mistake(where, f"headers has {article} {carrier}, too.", "Keep one of the two."))
    elif key and not can_be_sent(key):
        mistakes.append(Mistake(where, "the key holds characters that a header cannot carry."))
    elif key:
        headers[carrier] = f"{before}{key}"
    return headers


def has_header(headers: Mapping[str, str], header: str) -> bool:
    """Whether `headers` have one of this name, in any case of letters."""
    return any(name.lower() == header.lower() for name in headers)


def read_parameters(path: str, config: EndpointConfig, mistakes: list[Mistake]) -> dict[str, Any]:
    """Return the configured parameters in JSON's types, with secrets revealed."""
    try:
        plain: dict[str, Any] = as_json(without_secrets(config.parameters), "")
    except InputError as error:
        place, _, problem = str(error).partition(": ")
        mistakes.append(Mistake(f"{path}{place}", f"{problem}."))
        return {}
    return plain


def bound_mistakes(
    path: str,
    config: EndpointConfig,
    bound_key: Sequence[str],
    containers: Sequence[str],
    completion_bound: Callable[[Mapping[str, Any]], int | None],
) -> list[Mistake]:
    """Return the mistake of parameters that remove the bound on a completion although `tokens_per_minute` is set.

    `bound_key` is the path of the key in the body that bounds a completion. `containers` are the keys of the body that
    hold several settings.
    """
    bound: Any = 1
    for key in reversed(bound_key):
        bound = {key: bound}
    body = with_parameters(bound, config.parameters, containers)
    if config.limits.tokens_per_minute is None or completion_bound(body) is not None:
        return []
    return [
        Mistake(
            ".".join((path, *bound_key)),
            "it removes the bound on a reply, and without a bound tokens_per_minute cannot be kept.",
            "Set a number of tokens from 1 on, or leave it out: then the judge's max_tokens applies.",
        )
    ]


MOST_CONNECTIONS = 100
"""Most requests of httpx in flight at once in a process: the scheduler keeps to it, so that none waits in the pool."""
_EXTRA = "Install it: pip install 'qreward-plugins[httpx]'."


def open_client(
    name: str,
    config: EndpointConfig,
    urls: Iterable[URL],
    headers: Mapping[str, str],
    *,
    plain_headers: Mapping[str, str],
    secrets: tuple[str, ...],
) -> HTTPClient[Any]:
    """Open the client that `config` asks for. It connects with the first request; proxies are read here, once.

    Raises ConfigurationError for a package that is not installed, a certificate that cannot be read, options that the
    URLs do not allow, and an `auth` that cannot be made.
    """
    options = config.httpx or HttpxOptions()
    proxies: dict[URL, URL] = {}
    for url in urls:
        proxy = proxy_for(url) if options.proxy is None else URL(options.proxy.get_secret_value())
        if proxy is not None:
            proxies[url] = proxy
    connecting = Connecting(
        name, headers, plain_headers, secrets, config.verify_tls, config.timeouts.connect_s, proxies
    )
    if config.client == "aiohttp":
        return AiohttpClient(connecting)
    return _open_httpx(f"sources.{name}", connecting, options)


def _open_httpx(path: str, connecting: Connecting, options: HttpxOptions) -> HTTPClient[Any]:
    proxy = "" if options.proxy is None else options.proxy.get_secret_value()
    needed = {"httpx": "client", **({"h2": "httpx.http2"} if options.http2 else {})}
    if proxy.startswith("socks5"):
        needed["socksio"] = "httpx.proxy"
    for package, key in needed.items():
        if importlib.util.find_spec(package) is None:
            raise ConfigurationError([Mistake(f"{path}.{key}", f"the package {package} is not installed.", _EXTRA)])
    import httpx

    from .httpx_client import HttpxClient

    auth: Any = None
    if options.auth is not None:
        if any(header.lower() == "authorization" for header in connecting.headers):
            raise ConfigurationError([Mistake(f"{path}.httpx.auth", "headers has an Authorization, too.", "Keep one.")])
        auth = _made(options.auth, f"{path}.httpx.auth")
        if not isinstance(auth, httpx.Auth):
            problem = f"the factory {options.auth} returned an object of type {type(auth).__name__}, not an httpx.Auth."
            raise ConfigurationError([Mistake(f"{path}.httpx.auth", problem)])
    return HttpxClient(connecting, context=_context(path, connecting, options), http2=options.http2, auth=auth)


def _made(path: str, key: str) -> Any:
    factory = load(PathLoader(path), key=key, excerpt=lambda text: "it raised an error while it was imported")
    try:
        return factory()
    except (Exception, SystemExit) as error:
        # Its message may hold a secret.
        problem = f"the factory {path} raised {type(error).__name__}."
    # Raised outside the `except`, so that its context does not hold the factory's error.
    raise ConfigurationError([Mistake(key, problem, "It is called without arguments; call it in Python to see why.")])


def _context(path: str, connecting: Connecting, options: HttpxOptions) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not connecting.verify_tls:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if options.cert is not None:
        problem = ""
        try:
            # With a password, because OpenSSL would ask for one at the terminal.
            context.load_cert_chain(options.cert[0], options.cert[-1], "")
        except ssl.SSLError:
            problem = "the certificate or its key is not valid, or the key has a password."
        except (OSError, ValueError) as error:
            problem = f"the certificate cannot be read ({getattr(error, 'strerror', None) or type(error).__name__})."
        if problem:
            raise ConfigurationError([Mistake(f"{path}.httpx.cert", problem)])
    return context
