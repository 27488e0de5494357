from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .pools import StandIns, kill


@pytest.fixture
def stand_ins(tmp_path: Path) -> Iterator[StandIns]:
    made = StandIns(tmp_path)
    yield made
    left = made.living()
    kill(*left)
    assert left == []
