"""The devices of replicas on a real local Ray that sets no variables of devices itself."""

from __future__ import annotations

import os
import tempfile

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'qreward-plugins[ray]')")

from qreward_plugins import RewardEngine, Sample  # noqa: E402

# Ray leaves sockets and log files of its own to the garbage collector.
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*Tip.*"),
]


@pytest.fixture
def cluster(monkeypatch):
    """Its GPUs are numbers. As verl recommends for large servers, the job keeps Ray from choosing devices."""
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    ray.init(num_cpus=3, num_gpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


async def test_each_replica_gets_its_own_devices(cluster, stand_ins, tmp_path):
    seen = tmp_path / "seen"
    shell = ["sh", "-c", f'echo "$CUDA_VISIBLE_DEVICES" >> {seen}; exec "$@"', "sh"]
    own = {
        "kind": "replicas",
        "model": "judge",
        "placement": "ray",
        "command": [*shell, *stand_ins.command()],
        "data_parallel": 2,
        "tensor_parallel": 2,
        "start_within_s": 180.0,
    }
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="qr", ignore_cleanup_errors=True) as private:
        tree = {
            "sources": {"own": own},
            "judges": {"quality": {"kind": "llm", "score_range": [0, 10], "max_tokens": 64}},
            "engine": {"seed": 7, "shared": "off", "shared_directory": private},
        }
        async with RewardEngine(tree) as engine:
            outcome = await engine.score(Sample([{"role": "user", "content": "Why?"}], "So."), deadline_s=180)
    assert outcome.reward == 0.7
    devices = sorted(device for line in seen.read_text().split() for device in line.split(","))
    assert devices == ["0", "1", "2", "3"]
