"""Defines the configuration keys that all sources share, each with its unit and its default.

A kind of source (in `qreward_plugins.sources`) adds its own keys in a model that inherits `SourceConfig`, or
`EndpointConfig` if it is asked over HTTP.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationInfo, field_validator
from yarl import URL

from ..secrets import with_secrets
from .nodes import (
    FactoryPath,
    Flag,
    Node,
    NonNegativeFloat,
    OneOrMore,
    PositiveFloat,
    PositiveInt,
    no_bool,
    one_or_several,
    refuse_repeated,
    takes,
)

FRAMEWORK_SCHEME = "framework://"
"""How the URL of a server begins that the training framework has started; see `load.with_framework`."""
OUTSIDE = (
    "a framework:// URL works only inside a training framework, whose adapter knows the address.",
    "Write the URL of the server.",
)
"""Problem and remedy of such a URL that no adapter has filled in."""


def is_framework_url(url: str) -> bool:
    """Whether a URL names a server of the framework."""
    return url.startswith(FRAMEWORK_SCHEME)


def _plain_url(url: str, *, remedy: str = "put a key into api_key or headers, and the query into parameters") -> str:
    if not url.isprintable() or any(map(str.isspace, url.strip())):
        raise ValueError("a URL must not have blanks or control characters")
    if is_framework_url(url):
        name = url.removeprefix(FRAMEWORK_SCHEME).split("/", 1)[0]
        if not name.replace("-", "").replace("_", "").isalnum():
            raise ValueError("framework:// must be followed by the name of a server, as in framework://reward")
    scheme, separator, rest = url.partition("://")
    authority = rest.split("/", 1)[0]
    if scheme not in ("http", "https", "framework") or not separator or not authority.strip():
        raise ValueError("a URL must start with http:// or https:// and have a host")
    if "@" in authority or "?" in rest or "#" in rest:
        # URLs are shown in messages, metrics and the journal, and the query of a service often holds its key.
        raise ValueError(f"a URL must not have credentials, a query or a fragment; {remedy}")
    try:
        _ = urlsplit(url).port
    except ValueError:
        raise ValueError("a URL must have brackets around an IPv6 address, and a port up to 65535") from None
    return url


def server_url(url: str) -> str:
    """Check the URL of a reward server, and return it. Raises `ValueError`."""
    return _plain_url(url, remedy="name the variable that holds the token in token_env")


FreeMapping = Annotated[dict[str, Any], AfterValidator(lambda value: with_secrets(value))]
"""A mapping with any keys, for a function or a server. Values under keys such as `api_key` or `token` are never shown.
In a mapping called `kwargs`, `parameters` or `arguments`, values from the environment are not shown, either."""


def _plain_name(name: str) -> str:
    if name.startswith("$"):
        raise ValueError("the name of a model is not read from a variable in this form; write ${oc.env:NAME}")
    if "://" in name and "@" in name:
        # The name is shown in metrics, messages and the journal.
        raise ValueError("the name of a model must not have credentials; put a key into api_key or headers")
    return name


ModelName = Annotated[str, Field(min_length=1), AfterValidator(_plain_name)]
ServiceURL = Annotated[str, AfterValidator(lambda url: _plain_url(url))]
ServerURL = Annotated[str, AfterValidator(server_url)]
"""The URL of a reward server."""
_TAKES_URLS = takes("a URL, or a list of URLs")
URLs = Annotated[OneOrMore[ServiceURL], _TAKES_URLS]
"""A URL, or a list of replicas."""
BaseURLs = Annotated[OneOrMore[Annotated[ServiceURL, AfterValidator(lambda url: url.rstrip("/"))]], _TAKES_URLS]
"""The same for URLs to which a path is appended; slashes at the end are removed."""


VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"), takes("the name of an environment variable")]


class Limits(Node):
    """The limits of a source. A limit that is declared here is never exceeded. If the headers of several replies state
    a lower limit, the log says so. A limit that is not declared is learned from 429s and from these headers."""

    requests_per_minute: PositiveFloat | None = None
    """Requests per minute. Default: not declared."""

    tokens_per_minute: PositiveFloat | None = None
    """Tokens per minute, prompt and completion together. Default: not declared. Each request reserves the longest
    completion that its body allows, and one token per byte of its prompt; fewer after replies to similar texts have
    stated their usage. A request that may take more than a whole window is sent alone, when nothing else waits."""

    concurrency: PositiveInt | None = None
    """Requests in flight at once. Default: not declared; the engine starts with 32, raises the number while it is used
    up, and lowers it when the server throttles."""

    window: Literal["auto", "sliding", "bucket"] = "auto"
    """How the server counts. `sliding`: at most the limit in any window, so a window may be spent at once. `bucket`:
    the limit refills steadily, so requests are paced. `auto` (default): sliding, until the server throttles a source
    that kept its limits; then bucket."""

    window_s: PositiveFloat = 60.0
    """Length of the server's window in seconds; the rates above are scaled to it. Default: 60."""

    burst: PositiveInt = 1
    """Requests that a `bucket` admits at once. Default: 1."""


