"""The configuration tree: every key, its unit and its default, documented beside it.

The models are frozen, forbid unknown keys, and hold no behaviour: what a key does lives in the room that it configures.
Keys that carry secrets are `SecretStr`, so that printing a configuration prints asterisks. Each kind of source has a
model of its own, which is found by the key `kind`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    FiniteFloat,
    SerializeAsAny,
    ValidationError,
    field_validator,
)
from pydantic_core import PydanticCustomError

from ..registry import KindError
from ..registry import sources as source_kinds
from .nodes import Integer, Node, NonNegativeFloat, Number, PositiveFloat, PositiveInt, no_bool, one_or_several
from .source_models import EndpointConfig, Limits, Price, SourceConfig, Timeouts

__all__ = [
    "AskingJudge",
    "Config",
    "Constant",
    "EndpointConfig",
    "EngineConfig",
    "FailurePolicy",
    "FunctionJudge",
    "Groups",
    "JournalConfig",
    "Judge",
    "LLMJudge",
    "Limits",
    "Node",
    "Price",
    "Scheduling",
    "SourceConfig",
    "Strategy",
    "SumJudge",
    "Timeouts",
]

Interval = tuple[Number, Number]


def _ascending(interval: Interval | None) -> Interval | None:
    if interval is not None and interval[0] >= interval[1]:
        raise ValueError(f"the low end {interval[0]:g} must be below the high end {interval[1]:g}")
    return interval


class _JudgeNode(Node):
    sources: tuple[str, ...] = ()
    """Names of the sources that may answer this judge; a glob over names (`local-*`) or, after `model:`, over models
    (`model:Qwen/*`) means all that match and can answer. Default: all that can, which for a judge of kind `llm` are
    those of kind `openai`, and for one of kind `function` those of kinds `function` and `http`."""

    floor: Number | None = None
    """Score of a response that is empty or cannot be judged, and of an invalid verdict with `on_invalid: floor`.
    Default: the low end of the reward range."""

    on_invalid: Literal["missing", "floor"] = "missing"
    """What becomes of a sample whose verdicts were invalid on every try, when the judge answers other samples well.
    `missing` (default): no reward, as after any failure. `floor`: the floor score; choose it when the policy could
    learn to provoke invalid verdicts in order to escape a bad score."""

    invalid_retries: Annotated[int, Field(ge=0, le=10), BeforeValidator(no_bool)] = 1
    """Further tries after an invalid verdict, on another source where there is one. Default: 1."""

    correct_at: Number | None = None
    """The reward from which a response counts as correct (the metric `acc`). Default: correctness is not defined."""

    _names = field_validator("sources", mode="before")(one_or_several)


class LLMJudge(_JudgeNode):
    """A language model that reads the response and gives a score."""

    kind: Literal["llm"]

    invalid_retries: Annotated[int, Field(ge=0, le=10), BeforeValidator(no_bool)] = 3
    """Further tries after an invalid verdict, on another source where there is one. Default: 3, so that a judge that
    answers one request in ten with prose loses one sample in ten thousand."""

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

    max_prompt_chars: Annotated[int, Field(ge=1000), BeforeValidator(no_bool)] = 131_072
    """Longest prompt shown to the judge, in characters; also the limit of the reference, and of each further column
    that the instructions show. Default: 131,072, which is about 32,000 tokens."""

    max_response_chars: Annotated[int, Field(ge=1000), BeforeValidator(no_bool)] = 262_144
    """Longest response shown to the judge, in characters. Default: 262,144, which is about 64,000 tokens: a long chain
    of thought. Give a smaller number if the judge's context window is smaller: it would refuse the request."""

    on_too_long: Literal["cut", "fail", "floor"] = "cut"
    """What happens to a sample whose prompt or response is longer. `cut` (default): the judge sees both ends and is
    told how much is left out between them; the verdict is marked (`Verdict.cut`, the metric `cut_rate`). `fail`: no
    reward (reason `too_long`). `floor`: the floor score if the response is too long; no reward if only the prompt or
    another text is, because the policy did not write those."""

    _ranges = field_validator("score_range", "reward_range")(_ascending)


class FunctionJudge(_JudgeNode):
    """The value of a reward function or a scoring service (sources of kind `function` and `http`), taken as the
    verdict: a number, or a mapping with the key `score`."""

    kind: Literal["function"]

    reward_range: Interval | None = None
    """The range that scores must lie in. Default: any finite number."""

    components: tuple[str, ...] = ()
    """Keys of the mapping that go into the metrics. Naming them keeps the metrics of every sample alike,
    failed ones included. Default: every key with a number, as it comes."""

    _ranges = field_validator("reward_range")(_ascending)


def _weighs(weight: float) -> float:
    if weight == 0:
        raise ValueError("a weight of 0 adds nothing; leave the judge out of the sum, or give it another weight")
    return weight


class SumJudge(Node):
    """Several rewards for one sample: other judges of this configuration score it, and what they say is added up."""

    kind: Literal["sum"]

    weights: Annotated[dict[str, Annotated[Number, AfterValidator(_weighs)]], Field(min_length=1)]
    """The judges whose rewards are added, by name, and what each reward is multiplied by; a negative weight makes a
    penalty of it. They may be sums themselves. Every one of them scores the sample; the sum is missing where one of
    their rewards is."""

    correct_at: Number | None = None
    """The sum from which on the response counts as correct. Default: the sum says nothing about it."""


