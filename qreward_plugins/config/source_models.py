"""What the nodes below `sources` have in common: every key, its unit and its default, documented beside it.

A kind of source adds its own keys where it is defined (`qreward_plugins.sources`), in a model that inherits
`SourceConfig`, or `EndpointConfig` if it is asked over HTTP.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationInfo, field_validator

from ..redaction import with_secrets
from .nodes import Node, NonNegativeFloat, PositiveFloat, PositiveInt, one_or_several, takes


def _plain_url(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    authority = rest.split("/", 1)[0]
    if scheme not in ("http", "https") or not separator or not authority.strip():
        raise ValueError("a URL starts with http:// or https:// and names a host")
    if "@" in authority or "?" in rest or "#" in rest:
        # It stands in messages, metrics and the journal; keys of services come in queries.
        raise ValueError(
            "a URL holds no credentials, query or fragment; a key goes into api_key or headers, and what a query would "
            "say into parameters"
        )
    return url


def _without_slash(url: str) -> str:
    return url.rstrip("/")


def _secrets_marked(value: dict[str, Any]) -> dict[str, Any]:
    marked: dict[str, Any] = with_secrets(value)
    return marked


FreeMapping = Annotated[dict[str, Any], AfterValidator(_secrets_marked)]
"""A mapping with any keys, for a function or a server. A value under the name of a secret (`api_key`, `token`) is never
shown, and neither is one from the environment where the mapping is called `kwargs` or `parameters`."""


def _plain_name(name: str) -> str:
    if "://" in name and "@" in name:
        # The name is shown in metrics, messages and the journal.
        raise ValueError("a model's name holds no credentials; a key goes into api_key or headers")
    return name


ModelName = Annotated[str, Field(min_length=1), AfterValidator(_plain_name)]
ServiceURL = Annotated[str, AfterValidator(_plain_url)]
URLs = Annotated[tuple[ServiceURL, ...], Field(min_length=1), BeforeValidator(one_or_several)]
"""A URL, or a list of replicas."""
BaseURLs = Annotated[
    tuple[Annotated[ServiceURL, AfterValidator(_without_slash)], ...],
    Field(min_length=1),
    BeforeValidator(one_or_several),
]
"""The same, for URLs that a path is added to."""


VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"), takes("the name of an environment variable")]


class Limits(Node):
    """What a source allows. A limit that is declared here is never exceeded; while the headers of several replies
    announce a lower one, that one counts. A limit that is left out is learned from 429s and from those headers."""

    requests_per_minute: PositiveFloat | None = None
    """Requests per minute. Default: none declared."""

    tokens_per_minute: PositiveFloat | None = None
    """Tokens per minute, prompt and completion together. Default: none declared. Each request reserves the longest
    completion that its body allows, and for its prompt one token for each byte, or less once answers to similar texts
    have stated their usage. A request that may take more than a whole window goes alone, when nothing else waits."""

    concurrency: PositiveInt | None = None
    """Requests in flight at once. Default: none declared; it begins with 32, grows as long as it is used, and shrinks
    when the server throttles."""

    window: Literal["auto", "sliding", "bucket"] = "auto"
    """How the server counts. `sliding`: at most the limit in any window, so the window is spent at once. `bucket`: the
    limit refills steadily, so requests are paced. `auto` (default): sliding, until the server throttles a source that
    kept to its limits; then bucket."""

    window_s: PositiveFloat = 60.0
    """Length in seconds of the window that the server counts over; the rates above are scaled to it. Default: 60."""

    burst: PositiveInt = 1
    """Requests that a `bucket` lets through at once. Default: 1."""


class Timeouts(Node):
    """How long one attempt may take."""

    connect_s: PositiveFloat = 10.0
    """Seconds to connect, TLS included. Default: 10."""

    total_s: PositiveFloat = 120.0
    """Seconds for the whole attempt, from sending to the last byte of the reply. Default: 120."""


class Price(Node):
    """What a source charges, in US dollars."""

    input_per_million: NonNegativeFloat = 0.0
    """Dollars for a million prompt tokens. Default: 0."""

    output_per_million: NonNegativeFloat = 0.0
    """Dollars for a million completion tokens. Default: 0."""

    per_request: NonNegativeFloat = 0.0
    """Dollars for a request. Default: 0."""


class SourceConfig(Node):
    """What every source has."""

    kind: str
    """The kind of source: a name that `qreward kinds` lists, or `package.module:Class`."""

    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    price: Price = Price()

    version: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Identifies for the journal what answers here; recorded answers of another version are not used. For a function:
    without a version its answers are recorded but never used again, because the journal cannot see what the function
    imports; change it whenever the function scores differently. For a model or service: it replaces the URLs, for
    servers whose address changes from run to run. Default: none."""

    weight: PositiveFloat = 1.0
    """Share of the requests relative to other sources; only the strategies other than `earliest_finish` heed it.
    Default: 1."""


class EndpointConfig(SourceConfig):
    """What every source has that is asked over HTTP."""

    URL_KEY: ClassVar[str] = "url"
    """The key that holds the URLs. A kind defines it: `url: URLs`."""

    api_key: Annotated[SecretStr, Field(min_length=1)] | None = None
    """The key, best written as `${oc.env:NAME}`. Inline in a trainer's own configuration use `api_key_env`: trainers
    print and upload their configuration with everything resolved."""

    api_key_env: VariableName | None = None
    """Name of the environment variable that holds the key; read when the source is opened."""

    headers: dict[str, SecretStr] = Field(default_factory=dict)
    """Further headers of every request; their values are treated as secrets."""

    parameters: FreeMapping = Field(default_factory=dict)
    """Further keys of every request's body (e.g. `chat_template_kwargs`); they win over what is there otherwise. Values
    under the name of a secret, and those from the environment, are treated as secrets."""

    verify_tls: bool = True
    """Verify the server's certificate. Turn it off for this one source only if you must."""

    max_reply_bytes: PositiveInt = 1_048_576
    """Largest body of a reply in bytes, after decompression; a longer one fails the attempt. Default: 1 MiB."""

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of all replicas, as configured."""
        urls: tuple[str, ...] = getattr(self, self.URL_KEY)
        return urls

    @field_validator("api_key_env")
    @classmethod
    def _one_key(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("api_key") is not None:
            raise ValueError("give api_key or api_key_env, not both")
        return value
