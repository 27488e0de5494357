from __future__ import annotations

import json
from pathlib import Path

import pytest

from qreward_plugins.replicas import Topology, TopologyError
from qreward_plugins.replicas.topology import check_heads, found_devices, found_platform


@pytest.mark.parametrize(
    ("topology", "groups", "variables"),
    [
        (Topology(), ((),), {}),
        (Topology(3, 2), ((), (), ()), {}),
        (Topology(1, 1, (0,), "cuda"), ((0,),), {"CUDA_VISIBLE_DEVICES": "0"}),
        (Topology(2, 4, tuple(range(8)), "cuda"), ((0, 1, 2, 3), (4, 5, 6, 7)), {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}),
        (Topology(2, 2, (7, 1, 3, 5), "cuda"), ((7, 1), (3, 5)), {"CUDA_VISIBLE_DEVICES": "3,5"}),
        (Topology(2, 1, ("GPU-a", "MIG-b"), "cuda"), (("GPU-a",), ("MIG-b",)), {"CUDA_VISIBLE_DEVICES": "MIG-b"}),
        (
            Topology(2, 2, (0, 1, 2, 3), "rocm"),
            ((0, 1), (2, 3)),
            {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "0,1"},
        ),
        (Topology(2, 1, (0, 1), "xpu"), ((0,), (1,)), {"ZE_AFFINITY_MASK": "1"}),
        (Topology(2, 2, platform="cuda", assigned=True), ((), ()), {}),
    ],
)
def test_each_replica_gets_its_own_devices(topology, groups, variables):
    assert topology.groups == groups
    assert topology.environment(topology.data_parallel - 1) == variables


@pytest.mark.parametrize(
    ("arguments", "key", "text"),
    [
        ({"data_parallel": 0}, "data_parallel", "a whole number from 1 on, not 0"),
        ({"tensor_parallel": -2}, "tensor_parallel", "not -2"),
        ({"tensor_parallel": True}, "tensor_parallel", "not True"),
        ({"data_parallel": 1.5}, "data_parallel", "not 1.5"),
        ({"platform": "cuda", "devices": (0, 0), "data_parallel": 2}, "devices", "device 0 is named twice"),
        ({"platform": "cuda"}, "devices", r"1 x 1 = 1, and there are 0 devices \(none\)"),
        (
            {"platform": "cuda", "devices": (0, 1, 2), "data_parallel": 2, "tensor_parallel": 2},
            "devices",
            r"2 x 2 = 4, and there are 3 devices \(0, 1, 2\)\. Name 4",
        ),
        ({"platform": "rocm", "devices": (0, 1)}, "devices", "1 x 1 = 1, and there are 2 devices"),
        ({"platform": "cpu", "devices": (0,)}, "devices", "there are none on the platform cpu"),
        ({"platform": "cuda", "devices": (0,), "assigned": True}, "devices", "Ray chooses them"),
    ],
)
def test_a_topology_that_cannot_be_is_refused(arguments, key, text):
    with pytest.raises(TopologyError, match=text) as caught:
        Topology(**arguments)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("config", "size", "text"),
    [
        ({"num_attention_heads": 14, "num_key_value_heads": 2}, 4, "the 14 attention heads of .* 1, 2, 7, 14"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 3, "the 4 key-value heads"),
        ({"num_attention_heads": 14, "num_key_value_heads": 2}, 7, "the 2 key-value heads"),
        ({"num_attention_heads": 32, "num_key_value_heads": 4}, 8, ""),  # each key-value head is kept twice
        ({"num_attention_heads": 2}, 2, ""),
        ({"text_config": {"num_attention_heads": 10}}, 4, "the 10 attention heads"),
        ({"num_attention_heads": "many"}, 4, ""),
        ([], 4, ""),
        ({"num_attention_heads": 3}, 1, ""),
    ],
)
def test_heads_that_cannot_be_divided_are_found_before_the_start(tmp_path, config, size, text):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if text:
        with pytest.raises(TopologyError, match=text):
            check_heads(str(tmp_path), size)
    else:
        check_heads(str(tmp_path), size)


def test_the_heads_of_a_model_of_the_hub_are_read_from_its_cache(tmp_path):
    repository = tmp_path / "hub/models--Qwen--Some"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("abc")
    (repository / "snapshots/abc").mkdir(parents=True)
    (repository / "snapshots/abc/config.json").write_text('{"num_attention_heads": 14}')
    with pytest.raises(TopologyError, match="the 14 attention heads of Qwen/Some"):
        check_heads("Qwen/Some", 4, {"HF_HOME": str(tmp_path)})
    check_heads("Qwen/Other", 4, {"HF_HOME": str(tmp_path)})


def machine(root: Path, *files: str) -> Path:
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("simd_count 304\n" if "nodes/1" in name else "simd_count 0\n")
    return root


@pytest.mark.parametrize(
    ("files", "environment", "platform", "devices"),
    [
        ((), {}, "cpu", ()),
        ((), {"CUDA_VISIBLE_DEVICES": "0,1"}, "cpu", ()),
        (("dev/nvidia0", "dev/nvidia1", "dev/nvidiactl"), {}, "cuda", (0, 1)),
        (("dev/nvidia0", "dev/nvidia1"), {"CUDA_VISIBLE_DEVICES": "1"}, "cuda", (1,)),
        (("dev/nvidia0",), {"CUDA_VISIBLE_DEVICES": ""}, "cuda", ()),
        (("dev/nvidia0",), {"CUDA_VISIBLE_DEVICES": "-1"}, "cuda", ()),
        (("dev/nvidia0",), {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}, "cuda", ("GPU-a", "GPU-b")),
        (
            ("sys/class/kfd/kfd/topology/nodes/0/properties", "sys/class/kfd/kfd/topology/nodes/1/properties"),
            {},
            "rocm",
            (0,),
        ),
        ((), {"ZE_AFFINITY_MASK": "0,1"}, "xpu", (0, 1)),
    ],
)
def test_the_devices_of_this_machine(tmp_path, files, environment, platform, devices):
    root = machine(tmp_path, *files)
    assert found_platform(environment, root) == platform
    assert found_devices(platform, environment, root) == devices


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    check_heads("Qwen/Some", 2, {})
