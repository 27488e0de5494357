"""What type checkers see of an accelerated function."""

from __future__ import annotations

from pathlib import Path

import pytest

SOURCE = """
from collections.abc import Iterator

from typing_extensions import assert_type

from qreward_plugins import accelerate

@accelerate
async def bare(x: int, *, y: str = ".") -> float:
    return x + len(y)

@accelerate(rate="600/min", timeout_s=3, retry_on=(TimeoutError,), default=None, key=lambda x: x)
def with_options(x: int) -> list[str]:
    return [str(x)]

@accelerate
def items(n: int) -> Iterator[bytes]:
    yield bytes(n)

async def right() -> None:
    assert_type(await bare(1, y="."), float)
    assert_type(await bare.map([1]), list[float])
    assert_type(await bare.with_options(retries=2)(1), float)
    assert_type(with_options(1), list[str])
    assert_type(list(items(1)), list[bytes])

async def wrong() -> None:
    await bare("x")  # type: ignore[arg-type]
    with_options()  # type: ignore[call-arg]
    accelerate(timeout=3)  # type: ignore[call-overload]
    accelerate(hedge="soon")  # type: ignore[call-overload]
"""


def test_mypy_strict_sees_the_signature_of_the_function(monkeypatch, tmp_path):
    """The ignores in the source are checked, too: an unused one is an error under `strict`."""
    api = pytest.importorskip("mypy.api")
    monkeypatch.chdir(Path(__file__).parents[2])  # its configuration and cache
    (tmp_path / "typed.py").write_text(SOURCE)
    output, errors, status = api.run([str(tmp_path / "typed.py")])
    assert (status, errors) == (0, ""), output
