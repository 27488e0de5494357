"""Defines `ReplicaSet`: equal servers of one model, which are started, supervised and stopped with the engine.

The servers run in a pool (`qreward_plugins.replicas`), which all processes of a job share. Requests and replies are
those of the kind `openai` or `reward_model`, whose source does the asking here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationInfo, WrapValidator, field_validator

from ..config.nodes import Flag, PositiveFloat, PositiveInt, no_bool, takes
from ..config.source_models import (
    Batch,
    EndpointConfig,
    FreeMapping,
    ModelName,
    Routing,
    RoutingChoice,
    SourceConfig,
    StreamTimeouts,
)
from ..errors import ConfigurationError, Mistake, QRewardError, ReplicasNotStarted, SourceUnusable, TransientError
from ..redaction import Secret, names_secret, secrets_in, without_secrets
from ..replicas.pool import PoolFailed, ReplicaState
from ..replicas.pool_use import LocalPoolUse, PoolUse
from ..replicas.server_kinds import CHAT, SERVER_KINDS, missing_places
from ..replicas.spec import PoolSpec
from ..replicas.topology import Device, Platform, Topology, TopologyError, check_heads, found_devices, found_platform
from .base import Reply, Request
from .endpoint import Endpoint
from .kind import LOGITS, TEXT, SourceKind
from .openai import OpenAISource
from .provider import Provider
from .reward_model import RewardModelSource
from .reward_protocols import PROTOCOLS

_COMMAND = "command"
_LOG_LINES = 20
_LOG_CHARS = 300
_Word = Annotated[str, WrapValidator(lambda value, read: value if isinstance(value, Secret) else read(value))]
"""A word of a command line. One that comes from the environment is not shown."""
_REPLACED = frozenset({"kind", "version", "api_keys", "api_key_env", "timeouts"})


def _task(value: str) -> str:
    if value != CHAT and value not in PROTOCOLS:
        raise ValueError(f"it is {CHAT}, or a protocol of reward models: {', '.join(PROTOCOLS)}")
    return value


class ReplicaSet(SourceKind):
    """Equal servers of one model, started and supervised here: vLLM, SGLang, llama.cpp or a command.

    Raises ConfigurationError for a topology that the devices or the model do not allow, for arguments that the servers
    get from here, and as the sources do that ask them.
    """

    class Config(EndpointConfig):
        """Servers of one model that start with the engine and end with it. See docs/replicas.md."""

        server: Literal["vllm", "sglang", "llama_cpp"] | None = None
        """The program that serves the model. It must be installed, in this environment or in that of `program`.
        Default: `command`."""

        command: (
            Annotated[tuple[_Word, ...], Field(min_length=1), takes("a list with the words of a command")] | None
        ) = None
        """Another program: the words of its command line, in which `{port}` and `{name}` must occur (and `{host}` with
        `placement: ray`); `{host}`, `{model}` and `{tensor_parallel}` are replaced, too. It must listen on this port,
        list this name at `/v1/models` once it is ready, and end at SIGTERM. Default: none."""

        program: (
            Annotated[tuple[_Word, ...], Field(min_length=1), takes("a list with the words of a command")] | None
        ) = None
        """The beginning of the command line of `server`, for a program of another environment: `[/opt/vllm/bin/python,
        -m, vllm.entrypoints.openai.api_server]`. Default: the module in this Python, or `llama-server`."""

        model: ModelName
        """The model: a folder, or a name of the Hugging Face hub; for llama.cpp a file. Requests give this name."""

        task: Annotated[str, AfterValidator(_task)] = CHAT
        """What the model does. `chat` (default): it writes texts. Otherwise it is a reward model, and this is the
        protocol by which it is asked, as in the kind `reward_model`: `vllm_classify`, `sglang_classify`, ..."""

        data_parallel: PositiveInt = 1
        """Number of replicas. Each is an independent server. Default: 1."""

        tensor_parallel: PositiveInt = 1
        """Devices of each replica; on a CPU, its processes. Default: 1."""

        pipeline_parallel: PositiveInt = 1
        """Only 1 (default): a replica spreads over devices by `tensor_parallel`."""

        expert_parallel: PositiveInt = 1
        """Only 1 (default): a replica spreads over devices by `tensor_parallel`."""

        platform: Literal["auto", "cuda", "rocm", "xpu", "cpu"] = "auto"
        """The devices of the servers. `auto` (default): what this machine has; with `placement: ray`, `cuda` if the
        cluster has GPUs."""

        devices: (
            Annotated[tuple[Annotated[Device, Field(union_mode="left_to_right")], ...], Field(min_length=1)] | None
        ) = None
        """The devices, by index or name; `data_parallel` x `tensor_parallel` of them. The first `tensor_parallel` are
        those of the first replica, and so on. Not with `placement: ray`, where Ray chooses them. Default: those that
        this process may use (`CUDA_VISIBLE_DEVICES` ...), or all of the machine; there must be as many as needed."""

        placement: Literal["local", "ray"] = "local"
        """Where the servers run. `local` (default): on this machine. `ray`: on the Ray cluster of this process, each on
        a placement group of its own with all of its devices on one node."""

        arguments: FreeMapping = Field(default_factory=dict)
        """Further arguments of the server: `max_model_len: 16384` becomes `--max-model-len 16384`, `true` a flag
        without a value, a mapping JSON. `false` becomes `--no-...` for vLLM; for the others it is left out."""

        environment: dict[str, SecretStr] = Field(default_factory=dict)
        """Further variables of the environment of the servers (`HF_TOKEN`, `PYTHONPATH` ...); their values are treated
        as secrets. Default: none; they have the environment of the process that starts them."""

        start_within_s: PositiveFloat = 600.0
        """Seconds within which all replicas must be ready. Default: 600."""

        stop_within_s: PositiveFloat = 5.0
        """Seconds that a replica has to end after SIGTERM, before it is killed. Closing an engine takes 10 s at most;
        servers that have longer end behind it. Default: 5."""

        restarts: Annotated[int, Field(ge=0), BeforeValidator(no_bool), takes("a number from 0 on")] = 3
        """How often in a row a replica that dies is started again, after 1, 2, 4 ... s. After 10 minutes without a
        death the count begins anew. Default: 3."""

        log_folder: Annotated[str, Field(min_length=1)] | None = None
        """Folder of the servers' logs: `NAME-0.log`, `NAME-1.log` ..., of 32 MB each at most. Default: a private one,
        which is removed when the servers stop."""

        vision: Flag = False
        """Whether the model reads images; as in the kinds `openai` and `reward_model`. Default: false."""

        stream: Literal["auto"] | Flag = False
        """Read replies as server-sent events, for `task: chat`; as in the kind `openai`. Default: false."""

        chat_template: Annotated[str, Field(min_length=1)] | None = None
        """The chat template of a reward model; as in the kind `reward_model`. Default: the server renders."""

        batch: Batch | None = None
        """Send several responses in one request, for reward models; as in the kind `reward_model`. Default: one."""

        routing: RoutingChoice = Routing()
        """Which replica a request goes to, as in the kind `openai`. Default: `[prefix_aware, least_pending_tokens]`."""

        timeouts: StreamTimeouts = StreamTimeouts()

        @property
        def urls(self) -> tuple[str, ...]:
            """None: the addresses are known when the servers run."""
            return ()

        @field_validator("command")
        @classmethod
        def _one_of_both(cls, value: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
            if value is not None:
                if info.data.get("server") is not None:
                    raise ValueError("set server or command, not both")
                missing = missing_places(value)
                if missing:
                    raise ValueError(f"a word must hold {' and '.join(missing)}")
            return value

        @field_validator("api_keys", "api_key_env")
        @classmethod
        def _one_key(cls, value: Any) -> Any:
            if isinstance(value, tuple):
                raise ValueError("servers of one's own have one key; set api_key or api_key_env")
            return value

    answers = (TEXT, LOGITS)
    has_servers = True
    usual_latency_s = 2.0

    def __init__(self, name: str, config: Config) -> None:
        super().__init__(name, config)
        self._spec = spec = pool_spec(name, config)
        self._kind = SERVER_KINDS[spec.server]
        self._config = config
        self._inner = _inner(name, config)
        self._use: PoolUse = _use(name, config, spec)
        self._seen = -1
        secrets = [value for key, value in os.environ.items() if names_secret(key)]
        given = [config.arguments, list(config.command or ()), list(config.program or ())]
        self._redactor = self._inner.redactor.beside([*secrets, *spec.environment.values(), *secrets_in(given)])

    @classmethod
    def answered(cls, settings: Mapping[str, Any]) -> tuple[str, ...]:
        return (TEXT,) if settings.get("task", CHAT) == CHAT else (LOGITS,)

    @property
    def spec(self) -> PoolSpec:
        """What its servers are started with."""
        return self._spec

    @property
    def replicas(self) -> tuple[ReplicaState, ...]:
        """The state of each replica; empty before the start."""
        return self._use.states

    @property
    def model(self) -> str:
        return self._config.model

    @property
    def slots(self) -> int | None:
        return self._inner.slots

    @property
    def batch(self) -> Batch | None:
        return self._inner.batch

    def __getattr__(self, member: str) -> Any:
        # The optional members of a source (`demand`, `unmet`, `sent` ...) are those of the source that asks.
        if member.startswith("_"):
            raise AttributeError(member)
        return getattr(self._inner, member)

    @property
    def started(self) -> bool:
        """Whether the servers have been started."""
        return self._use.started

    async def start(self) -> None:
        """Start the servers, or find those that another process has started, and wait until all are ready.

        Raises `ReplicasNotStarted`. Cancelling ends only the wait; `aclose` stops the servers.
        """
        problem, log = "", ""
        try:
            await self._use.start()
        except PoolFailed as error:
            problem, log = self._redactor.of(error.problem, _LOG_CHARS), error.log
            absent = "" if self._config.program or self._config.placement != "local" else self._kind.absent()
            if absent:
                problem += f"; {absent}"
        if problem:
            raise ReplicasNotStarted(f"source {self._name!r} cannot start its servers: {problem}{self._shown(log)}")
        self._look()

    async def send(self, request: Request, *, on_sent: Callable[[], None]) -> Reply:
        """See `Source.send`. The first request starts the servers, if `start` has not."""
        await self._prepare()
        return await self._inner.send(request, on_sent=on_sent)

    async def send_batch(
        self, requests: Sequence[Request], *, on_sent: Callable[[], None]
    ) -> Sequence[Reply | QRewardError]:
        """Send several requests as one; see `Source`."""
        await self._prepare()
        return await self._inner.send_batch(requests, on_sent=on_sent)

    def question(self, request: Request) -> object:
        """See `Endpoint.question`. Addresses and topology change no answer, so they are not part of it."""
        return self._inner.question(request)

    async def aclose(self) -> None:
        """Close the connections, and stop the servers if no other process uses them. Idempotent."""
        try:
            await self._inner.aclose()
        finally:
            await self._use.aclose()

    @classmethod
    def provider(cls, config: Any, environment: Mapping[str, str]) -> Provider:
        """Return what identifies its servers: everything that they are started with."""
        known = config.model_dump(mode="json", exclude=set(SourceConfig.model_fields) - {"kind"})
        return Provider(config.kind, (json.dumps(known, sort_keys=True),), config.model)

    async def _prepare(self) -> None:
        problem = ""
        if not self._use.started:
            try:
                await self.start()
            except ReplicasNotStarted as error:
                problem = str(error)
        if problem:
            raise SourceUnusable(problem, certain=True)
        if self._seen != self._use.version:
            self._look()
        if not self._inner.urls:
            states = self._use.states
            # Without states, the process of the pool has been lost, and is being replaced.
            shown = "; ".join(f"replica {state.number} is {state.state}" for state in states) or "its pool has ended"
            if self._use.ended or (states and all(state.state in ("failed", "stopped") for state in states)):
                raise SourceUnusable(f"source {self._name!r}: no replica is left ({shown})", certain=True)
            raise TransientError(f"source {self._name!r}: no replica is up ({shown})")

    def _look(self) -> None:
        """Take in which replicas are up. The pool reports in another thread, and requests are sent in this one."""
        self._seen = self._use.version
        path = "/v1" if self._config.task == CHAT else ""
        self._inner.move([state.url + path for state in self._use.states if state.url])

    def _shown(self, log: str) -> str:
        lines = [self._redactor.of(line, _LOG_CHARS) for line in log.splitlines()[-_LOG_LINES:]]
        return "".join(["\nthe last lines of its log:", *(f"\n  {line}" for line in lines if line)]) if lines else ""


def pool_spec(name: str, config: ReplicaSet.Config) -> PoolSpec:
    """Return what the servers of a source are started with. Raises ConfigurationError."""
    where = f"sources.{name}"
    if config.server is None and config.command is None:
        raise ConfigurationError([Mistake(f"{where}.server", "no server is named.", "Set server or command.")])
    mistakes: list[Mistake] = []
    server = config.server or _COMMAND
    kind = SERVER_KINDS[server]
    if config.command is not None and config.program is not None:
        mistakes.append(Mistake(f"{where}.program", "it is the beginning of command.", "Leave it out."))
    if (
        config.placement == "ray"
        and config.command is not None
        and not any("{host}" in word for word in config.command)
    ):
        problem = "with `placement: ray` a word must hold {host}, because the servers are asked from other nodes."
        mistakes.append(Mistake(f"{where}.command", problem))
    if not kind.serves(config.task):
        problem = f"{server} does not speak {config.task}."
        mistakes.append(Mistake(f"{where}.task", problem, "Use another server or another protocol."))
    mistakes += [
        Mistake(f"{where}.arguments.{one.argument}", one.problem, one.remedy) for one in kind.refused(config.arguments)
    ]
    topology = None
    try:
        topology = _topology(config)
        if kind.divides_heads:
            check_heads(config.model, config.tensor_parallel)
    except TopologyError as error:
        mistakes.append(Mistake(f"{where}.{error.key}", error.problem, error.remedy))
    if mistakes or topology is None:
        raise ConfigurationError(mistakes)
    return PoolSpec(
        name=name,
        server=server,
        model=config.model,
        topology=topology,
        task=config.task,
        arguments=without_secrets(config.arguments),
        command=tuple(without_secrets(list(config.command or ()))),
        program=tuple(without_secrets(list(config.program or ()))),
        environment={key: value.get_secret_value() for key, value in config.environment.items()},
        start_within_s=config.start_within_s,
        stop_within_s=config.stop_within_s,
        restarts=config.restarts,
        log_folder=None if config.log_folder is None else os.path.abspath(config.log_folder),
    )


def _topology(config: ReplicaSet.Config) -> Topology:
    platform: Platform
    if config.platform != "auto":
        platform = config.platform
    elif config.placement == "ray":
        from ..replicas.ray_pool import cluster_platform

        platform = cluster_platform()
    else:
        platform = "cuda" if config.devices and found_platform() == "cpu" else found_platform()
    devices = config.devices or ()
    if config.devices is None and config.placement == "local":
        devices = found_devices(platform)
    return Topology(
        config.data_parallel,
        config.tensor_parallel,
        devices,
        platform,
        config.pipeline_parallel,
        config.expert_parallel,
        assigned=config.placement == "ray",
    )


def _use(name: str, config: ReplicaSet.Config, spec: PoolSpec) -> PoolUse:
    if config.placement == "local":
        return LocalPoolUse(spec)
    from ..named_actors import missing_ray, ray_is_up
    from ..replicas.ray_pool import RayPoolUse

    if not ray_is_up():
        raise ConfigurationError(
            [Mistake(f"sources.{name}.placement", missing_ray(), "Call ray.init() before you create the engine.")]
        )
    return RayPoolUse(spec)


def _inner(name: str, config: ReplicaSet.Config) -> Endpoint:
    """Make the source that asks the servers. It has no address yet."""
    shared = {key: getattr(config, key) for key in EndpointConfig.model_fields if key not in _REPLACED}
    # What the servers answer depends on the model and its settings, not on where they run.
    known = {"server": config.server or config.command, "model": config.model, "arguments": config.arguments}
    version = config.version or json.dumps(known, sort_keys=True)
    shared.update(base_url=(), version=version, vision=config.vision, api_key_env=config.api_key_env)
    if config.task == CHAT:
        for key in ("chat_template", "batch"):
            if getattr(config, key) is not None:
                raise ConfigurationError(
                    [Mistake(f"sources.{name}.{key}", "only a reward model has it.", "Set task, or leave it out.")]
                )
        chat = OpenAISource.Config(kind="openai", base_url=("http://replicas",), model=config.model)
        shared.update(stream=config.stream, timeouts=config.timeouts)
        return OpenAISource(name, chat.model_copy(update=shared))
    if config.stream:
        raise ConfigurationError(
            [Mistake(f"sources.{name}.stream", "a reward model does not stream.", "Leave it out.")]
        )
    numbers = RewardModelSource.Config(kind="reward_model", base_url=("http://replicas",), model=config.model)
    shared.update(timeouts=config.timeouts, chat_template=config.chat_template, batch=config.batch)
    return RewardModelSource(name, numbers.model_copy(update={**shared, "protocol": config.task}))
