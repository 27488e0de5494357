"""The keys of a source of kind `replicas`, and the parts that they mean: the spec of its pool, and the inner source.

The parts come from the configuration alone. Nothing is started here.
"""

from __future__ import annotations

import json
import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationInfo, WrapValidator, field_validator

from ..config.nodes import Flag, PositiveFloat, PositiveInt, no_bool, takes
from ..config.registry import sources
from ..config.source_models import (
    PREFIX_AWARE,
    Batch,
    EndpointConfig,
    FreeMapping,
    ModelName,
    Routing,
    StreamTimeouts,
    VariableName,
)
from ..errors import ConfigurationError, Mistake
from ..replicas.server_kinds import (
    CHAT,
    SERVER_KINDS,
    VARIABLES,
    Device,
    Platform,
    PoolSpec,
    Topology,
    TopologyError,
    found_devices,
    found_platform,
    problem_of_command,
)
from ..secrets import Secret, without_secrets
from .endpoint import Endpoint
from .kind import key_of
from .reward_protocols import PROTOCOLS

_Word = Annotated[str, WrapValidator(lambda value, read: value if isinstance(value, Secret) else read(value))]
"""A word of a command line. One that comes from the environment is not shown."""


def _task(value: str) -> str:
    if value != CHAT and value not in PROTOCOLS:
        raise ValueError(f"it is {CHAT}, or a protocol of reward models: {', '.join(PROTOCOLS)}")
    return value


class ReplicaSetConfig(EndpointConfig):
    """Servers of one model that are started and stopped with the engine. See docs/replicas.md."""

    server: Literal["vllm", "sglang", "llama_cpp"] | None = None
    """The program that serves the model. It must be installed, in this environment or in that of `program`.
    Default: `command`."""

    command: Annotated[tuple[_Word, ...], Field(min_length=1), takes("a list with the words of a command")] | None = (
        None
    )
    """Another program: the words of its command line, in which `{port}` and `{name}` must occur (and `{host}` with
    `placement: ray`); `{host}`, `{model}` and `{tensor_parallel}` are replaced, too. It must listen on this port,
    list this name at `/v1/models` once it is ready, and end at SIGTERM. Default: none."""

    program: Annotated[tuple[_Word, ...], Field(min_length=1), takes("a list with the words of a command")] | None = (
        None
    )
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

    platform: Literal["auto", "cuda", "rocm", "cpu"] = "auto"
    """The devices of the servers. `auto` (default): what this machine has; with `placement: ray`, `cuda` if the
    cluster has GPUs."""

    devices: Annotated[tuple[Annotated[Device, Field(union_mode="left_to_right")], ...], Field(min_length=1)] | None = (
        None
    )
    """The devices, by index or name; `data_parallel` x `tensor_parallel` of them. The first `tensor_parallel` are
    those of the first replica, and so on. Not with `placement: ray`, where Ray chooses them. Default: those that
    this process may use (`CUDA_VISIBLE_DEVICES` ...), or all NVIDIA GPUs; there must be as many as needed."""

    placement: Literal["local", "ray"] = "local"
    """Where the servers run. `local` (default): on this machine. `ray`: on the Ray cluster of this process, each on
    a placement group of its own with all of its devices on one node."""

    arguments: FreeMapping = Field(default_factory=dict)
    """Further arguments of the server: `max_model_len: 16384` becomes `--max-model-len 16384`, `true` a flag
    without a value, a mapping JSON. `false` becomes `--no-...` for vLLM; for the others it is left out."""

    environment: dict[VariableName, SecretStr] = Field(default_factory=dict)
    """Further variables of the environment of the servers (`HF_TOKEN`, `PYTHONPATH` ...); their values are treated
    as secrets. Default: none; they have the environment of the process that starts them."""

    start_within_s: PositiveFloat = 600.0
    """Seconds within which all replicas must be ready. Default: 600."""

    restarts: Annotated[int, Field(ge=0), BeforeValidator(no_bool), takes("a number from 0 on")] = 3
    """How often in a row a replica that dies is started again, after 1, 2, 4 ... s. After 10 minutes without a
    death the count begins anew. Default: 3."""

    weight_updates: Literal["restart", "in_place"] = "restart"
    """How `update_weights` gives other weights to a server. `restart` (default): the server is started again with
    them, which works for every server and checkpoint with a complete folder. `in_place`: it loads them while it
    runs, which takes seconds and needs vLLM or SGLang; vLLM is then started in its development mode, in which
    every program that reaches its port can change its weights."""

    sleep_mode: Flag = False
    """Whether `sleep` uses the sleep of vLLM or SGLang, which keeps their processes. Otherwise their servers are
    stopped, and `wake_up` starts them. vLLM is then started in its development mode. Default: false."""

    colocated: Flag = False
    """Whether the servers use the devices of the trainer. They then take calls only while the trainer asks for rewards,
    and sleep while it trains. The adapters see to it; a trainer that asks for rewards while it trains is refused. It
    needs `placement: local`. Default: false."""

    log_folder: Annotated[str, Field(min_length=1)] | None = None
    """Folder of the servers' logs: `NAME-0.log`, `NAME-1.log` ..., which grow as long as the servers write. Default: a
    private one, which is removed when the servers stop."""

    vision: Flag = False
    """Whether the model reads images; as in the kind `openai`. Default: false."""

    stream: Flag = False
    """Read replies as server-sent events, for `task: chat`; as in the kind `openai`. Default: false."""

    chat_template: Annotated[str, Field(min_length=1)] | None = None
    """The chat template of a reward model; as in the kind `reward_model`. Default: the server renders."""

    batch: Batch | None = None
    """Send several responses in one request, for reward models; as in the kind `reward_model`. Default: one."""

    routing: Routing = PREFIX_AWARE
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
            if problem := problem_of_command(value):
                raise ValueError(problem)
        return value

    @field_validator("api_key_env")
    @classmethod
    def _one_key(cls, value: Any) -> Any:
        if isinstance(value, tuple):
            raise ValueError("the replicas have one key; set api_key, or one name as api_key_env")
        return value


