"""A folder that cannot be written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Within it, nothing can be written into `folder`, not even by root, who becomes nobody."""
    files = [path for path in folder.iterdir() if path.is_file()]
    root = os.geteuid() == 0
    for path in files:
        path.chmod(0o444)
    folder.chmod(0o555)
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)
        for path in files:
            path.chmod(0o644)
