"""A player whose parent is killed ends, busy as it may be, and so do its processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

BUSY = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, *sys.argv[1:], flush=True)
while True:
    pass
"""

STARTS = """
import os, sys
from pathlib import Path

import pytest
from conformance.processes import PlayerProcess

with PlayerProcess("nothing", "busy", Path(sys.argv[1]), os.environ, start_s=600, watchdog_s=600) as player:
    print(player._process.pid, player._replies.get(), flush=True)
    player.ask("anything")
"""


def lives(pid):
    """Whether a process runs (Linux)."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_busy_player_ends_with_a_parent_that_is_killed(tmp_path):
    (tmp_path / "busy.py").write_text(BUSY)
    paths = [str(tmp_path), str(Path(__file__).parents[1]), *sys.path]
    command = [sys.executable, "-c", STARTS, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        player, child, folder = parent.stdout.readline().split()
        assert folder == str(tmp_path)
        assert lives(player)
        assert lives(child)
        parent.kill()
    ends_at = time.monotonic() + 60.0
    while lives(player) or lives(child):
        assert time.monotonic() < ends_at, "the player plays on"
        time.sleep(0.05)