_COMMAND = "command"
_REPLACED = frozenset({"kind", "version", "api_key_env", "timeouts"})


def pool_spec(name: str, config: ReplicaSetConfig) -> PoolSpec:
    """Return what the servers of a source are started with. Raises ConfigurationError."""
    where = f"sources.{name}"
    if config.server is None and config.command is None:
        raise ConfigurationError([Mistake(f"{where}.server", "no server is named.", "Set server or command.")])
    mistakes: list[Mistake] = []
    server = config.server or _COMMAND
    kind = SERVER_KINDS[server]
    for key, wanted in (("weight_updates", config.weight_updates == "in_place"), ("sleep_mode", config.sleep_mode)):
        if wanted and kind.control is None:
            problem = f"{server} has no routes for it; its servers are stopped and started again instead."
            mistakes.append(Mistake(f"{where}.{key}", problem, "Leave it out."))
    if config.colocated and config.placement == "ray":
        problem = "Ray gives the trainer's GPUs to nobody else, so it cannot place servers there."
        mistakes.append(Mistake(f"{where}.colocated", problem, "Use `placement: local`, and name the `devices`."))
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
    topology = Topology()
    try:
        topology = _topology(config)
        for variable in VARIABLES[topology.platform]:
            if variable in config.environment:
                problem = "each replica sees its own devices by this variable."
                remedy = "Ray chooses them; leave it out." if topology.assigned else "Set devices."
                mistakes.append(Mistake(f"{where}.environment.{variable}", problem, remedy))
    except TopologyError as error:
        mistakes.append(Mistake(f"{where}.{error.key}", error.problem, error.remedy))
    spec = PoolSpec(
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
        restarts=config.restarts,
        in_place=config.weight_updates == "in_place",
        sleep_mode=config.sleep_mode,
        api_key=key_of(config, os.environ) or "",
        log_folder=None if config.log_folder is None else os.path.abspath(config.log_folder),
    )
    mistakes += [Mistake(f"{where}.arguments.{key}", why, "Leave it out.") for key, why in kind.refused(spec)]
    if mistakes:
        raise ConfigurationError(mistakes)
    return spec


def _topology(config: ReplicaSetConfig) -> Topology:
    platform: Platform
    if config.platform != "auto":
        platform = config.platform
    elif config.placement == "ray":
        from ..replicas.ray_server import cluster_platform

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
        assigned=config.placement == "ray",
    )


def inner_source(name: str, config: ReplicaSetConfig) -> Endpoint:
    """Make the source that sends the requests to the servers: an `openai` or a `reward_model`. It has no URL yet.

    Raises ConfigurationError for keys that this kind does not have.
    """
    if config.task == CHAT:
        kind, own, foreign, whose = "openai", ("stream", "vision"), ("chat_template", "batch"), "a reward model"
    else:
        kind, own, foreign, whose = "reward_model", ("chat_template", "batch"), ("stream", "vision"), "a chat model"
    remedy = "Set task, or leave it out." if config.task == CHAT else "Leave it out."
    mistakes = [
        Mistake(f"sources.{name}.{key}", f"only {whose} has it.", remedy) for key in foreign if getattr(config, key)
    ]
    if mistakes:
        raise ConfigurationError(mistakes)
    settings = {key: getattr(config, key) for key in EndpointConfig.model_fields if key not in _REPLACED}
    # What the servers answer depends on the model and its settings, not on where they run.
    known = {"server": config.server or config.command, "model": config.model, "arguments": config.arguments}
    version = config.version or json.dumps(known, sort_keys=True)
    settings.update(base_url=(), version=version, api_key_env=config.api_key_env, timeouts=config.timeouts)
    settings.update({key: getattr(config, key) for key in own})
    if config.task != CHAT:
        settings["protocol"] = config.task
    opened: Any = sources.load(kind)
    usual = opened.Config(kind=kind, base_url=("http://replicas",), model=config.model)
    source: Endpoint = opened(name, usual.model_copy(update=settings))
    return source
