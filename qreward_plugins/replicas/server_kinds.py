"""Defines `PoolSpec`, everything that the servers of a pool are started with, and the programs that serve a model.

A program (vLLM, SGLang, llama.cpp, or a command of the user's) is a class that writes the command line and the
environment of one replica, and says which arguments it refuses. All of them list their models at `/v1/models`, where
the pool looks for the name that it gave to this very process.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from shutil import which
from typing import Any, ClassVar

from .control import Control, SGLangControl, VLLMControl
from .topology import Topology

STOP_WITHIN_S = 5.0
"""Default of `stop_within_s`, in seconds. Closing an engine takes 10 s at most."""
CHAT = "chat"
"""The task of a language model. Every other task is a protocol of reward models."""

_SET_BY_US: Mapping[str, str] = {
    "model": "model",
    "host": "placement",
    "port": "",
    "served_model_name": "model",
    "tensor_parallel_size": "tensor_parallel",
    "tp": "tensor_parallel",
}
"""The part of `ServerKind.SET_BY_US` that vLLM and SGLang share."""
_ALONE = ("data_parallel_size", "dp", "pipeline_parallel_size", "pp", "nnodes")
"""The part of `ServerKind.ALONE` that they share."""
_PLACES = ("{host}", "{port}", "{model}", "{name}", "{tensor_parallel}")


@dataclass(frozen=True)
class PoolSpec:
    """What the servers of a pool are started with. Times are seconds.

    `name` is that of the source. `restarts` is how often in a row a replica that dies is started again.
    `stop_within_s` is the time between SIGTERM and SIGKILL. `in_place`: servers load other weights while they run;
    otherwise they are started again with them. `sleep_mode`: servers free their devices by their own sleep; otherwise
    they are stopped for it. `api_key` is the key that the servers demand. The repr leaves it out, and the values of
    `environment` and the words of the command line, which may hold secrets, too.
    """

    name: str
    server: str
    model: str
    topology: Topology
    task: str = CHAT
    arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)
    command: tuple[str, ...] = field(default=(), repr=False)
    program: tuple[str, ...] = field(default=(), repr=False)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    start_within_s: float = 600.0
    stop_within_s: float = STOP_WITHIN_S
    restarts: int = 3
    in_place: bool = False
    sleep_mode: bool = False
    api_key: str = field(default="", repr=False)
    log_folder: str | None = None

    @property
    def kind(self) -> ServerKind:
        """The program that serves the model."""
        return SERVER_KINDS[self.server]

    @property
    def file_name(self) -> str:
        """Its name, with only those characters that a file name and a command line carry everywhere."""
        return re.sub(r"[^A-Za-z0-9_.-]", "_", self.name)[:64]

    @property
    def key(self) -> str:
        """16 hexadecimal digits that identify it: equal pools have equal keys, in all processes."""
        text = json.dumps(asdict(self), sort_keys=True).encode()  # orjson does not write all numbers and keys
        return hashlib.blake2b(text, digest_size=8, person=b"qreward pool").hexdigest()

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of requests to its servers: the key, if there is one."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(frozen=True)
class Launch:
    """One start of one server. `name` is listed at `/v1/models` by this process and no other. `host` and `port` are
    where it listens. `weights` is what is loaded instead of the model: a folder, or a file for llama.cpp; "": none.
    """

    spec: PoolSpec
    name: str
    host: str
    port: int
    weights: str = ""

    @property
    def loaded(self) -> str:
        """The model that the server loads: a folder, a file, or a name of the hub."""
        return self.weights or self.spec.model

    @property
    def on_cpu(self) -> bool:
        """Whether the server has no devices."""
        return self.spec.topology.platform == "cpu"


@dataclass(frozen=True)
class Refused:
    """An argument that a pool sets itself, or that it cannot serve."""

    argument: str
    problem: str
    remedy: str


class ServerKind(ABC):
    """A program that serves a model with an API like OpenAI's."""

    name: ClassVar[str]
    PROGRAM: ClassVar[tuple[str, ...]] = ()
    """The beginning of its command line. The setting `program` replaces it."""
    MODULE: ClassVar[str] = ""
    """The module of Python that `PROGRAM` runs."""
    SET_BY_US: ClassVar[Mapping[str, str]] = {}
    """Arguments that are set here: the argument, and the key of the configuration that it follows from, or ""."""
    ALONE: ClassVar[tuple[str, ...]] = ()
    """Arguments that spread a replica over several engines."""
    TASKS: ClassVar[tuple[str, ...]] = ()
    """How the protocols of reward models that it speaks begin."""
    control: ClassVar[type[Control] | None] = None
    """The routes by which it is controlled; None if it has none."""
    divides_heads: ClassVar[bool] = False
    """Whether it divides the attention heads among the devices of a replica."""

    def absent(self) -> str:
        """Say what is missing here to run `PROGRAM`, and what helps; "" if nothing is missing."""
        what = ""
        if self.MODULE and find_spec(self.MODULE) is None:
            what = f"{self.MODULE} is not installed for {sys.executable}"
        elif self.PROGRAM and which(self.PROGRAM[0]) is None:
            what = f"there is no program {self.PROGRAM[0]} on the PATH"
        return f"{what}. Install it, or name the program of another environment in `program`" if what else ""

    @abstractmethod
    def command(self, launch: Launch) -> list[str]:
        """Return the command line of a replica."""

    def environment(self, launch: Launch) -> Mapping[str, str]:
        """Return the variables that a replica needs beside its devices. Default: none."""
        return {}

    def serves(self, task: str) -> bool:
        """Whether it can serve a task."""
        return task == CHAT or task.startswith(self.TASKS)

    def refused(self, arguments: Mapping[str, Any]) -> Iterator[Refused]:
        """Find the arguments that must not be given."""
        for key, value in arguments.items():
            plain = key.lstrip("-").replace("-", "_")
            if plain in self.SET_BY_US:
                setting = self.SET_BY_US[plain]
                why = "it is set by a key of this source." if setting else "each replica gets a free one."
                yield Refused(key, why, f"Set {setting}." if setting else "Leave it out.")
            elif plain in self.ALONE and value not in (False, None) and (value is True or str(value) != "1"):
                why = "each replica is an independent server on its devices."
                yield Refused(key, why, "Use data_parallel and tensor_parallel of this source.")
            elif plain in ("api_key", "hf_token"):
                why = "every user of the machine can see the arguments of a process."
                yield Refused(key, why, "Set the variable of the server in `environment`.")

    def flags(self, arguments: Mapping[str, Any]) -> list[str]:
        """Write arguments as flags: `max_model_len: 16384` becomes `--max-model-len 16384`."""
        words: list[str] = []
        for key, value in arguments.items():
            flag = "--" + key.lstrip("-").replace("_", "-")
            if value is True:
                words.append(flag)
            elif value is False:
                words += self.off(flag)
            elif isinstance(value, Mapping):
                words += (flag, json.dumps(value))
            elif isinstance(value, (list, tuple)):
                words += (flag, *map(str, value))
            elif value is not None:
                words += (flag, str(value))
        return words

    def off(self, flag: str) -> list[str]:
        """Write a flag that is false. Default: it is left out."""
        return []


