"""Opens the HTTP client of a source: the one over aiohttp, or the one over httpx with its options.

Everything that can be wrong is reported when the source is opened, with the path of its key.
"""

from __future__ import annotations

import importlib.util
import ssl
from collections.abc import Iterable, Mapping
from typing import Any

from yarl import URL

from ..config.source_models import EndpointConfig, HttpxOptions
from ..errors import ConfigurationError, Mistake
from ..system.functions import PathLoader, load
from .aiohttp_client import AiohttpClient
from .http import Connecting, HTTPClient, proxy_for

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
