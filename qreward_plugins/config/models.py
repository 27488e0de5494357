"""Defines the configuration tree: every key with its unit and its default.

The models are frozen, forbid unknown keys and have no behaviour. Secrets are `SecretStr`, so that printing a
configuration prints asterisks. Each kind of source and of judge has its own model, which the key `kind` selects. A kind
of judge (in `qreward_plugins.judges`) adds its own keys in a model that inherits `JudgeConfig`, or `AskingConfig` if it
asks sources.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    FiniteFloat,
    PrivateAttr,
    SecretStr,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import PydanticCustomError

from . import registry
from .nodes import (
    FactoryPath,
    Flag,
    Integer,
    JudgeName,
    Node,
    Number,
    OneOrMore,
    PositiveFloat,
    PositiveInt,
    Priority,
    Several,
    SourceName,
    alone,
    no_bool,
    takes,
)
from .registry import KindError, Kinds
from .source_models import Budget, ServerURL, SourceConfig, VariableName

if TYPE_CHECKING:
    from .load import Origin


def _ascending(interval: tuple[float, float]) -> tuple[float, float]:
    if interval[0] >= interval[1]:
        raise ValueError(f"the low end {interval[0]:g} must be below the high end {interval[1]:g}")
    return interval


Interval = Annotated[
    tuple[Number, Number], AfterValidator(_ascending), takes("a list of two numbers, the low and the high end")
]
"""The low and the high end of a range."""


class JudgeConfig(Node):
    """The keys of every judge."""

    kind: str
    """The kind of judge: a name that `qreward check --kinds` lists, or `package.module:Class`."""

    priority: Priority | None = None
    """Priority of the samples that go to this judge, if their route sets none: `high`, `normal`, `low`, or a whole
    number. Parts of a judge go by the priority of the whole. Default: that of the split (`engine.priority`)."""


class AskingConfig(JudgeConfig):
    """The keys of every judge that asks sources."""

    sources: Several[SourceName] = ()
    """Names of the sources that may answer this judge. A glob over names (`local-*`) or over models (`model:Qwen/*`)
    selects all matching sources that can answer. Default: all sources that give what its kind asks for."""

    floor: Number | None = None
    """Score of a response that is empty or cannot be judged, and of an invalid verdict with `on_invalid: floor`.
    Default: the low end of the reward range."""

    on_invalid: Literal["missing", "floor"] = "missing"
    """What happens to a sample whose verdicts are invalid on every try, while the judge answers other samples well.
    `missing` (default): no reward, as after any failure. `floor`: the floor score; choose it if the policy could learn
    to provoke invalid verdicts in order to avoid a bad score."""

    invalid_retries: Annotated[int, Field(ge=0, le=10), BeforeValidator(no_bool)] = 1
    """Further tries after an invalid verdict, on another source if there is one. Default: 1."""

    reward_range: Interval | None = None
    """The range of the rewards. Default: any finite number."""

    correct_at: Number | None = None
    """The reward from which a response counts as correct (the metric `acc`). Default: correctness is not defined."""


class ImageLimits(Node):
    """What is sent of the images of a sample."""

    max_count: PositiveInt = 16
    """Most images of a sample, those of the prompt and of the response together. A sample with more fails. Default:
    16."""

    max_side: Annotated[int, Field(ge=16), BeforeValidator(no_bool)] = 2048
    """Longest side in pixels. A larger image is scaled down to it. Default: 2048."""

    max_bytes: PositiveInt = 5_242_880
    """Largest image in bytes, as it is sent, without the third that base64 adds. If an image is larger after it was
    scaled down, its sample fails. Default: 5,242,880 (5 MiB)."""

    folder: Annotated[str, Field(min_length=1)] | None = None
    """Folder of the images whose paths stand in prompts; a path that leads out of it is refused. Default: none, and a
    sample with a path fails."""

    allow_urls: Flag = False
    """Whether http and https URLs of images are passed on to the server, which then fetches them. A prompt from others
    can make the server call any address in its network. Such answers are not used again from a journal. Default:
    false, and a sample with such a URL fails. URLs are never fetched here."""


def _pattern(text: str) -> str:
    try:
        pattern = re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    if pattern.search("") is not None:
        raise ValueError("the pattern matches an empty text, so it would match between all characters")
    return text


class JournalConfig(Node):
    """The durable record of verdicts."""

    path: Annotated[str, Field(min_length=1)]
    """SQLite file on a local disk; processes of one machine may share it."""

    reuse: Flag = True
    """Use a recorded answer instead of asking again. This requires the same request, the same source, and a judge that
    reads replies in the same way. Keys that only map the score (`reward_range`, `correct_at`, `floor`, `weights`) may
    differ. Answers of a function are used again only if its source has a `version`. Default: true."""

    keep: Literal["interesting", "all", "none"] = "interesting"
    """Whose texts are kept for `qreward why`: prompt, response, what was sent, and each reply. `interesting` (default):
    of samples without a reward or with a floor, of those with an invalid reply, and in each step about 8 of the best, 8
    of the worst, and 32 at random. `all`: of all samples. `none`: numbers and rationales only."""

    texts_mb: PositiveFloat = 4096.0
    """Size of the file in MB (10^6 bytes) above which the oldest texts are deleted. Numbers are never deleted. Default:
    4096."""

    redact: Annotated[
        Several[Annotated[str, AfterValidator(_pattern)]], takes("a regular expression, or a list of them")
    ] = ()
    """Regular expressions. In all texts that the journal records, `[redacted]` replaces what one of them matches; what
    judges and trainers get stays as it is. Default: none."""


Strategy = Literal["earliest_finish", "round_robin", "weighted", "least_requests"]


class Scheduling(Node):
    """How samples are distributed over the sources of their judge."""

    strategy: Strategy = "earliest_finish"
    """How a source is chosen among those that can send now. `earliest_finish` (default): by learned latency, quota and
    health, so that the batch ends soonest. `round_robin`: in turn. `weighted`: in turn, by the sources' `weight`.
    `least_requests`: the source with the fewest requests in flight relative to its `weight`."""

    prefer: Literal["speed", "cost"] = "speed"
    """`speed` (default): use every source. `cost`: use only the cheapest sources (by `price`) that together finish all
    waiting samples within half of the time left to their deadline, and hedge only overdue attempts."""

    hedge: Flag = True
    """Start a second attempt at another source if the first takes much longer than expected. The first verdict counts,
    and the other attempt is cancelled. `off`: never. Default: on."""

    hedge_budget: Annotated[FiniteFloat, Field(gt=0, le=1), BeforeValidator(no_bool)] = 0.25
    """Most hedges of a batch, as a share of its samples (a small batch may have 4). In a sum, every part counts as one.
    Default: 0.25."""


class Priorities(Node):
    """The priority of samples by split: `high` (10), `normal` (0), `low` (-10), or a whole number. Waiting samples of a
    higher priority go first; those under way go on."""

    train: Priority = 0
    """Samples of training, and samples without a split. Default: normal."""

    validation: Priority = 0
    """Samples of a validation. Default: normal."""


def _off(value: Any) -> Any:
    # YAML reads the bare word `off` as false.
    return "off" if value is False else value


class ServerConfig(Node):
    """A reward server (`qreward serve`) that scores instead of this process."""

    url: ServerURL
    """Its address, e.g. `http://10.0.0.5:8080`."""

    token: SecretStr | None = None
    """The token that it expects. Better is `token_env`. Default: none."""

    token_env: VariableName | None = None
    """The environment variable that holds the token. Default: none."""

    start_s: PositiveFloat = 60.0
    """Most seconds for which a new engine waits for the server to answer. Default: 60."""


class EngineConfig(Node):
    """How samples are scored, for all judges."""

    deadline_s: PositiveFloat = 300.0
    """Most seconds from the submission of a sample to its outcome. The engine always keeps this limit. Default: 300."""

    max_attempts: PositiveInt = 6
    """Most attempts of a sample; attempts that are throttled, or probe a source whose circuit is open, do not
    count. Default: 6."""

    seed: Integer | None = None
    """Seed of backoff and of the fences around untrusted text. Default: drawn by the operating system."""

    reload: Flag = False
    """`on`: watch the YAML file of the configuration, and apply its changes while the engine runs, or refuse them as a
    whole with one line in the log (docs/limits.md). Default: off."""

    shared: Annotated[Literal["auto", "ray", "machine", "local", "off"], BeforeValidator(_off)] = "auto"
    """How several processes share the limits of the same sources. A keeper gives each process the share of each limit
    that it can use: with `ray` for the processes of a Ray job, with `machine` for all processes of one user on one
    machine. `local`: each process uses an equal, fixed share of every limit (the adapters know the number of
    processes). `off`: each process uses the whole limits. `auto` (default): `ray` if Ray is initialised in the process
    and not all sources are functions without limits; otherwise `machine` if a source declares requests or tokens per
    minute or there is a budget, but `local` for an engine with `processes` above 1. Windows has no `machine`."""

    ask_once: Flag | None = None
    """Ask a language model once if several samples of this process put the same question to it at the same time: equal
    responses of a group get the same reward. If that call fails, each asks for itself. Default: on with a journal that
    reuses answers, otherwise off."""

    budget: Budget | None = None
    """What all sources together may spend; those without a `price` cost nothing. Default: no bound."""

    scheduling: Scheduling = Scheduling()

    priority: Annotated[Priorities, takes("a mapping with `train` and `validation`")] = Priorities()
    """Which split goes first. The priority of a route comes before that of a judge, and that before the split's; the
    `priority` of a call comes before all of them."""

    journal: JournalConfig | None = None
    """Where verdicts are recorded. Default: no journal."""

    server: Annotated[ServerConfig | None, alone("url"), takes("a URL, or a mapping with `url`")] = None
    """A reward server that scores instead of this process: its URL, or a mapping with `url` and `token_env`. Sources,
    judges, routes, journal and scheduling are then those of the server, and must not be set here. Of the keys of
    `engine`, `deadline_s` and `priority` count here. Default: none."""


class Route(Node):
    """The samples of some data sources: their judge, and how urgent they are."""

    judge: JudgeName
    """The name of the judge."""

    priority: Priority | None = None
    """Priority of these samples: `high`, `normal`, `low`, or a whole number. Default: that of the judge, otherwise
    that of the split."""

    latency_sensitive: Flag = False
    """Start hedges as early as if no other sample waited. A hedge then takes a place that a waiting sample would have
    had. `scheduling.hedge_budget` holds. Default: false."""


class ModelRoute(Node):
    """Which sources answer the clients that ask for a model; see docs/server.md."""

    sources: Annotated[OneOrMore[SourceName], takes("the name of a source, or a list of names")]
    """Names of the sources, or globs over names or, after `model:`, over models. A request goes to those of them that
    speak its format; if one fails, another one gets it. Each is asked for its own `model`."""

    strategy: Strategy | None = None
    """How a source is chosen among those that can send now, as `engine.scheduling.strategy`. Default: that of
    `engine.scheduling`."""


class Constant(Node):
    """Train failed samples with a fixed reward. See docs/failures.md before you choose it."""

    constant: Number
    """The reward of a failed sample."""


FailurePolicy: TypeAlias = Annotated[
    Literal["auto", "neutral", "exclude", "raise"] | Constant,
    takes("`auto`, `neutral`, `exclude`, `raise`, or a mapping with `constant`"),
]
"""What an adapter does with a sample that has no reward."""


class Groups(Node):
    """The samples of one prompt: how many must have a reward, and how long they wait for each other."""

    wait_s: PositiveFloat = 300.0
    """Most seconds, from its failure, that a failed trajectory of an agentic pipeline of ROLL waits for siblings that
    other processes score, to get their mean. After that it gets the mean of the scored siblings. Default: 300."""

    min_scored: Annotated[Literal["all"] | PositiveInt, takes("`all`, or a whole number above 0")] = 2
    """Samples of a group that must have a reward (in a smaller group: all of them). If the framework can replace a
    group (slime, ROLL), a group with fewer is dropped and another prompt is used. `all`: every sample. Default: 2,
    because a single sample cannot be compared with another one."""

    give_up_after: PositiveInt = 256
    """Number of groups without enough rewards, in a row, after which the run ends with an error. Without this limit, a
    judge that is down would cause prompts to be replaced for ever (slime, ROLL). verl counts those of steps that train
    on nothing, and ends after three such steps at the earliest. Default: 256."""


def _by_kind(room: Kinds[Any]) -> Callable[[Any, ValidationInfo], Any]:
    """Return a validator that reads a node with the model of its kind. pydantic adds the place to its errors."""

    def read(node: Any, info: ValidationInfo) -> Any:
        if not isinstance(node, Mapping):
            return node
        problem, names, name = "", info.context, node.get("kind")
        try:
            kind = room.load(name if isinstance(name, str) else "")
            return kind.Config.model_validate(node, context=None if names is None else names.within(node, kind))
        except ValidationError:
            raise
        except KindError as error:
            problem = str(error)
        except Exception as error:
            # A validator of another package may raise any error, and its message may quote a secret.
            problem = f"its kind cannot read it: a validator raised {type(error).__name__}"
        raise PydanticCustomError("unreadable", "{problem}", {"problem": problem})

    return read


def _not_empty(name: str) -> str:
    if not name:
        raise ValueError("a name must not be empty")
    return name


def _without_number(name: str) -> str:
    if re.search(r"#[1-9][0-9]*$", name):
        raise ValueError("a name must not end in # and a number; the keys of a source with several keys are named so")
    return _not_empty(name)


class Config(Node):
    """The whole tree."""

    sources: dict[
        Annotated[str, AfterValidator(_without_number)],
        SerializeAsAny[Annotated[SourceConfig, BeforeValidator(_by_kind(registry.sources))]],
    ] = Field(default_factory=dict)
    """The sources, by name. Required, unless `engine.server` is set."""

    judges: dict[
        Annotated[str, AfterValidator(_not_empty)],
        SerializeAsAny[Annotated[JudgeConfig, BeforeValidator(_by_kind(registry.judges))]],
    ] = Field(default_factory=dict)
    """The judges, by name. Only a file for clients, with `models`, and one with `engine.server` need none."""

    routes: dict[str, Annotated[Route, alone("judge"), takes("the name of a judge, or a mapping with `judge`")]] = (
        Field(default_factory=dict)
    )
    """Which judge scores which data source: a mapping from glob pattern to the name of a judge, or to a mapping with
    `judge`, `priority` and `latency_sensitive`; the first match wins.
    Default: the one judge scores everything; judges that are only parts of others do not count."""

    models: dict[str, ModelRoute] = Field(default_factory=dict)
    """Which sources answer the clients of a transport or a server that ask for a model: a mapping from glob pattern
    over models to a group of sources; the first match wins. It does not concern judges; with it, `judges` may be left
    out. Default: each model is answered by the sources whose `model` it is."""

    engine: EngineConfig = EngineConfig()

    observers: Several[FactoryPath] = ()
    """The observers in every process that scores: `package.module:factory` or `path/to/file.py:factory`. The factory is
    called without arguments, and returns the observer, which is called with every event. Default: none."""

    on_failure: FailurePolicy = "auto"
    """What an adapter does with a sample that has no reward. `auto` (default): keep it out of training in the
    framework's own way; `neutral` and `exclude` do the same. `raise`: stop the run. `{constant: x}`: train it with the
    reward x."""

    dense: Flag = False
    """Whether the trainer gets a reward in parts, each at the last token of the step or turn that it is for: what a
    process reward model with `reduce` and a judge of kind `turns` say of each step. The parts add up to the reward.
    verl has a place for them, and so have the pipelines of ROLL with a row for each step. Default: false, and the whole
    reward is at the last token of the response."""

    groups: Groups = Groups()

    _origin: Origin | None = PrivateAttr(default=None)
