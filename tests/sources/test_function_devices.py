"""Functions whose worker processes see one device each. A device is only a number in an environment variable here."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from qreward_plugins import ConfigurationError, RewardEngine, Sample

pytestmark = pytest.mark.anyio
PATIENCE_S = 30.0

FUNCTION = """
import os, time
from contextlib import suppress
from pathlib import Path

SEEN = os.environ["CUDA_VISIBLE_DEVICES"]  # when the file is imported
with (Path(__file__).parent / "imports").open("a") as file:
    file.write(f"{os.getpid()} {SEEN}\\n")

def score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "crash once on 5":
        crashed = Path(__file__).parent / "crashed"
        if SEEN == "5":
            with suppress(FileExistsError):
                crashed.touch(exist_ok=False)
                os._exit(3)
        while not crashed.exists():
            time.sleep(0.01)
    return {"score": 1.0, "device": int(SEEN), "pid": os.getpid()}

def plurals(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(len(text)) for text in solution_strs]

async def awaited(**_):
    return 1.0

if (Path(__file__).parent / "out of memory").exists():
    os._exit(9)
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as in a reward worker
    (tmp_path / "model.py").write_text(FUNCTION)

    def made(name: str = "score", **source: Any) -> dict[str, Any]:
        node = {"kind": "function", "function": f"{tmp_path}/model.py:{name}", "devices": [3, 5], **source}
        return {"sources": {"rm": node}, "judges": {"j": {"kind": "function"}}, "engine": {"deadline_s": 60}}

    return made


def samples(*responses: str) -> list[Sample]:
    return [Sample([{"role": "user", "content": "?"}], response) for response in responses]


def imports(tmp_path: Path) -> dict[int, int]:
    """The devices that the importing processes saw, by process id."""
    return {int(pid): int(seen) for pid, seen in map(str.split, (tmp_path / "imports").read_text().splitlines())}


async def test_each_worker_sees_its_own_device_when_it_imports_the_file(tree, tmp_path, caplog):
    caplog.set_level(logging.INFO, "qreward_plugins.sources")
    async with RewardEngine(tree()) as engine:
        outcomes = await engine.score_all(samples(*"abcdefgh"))
    seen = imports(tmp_path)
    assert sorted(seen.values()) == [3, 5]  # all workers, and neither this process
    assert {(o.verdict.components["pid"], o.verdict.components["device"]) for o in outcomes} <= set(seen.items())
    said = [record.getMessage() for record in caplog.records if "sees" in record.getMessage()]
    expected = [f"source 'rm': worker process {pid} sees CUDA_VISIBLE_DEVICES={seen[pid]}" for pid in seen]
    assert sorted(said) == sorted(expected)


async def test_a_worker_that_dies_is_replaced_on_its_device(tree, tmp_path):
    async with RewardEngine(tree(workers=4)) as engine:
        outcomes = await engine.score_all(samples(*["crash once on 5"] * 4))
        assert [outcome.reward for outcome in outcomes] == [1.0] * 4
        deadline = time.monotonic() + PATIENCE_S
        while len(imports(tmp_path)) < 5:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
    *first, last = imports(tmp_path).values()
    assert (sorted(first), last) == ([3, 3, 5, 5], 5)


async def test_a_call_may_carry_several_samples(tree):
    async with RewardEngine(tree("plurals", batch={"max_size": 4})) as engine:
        outcomes = await engine.score_all(samples("a", "bb", "ccc"))
    assert [outcome.reward for outcome in outcomes] == [1.0, 2.0, 3.0]


async def test_workers_that_all_die_while_they_load_stop_the_start(tree, tmp_path):
    (tmp_path / "out of memory").touch()
    async with RewardEngine(tree()) as engine:
        with pytest.raises(ConfigurationError, match=r"sources\.rm\.function.*no worker process could be started"):
            await engine.score_all(samples("a"))


async def test_names_of_lists_are_for_batches_only(tree):
    async with RewardEngine(tree("plurals")) as engine:
        (outcome,) = await engine.score_all(samples("abcde"))
    assert (outcome.reward, "TypeError" in outcome.detail) == (None, True), outcome.detail


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere", "the function cannot be loaded: .*model.py has no 'nowhere'"),
        ("awaited", "the function cannot be loaded: it is async, and would run in a process without devices"),
    ],
)
async def test_a_function_that_workers_cannot_load_stops_the_start(tree, name, problem):
    async with RewardEngine(tree(name)) as engine:
        for _ in range(2):
            with pytest.raises(ConfigurationError, match=rf"sources\.rm\.function: {problem}"):
                await engine.score_all(samples("a"))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"mode": "thread"}, "threads see the devices of their process; remove mode: thread, or devices"),
        ({"workers": 1}, "workers: 1 leaves devices unused; set 2 or more, or remove it"),
        ({"devices": [0, -1]}, "-1 is no index of a device"),
        ({"devices": [1, 1]}, "the device 1 is named twice"),
        ({"devices": 0}, "must be a list of devices, by index or name"),
        ({"devices": []}, "must be a list of devices, by index or name"),
    ],
)
def test_what_cannot_work_is_refused(tree, settings, problem):
    with pytest.raises(ConfigurationError) as caught:
        RewardEngine(tree(**settings))
    (mistake,) = caught.value.mistakes
    assert mistake.path == "sources.rm.devices"
    assert problem in str(mistake)
