"""Writes the parts of the distribution's metadata that depend on where the repository is published.

The README has relative links, which work wherever the repository is browsed. A package index shows it without the
repository. So at build time links and pictures get the address in the environment variable `QREWARD_REPOSITORY`, and
the project gets its URLs. Without that address, links become plain text and pictures their descriptions: an index then
shows no dead link.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "QREWARD_REPOSITORY"
BRANCH = "main"

_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!https?:)(?P<target>[^)\s]*)\)")


class ReadmeAndURLs(MetadataHookInterface):
    """The hook that hatchling calls."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme` and `urls`."""
        address = os.environ.get(VARIABLE, "").rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme(text, address)}
        metadata["urls"] = urls(address)


def readme(text: str, address: str) -> str:
    """The README with absolute links; without relative links if there is no address."""

    def absolute(found: re.Match[str]) -> str:
        picture, words, target = found["picture"], found["text"], found["target"]
        if target.startswith("#"):
            return found[0]
        if not address:
            return f"*{words}*" if picture else words
        return f"{picture}[{words}]({address}/{'raw' if picture else 'blob'}/{BRANCH}/{target})"

    return _LINK.sub(absolute, text)


def urls(address: str) -> dict[str, str]:
    """The project's URLs."""
    if not address:
        return {}
    pages = {"Documentation": "README.md#documentation", "Changelog": "CHANGELOG.md"}
    found = {"Repository": address, "Issues": f"{address}/issues"}
    return found | {name: f"{address}/blob/{BRANCH}/{path}" for name, path in pages.items()}