class VLLM(ServerKind):
    """vLLM: `python -m vllm.entrypoints.openai.api_server`, whose flags are those of `vllm serve`."""

    name = "vllm"
    # The command `vllm` looks for a package of this name, which builds for the CPU do not install.
    PROGRAM = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    MODULE = "vllm"
    SET_BY_US: ClassVar[Mapping[str, str]] = {
        **_SET_BY_US,
        "runner": "task",
        "task": "task",
    }
    ALONE = (
        *_ALONE,
        *("data_parallel_size_local", "dpl", "data_parallel_rank", "data_parallel_address"),
        *("enable_expert_parallel", "api_server_count"),
    )
    TASKS = ("vllm_",)
    control = VLLMControl
    divides_heads = True

    def command(self, launch: Launch) -> list[str]:
        words = [*(launch.spec.program or self.PROGRAM), "--model", launch.loaded]
        words += ["--host", launch.host, "--port", str(launch.port)]
        # Requests carry the first name, which is the same at all replicas. The second tells whose process this is.
        words += ["--served-model-name", launch.spec.model, launch.name]
        words += ["--tensor-parallel-size", str(launch.spec.topology.tensor_parallel)]
        if launch.spec.task != CHAT:
            words += ["--runner", "pooling"]
        if launch.spec.sleep_mode and not launch.on_cpu:  # on a CPU it refuses the flag, and sleeps without it
            words.append("--enable-sleep-mode")
        return words + self.flags(launch.spec.arguments)

    def environment(self, launch: Launch) -> Mapping[str, str]:
        common = {"VLLM_NO_USAGE_STATS": "1"}
        if launch.spec.in_place or launch.spec.sleep_mode:
            common["VLLM_SERVER_DEV_MODE"] = "1"
        if not launch.on_cpu:
            return common
        # Without the last two, every replica would bind its threads to the same cores.
        return {**common, "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}

    def off(self, flag: str) -> list[str]:
        return ["--no-" + flag.removeprefix("--")]


class SGLang(ServerKind):
    """SGLang: `python -m sglang.launch_server`. It reads no model in requests, so the name it lists is its own."""

    name = "sglang"
    PROGRAM = (sys.executable, "-m", "sglang.launch_server")
    MODULE = "sglang"
    SET_BY_US: ClassVar[Mapping[str, str]] = {
        **_SET_BY_US,
        "model_path": "model",
        "tp_size": "tensor_parallel",
        "is_embedding": "task",
    }
    ALONE = (
        *_ALONE,
        *("dp_size", "pp_size", "expert_parallel_size", "ep_size", "ep", "enable_dp_attention"),
    )
    TASKS = ("sglang_",)
    control = SGLangControl
    divides_heads = True

    def command(self, launch: Launch) -> list[str]:
        words = [*(launch.spec.program or self.PROGRAM), "--model-path", launch.loaded]
        words += ["--host", launch.host, "--port", str(launch.port), "--served-model-name", launch.name]
        words += ["--tp-size", str(launch.spec.topology.tensor_parallel)]
        if launch.spec.task != CHAT:
            words.append("--is-embedding")
        if launch.spec.sleep_mode:
            words.append("--enable-memory-saver")
        return words + self.flags(launch.spec.arguments)


class LlamaCpp(ServerKind):
    """llama.cpp: `llama-server`. It reads no model in requests, so the name it lists is its own."""

    name = "llama_cpp"
    PROGRAM = ("llama-server",)
    SET_BY_US: ClassVar[Mapping[str, str]] = {
        "model": "model",
        "m": "model",
        "host": "placement",
        "port": "",
        "alias": "model",
        "a": "model",
    }

    def command(self, launch: Launch) -> list[str]:
        words = [*(launch.spec.program or self.PROGRAM), "--model", launch.loaded]
        words += ["--host", launch.host, "--port", str(launch.port), "--alias", launch.name]
        return words + self.flags(launch.spec.arguments)


class Command(ServerKind):
    """A command of the user's, with places for what each replica needs: `{host}`, `{port}`, `{name}`, `{model}` and
    `{tensor_parallel}`.
    """

    name = "command"
    TASKS = ("",)

    def command(self, launch: Launch) -> list[str]:
        values = {
            "{host}": launch.host,
            "{port}": str(launch.port),
            "{name}": launch.name,
            "{model}": launch.loaded,
            "{tensor_parallel}": str(launch.spec.topology.tensor_parallel),
        }
        words = []
        for word in launch.spec.command:
            # Not str.format, because a word may hold other braces, such as JSON.
            for place in _PLACES:
                word = word.replace(place, values[place])
            words.append(word)
        return words + self.flags(launch.spec.arguments)


def missing_places(command: Sequence[str]) -> list[str]:
    """Return the places that a command of the user's must have and has not."""
    return [place for place in ("{port}", "{name}") if not any(place in word for word in command)]


SERVER_KINDS: Mapping[str, ServerKind] = {kind.name: kind for kind in (VLLM(), SGLang(), LlamaCpp(), Command())}
"""The kinds of servers by name."""
