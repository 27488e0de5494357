"""The CPU as a platform of verl (verl/plugin/platform): devices, ranks and collectives without an accelerator."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator
from typing import Any

import torch
import verl.utils.distributed as verl_distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry, set_platform

_BYTES_USED = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
_NOTHING_TO_DO = (
    "empty_cache",
    "ipc_collect",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "set_device",
    "set_per_process_memory_fraction",
    "synchronize",
)


class _DeviceModule(types.ModuleType):
    """`torch.cpu` with the functions of `torch.cuda` that verl calls."""

    def __init__(self) -> None:
        super().__init__("verl_cpu.device")
        for name in _BYTES_USED:
            setattr(self, name, lambda *args, **kwargs: 0)
        for name in _NOTHING_TO_DO:
            setattr(self, name, lambda *args, **kwargs: None)
        self.is_available = lambda: False
        self.get_device_name = lambda *args, **kwargs: "CPU"
        self.mem_get_info = lambda *args, **kwargs: (1, 1)
        self.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        self.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """One CPU device. Its Ray resource is called "GPU", the only name in verl's resource check; it is a logical
    resource passed to `ray.init`."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _DeviceModule()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def install() -> None:
    """Make the CPU the platform of this process."""
    set_platform(CPUPlatform())
    # verl registers its FSDP engine for cuda and npu; the one for cuda runs on any device.
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    start_process_group = verl_distributed.initialize_global_process_group_ray

    def start_on_cpu(timeout_second: int | None = None, backend: str | None = None) -> Any:
        # verl composes "cpu:gloo,<device>:<backend>", which names the CPU twice here, and torch refuses that.
        return start_process_group(timeout_second, backend or "cpu:gloo")

    verl_distributed.initialize_global_process_group_ray = start_on_cpu
