"""Starts servers, waits until they answer, and ends them."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

START_WITHIN_S = 600.0
"""vLLM imports for a minute on a quiet machine, and for five on a busy one."""
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
_GUARD = Path(__file__).parent / "guard.py"
_SHOWN_OF_LOG = 4000


def why_not() -> str | None:
    """Return why these tests cannot run here; None if they can."""
    if not os.environ.get("QREWARD_VLLM"):
        return "set QREWARD_VLLM=1, or run tests/conformance/vllm/environment.sh"
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed; run tests/conformance/vllm/environment.sh"
    return None


class Server:
    """A server with an OpenAI-like `/v1/models`. `start_s` are the seconds until it answered."""

    def __init__(self, command: Sequence[str], *, port: int, model: str, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.model = model
        self._log = log
        began = time.monotonic()
        with log.open("ab") as out:
            self._guard = subprocess.Popen(
                [sys.executable, str(_GUARD), *command],
                env={**os.environ, **_SETTINGS},
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait(began + START_WITHIN_S)
        except BaseException:
            self.close()
            raise
        self.start_s = time.monotonic() - began

    def _wait(self, until: float) -> None:
        while time.monotonic() < until:
            assert self._guard.poll() is None, f"the server ended; its log ends with:\n{self._end_of_log()}"
            # Another program may have taken the port, so the name of the model must be ours.
            with suppress(OSError, ValueError):
                if any(one["id"] == self.model for one in get(f"{self.url}/v1/models")["data"]):
                    return
            time.sleep(0.5)
        raise AssertionError(f"no answer within {START_WITHIN_S:g} s; the log ends with:\n{self._end_of_log()}")

    def _end_of_log(self) -> str:
        return self._log.read_text(errors="replace")[-_SHOWN_OF_LOG:]

    def close(self) -> None:
        """End the server and all of its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._guard.pid, signal.SIGKILL)
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        self._guard.wait()


def serve_vllm(model: Path, *arguments: str, log: Path) -> Server:
    """Serve a model with vLLM on the CPU, in float32, so that its numbers can be compared closely."""
    port, name = free_port(), model.name
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--served-model-name", name, "--dtype", "float32", *_VLLM, *arguments]
    return Server(command, port=port, model=name, log=log)


def serve_llama(*, log: Path) -> Server:
    """Serve Gemma 3 270M with llama.cpp's own server, under the name `llama`."""
    port = free_port()
    command = [sys.executable, "-m", "tests.conformance.vllm.llama", "--port", str(port)]
    return Server(command, port=port, model="llama", log=log)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def get(url: str) -> Any:
    """Return the JSON at `url`. Raises OSError or ValueError."""
    with urllib.request.urlopen(url, timeout=5) as reply:
        return json.loads(reply.read())
