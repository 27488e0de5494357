"""The nodes of the tree below `sources`: every key, its unit and its default, documented beside it.

What all sources have, and what all that are asked over HTTP have, stands once; a kind adds what is its own.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SecretStr, ValidationInfo, field_validator

from ..redaction import with_secrets
from .nodes import Node, NonNegativeFloat, PositiveFloat, PositiveInt, one_or_several


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
"""A mapping with any keys, for a function or a server. A value under the name of a secret (`api_key`, `token`), or from
the environment, is never shown."""


def _plain_name(name: str) -> str:
    if "://" in name and "@" in name:
        # The name is shown in metrics, messages and the journal.
        raise ValueError("a model's name holds no credentials; a key goes into api_key or headers")
    return name


ModelName = Annotated[str, Field(min_length=1), AfterValidator(_plain_name)]
ServiceURL = Annotated[str, AfterValidator(_plain_url)]
BaseURL = Annotated[ServiceURL, AfterValidator(_without_slash)]


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


class AnySource(Node):
    """What every source has."""

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


class Endpoint(AnySource):
    """What every source has that is asked over HTTP."""

    api_key: Annotated[SecretStr, Field(min_length=1)] | None = None
    """The key, best written as `${oc.env:NAME}`. Inline in a trainer's own configuration use `api_key_env`: trainers
    print and upload their configuration with everything resolved."""

    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
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

    @field_validator("api_key_env")
    @classmethod
    def _one_key(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("api_key") is not None:
            raise ValueError("give api_key or api_key_env, not both")
        return value


class OpenAISource(Endpoint):
    """Any server with an OpenAI-compatible `/chat/completions`."""

    kind: Literal["openai"]

    base_url: Annotated[tuple[BaseURL, ...], Field(min_length=1)]
    """URL up to and including the version, e.g. `https://api.example.com/v1`; or a list of replicas that share the
    limits of this source."""

    model: ModelName
    """Name of the model, as the server knows it."""

    _urls = field_validator("base_url", mode="before")(one_or_several)


SamplePart = Literal[
    "prompt",
    "messages",
    "conversation",
    "response",
    "ground_truth",
    "data_source",
    "extras",
    "group_id",
    "id",
]


def _remote_rm_body() -> dict[str, SamplePart]:
    return {"prompt": "prompt", "response": "response", "label": "ground_truth"}


class HTTPSource(Endpoint):
    """Any service that is sent a sample as JSON and answers with its score: a reward model's server, a rule service,
    what slime calls a remote reward model."""

    kind: Literal["http"]

    url: Annotated[tuple[ServiceURL, ...], Field(min_length=1)]
    """The whole URL that requests are posted to, e.g. `http://localhost:8000/score`; or a list of replicas that share
    the limits of this source. It has no query: URLs are shown in messages and metrics."""

    model: ModelName | None = None
    """Name of what scores there, for metrics; for the journal it replaces the URLs, as `version` does. Default: the
    first URL without its scheme. Set it if the address changes from run to run."""

    body: Annotated[dict[str, SamplePart], Field(min_length=1)] = Field(default_factory=_remote_rm_body)
    """The keys of the body, and what of the sample each holds. `prompt`: the text of a prompt that is one user message,
    else its messages; `messages`: the prompt as a list of messages; `conversation`: that list with the response as the
    assistant's turn at its end; `response`, `ground_truth`, `data_source`, `extras`, `group_id` and `id` (two samples
    that differ only in a part that is sent never share an answer of the journal). Keys with a constant value go into
    `parameters`. Default: `{prompt: prompt, response: response, label: ground_truth}`, what slime posts to its
    `--rm-url`."""

    score_key: Annotated[str, Field(pattern=r"^[^.]+(\.[^.]+)*$")] | None = None
    """Where in the reply the value stands: keys joined by dots, a number for an item of a list (`data.score`,
    `results.0.score`). Default: the whole reply is the value, a number or a mapping with `score`."""

    _urls = field_validator("url", mode="before")(one_or_several)

    @field_validator("body")
    @classmethod
    def _sends_the_response(cls, body: dict[str, SamplePart]) -> dict[str, SamplePart]:
        if not {"response", "conversation"} & set(body.values()):
            raise ValueError("no key holds the response; add `response: response`, or one that holds `conversation`")
        return body


class FunctionSource(AnySource):
    """A Python function that scores; it may be a framework's own reward function."""

    kind: Literal["function"]

    function: Annotated[str, Field(pattern=r"^[^:]+:[A-Za-z_][A-Za-z0-9_.]*$")]
    """`package.module:name` or `path/to/file.py:name`."""

    arguments: Literal["fields", "sample"] = "fields"
    """What the function is called with. `fields` (default): the keywords `data_source`, `solution_str`, `ground_truth`
    and `extra_info`, the convention of reward functions. `sample`: one `Sample`."""

    kwargs: FreeMapping = Field(default_factory=dict)
    """Further keyword arguments of every call. Values under the name of a secret (`api_key`, `token`, `password`), and
    those from the environment, are treated as secrets."""

    mode: Literal["auto", "process", "thread"] = "auto"
    """Where a sync function runs; async functions are always awaited. `process` (`auto`, the default): in worker
    processes, where a call that hangs is killed. `thread`: in threads, for functions that only wait; a call that hangs
    cannot be killed there and goes on after its time-out. A sample whose call crashes is tried once more, after
    all other samples. While other samples wait and no worker is free, a call is ended before `timeouts.total_s` once it
    takes 8 times as long as usual, and at least 5 s (15 s while no call has ended yet). Its sample, too, is tried once
    more after the others, and then has the whole `timeouts.total_s`. A call that had that is not tried again."""

    workers: PositiveInt | None = None
    """Worker processes or threads. Default: the number of processors this process may use; up to 8 more processes run
    the last tries of samples that hung, so that these do not wait for each other, unless `limits` has a `concurrency`
    or a number of requests."""


Source = Annotated[OpenAISource | HTTPSource | FunctionSource, Field(discriminator="kind")]
