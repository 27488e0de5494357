"""Defines `Topology`: how many replicas there are, and which devices each of them gets.

The values are checked when a topology is made, so that mistakes are found before a server has loaded a model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Platform = Literal["cuda", "rocm", "cpu"]
Device = int | str
"""The index of a device, or its name (`GPU-1a2b...`, `MIG-...`)."""

VARIABLES: Mapping[Platform, tuple[str, ...]] = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    # HIP programs read the first, the runtime below them the second. The second renumbers the devices, so the first
    # must count from 0 then; `environment` does that.
    "rocm": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "cpu": (),
}
"""The variables by which a process of a platform finds its devices."""


class TopologyError(ValueError):
    """A topology that cannot be. `key` is the setting, `problem` and `remedy` are sentences."""

    def __init__(self, key: str, problem: str, remedy: str = "") -> None:
        super().__init__(f"{key}: {problem} {remedy}".rstrip())
        self.key = key
        self.problem = problem
        self.remedy = remedy


@dataclass(frozen=True)
class Topology:
    """`data_parallel` replicas with `tensor_parallel` devices each.

    `devices` are all devices, in the order in which replicas get them; none on a CPU, where the ranks of a replica are
    processes. Both numbers are at least 1. With `assigned`, a scheduler such as Ray chooses the devices, so none are
    named here.

    Raises `TopologyError`.
    """

    data_parallel: int = 1
    tensor_parallel: int = 1
    devices: tuple[Device, ...] = ()
    platform: Platform = "cpu"
    assigned: bool = False

    def __post_init__(self) -> None:
        wrong = next((device for device in self.devices if isinstance(device, int) and device < 0), None)
        if wrong is not None:
            raise TopologyError("devices", f"{wrong} is no index of a device.", "Indices begin with 0.")
        twice = next((device for device in self.devices if self.devices.count(device) > 1), None)
        if twice is not None:
            raise TopologyError("devices", f"the device {twice} is named twice.", "Name each once.")
        if self.platform == "cpu" or self.assigned:
            if self.devices:
                why = "Ray chooses them" if self.assigned else "there are none on the platform cpu"
                raise TopologyError("devices", f"devices cannot be named, because {why}.", "Leave them out.")
        elif len(self.devices) != self.size:
            product = f"data_parallel x tensor_parallel = {self.data_parallel} x {self.tensor_parallel} = {self.size}"
            shown = ", ".join(map(str, self.devices)) or "none"
            problem = f"{product}, and the number of devices is {len(self.devices)} ({shown})."
            raise TopologyError("devices", problem, f"Name {self.size}, or change the two numbers.")

    @property
    def size(self) -> int:
        """Devices of all replicas together."""
        return self.data_parallel * self.tensor_parallel

    @property
    def groups(self) -> tuple[tuple[Device, ...], ...]:
        """The devices of each replica."""
        step = self.tensor_parallel
        return tuple(self.devices[number * step : (number + 1) * step] for number in range(self.data_parallel))

    def environment(self, replica: int) -> dict[str, str]:
        """Return the variables that give a replica its devices; empty if there is nothing to choose."""
        group = self.groups[replica]
        if not group:
            return {}
        named = ",".join(map(str, group))
        if self.platform == "rocm":
            return {"ROCR_VISIBLE_DEVICES": named, "HIP_VISIBLE_DEVICES": ",".join(map(str, range(len(group))))}
        return dict.fromkeys(VARIABLES[self.platform], named)

    def shown_devices(self, replica: int) -> str:
        """The devices of a replica, for people."""
        if self.assigned:
            return "chosen by Ray"
        return ", ".join(map(str, self.groups[replica])) or "cpu"


def found_platform(root: Path = Path("/")) -> Platform:
    """Return the platform of this machine by its device files. `root` is that of the file system."""
    if _nvidia(root):
        return "cuda"
    return "rocm" if (root / "dev/kfd").exists() else "cpu"


def variables_of_each(devices: tuple[Device, ...]) -> list[dict[str, str]]:
    """Return the variables for one process on each of `devices`, which are those of CUDA where no other platform is
    found. Raises `TopologyError`.
    """
    platform = found_platform()
    topology = Topology(len(devices), 1, devices, "cuda" if platform == "cpu" else platform)
    return [topology.environment(number) for number in range(len(devices))]


def found_devices(
    platform: Platform, environment: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> tuple[Device, ...]:
    """Return the devices that this process may use: those of its variable, or all NVIDIA GPUs. Those of other
    platforms must be named.
    """
    for variable in VARIABLES[platform]:
        if variable in environment:
            parts = [part.strip() for part in environment[variable].split(",")]
            # CUDA reads the list up to the first index that is not a device; -1 is the usual way to write "none".
            kept = parts[: parts.index("-1")] if "-1" in parts else parts
            return tuple(int(part) if part.isdigit() else part for part in kept if part)
    return tuple(range(_nvidia(root))) if platform == "cuda" else ()


def _nvidia(root: Path) -> int:
    """The number of NVIDIA GPUs of this machine."""
    try:
        return sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir(root / "dev"))
    except OSError:
        return 0
