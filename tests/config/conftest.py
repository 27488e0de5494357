"""What the tests of the configuration share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def usual_recursion_limit() -> Iterator[None]:
    """Python's default limit, which bounds how deep a file may be nested. Libraries raise it."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)
