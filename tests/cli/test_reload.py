"""`qreward reload --check`, and SIGHUP for `qreward serve`."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import yaml


def tree(**source):
    return {
        "sources": {"a": {"kind": "openai", "base_url": "http://a.invalid/v1", "model": "m", **source}},
        "judges": {"quality": {"kind": "llm"}},
    }


@pytest.fixture
def check(tmp_path):
    def run(old, new, *, stdin=False):
        for name, value in (("old", old), ("new", new)):
            (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(value))
        arguments = ["--check", "-" if stdin else "old.yaml", "new.yaml"]
        return subprocess.run(
            [sys.executable, "-m", "qreward_plugins.cli", "reload", *arguments],
            cwd=tmp_path,
            input=(tmp_path / "old.yaml").read_text() if stdin else "",
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": "", "PYTHONPATH": ":".join(sys.path), "COLUMNS": "160"},
        )

    return run


def test_the_difference_is_a_table_and_shows_no_secret(check):
    new = tree(limits={"requests_per_minute": 60}, api_key="sk-secret")
    new["sources"]["b"] = {"kind": "openai", "base_url": "http://b.invalid/v1", "model": "m"}
    shown = check(tree(), new, stdin=True)
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert any("sources.a.limits.requests_per_minute" in line and "60" in line for line in lines)
    assert any("sources.b" in line and "changes at once" in line for line in lines)
    assert any("sources.a.api_key" in line and "what is under way ends there first" in line for line in lines)
    assert "sk-secret" not in shown.stdout
    assert lines[-1] == "a reload would apply this as a whole"


def test_what_needs_a_restart_and_what_is_wrong_have_their_exit_codes(check):
    shown = check(tree(), {**tree(), "engine": {"shared": "off"}})
    assert shown.returncode == 1
    assert shown.stdout.splitlines()[-1] == "a reload would be refused as a whole: engine.shared needs a restart"
    wrong = check(tree(), tree(limits={"requests_per_minute": -1}))
    assert wrong.returncode == 2
    assert "sources.a.limits.requests_per_minute" in wrong.stderr


def test_sighup_reloads_the_file(start_cli, server, write_config, row):
    config = write_config({"judge": server})
    process = start_cli("serve", config, "--port", 0)
    assert process.stdout.readline().startswith("reward server at ")
    written = yaml.safe_load(config.read_text())
    written.setdefault("engine", {})["deadline_s"] = 77
    config.write_text(yaml.safe_dump(written))
    process.send_signal(signal.SIGHUP)
    assert process.stdout.readline().startswith("reloaded: engine.deadline_s: ")
    config.write_text("sources: [")
    process.send_signal(signal.SIGHUP)
    line = process.stdout.readline()
    assert "not reloaded, and nothing has changed: " in line
    assert "\\n" not in line
    code, _, errors = process.end(signal.SIGTERM)
    assert (code, errors) == (0, "")
