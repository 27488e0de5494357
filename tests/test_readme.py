"""The examples in the README and the pages of docs/ are run, so that they cannot go stale."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import slime_adapter
from qreward_plugins import load_config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page: page.read_text() for page in PAGES}
FENCED = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
MOST_LINES_OF_README = 450


def blocks(language):
    return [
        pytest.param("\n".join(line.removeprefix(indent) for line in body.splitlines()), id=f"{page.stem}-{number}")
        for page, text in TEXTS.items()
        for number, (indent, found, body) in enumerate(FENCED.findall(text))
        if found == language
    ]


def bodies(language):
    return [body for block in blocks(language) for body in block.values]


@pytest.mark.parametrize("block", blocks("yaml"))
def test_every_configuration_is_valid(block):
    config = load_config(yaml.safe_load(block))
    assert config.sources or config.engine.server


@pytest.mark.parametrize("block", blocks("python"))
def test_every_program_compiles(block):
    compile(block, "README.md", "exec")


@pytest.mark.parametrize(
    ("contains", "output"),
    [
        ("portal.score(", r"1\.0\n"),
        ("observers=", r"math: 1\.0 from a after 1 attempt\n"),
        ("AsyncOpenAI(http_client", r"Air scatters blue light\.\nAir scatters blue light\.\n"),
        ("grade.statistics()", r"0\.5\n\[0\.1, 0\.5, 0\.3\]\n1 retry\n"),
        ("length.retune", r"3 \[1, None\]\n"),
        ("stream_text", r"Air scatters blue light\.\nlocal 1\n"),
        ("FakeVerlTrainer", r"0\.0\n1\.0\n"),
        ("FakeSlimeTrainer", r"0\.0 \{'held_out': \[[01.]+(, [01.]+)*\]\}\n"),
        ("FakeRollTrainer", r"0\.0 [\s\S]*\nJudgeUnavailable 8 groups in a row had fewer than 2 [\s\S]*\n"),
    ],
)
def test_the_examples_without_a_provider_run(capsys, contains, output):
    (program,) = [block for block in bodies("python") if contains in block]
    try:
        exec(program, {"__name__": "readme"})
    finally:
        slime_adapter.close()
    assert re.fullmatch(output, capsys.readouterr().out)


def test_every_command_and_target_exists():
    from typer.main import get_command

    from qreward_plugins.cli.app import app

    commands = set(re.findall(r"^qreward ([a-z-]+)", "\n".join(bodies("bash")), re.MULTILINE))
    assert commands == set(get_command(app).commands)
    assert commands <= anchors(ROOT / "docs/commands.md")
    targets = {target for text in TEXTS.values() for target in re.findall(r"(?:`|^)make ([a-z]+)", text, re.MULTILINE)}
    assert targets <= set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(FENCED, "", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", TEXTS[page]):
        path, _, anchor = target.partition("#")
        leads_to = page.parent / path if path else page
        assert leads_to.exists(), target
        assert not anchor or anchor in anchors(leads_to), target


def test_the_readme_leads_to_every_page_and_is_short():
    text = TEXTS[ROOT / "README.md"]
    assert all(f"](docs/{page.name}" in text for page in PAGES[1:])
    assert len(text.splitlines()) <= MOST_LINES_OF_README
