from __future__ import annotations

import pytest

from qreward_plugins.replicas import Topology, TopologyError
from qreward_plugins.replicas.server_kinds import found_devices, found_platform


@pytest.mark.parametrize(
    ("topology", "groups", "variables"),
    [
        (Topology(), ((),), {}),
        (Topology(2, 4, tuple(range(8)), "cuda"), ((0, 1, 2, 3), (4, 5, 6, 7)), {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}),
        (Topology(2, 2, (7, 1, 3, 5), "cuda"), ((7, 1), (3, 5)), {"CUDA_VISIBLE_DEVICES": "3,5"}),
        (Topology(2, 1, ("GPU-a", "MIG-b"), "cuda"), (("GPU-a",), ("MIG-b",)), {"CUDA_VISIBLE_DEVICES": "MIG-b"}),
        (
            Topology(2, 2, (0, 1, 2, 3), "rocm"),
            ((0, 1), (2, 3)),
            {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "0,1"},
        ),
        (Topology(2, 2, platform="cuda", assigned=True), ((), ()), {}),
    ],
)
def test_each_replica_gets_its_own_devices(topology, groups, variables):
    assert topology.groups == groups
    assert topology.environment(topology.data_parallel - 1) == variables


@pytest.mark.parametrize(
    ("arguments", "key", "text"),
    [
        ({"platform": "cuda", "devices": (0, 0), "data_parallel": 2}, "devices", "device 0 is named twice"),
        ({"platform": "cuda"}, "devices", r"1 x 1 = 1, and the number of devices is 0 \(none\)"),
        (
            {"platform": "cuda", "devices": (0, 1, 2), "data_parallel": 2, "tensor_parallel": 2},
            "devices",
            r"2 x 2 = 4, and the number of devices is 3 \(0, 1, 2\)\. Name 4",
        ),
        ({"platform": "cpu", "devices": (0,)}, "devices", "there are none on the platform cpu"),
        ({"platform": "cuda", "devices": (0,), "assigned": True}, "devices", "Ray chooses them"),
    ],
)
def test_a_topology_that_cannot_be_is_refused(arguments, key, text):
    with pytest.raises(TopologyError, match=text) as caught:
        Topology(**arguments)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("files", "environment", "platform", "devices"),
    [
        ((), {}, "cpu", ()),
        (("dev/nvidia0", "dev/nvidia1", "dev/nvidiactl"), {}, "cuda", (0, 1)),
        (("dev/nvidia0", "dev/nvidia1"), {"CUDA_VISIBLE_DEVICES": "1"}, "cuda", (1,)),
        (("dev/nvidia0",), {"CUDA_VISIBLE_DEVICES": "-1"}, "cuda", ()),
        (("dev/nvidia0",), {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}, "cuda", ("GPU-a", "GPU-b")),
        (("dev/kfd",), {}, "rocm", ()),
        (("dev/kfd",), {"HIP_VISIBLE_DEVICES": "2,3"}, "rocm", (2, 3)),
    ],
)
def test_the_devices_of_this_machine(tmp_path, files, environment, platform, devices):
    (tmp_path / "dev").mkdir()
    for name in files:
        (tmp_path / name).touch()
    assert found_platform(tmp_path) == platform
    assert found_devices(platform, environment, tmp_path) == devices
