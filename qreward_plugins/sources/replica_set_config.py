"""The keys of a source of kind `replicas`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationInfo, WrapValidator, field_validator

from ..config.nodes import Flag, PositiveFloat, PositiveInt, no_bool, takes
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
from ..replicas.server_kinds import CHAT, Device, problem_of_command
from ..secrets import Secret
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
