"""The README's examples are run, so that they cannot go stale."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import slime_adapter
from qreward_plugins import load_config

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
FENCED = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def blocks(language):
    return [
        "\n".join(line.removeprefix(indent) for line in body.splitlines())
        for indent, found, body in FENCED.findall(TEXT)
        if found == language
    ]


@pytest.mark.parametrize("block", blocks("yaml"))
def test_every_configuration_is_valid(block):
    config = load_config(yaml.safe_load(block))
    assert config.sources


@pytest.mark.parametrize("block", blocks("python"))
def test_every_program_compiles(block):
    compile(block, "README.md", "exec")


@pytest.mark.parametrize(
    ("contains", "output"),
    [
        ("portal.score", r"1\.0\n"),
        ("observers=", r"math: 1\.0 from a after 1 attempt\n"),
        ("FakeVerlTrainer", r"0\.0\n1\.0\n"),
        ("FakeSlimeTrainer", r"0\.0 \{'held_out': \[[01.]+(, [01.]+)*\]\}\n"),
        ("FakeRollTrainer", r"0\.0 [\s\S]*\nJudgeUnavailable 8 groups in a row had fewer than 2 [\s\S]*\n"),
    ],
)
def test_the_examples_without_a_provider_run(capsys, contains, output):
    (program,) = [block for block in blocks("python") if contains in block]
    try:
        exec(program, {"__name__": "readme"})
    finally:
        slime_adapter.close()
    assert re.fullmatch(output, capsys.readouterr().out)


def test_every_command_and_target_exists():
    from typer.main import get_command

    from qreward_plugins.cli.app import app

    shell = "\n".join(blocks("bash"))
    commands = set(re.findall(r"^qreward ([a-z-]+)", shell, re.MULTILINE))
    assert commands == set(get_command(app).commands)
    targets = set(re.findall(r"`?make ([a-z]+)", TEXT))
    assert targets <= set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target
