"""The programs, commands and files in the README and in `docs/` are run, so that they cannot go stale."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import slime_adapter
from qreward_plugins import RewardEngine, Sample, load_config
from qreward_plugins.cli.app import COMMANDS as COMMANDS_OF_APP
from qreward_plugins.cli.app import app
from qreward_plugins.testing import JudgeServer

ROOT = Path(__file__).parents[1]
MORE = ["CHANGELOG.md", "CONTRIBUTING.md"]
PAGES = [ROOT / "README.md", *(ROOT / name for name in MORE), *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page: page.read_text() for page in PAGES}
FENCED = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
MOST_LINES_OF_README = 200


def found_in(page, language):
    return [
        "\n".join(line.removeprefix(indent) for line in body.splitlines())
        for indent, found, body in FENCED.findall(TEXTS[page])
        if found == language
    ]


def blocks(language):
    return [
        pytest.param(body, id=f"{page.stem}-{number}")
        for page in PAGES
        for number, body in enumerate(found_in(page, language))
    ]


def bodies(language):
    return [body for page in PAGES for body in found_in(page, language)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that programs and commands name, beside a judge server."""
    folder = tmp_path_factory.mktemp("reader")
    for body in bodies("python"):
        if name := re.match(r"# (my_\w+\.py)\n", body):
            (folder / name[1]).write_text(body)
    with JudgeServer(models=["Qwen/Qwen3-32B"]) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUDGE_BASE_URL", server.base_url)
        patch.syspath_prepend(folder)
        judge = yaml.safe_load(found_in(ROOT / "README.md", "yaml")[0])
        judge["sources"]["mine"]["base_url"] = server.base_url
        judge["judges"]["quality"]["max_tokens"] = 512
        (folder / "judges.yaml").write_text(yaml.safe_dump(judge))
        judge["sources"]["mine"]["limits"] = {"concurrency": 32}
        (folder / "new.yaml").write_text(yaml.safe_dump(judge))
        (folder / "qreward.yaml").write_text(yaml.safe_dump({"qreward": judge}))
        (folder / "rewards.yaml").write_text(found_in(ROOT / "docs/reward_function.md", "yaml")[0])
        (folder / "short.yaml").write_text(found_in(ROOT / "docs/extending.md", "yaml")[0])
        row = {"prompt": "What is 17 + 25?", "response": "It is 42.", "ground_truth": "42"}
        (folder / "rollouts.jsonl").write_text(f"{json.dumps(row)}\n")
        labelled = {"prompt": row["prompt"], "chosen": "It is 42.", "rejected": "It is 7.", "ground_truth": "42"}
        (folder / "labelled.jsonl").write_text(f"{json.dumps(labelled)}\n")
        for name in ("verdicts", "before", "after"):
            judge["engine"] = {"journal": {"path": str(folder / f"{name}.sqlite")}}
            with RewardEngine(judge).portal() as portal:
                for deadline_s in (60.0, 1e-6):  # the second one fails
                    question = [{"role": "user", "content": row["prompt"]}]
                    sample = Sample(question, row["response"], row["ground_truth"], step=1, id=f"{deadline_s}")
                    portal.score(sample, deadline_s=deadline_s)
        yield folder


@pytest.mark.parametrize("block", blocks("yaml"))
def test_every_configuration_is_valid(folder, block):
    config = load_config(yaml.safe_load(block))
    assert config.sources or config.engine.server
    assert load_config(config) == config


OUTPUTS = {
    "observers=": r"math: 1\.0 from a after 1 attempt\n",
    "AsyncOpenAI(http_client": r"Air scatters blue light\.\nAir scatters blue light\.\n",
    "grade.statistics()": r"0\.5\n\[0\.1, 0\.5, 0\.3\]\n1 retry\n",
    "stream_text": r"Air scatters blue light\. 1\nAir scatters blue light\.",
    "FakeVerlTrainer": r"0\.0\n1\.0\n",
    "FakeSlimeTrainer": r"0\.0 \{'held_out': \[[01.]+(, [01.]+)*\]\}\n",
    "FakeRollTrainer": r"0\.0 [\s\S]*\nJudgeUnavailable 8 groups in a row had fewer than 2 [\s\S]*\n",
    "PlayFault": r"\[[\d.]+, [\d.]+, [\d.]+, None\]\n",
    "score_all(samples):": r"1\.0 Scored\([\s\S]*\)\n",
}
"""What a program prints, by a part of it. A program without an entry prints nothing."""