class Timeouts(Node):
    """How long one attempt may take."""

    connect_s: PositiveFloat = 10.0
    """Seconds to connect, TLS included. Default: 10."""

    total_s: PositiveFloat = 120.0
    """Seconds for the whole attempt, from sending to the last byte of the reply. Default: 120."""


class StreamTimeouts(Timeouts):
    """How long one attempt, and a silence in its stream, may take."""

    idle_s: PositiveFloat | None = None
    """Most seconds between two events of a streamed reply. Comments, which servers send to keep a connection alive, do
    not count as events. Before the first event only `total_s` applies. It needs `stream`. Default: no limit."""


class Price(Node):
    """The prices of a source, in US dollars."""

    input_per_million: NonNegativeFloat = 0.0
    """Dollars for a million prompt tokens. Default: 0."""

    output_per_million: NonNegativeFloat = 0.0
    """Dollars for a million completion tokens. Default: 0."""

    per_request: NonNegativeFloat = 0.0
    """Dollars for a request. Default: 0."""

    @property
    def is_zero(self) -> bool:
        """Whether nothing costs anything."""
        return not (self.input_per_million or self.output_per_million or self.per_request)


class Budget(Node):
    """What may be spent, over all processes that share limits (`engine.shared`), by `price`. Before an attempt is sent,
    the most that it is estimated to cost is set aside, and what it did cost replaces that. So no more than this is
    spent while the keeper lives and the estimates hold: a model that writes more than its longest completion overruns
    the budget by what is in flight. An attempt that was sent and never answered counts as that most."""

    usd: PositiveFloat
    """US dollars."""

    per: Literal["run", "hour"] = "run"
    """`run` (default): from the first of these processes that starts to the last that ends; a restart is another run.
    `hour`: in any 60 minutes."""

    on_spent: Literal["stop", "raise"] = "stop"
    """What happens when it is spent. `stop` (default): nothing more is sent. Samples go to another source of their
    judge, and fail (`infra/budget`) if it has none. `raise`: the engine raises `BudgetSpent`, which ends the run.
    Clients of a reward server get failed samples (`infra/budget`)."""


class Batch(Node):
    """Several calls in one request. One request counts once against `requests_per_minute` and `concurrency`, whatever
    number of calls it carries. A source without a request under way never waits for more calls."""

    max_size: Annotated[int, Field(ge=2), BeforeValidator(no_bool)] = 32
    """Most calls of one request, at least 2. Calls that wait are spread evenly over the free places of a source that
    declares its `concurrency` (or has `workers`), so a request may carry fewer. Default: 32."""

    max_wait_s: NonNegativeFloat = 0.02
    """Most seconds for which a request that is not full waits for more calls, while another request of this source is
    under way. 0: it never waits. Default: 0.02."""

    max_tokens: PositiveInt | None = None
    """Most tokens of one request, prompt and completion together, by the same estimate as for `tokens_per_minute`. A
    call that takes more goes alone. Default: no bound."""


