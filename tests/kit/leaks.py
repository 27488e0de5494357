"""What a test leaves behind. The fixture holds for each test of a folder whose conftest imports it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

WITHIN_S = 5.0


def tasks_left() -> list[asyncio.Task[Any]]:
    """The tasks of the running loop other than the caller's and the test runner's own."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    return [task for task in others if "TestRunner" not in repr(task.get_coro())]


def connections_left(*urls: str, listening: bool = True) -> list[str]:
    """The TCP sockets of this process at the ports of the given URLs, its own and its peers', that stay open for 5 s.
    `listening`: those of servers that accept connections, too.

    All descriptors of the process cannot be counted: one that has used Ray keeps threads of gRPC, which open sockets
    when they like. It blocks: in a loop, call it in a thread.
    """
    ports = {urlsplit(url).port for url in urls}
    ends_at = time.monotonic() + WITHIN_S
    while True:
        found = [
            f"{end.laddr} -> {end.raddr or 'nobody'}: {end.status}"
            for end in psutil.Process().net_connections("tcp")
            if {end.laddr.port, end.raddr.port if end.raddr else None} & ports
            and (listening or end.status != psutil.CONN_LISTEN)
        ]
        if not found or time.monotonic() > ends_at:
            return found
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """No thread that keeps the interpreter alive outlives a test, nor anything whose loss is a warning when it is
    collected.
    """
    before = set(threading.enumerate())
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gc.collect()
    assert [thread for thread in threading.enumerate() if thread not in before and not thread.daemon] == []
