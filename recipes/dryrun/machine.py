"""What this machine has: paths, GPUs, models, programs."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from .lines import Line


def has_module(name: str) -> bool:
    """Whether a module below a package can be imported. Folders of recipes have the names of frameworks, so looking for
    the package alone would find them.
    """
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def count_gpus() -> int:
    """The number of GPUs that this process may use, as torch counts them."""
    import torch

    return int(torch.cuda.device_count())


def cluster_gpus(address: str) -> list[int]:
    """The GPUs of each node of a running Ray cluster. `address` is that of its dashboard, as `ray job submit` takes it.

    Raises what Ray raises if it does not answer.
    """
    from ray.util.state import list_nodes

    nodes = list_nodes(address=address, filters=[("state", "=", "ALIVE")], detail=True, timeout=20)
    return [int((node.resources_total or {}).get("GPU", 0)) for node in nodes]


def gpu_line(
    nodes: int,
    per_node: int,
    *,
    judge_devices: Iterable[int] = (),
    environment: Mapping[str, str] = os.environ,
    count: Callable[[], int] = count_gpus,
    of_cluster: Callable[[str], list[int]] = cluster_gpus,
) -> Line:
    """Whether the GPUs that a training asks for exist, and are not those of the judge's own servers."""
    what, asked = "GPUs", f"asks for {nodes} x {per_node}"
    address = environment.get("RAY_API_SERVER_ADDRESS")
    if address:
        try:
            found = of_cluster(address)
        except Exception as error:
            return Line(what, "FAIL", f"{asked}; the cluster at {address} does not answer: {type(error).__name__}",
                        "start it (ray start --head), or unset RAY_API_SERVER_ADDRESS")  # fmt: skip
        enough = sum(number >= per_node for number in found)
        found_text = (
            f"{asked}; the cluster has {', '.join(map(str, sorted(found, reverse=True))) or 'no'} GPUs on its nodes"
        )
        if enough >= nodes:
            return Line(what, "ok", found_text)
        return Line(what, "FAIL", found_text, "add nodes to the cluster (ray start --address ...), or ask for fewer")
    have = count()
    if nodes > 1:
        return Line(what, "FAIL", f"{asked}; only this machine ({have}) was looked at",
                    "start a Ray over all nodes, and set RAY_API_SERVER_ADDRESS to its dashboard")  # fmt: skip
    if have < per_node:
        return Line(what, "FAIL", f"{asked}; this machine shows {have}", "run it where they are, or ask for fewer")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    judges = sorted(set(judge_devices))
    mine = {int(part) for part in visible.split(",") if part.strip().isdigit()} if visible else set(range(have))
    both = sorted(mine.intersection(judges))
    if both and (visible or len(mine) - len(both) < per_node):
        rest = ",".join(str(number) for number in sorted(mine) if number not in judges)
        return Line(what, "FAIL", f"{asked}; the judge's servers take the devices {both} of the trainer",
                    f"set CUDA_VISIBLE_DEVICES={rest or '...'} for the training, and ask for so many")  # fmt: skip
    if both:
        rest = ",".join(str(number) for number in sorted(mine) if number not in judges)
        return Line(what, "FAIL", f"{asked} of {have}; nothing keeps the trainer off the judge's devices {both}",
                    f"set CUDA_VISIBLE_DEVICES={rest} for the training")  # fmt: skip
    return Line(what, "ok", f"{asked}; this machine shows {have}")


def path_line(what: str, path: str | os.PathLike[str], remedy: str) -> Line:
    """Whether a path exists."""
    if Path(path).exists():
        return Line(what, "ok", str(path))
    return Line(what, "FAIL", f"{path} does not exist", remedy)


def folder_line(what: str, path: str | os.PathLike[str]) -> Line:
    """Whether a folder can be written, or made."""
    folder = Path(path)
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if existing.is_dir() and os.access(existing, os.W_OK):
        return Line(what, "ok", f"{folder} ({'exists' if existing == folder else 'will be made'})")
    return Line(what, "FAIL", f"{folder} cannot be written", "choose another folder")


def local_model(name: str) -> str | None:
    """The folder or the name of a model that is on this machine; None if a start would download it."""
    if Path(name).is_dir():
        return name
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return name if isinstance(try_to_load_from_cache(name, "config.json"), str) else None
    except HFValidationError:
        return None


def model_line(what: str, name: str) -> Line:
    """Whether a model is on this machine."""
    if local_model(name) is not None:
        return Line(what, "ok", f"{name} is on this machine")
    if name.startswith(("/", ".", "~")):
        return Line(what, "FAIL", f"{name} does not exist", "name a folder with the model, or a name of the hub")
    return Line(what, "note", f"{name} is not in the local cache; every node would download it first",
                f"hf download {name}")  # fmt: skip


def packages_line(what: str, packages: Iterable[str], remedy: str) -> Line:
    """Whether Python packages are installed."""
    wanted = list(packages)
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        return Line(what, "FAIL", f"not installed: {', '.join(missing)}", remedy)
    return Line(what, "ok", ", ".join(wanted) or "nothing further is needed")


def variables_line(names: Iterable[str], environment: Mapping[str, str] = os.environ) -> Line:
    """Whether variables that hold keys are set. Their values are never shown."""
    wanted = sorted(set(names))
    missing = [name for name in wanted if not environment.get(name)]
    if missing:
        return Line("keys", "FAIL", f"not set: {', '.join(missing)}", "export them where the run is started")
    return Line("keys", "ok", f"set: {', '.join(wanted)}" if wanted else "the judges need none")
