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


@pytest.fixture(autouse=True)
def shared_directory(short_directory: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pools of this test are found here, so no other run's are used."""
    monkeypatch.setattr("qreward_plugins.system.private_directory.USUAL", short_directory)
    return Path(short_directory)
