"""What type checkers see of an accelerated function."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_mypy_strict_sees_the_signature_of_the_function(monkeypatch):
    """The ignores in `typed.py` are checked, too: an unused one is an error under `strict`."""
    api = pytest.importorskip("mypy.api")
    monkeypatch.chdir(Path(__file__).parents[2])  # its configuration and cache
    output, errors, status = api.run(["tests/acceleration/typed.py"])
    assert (status, errors) == (0, ""), output
