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
from typing import Any, ClassVar

from .control import Control, SGLangControl, VLLMControl
from .topology import Topology

CHAT = "chat"
"""The task of a language model. Every other task is a protocol of reward models."""

_PLACES = ("{host}", "{port}", "{model}", "{name}", "{tensor_parallel}")


@dataclass(frozen=True)
class PoolSpec:
    """What the servers of a pool are started with. Times are seconds.

    `name` is that of the source. `restarts` is how often in a row a replica that dies is started again.
    `stop_within_s` is the time between SIGTERM and SIGKILL; closing an engine takes 10 s at most. `in_place`: servers
    load other weights while they run; otherwise they are started again with them. `sleep_mode`: servers free their
    devices by their own sleep; otherwise they are stopped for it. `api_key` is the key that the servers demand. The
    repr leaves it out, and the values of `environment` and the words of the command line, which may hold secrets, too.
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
    stop_within_s: float = 5.0
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


class ServerKind(ABC):
    """A program that serves a model with an API like OpenAI's."""

    name: ClassVar[str]
    PROGRAM: ClassVar[tuple[str, ...]] = ()
    """The beginning of its command line. The setting `program` replaces it."""
    TASKS: ClassVar[tuple[str, ...]] = ()
    """How the protocols of reward models that it speaks begin."""
    control: ClassVar[type[Control] | None] = None
    """The routes by which it is controlled; None if it has none."""

    def command(self, launch: Launch) -> list[str]:
        """Return the command line of a replica."""
        return [*self.words(launch), *self._flags(launch.spec.arguments)]

    @abstractmethod
    def words(self, launch: Launch) -> list[str]:
        """Return the command line without the arguments of the configuration."""

    def environment(self, launch: Launch) -> Mapping[str, str]:
        """Return the variables that a replica needs beside its devices. Default: none."""
        return {}

    def serves(self, task: str) -> bool:
        """Whether it can serve a task."""
        return task == CHAT or task.startswith(self.TASKS)

    def refused(self, spec: PoolSpec) -> Iterator[tuple[str, str]]:
        """Find the arguments that must not be given, and say why."""
        ours = set(self.words(Launch(spec, "", "", 0)))
        for key in spec.arguments:
            flag = _flag(key)
            if flag in ("--api-key", "--hf-token"):
                yield key, "every user of the machine can see the arguments of a process; use `environment`."
            elif flag in ours:
                yield key, "it follows from the keys of this source, or differs between its replicas."

    def _flags(self, arguments: Mapping[str, Any]) -> list[str]:
        """Write arguments as flags: `max_model_len: 16384` becomes `--max-model-len 16384`."""
        words: list[str] = []
        for key, value in arguments.items():
            flag = _flag(key)
            if value is True:
                words.append(flag)
            elif value is False:
                words += self._off(flag)
            elif isinstance(value, Mapping):
                words += (flag, json.dumps(value))
            elif isinstance(value, (list, tuple)):
                words += (flag, *map(str, value))
            elif value is not None:
                words += (flag, str(value))
        return words

    def _off(self, flag: str) -> list[str]:
        """Write a flag that is false. Default: it is left out."""
        return []


class VLLM(ServerKind):
    """vLLM: `python -m vllm.entrypoints.openai.api_server`, whose flags are those of `vllm serve`."""

    name = "vllm"
    # The command `vllm` looks for a package of this name, which builds for the CPU do not install.
    PROGRAM = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    TASKS = ("vllm_",)
    control = VLLMControl

    def words(self, launch: Launch) -> list[str]:
        words = [*(launch.spec.program or self.PROGRAM), "--model", launch.loaded]
        words += ["--host", launch.host, "--port", str(launch.port)]
        # Requests carry the first name, which is the same at all replicas. The second tells whose process this is.
        words += ["--served-model-name", launch.spec.model, launch.name]
        words += ["--tensor-parallel-size", str(launch.spec.topology.tensor_parallel)]
        if launch.spec.task != CHAT:
            words += ["--runner", "pooling"]
        if launch.spec.sleep_mode and not launch.on_cpu:  # on a CPU it refuses the flag, and sleeps without it
            words.append("--enable-sleep-mode")
        return words

    def environment(self, launch: Launch) -> Mapping[str, str]:
        common = {"VLLM_NO_USAGE_STATS": "1"}
        if launch.spec.in_place or launch.spec.sleep_mode:
            common["VLLM_SERVER_DEV_MODE"] = "1"
        if not launch.on_cpu:
            return common
        # Without the last two, every replica would bind its threads to the same cores.
        return {**common, "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}

    def _off(self, flag: str) -> list[str]:
        return ["--no-" + flag.removeprefix("--")]


class SGLang(ServerKind):
    """SGLang: `python -m sglang.launch_server`. It reads no model in requests, so the name it lists is its own."""

    name = "sglang"
    PROGRAM = (sys.executable, "-m", "sglang.launch_server")
    TASKS = ("sglang_",)
    control = SGLangControl

    def words(self, launch: Launch) -> list[str]:
        words = [*(launch.spec.program or self.PROGRAM), "--model-path", launch.loaded]
        words += ["--host", launch.host, "--port", str(launch.port), "--served-model-name", launch.name]
        words += ["--tp-size", str(launch.spec.topology.tensor_parallel)]
        if launch.spec.task != CHAT:
            words.append("--is-embedding")
        if launch.spec.sleep_mode:
            words.append("--enable-memory-saver")
        return words


class LlamaCpp(ServerKind):
    """llama.cpp: `llama-server`. It reads no model in requests, so the name it lists is its own."""

    name = "llama_cpp"
    PROGRAM = ("llama-server",)

    def words(self, launch: Launch) -> list[str]:
        words = [*(launch.spec.program or self.PROGRAM), "--model", launch.loaded]
        return [*words, "--host", launch.host, "--port", str(launch.port), "--alias", launch.name]


class Command(ServerKind):
    """A command of the user's, with places for what each replica needs: `{host}`, `{port}`, `{name}`, `{model}` and
    `{tensor_parallel}`.
    """

    name = "command"
    TASKS = ("",)

    def words(self, launch: Launch) -> list[str]:
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
        return words


def _flag(key: str) -> str:
    return "--" + key.lstrip("-").replace("_", "-")


def problem_of_command(command: Sequence[str]) -> str:
    """Say which place a command of the user's lacks, or has and should not; "" if it is right."""
    missing = [place for place in ("{port}", "{name}") if not any(place in word for word in command)]
    if missing:
        return f"no word holds {' or '.join(missing)}; the server gets its port and its name there"
    # Doubled braces, and those of JSON, are the server's.
    found = [place for word in command for place in re.findall(r"(?<!{){[a-z_]+}(?!})", word)]
    unknown = [place for place in found if place not in _PLACES]
    return f"there is no place {unknown[0]}; places are {', '.join(_PLACES)}" if unknown else ""


SERVER_KINDS: Mapping[str, ServerKind] = {kind.name: kind for kind in (VLLM(), SGLang(), LlamaCpp(), Command())}
"""The kinds of servers by name."""