def test_every_output_belongs_to_one_program():
    assert {part: sum(part in body for body in bodies("python")) for part in OUTPUTS} == dict.fromkeys(OUTPUTS, 1)


@pytest.mark.parametrize("block", blocks("python"))
def test_every_program_runs(folder, capsys, monkeypatch, block):
    monkeypatch.chdir(folder)
    try:
        exec(compile(block, "docs", "exec"), {"__name__": "docs"})
    finally:
        slime_adapter.close()
    output = next((output for part, output in OUTPUTS.items() if part in block), "")
    assert re.fullmatch(output, capsys.readouterr().out)


def test_the_tests_of_the_page_for_ci_pass(folder):
    programs = [body for body in found_in(ROOT / "docs/testing.md", "python") if body.startswith("# test_")]
    files = {body.partition("\n")[0].removeprefix("# "): body for body in programs}
    for name, body in files.items():
        (folder / name).write_text(body)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    assert f"{len(files)} passed" in done.stdout, done.stdout


def commands_of(text):
    """The command lines in the blocks and in the sentences of a text, without what follows a pipe."""
    lines = [line for _, found, body in FENCED.findall(text) if found == "bash" for line in body.splitlines()]
    lines += re.findall(r"`(qreward [a-z][^`\n]*)`", re.sub(FENCED, "", text))
    return [part.strip() for line in lines for part in line.split("|") if part.strip().startswith("qreward ")]


COMMANDS = sorted({one for page, text in TEXTS.items() if page.stem != "CHANGELOG" for one in commands_of(text)})
"""Those of all pages. The change log names commands that are gone."""
LEFT_OUT = {"serve", "ui", "serve-judge", "fake-judge", "init", "calibrate"}
"""Servers do not end, `init` asks questions, and `calibrate` needs a reward model."""
SHORTER = {"2048": "16"}
"""Words of a command that would take long, and what stands for them."""


def test_every_command_is_accepted():
    """Unknown options and commands are refused before `--help` counts. A command without options needs no look."""
    for command in COMMANDS:
        words = [word for word in shlex.split(command, comments=True)[1:] if word != "COMMAND"]
        if words and words[0] in COMMANDS_OF_APP and not any(word.startswith("-") for word in words):
            continue
        result = CliRunner().invoke(app, [*words, "--help"])
        assert result.exit_code == 0, command


def test_every_command_that_ends_runs(folder, monkeypatch):
    """Those of blocks, on the files of the pages."""
    monkeypatch.chdir(folder)
    lines = {line for text in TEXTS.values() for line in commands_of("\n".join(found[0] for found in whole(text)))}
    ran = set()
    for command in sorted(lines):
        words = [SHORTER.get(word, word) for word in shlex.split(command, comments=True)[1:]]
        if words[0] in LEFT_OUT:
            continue
        if words[0] == "plan":
            words = [*words[: words.index("--plot")], "--seeds", "1"] if "--plot" in words else [*words, "--seeds", "1"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (command, result.output)
        ran.add(words[0])
    assert ran == {"audit", "bench", "check", "diff", "export", "journal", "plan", "replay", "score", "sources", "why"}


def whole(text):
    return [found for found in FENCED.finditer(text) if found[2] == "bash"]


def test_every_target_exists():
    targets = {target for text in TEXTS.values() for target in re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)}
    assert targets <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them, and the identifiers that the build adds."""
    headings = re.findall(r"^#+ (.*)$", re.sub(FENCED, "", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page):
    """The build of the site checks the anchors on pages that it writes itself."""
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", re.sub(FENCED, "", TEXTS[page])):
        path, _, anchor = target.partition("#")
        leads_to = page.parent / path if path else page
        assert leads_to.exists(), target
        assert not anchor or "<!-- every key -->" in leads_to.read_text() or anchor in anchors(leads_to), target


def test_the_readme_is_short():
    assert len(TEXTS[ROOT / "README.md"].splitlines()) <= MOST_LINES_OF_README
