"""Defines `PoolSpec`, everything that the servers of a pool are started with, and the programs that serve a model.

Its `Topology` says how many replicas there are, and which devices each of them gets. The values are checked when it is
made, so that mistakes are found before a server has loaded a model.

A program (vLLM, SGLang, llama.cpp, or a command of the user's) is a class that writes the command line and the
environment of one replica, and says which arguments it refuses. All of them list their models at `/v1/models`, where
the pool looks for the name that it gave to this very process.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from .control import Control, SGLangControl, VLLMControl

CHAT = "chat"
"""The task of a language model. Every other task is a protocol of reward models."""

_PLACES = ("{host}", "{port}", "{model}", "{name}", "{tensor_parallel}")


Platform = Literal["cuda", "rocm", "cpu"]
Device = int | str
"""The index of a device, or its name (`GPU-1a2b...`, `MIG-...`)."""

VARIABLES: Mapping[Platform, tuple[str, ...]] = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    # HIP programs read the first, the runtime below them the second. The second renumbers the devices, so the first
    # must count from 0 then; `environment` does that.
    "rocm": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "cpu": (),
}
"""The variables by which a process of a platform finds its devices."""


class TopologyError(ValueError):
    """A topology that cannot be. `key` is the setting, `problem` and `remedy` are sentences."""

    def __init__(self, key: str, problem: str, remedy: str = "") -> None:
        super().__init__(f"{key}: {problem} {remedy}".rstrip())
        self.key = key
        self.problem = problem
        self.remedy = remedy


@dataclass(frozen=True)
class Topology:
    """`data_parallel` replicas with `tensor_parallel` devices each.

    `devices` are all devices, in the order in which replicas get them; none on a CPU, where the ranks of a replica are
    processes. Both numbers are at least 1. With `assigned`, a scheduler such as Ray chooses the devices, so none are
    named here.

    Raises `TopologyError`.
    """

    data_parallel: int = 1
    tensor_parallel: int = 1
    devices: tuple[Device, ...] = ()
    platform: Platform = "cpu"
    assigned: bool = False

    def __post_init__(self) -> None:
        wrong = next((device for device in self.devices if isinstance(device, int) and device < 0), None)
        if wrong is not None:
            raise TopologyError("devices", f"{wrong} is no index of a device.", "Indices begin with 0.")
        twice = next((device for device in self.devices if self.devices.count(device) > 1), None)
        if twice is not None:
            raise TopologyError("devices", f"the device {twice} is named twice.", "Name each once.")
        if self.platform == "cpu" or self.assigned:
            if self.devices:
                why = "Ray chooses them" if self.assigned else "there are none on the platform cpu"
                raise TopologyError("devices", f"devices cannot be named, because {why}.", "Leave them out.")
        elif len(self.devices) != self.size:
            product = f"data_parallel x tensor_parallel = {self.data_parallel} x {self.tensor_parallel} = {self.size}"
            shown = ", ".join(map(str, self.devices)) or "none"
            problem = f"{product}, and the number of devices is {len(self.devices)} ({shown})."
            raise TopologyError("devices", problem, f"Name {self.size}, or change the two numbers.")

    @property
    def size(self) -> int:
        """Devices of all replicas together."""
        return self.data_parallel * self.tensor_parallel

    @property
    def groups(self) -> tuple[tuple[Device, ...], ...]:
        """The devices of each replica."""
        step = self.tensor_parallel
        return tuple(self.devices[number * step : (number + 1) * step] for number in range(self.data_parallel))

    def environment(self, replica: int) -> dict[str, str]:
        """Return the variables that give a replica its devices; empty if there is nothing to choose."""
        group = self.groups[replica]
        if not group:
            return {}
        named = ",".join(map(str, group))
        if self.platform == "rocm":
            return {"ROCR_VISIBLE_DEVICES": named, "HIP_VISIBLE_DEVICES": ",".join(map(str, range(len(group))))}
        return dict.fromkeys(VARIABLES[self.platform], named)

    def shown_devices(self, replica: int) -> str:
        """The devices of a replica, for people."""
        if self.assigned:
            return "chosen by Ray"
        return ", ".join(map(str, self.groups[replica])) or "cpu"


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
        ranks = launch.spec.topology.tensor_parallel
        values = (launch.host, str(launch.port), launch.loaded, launch.name, str(ranks))
        words = []
        for word in launch.spec.command:
            # Not str.format, because a word may hold other braces, such as JSON.
            for place, value in zip(_PLACES, values, strict=True):
                word = word.replace(place, value)
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


def found_platform(root: Path = Path("/")) -> Platform:
    """Return the platform of this machine by its device files. `root` is that of the file system."""
    if _nvidia(root):
        return "cuda"
    return "rocm" if (root / "dev/kfd").exists() else "cpu"


def variables_of_each(devices: tuple[Device, ...]) -> list[dict[str, str]]:
    """Return the variables for one process on each of `devices`, which are those of CUDA where no other platform is
    found. Raises `TopologyError`.
    """
    platform = found_platform()
    topology = Topology(len(devices), 1, devices, "cuda" if platform == "cpu" else platform)
    return [topology.environment(number) for number in range(len(devices))]


def found_devices(
    platform: Platform, environment: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> tuple[Device, ...]:
    """Return the devices that this process may use: those of its variable, or all NVIDIA GPUs. Those of other
    platforms must be named.
    """
    for variable in VARIABLES[platform]:
        if variable in environment:
            parts = [part.strip() for part in environment[variable].split(",")]
            # CUDA reads the list up to the first index that is not a device; -1 is the usual way to write "none".
            kept = parts[: parts.index("-1")] if "-1" in parts else parts
            return tuple(int(part) if part.isdigit() else part for part in kept if part)
    return tuple(range(_nvidia(root))) if platform == "cuda" else ()


def _nvidia(root: Path) -> int:
    """The number of NVIDIA GPUs of this machine."""
    try:
        return sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir(root / "dev"))
    except OSError:
        return 0
