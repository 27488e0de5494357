"""Defines the programs that serve a model: vLLM, SGLang, llama.cpp, or a command of the user's.

Each is a class that writes the command line and the environment of one replica, and says which arguments it refuses.
All of them list their models at `/v1/models`, where the pool looks for the name that it gave to this very process.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from shutil import which
from typing import Any, ClassVar

from .control import Control, SGLangControl, VLLMControl

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
class Launch:
    """What one server is started with.

    `model` is the name that requests give. `weights` is what is loaded, a folder or a name of the hub; "": `model`.
    `name` is listed at `/v1/models` by this process and no other. `host` and `port` are where it listens. `in_place`:
    it can load other weights while it runs. `sleep_mode`: it can free its devices while it runs.
    """

    model: str
    name: str
    host: str
    port: int
    tensor_parallel: int = 1
    task: str = CHAT
    platform: str = "cpu"
    arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)
    command: tuple[str, ...] = field(default=(), repr=False)
    program: tuple[str, ...] = field(default=(), repr=False)
    weights: str = ""
    in_place: bool = False
    sleep_mode: bool = False

    @property
    def loaded(self) -> str:
        """The model that the server loads: a folder, or a name of the hub."""
        return self.weights or self.model


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
    control: ClassVar[Control | None] = None
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
    control = VLLMControl()
    divides_heads = True

    def command(self, launch: Launch) -> list[str]:
        words = [*(launch.program or self.PROGRAM), "--model", launch.loaded]
        words += ["--host", launch.host, "--port", str(launch.port)]
        # Requests carry the first name, which is the same at all replicas. The second tells whose process this is.
        words += ["--served-model-name", launch.model, launch.name]
        words += ["--tensor-parallel-size", str(launch.tensor_parallel)]
        if launch.task != CHAT:
            words += ["--runner", "pooling"]
        if launch.sleep_mode and launch.platform != "cpu":  # on a CPU it refuses the flag, and sleeps without it
            words.append("--enable-sleep-mode")
        return words + self.flags(launch.arguments)

    def environment(self, launch: Launch) -> Mapping[str, str]:
        common = {"VLLM_NO_USAGE_STATS": "1"}
        if launch.in_place or launch.sleep_mode:
            common["VLLM_SERVER_DEV_MODE"] = "1"
        if launch.platform != "cpu":
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
    control = SGLangControl()
    divides_heads = True

    def command(self, launch: Launch) -> list[str]:
        words = [*(launch.program or self.PROGRAM), "--model-path", launch.loaded]
        words += ["--host", launch.host, "--port", str(launch.port), "--served-model-name", launch.name]
        words += ["--tp-size", str(launch.tensor_parallel)]
        if launch.task != CHAT:
            words.append("--is-embedding")
        if launch.sleep_mode:
            words.append("--enable-memory-saver")
        return words + self.flags(launch.arguments)


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
        words = [*(launch.program or self.PROGRAM), "--model", launch.loaded]
        words += ["--host", launch.host, "--port", str(launch.port), "--alias", launch.name]
        return words + self.flags(launch.arguments)


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
            "{tensor_parallel}": str(launch.tensor_parallel),
        }
        words = []
        for word in launch.command:
            # Not str.format, because a word may hold other braces, such as JSON.
            for place in _PLACES:
                word = word.replace(place, values[place])
            words.append(word)
        return words + self.flags(launch.arguments)


def missing_places(command: Sequence[str]) -> list[str]:
    """Return the places that a command of the user's must have and has not."""
    return [place for place in ("{port}", "{name}") if not any(place in word for word in command)]


SERVER_KINDS: Mapping[str, ServerKind] = {kind.name: kind for kind in (VLLM(), SGLang(), LlamaCpp(), Command())}
"""The kinds of servers by name."""