AskingJudge: TypeAlias = LLMJudge | FunctionJudge
"""The judges that ask sources."""

Judge = Annotated[LLMJudge | FunctionJudge | SumJudge, Field(discriminator="kind")]


class JournalConfig(Node):
    """The durable record of verdicts."""

    path: Annotated[str, Field(min_length=1)]
    """SQLite file on a local disk; processes of one machine may share it."""

    reuse: bool = True
    """Use a recorded answer instead of asking again. All that is sent must be the same, and so must who is asked and
    how the judge reads the reply; what is done with the score (`reward_range`, `correct_at`, `floor`, `weights`) may
    differ. Answers of a function are used again only if its source has a `version`. Default: true."""


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

    hedge_budget: Annotated[FiniteFloat, Field(gt=0, le=1), BeforeValidator(no_bool)] = 0.25
    """Hedges of a batch, as a share of its samples, at most (a small batch may have 4); of a sum every part counts as
    one. Default: 0.25."""


def _off(value: Any) -> Any:
    # YAML takes the bare word for a boolean.
    return "off" if value is False else value


class EngineConfig(Node):
    """How samples are scored, whatever the judge."""

    deadline_s: PositiveFloat = 300.0
    """Seconds from handing a sample in to its outcome, always kept. Default: 300."""

    max_attempts: PositiveInt = 6
    """Attempts a sample gets; being throttled does not count. Default: 6."""

    seed: Integer | None = None
    """Seed of backoff and of the fences around untrusted text. Default: drawn by the operating system."""

    shared: Annotated[Literal["auto", "ray", "local", "off"], BeforeValidator(_off)] = "auto"
    """How processes that use the same sources keep to one limit. `ray`: a keeper, an actor of the Ray job, gives every
    process the share of each limit that it can use. `local`: each process keeps to an equal, fixed share of every limit
    (the adapters know how many there are). `off`: each process takes the limits for its own. `auto` (default): `ray`
    where Ray is initialised in the process, or else `local`."""

    scheduling: Scheduling = Scheduling()

    journal: JournalConfig | None = None
    """Where verdicts are recorded. Default: nowhere."""


class Constant(Node):
    """Train failed samples on a fixed number. Read the README before you choose it."""

    constant: Number
    """The reward of a failed sample."""


FailurePolicy: TypeAlias = Literal["auto", "neutral", "exclude", "raise"] | Constant
"""What becomes of a sample without a reward."""


class Groups(Node):
    """The samples of one prompt: how long they wait for each other, and when they are worth training."""

    wait_s: PositiveFloat = 300.0
    """Seconds that a failed sample waits for its siblings at most, from its failure, where other processes score them
    and it is to get their mean (verl, `on_failure: neutral`); then it gets the mean of those that are scored. Default:
    300."""

    min_scored: Literal["all"] | PositiveInt = 2
    """Samples of a group that must have a reward (a smaller group: all of them); where the framework can replace a
    group (slime, ROLL), one with fewer is dropped, and another prompt takes its place. `all`: every one. Default: 2,
    because one alone has nothing to compare with."""

    give_up_after: PositiveInt = 256
    """Groups dropped in a row after which the run ends with an error, because a judge that is down would have prompts
    replaced for ever. Default: 256."""


def _source(node: Any) -> Any:
    """A source, as the model of its kind reads it. pydantic adds the place of the source to what that model finds."""
    if not isinstance(node, Mapping):
        return node
    try:
        kind = source_kinds.load(str(node.get("kind")))
    except KindError as error:
        said = error.problem
        raise PydanticCustomError(NO_KIND, "{said}", {"said": said}) from None
    try:
        return kind.Config.model_validate(node)
    except ValidationError:
        raise
    except Exception as error:
        # A validator of another package may raise anything, and say anything of the value.
        said = f"its kind cannot read it: a validator raised {type(error).__name__}"
    raise PydanticCustomError("unreadable", "{said}", {"said": said})


NO_KIND = "no_kind"
"""The type of pydantic's error for a node whose kind cannot be used. Reading the keys has reported that."""


class Config(Node):
    """The whole tree."""

    sources: Annotated[
        dict[str, SerializeAsAny[Annotated[SourceConfig, BeforeValidator(_source)]]], Field(min_length=1)
    ]
    """The sources, by name."""

    judges: Annotated[dict[str, Judge], Field(min_length=1)]
    """The judges, by name."""

    routes: dict[str, str] = Field(default_factory=dict)
    """Which judge scores which data source: glob pattern to name of the judge, the first match wins. Default: the one
    judge for everything; judges that are only parts of a sum do not count."""

    engine: EngineConfig = EngineConfig()

    on_failure: FailurePolicy = "auto"
    """What an adapter does with a sample that has no reward. `auto` (default): what the framework does best; with verl
    `neutral` where the advantage estimator compares the samples of a group, `exclude` elsewhere. `neutral`: give it the
    mean of its group's scored samples, so that its advantage is zero. `exclude`: leave it out of training in the
    framework's own way; with slime and ROLL these three are one. `raise`: stop the run. `{constant: x}`: train it on
    x."""

    groups: Groups = Groups()
