"""Writes what docs/keys.md and docs/commands.md list, from the code. A test compares them.

    python scripts/reference_pages.py

A page holds what is written between `<!-- every key -->` or `<!-- options: COMMAND -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from pathlib import Path

from command_options import options_of
from configuration_keys import every_key

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("keys.md", "commands.md")
_PART = re.compile(r"(<!-- (every key|options: ([a-z-]+)) -->\n).*?(<!-- end -->)", re.DOTALL)


def current(page: str) -> str:
    """The text of a page with everything that is written into it up to date."""

    def written(found: re.Match[str]) -> str:
        return f"{found[1]}\n{options_of(found[3]) if found[3] else every_key()}\n\n{found[4]}"

    return _PART.sub(written, page)


def main() -> None:
    for name in PAGES:
        path = DOCS / name
        path.write_text(current(path.read_text()))


if __name__ == "__main__":
    main()
