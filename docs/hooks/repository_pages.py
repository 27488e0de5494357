"""Adds a page to the site for every file outside of `docs/` that a page links to: an example, a recipe, a module.

In the repository such a link opens the file, but the site holds no other files. So each linked file becomes a page
below `repository/`: Markdown as it is, any other file as a listing. A linked folder becomes its README, or a list of
its files. The README of the repository is the site's home.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
DOCS = "docs"
HOME = "repository"
"""The folder of the site in which pages of other files are."""
FIRST = "index.md"
"""The site's home, which is the README."""

_LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?(\))")
_FENCE = re.compile(r"^( *)(```+)[^\n]*\n.*?^\1\2$", re.DOTALL | re.MULTILINE)
_UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
_LANGUAGES = {"py": "python", "sh": "bash", "yaml": "yaml", "yml": "yaml", "toml": "toml", "json": "json"}


def on_files(files: Files, config: Any) -> Files:
    """MkDocs' hook: adds a page for each file that a page, or a page of such a file, links to."""
    files.append(File.generated(config, FIRST, content=content_of("README.md")))
    pages = {file.src_uri for file in files}
    waiting = [target for file in files.documentation_pages() for target in _targets(source_of(file.src_uri), file)]
    waiting += [source_of(uri) for uri in _named(config["nav"]) if uri.startswith(f"{HOME}/")]
    while waiting:
        target = waiting.pop()
        uri = uri_of(target)
        if uri in pages or not (ROOT / target).exists():
            continue
        pages.add(uri)
        if uri.endswith(".md"):
            added = File.generated(config, uri, content=content_of(target))
            waiting += _targets(source_of(uri), added)
        else:
            added = File.generated(config, uri, abs_src_path=str(ROOT / target))
        files.append(added)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs' hook: rewrites the links that lead out of `docs/`, and those of a page from outside."""
    place, here = source_of(page.file.src_uri), page.file.src_uri

    def rewritten(found: re.Match[str]) -> str:
        target = _resolved(place, found[2])
        if target is None or not (ROOT / target).exists():
            return found[0]
        uri = posixpath.relpath(uri_of(target), posixpath.dirname(here) or ".")
        return f"{found[1]}{uri}{found[3] or ''}{found[4]}"

    return _indented(_outside_fences(markdown, lambda text: _LINK.sub(rewritten, text)))


def uri_of(target: str) -> str:
    """Where the site has a file of the repository; `target` is its path from the repository's root."""
    if target.startswith(f"{DOCS}/"):
        return target.removeprefix(f"{DOCS}/")
    if target == "README.md":
        return FIRST
    path = ROOT / target
    if path.is_dir():
        return f"{HOME}/{target}/index.md"
    if target.endswith("README.md"):
        return f"{HOME}/{target.removesuffix('README.md')}index.md"
    if path.suffix in (".md", ".png", ".svg"):
        return f"{HOME}/{target}"
    return f"{HOME}/{target}.md"


def source_of(uri: str) -> str:
    """The path from the repository's root of the file behind a page of the site."""
    if uri == FIRST:
        return "README.md"
    if not uri.startswith(f"{HOME}/"):
        return f"{DOCS}/{uri}"
    target = uri.removeprefix(f"{HOME}/")
    if target.endswith("index.md"):
        return f"{target.removesuffix('index.md')}README.md"
    return target if (ROOT / target).exists() else target.removesuffix(".md")


def content_of(target: str) -> str:
    """The Markdown of the page of a file or folder."""
    path = ROOT / target
    if path.is_dir():
        readme = path / "README.md"
        if readme.is_file():
            return readme.read_text()
        names = sorted(item.name for item in path.iterdir() if item.is_file() and not item.name.startswith("."))
        return _UNSEARCHED + "\n".join([f"# {target}", "", *(f"- [{name}]({name})" for name in names), ""])
    if path.suffix == ".md":
        return path.read_text()
    language = _LANGUAGES.get(path.suffix.removeprefix("."), "text")
    return f"{_UNSEARCHED}# {target}\n\n````{language}\n{path.read_text()}````\n"


def _named(nav: Any) -> list[str]:
    """The pages that a navigation names."""
    if isinstance(nav, str):
        return [nav]
    below = nav.values() if isinstance(nav, dict) else nav or ()
    return [uri for item in below for uri in _named(item)]


def _targets(place: str, file: File) -> list[str]:
    """What a page at `place` links to outside of `docs/`, as paths from the root."""
    found: list[str] = []

    def noted(part: str) -> str:
        found.extend(target for match in _LINK.finditer(part) if (target := _resolved(place, match[2])))
        return part

    _outside_fences(file.content_string, noted)
    return [target for target in found if not target.startswith(f"{DOCS}/")]


def _resolved(place: str, link: str) -> str | None:
    """The path from the root of what a link leads to; None if it leads out of the repository."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(place), link))
    return None if target.startswith("..") or target == "." else target


def _indented(text: str) -> str:
    """`text` with what belongs to a numbered step indented by four blanks. Python-Markdown wants four; three are usual
    elsewhere, and line up with the words of the step.
    """
    lines, in_list = [], False
    for line in text.split("\n"):
        if re.match(r"\d\. ", line):
            in_list = True
        elif line and not line.startswith("   "):
            in_list = False
        lines.append(f" {line}" if in_list and line.startswith("   ") else line)
    return "\n".join(lines)


def _outside_fences(text: str, change: Any) -> str:
    """`text` with the parts between fenced blocks changed."""
    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])
