"""The configuration tree: every key, its unit and its default, documented beside it.

The models are frozen, forbid unknown keys, and hold no behaviour: what a key does lives in the room that it configures.
Keys that carry secrets are `SecretStr`, so that printing a configuration prints asterisks.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    SecretStr,
    ValidationInfo,
    field_validator,
)


def _no_bool(value: Any) -> Any:
    # `requests_per_minute: yes` is a mistake, not 1 request a minute.
    if isinstance(value, bool):
        raise ValueError("true and false are not numbers")
    return value


Number = Annotated[FiniteFloat, BeforeValidator(_no_bool)]
PositiveFloat = Annotated[FiniteFloat, Field(gt=0), BeforeValidator(_no_bool)]
NonNegativeFloat = Annotated[FiniteFloat, Field(ge=0), BeforeValidator(_no_bool)]
Integer = Annotated[int, BeforeValidator(_no_bool)]
PositiveInt = Annotated[int, Field(gt=0), BeforeValidator(_no_bool)]
Interval = tuple[Number, Number]


class Node(BaseModel):
    """A node of the configuration tree."""

    # A validation error of pydantic quotes its input, which may be a key.
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, strict=False, hide_input_in_errors=True
    )


def _ascending(interval: Interval | None) -> Interval | None:
    if interval is not None and interval[0] >= interval[1]:
        raise ValueError(f"the low end {interval[0]:g} must be below the high end {interval[1]:g}")
    return interval


def _plain_url(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    authority = rest.split("/", 1)[0]
    if scheme not in ("http", "https") or not separator or not authority:
        raise ValueError("a base URL starts with http:// or https:// and names a host")
    if "@" in authority or "?" in rest or "#" in rest:
        raise ValueError("a base URL holds no credentials, query or fragment; write the key to api_key")
    return url.rstrip("/")


BaseURL = Annotated[str, AfterValidator(_plain_url)]


class Limits(Node):
    """What a source allows. What is declared here is law; what is left out is found out from 429s and from the headers
    in which servers announce their limits."""

    requests_per_minute: PositiveFloat | None = None
    """Requests per minute. Default: none declared."""

    tokens_per_minute: PositiveFloat | None = None
    """Tokens per minute, prompt and completion together. Default: none declared."""

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


class OpenAISource(Node):
    """Any server with an OpenAI-compatible `/chat/completions`."""

    kind: Literal["openai"]

    base_url: Annotated[tuple[BaseURL, ...], Field(min_length=1)]
    """URL up to and including the version, e.g. `https://api.example.com/v1`; or a list of replicas that share the
    limits of this source."""

    model: Annotated[str, Field(min_length=1)]
    """Name of the model, as the server knows it."""

    api_key: Annotated[SecretStr, Field(min_length=1)] | None = None
    """The key, best written as `${oc.env:NAME}`. Inline in a trainer's own configuration use `api_key_env`: trainers
    print and upload their configuration with everything resolved."""

    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Name of the environment variable that holds the key; read when the source is opened."""

    headers: dict[str, SecretStr] = Field(default_factory=dict)
    """Further headers of every request; their values are treated as secrets."""

    parameters: dict[str, Any] = Field(default_factory=dict)
    """Further keys of every request's body (e.g. `chat_template_kwargs`); they win over what the judge asks for."""

    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    price: Price = Price()

    weight: PositiveFloat = 1.0
    """Share of the requests relative to other sources; only the strategies other than `earliest_finish` heed it.
    Default: 1."""

    verify_tls: bool = True
    """Verify the server's certificate. Turn it off for this one source only if you must."""

    max_reply_bytes: PositiveInt = 1_048_576
    """Largest body of a reply in bytes, after decompression; a longer one fails the attempt. Default: 1 MiB."""

    @field_validator("base_url", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("api_key_env")
    @classmethod
    def _one_key(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("api_key") is not None:
            raise ValueError("give api_key or api_key_env, not both")
        return value


class FunctionSource(Node):
    """A Python function that scores; it may be a framework's own reward function."""

    kind: Literal["function"]

    function: Annotated[str, Field(pattern=r"^[^:]+:[A-Za-z_][A-Za-z0-9_.]*$")]
    """`package.module:name` or `path/to/file.py:name`."""

    arguments: Literal["fields", "sample"] = "fields"
    """What the function is called with. `fields` (default): the keywords `data_source`, `solution_str`, `ground_truth`
    and `extra_info`, the convention of reward functions. `sample`: one `Sample`."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of every call."""

    mode: Literal["auto", "process", "thread"] = "auto"
    """Where a sync function runs; async functions are always awaited. `process` (`auto`, the default): in worker
    processes, where a call that hangs is killed. `thread`: in threads, for functions that only wait; a call that hangs
    cannot be killed there and goes on after its time-out."""

    workers: PositiveInt | None = None
    """Worker processes or threads. Default: the number of processors this process may use."""

    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    price: Price = Price()

    weight: PositiveFloat = 1.0
    """Share of the requests relative to other sources; only the strategies other than `earliest_finish` heed it.
    Default: 1."""


Source = Annotated[OpenAISource | FunctionSource, Field(discriminator="kind")]


class _JudgeNode(Node):
    sources: tuple[str, ...] = ()
    """Names of the sources that may answer this judge; a glob over names (`local-*`) or, after `model:`, over models
    (`model:Qwen/*`) means all of its kind that match. Default: all sources of its kind."""

    floor: Number | None = None
    """Score of a response that is empty or cannot be judged, and of an invalid verdict with `on_invalid: floor`.
    Default: the low end of the reward range."""

    on_invalid: Literal["missing", "floor"] = "missing"
    """What becomes of a sample whose verdicts were invalid on every try, when the judge answers other samples well.
    `missing` (default): no reward, as after any failure. `floor`: the floor score; choose it when the policy could
    learn to provoke invalid verdicts in order to escape a bad score."""

    invalid_retries: Annotated[int, Field(ge=0, le=10), BeforeValidator(_no_bool)] = 1
    """Further tries after an invalid verdict, on another source where there is one. Default: 1."""

    correct_at: Number | None = None
    """The reward from which a response counts as correct (the metric `acc`). Default: correctness is not defined."""

    @field_validator("sources", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class LLMJudge(_JudgeNode):
    """A language model that reads the response and gives a score."""

    kind: Literal["llm"]

    instructions: str | None = None
    """What to judge by, as a Jinja2 template (sandboxed). Default: correctness and helpfulness, against the reference
    answer where there is one."""

    system: str | None = None
    """The system message, as a Jinja2 template. Default: a short statement of the judge's role. An empty text: none."""

    criteria: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")], str] = Field(default_factory=dict)
    """Names and descriptions of component scores that the judge gives beside the total, in the same range."""

    score_range: Interval = (0.0, 10.0)
    """The range in which the judge scores. Default: 0 to 10."""

    reward_range: Interval = (0.0, 1.0)
    """The range that the score is mapped to, linearly. Default: 0 to 1."""

    response_format: Literal["json_schema", "json_object", "none"] = "json_schema"
    """What is asked of the server; take `json_object` or `none` for servers without structured output."""

    temperature: NonNegativeFloat = 0.0
    """Sampling temperature. Default: 0."""

    max_tokens: PositiveInt = 512
    """Longest completion in tokens. Default: 512."""

    seed: Integer | None = None
    """Sampling seed asked of the server. Default: none."""

    max_prompt_chars: Annotated[int, Field(ge=1000), BeforeValidator(_no_bool)] = 32_000
    """Longest prompt shown to the judge, in characters; the middle of a longer one is left out. Default: 32,000."""

    max_response_chars: Annotated[int, Field(ge=1000), BeforeValidator(_no_bool)] = 32_000
    """Longest response shown to the judge, in characters; the middle of a longer one is left out. Default: 32,000."""

    _ranges = field_validator("score_range", "reward_range")(_ascending)


class FunctionJudge(_JudgeNode):
    """A reward function's value, taken as the verdict: a number, or a mapping with the key `score`."""

    kind: Literal["function"]

    reward_range: Interval | None = None
    """The range that scores must lie in. Default: any finite number."""

    components: tuple[str, ...] = ()
    """Keys of the function's mapping that go into the metrics. Naming them keeps the metrics of every sample alike,
    failed ones included. Default: every key with a number, as it comes."""

    _ranges = field_validator("reward_range")(_ascending)


Judge = Annotated[LLMJudge | FunctionJudge, Field(discriminator="kind")]


class JournalConfig(Node):
    """The durable record of verdicts."""

    path: Annotated[str, Field(min_length=1)]
    """SQLite file on a local disk; processes of one machine may share it."""

    reuse: bool = True
    """Answer a sample that was scored before (same judge, data source, prompt, response, ground truth and extras) out
    of the journal instead of asking again. Default: true."""


Strategy = Literal["earliest_finish", "round_robin", "weighted", "least_requests", "least_tokens"]


class Scheduling(Node):
    """How samples are spread over the sources of their judge."""

    strategy: Strategy = "earliest_finish"
    """How a source is chosen among those that can send now. `earliest_finish` (default): by learned latency, quota and
    health, so that the batch ends soonest. `round_robin`: in turn. `weighted`: in turn, by the sources' `weight`.
    `least_requests`, `least_tokens`: the one with the least in flight for its `weight`."""

    prefer: Literal["speed", "cost"] = "speed"
    """`speed` (default): use every source. `cost`: use only the cheapest sources (by `price`) that together end
    everything that waits within half of the time that is left to its deadline, and hedge only what is overdue."""

    hedge: bool = True
    """Start a second attempt at another source where the first takes much longer than it should; the first verdict
    counts and the other attempt is cancelled. `off`: never. Default: on."""

    hedge_budget: Annotated[FiniteFloat, Field(gt=0, le=1), BeforeValidator(_no_bool)] = 0.25
    """Hedges of a batch, as a share of its samples, at most (a small batch may have 4). Default: 0.25."""


class EngineConfig(Node):
    """How samples are scored, whatever the judge."""

    deadline_s: PositiveFloat = 300.0
    """Seconds from handing a sample in to its outcome, always kept. Default: 300."""

    max_attempts: PositiveInt = 6
    """Attempts a sample gets; being throttled does not count. Default: 6."""

    seed: Integer | None = None
    """Seed of backoff and of the fences around untrusted text. Default: drawn by the operating system."""

    scheduling: Scheduling = Scheduling()

    journal: JournalConfig | None = None
    """Where verdicts are recorded. Default: nowhere."""


class Constant(Node):
    """Train failed samples on a fixed number. Read the README before you choose it."""

    constant: Number
    """The reward of a failed sample."""


class Config(Node):
    """The whole tree."""

    sources: Annotated[dict[str, Source], Field(min_length=1)]
    """The sources, by name."""

    judges: Annotated[dict[str, Judge], Field(min_length=1)]
    """The judges, by name."""

    routes: dict[str, str] = Field(default_factory=dict)
    """Which judge scores which data source: glob pattern to name of the judge, the first match wins. Default: the one
    judge for everything."""

    engine: EngineConfig = EngineConfig()

    on_failure: Literal["exclude", "raise"] | Constant = "exclude"
    """What an adapter does with a sample that has no reward. `exclude` (default): leave it out of training in the
    framework's own way. `raise`: stop the run. `{constant: x}`: train it on x."""