class HttpxOptions(Node):
    """The options of a source with `client: httpx`. They are named as in httpx."""

    http2: Flag = False
    """Speak HTTP/2 with servers that do; this needs https. A request that is cancelled over HTTP/2 leaves the
    connection open, so the server may finish its answer. Default: false."""

    proxy: SecretStr | None = None
    """URL of a proxy: `http://`, `https://`, `socks5://` or `socks5h://`, with user and password if it wants them.
    Default: the HTTP proxy of the environment (`HTTPS_PROXY`, `HTTP_PROXY`, `NO_PROXY`)."""

    cert: (
        Annotated[
            tuple[Annotated[str, Field(min_length=1)], ...],
            Field(min_length=1, max_length=2),
            BeforeValidator(one_or_several),
            takes("the path of a PEM file, or a list of two paths: the certificate and its key"),
        ]
        | None
    ) = None
    """The client's certificate for mutual TLS: the path of a PEM file with certificate and key, or a list of two paths,
    the certificate and its key, which has no password. Default: none."""

    auth: FactoryPath | None = None
    """Who signs the requests: a function without arguments that returns an `httpx.Auth` (Entra, SigV4, service
    accounts). It is called in every process that scores. Requests of its own, such as for a token, are not counted by
    the limits, and must not block the event loop. Replaces `api_key`. Default: none."""

    @field_validator("proxy")
    @classmethod
    def _is_proxy(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            try:
                url = URL(value.get_secret_value())
                is_proxy = url.scheme in ("http", "https", "socks5", "socks5h") and bool(url.host)
            except ValueError:
                is_proxy = False
            if not is_proxy:
                # The parser's message may hold a part of the password.
                problem = "a proxy starts with http://, https://, socks5:// or socks5h:// and has a host"
                raise ValueError(f"{problem}; quote special characters of a password, as in %40 for @")
        return value


class SourceConfig(Node):
    """The keys of every source."""

    kind: str
    """The kind of source: a name that `qreward check --kinds` lists, or `package.module:Class`."""

    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    price: Price = Price()

    budget: Budget | None = None
    """What this source may spend, with all of its keys; it needs a `price`. Default: no bound."""

    version: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Identifies the version of the source for the journal; recorded answers of another version are not used. For a
    function: without a version, its answers are recorded but never used again, because the modules that it imports may
    change unseen; change the version whenever the function scores differently. For a model or service: it replaces the
    URLs in the journal's key, for servers whose address changes from run to run. Default: none."""

    weight: PositiveFloat = 1.0
    """Share of the requests relative to other sources. The strategy `earliest_finish` ignores it. Default: 1."""

    @field_validator("budget")
    @classmethod
    def _has_a_price(cls, value: Budget | None, info: ValidationInfo) -> Budget | None:
        price = info.data.get("price")
        if value is not None and price is not None and price.is_zero:
            raise ValueError("the source has no price to count by; set `price`")
        return value


RoutingStrategy = Literal["prefix_aware", "least_requests", "kv_cache", "least_pending_tokens", "round_robin"]


Routing = Annotated[OneOrMore[RoutingStrategy], takes("a strategy, or a list of strategies")]
"""The strategies by which a replica is chosen, in order: the first that can decide does."""
PREFIX_AWARE: tuple[RoutingStrategy, ...] = ("prefix_aware", "least_pending_tokens")
"""The strategies for servers whose prefix caches are ours alone."""


class EndpointConfig(SourceConfig):
    """The keys of every source that is asked over HTTP."""

    URL_KEY: ClassVar[str] = "url"
    """The name of the key that holds the URLs. A kind defines that key: `url: URLs`."""

    api_key: Annotated[SecretStr, Field(min_length=1)] | None = None
    """The API key, best written as `${oc.env:NAME}`. In a trainer's own configuration use `api_key_env`: trainers print
    and upload their configuration with all values resolved."""

    api_key_env: Annotated[
        VariableName | Annotated[tuple[VariableName, ...], Field(min_length=1)] | None,
        takes("the name of an environment variable, or a list of such names"),
    ] = None
    """Name of the environment variable that holds the API key, or a list of names, one for each of several keys. It is
    read when the source is opened. Each key has its own limits, as declared in `limits`, and its own health: a key
    that is refused takes only itself out. Logs and statistics show them as `NAME#1`, `NAME#2`, and so on; verdicts and
    metrics show `NAME`."""

    headers: dict[str, SecretStr] = Field(default_factory=dict)
    """Further headers of every request; their values are treated as secrets."""

    parameters: FreeMapping = Field(default_factory=dict)
    """Further keys of every request's body (e.g. `chat_template_kwargs`); they override other keys, and
    `null` removes one (`temperature: null`). Values that come from the environment, and values under a key such as
    `api_key` or `token`, are treated as secrets."""

    verify_tls: Flag = True
    """Verify the server's certificate. `false` turns this off for this source only. Default: true."""

    client: Literal["aiohttp", "httpx"] = "aiohttp"
    """The HTTP client. `aiohttp` (default): the fast one, HTTP/1.1. `httpx`: with the options below; it needs the extra
    `httpx` of this package, and takes several times as long for a request."""

    httpx: HttpxOptions | None = None
    """HTTP/2, proxies, client certificates and authentication, for `client: httpx`. Default: none."""

    routing: Routing = ("least_requests",)
    """Which of several base URLs a request goes to: the first strategy of this list that leaves one URL decides.
    `prefix_aware`: prompts with the same beginning go to the same replica, whose prefix cache then holds it.
    `least_requests`: fewest requests under way. `kv_cache`: fewest requests that wait at the server, those of other
    clients included, then least use of its KV cache, both read from the `/metrics` of vLLM, SGLang or llama.cpp once a
    second at most. `least_pending_tokens`: fewest tokens under way (estimated). `round_robin`: the one that was used
    least recently. For your own servers write `[prefix_aware, least_pending_tokens]`. It has no effect on a source with
    one URL. Default: `[least_requests]`, the evenest load, because gateways of a provider seldom have caches of their
    own."""

    max_reply_bytes: PositiveInt = 1_048_576
    """Largest body of a reply in bytes; a larger one fails the attempt. Default: 1 MiB."""

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of all replicas, as configured."""
        urls: tuple[str, ...] = getattr(self, self.URL_KEY)
        return urls

    @field_validator("httpx")
    @classmethod
    def _of_httpx(cls, value: HttpxOptions | None, info: ValidationInfo) -> HttpxOptions | None:
        if value is None:
            return None
        if info.data.get("client") != "httpx":
            raise ValueError("these are options of `client: httpx`; set it, or remove them")
        keys = [key for key in ("api_key", "api_key_env") if info.data.get(key) is not None]
        if value.auth is not None and keys:
            raise ValueError(f"set auth or {keys[0]}, not both")
        return value

    @field_validator("api_key_env")
    @classmethod
    def _each_key_once(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and info.data.get("api_key") is not None:
            raise ValueError("set api_key or api_key_env, not both")
        if isinstance(value, tuple):
            refuse_repeated(value, "a variable is named twice")  # not shown: it may be a key in the wrong place
        return value
