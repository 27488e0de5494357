"""Configurations and samples for whole-engine tests."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings

import pytest

from qreward_plugins import Sample


@pytest.fixture
def make_config():
    """Build the tree of a configuration: one LLM judge over the judge servers given by name."""

    def make(servers, *, limits=None, judge=None, engine=None, **top):
        sources = {
            name: {
                "kind": "openai",
                "base_url": server.base_url,
                "model": "judge",
                "limits": (limits or {}).get(name, {}),
                "timeouts": {"total_s": 20},
            }
            for name, server in servers.items()
        }
        return {
            "sources": sources,
            "judges": {"quality": {"kind": "llm", **(judge or {})}},
            "engine": {"seed": 7, **(engine or {})},
            **top,
        }

    return make


@pytest.fixture
def make_sample():
    def make(number=0, **fields):
        values = {
            "messages": [{"role": "user", "content": f"What is {number} plus 1?"}],
            "response": f"{number} plus 1 is {number + 1}.",
            "ground_truth": str(number + 1),
            "data_source": "test/add",
            "id": f"sample-{number}",
        }
        return Sample(**{**values, **fields})

    return make


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """No thread and no unclosed resource may outlive a test."""
    before = set(threading.enumerate())
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gc.collect()
    left = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    assert left == []


@pytest.fixture
def tasks_left():
    """The tasks of the running loop other than the caller's and the test runner's own."""

    def tasks():
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        return [task for task in others if "TestRunner" not in repr(task.get_coro())]

    return tasks
