from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pools import StandIns


@pytest.fixture
def stand_ins(tmp_path: Path) -> Iterator[StandIns]:
    made = StandIns(tmp_path)
    yield made
    left = made.living()
    for pid in left:
        os.kill(pid, 9)
    assert left == []
