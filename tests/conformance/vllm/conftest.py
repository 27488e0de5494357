"""The servers of these tests. Each starts when the first test needs it, and ends with the session."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from .models import make_models
from .servers import Server, serve_llama, serve_vllm

_POOLING = ("--runner", "pooling")
# By default a model may write white space for ever where the grammar allows it.
_CHAT = ("--structured-outputs-config", '{"backend":"xgrammar","disable_any_whitespace":true}')

# The environment of every process of Ray. By default its workers have a niceness of 15, and servers inherit it.
RAY = {"RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="session", autouse=True)
def _environment() -> None:
    remedy = "run tests/conformance/vllm/environment.sh"
    if not os.environ.get("QREWARD_VLLM"):
        pytest.skip(f"set QREWARD_VLLM=1, or {remedy}")
    if find_spec("vllm") is None:
        pytest.skip(f"vLLM is not installed; {remedy}")


@pytest.fixture(scope="session")
def models(_environment: None, tmp_path_factory: Any) -> Path:
    """The folder of the tiny models."""
    folder: Path = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


@pytest.fixture(scope="session")
def served(models: Path, tmp_path_factory: Any) -> Iterator[Callable[[str], str]]:
    """Returns the URL of the server of a model, whose name on the server is that of its folder."""
    # For work on the tests: a mapping of names to URLs of servers that run already.
    running: dict[str, str] = json.loads(os.environ.get("QREWARD_VLLM_SERVERS", "{}"))
    started: dict[str, Server] = {}
    logs: Path = tmp_path_factory.mktemp("logs")

    def url(name: str) -> str:
        if name in running:
            return running[name]
        if name not in started:
            log = logs / f"{name}.log"
            if name == "llama":
                started[name] = serve_llama(log=log)
            else:
                started[name] = serve_vllm(models / name, *(_CHAT if name == "chat" else _POOLING), log=log)
            print(f"\n{name}: answers after {started[name].start_s:.0f} s")
        return started[name].url

    yield url
    for server in started.values():
        server.close()


@pytest.fixture
def say(capsys: Any) -> Callable[[str], None]:
    """Print a measured number at once, although pytest captures what tests print."""

    def say(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}", end="", flush=True)

    return say


@pytest.fixture
def since(say: Callable[[str], None]) -> Callable[[str, float], None]:
    """Print the seconds since a time of the monotonic clock."""
    return lambda what, began: say(f"{what}: {time.monotonic() - began:.1f} s")


@pytest.fixture
def cluster(monkeypatch: Any) -> Iterator[Any]:
    """A local Ray, which is gone at the end. Returns its placement groups."""
    ray = pytest.importorskip("ray", reason="Ray is not installed; run tests/conformance/vllm/environment.sh")
    for name, value in RAY.items():
        monkeypatch.setenv(name, value)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=2**27)
    yield lambda: [row for row in ray.util.placement_group_table().values() if row["state"] != "REMOVED"]
    ray.shutdown()
