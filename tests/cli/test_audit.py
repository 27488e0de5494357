"""`qreward audit`: planted faults are found, and clean runs raise no alarm."""

from __future__ import annotations

import random
from contextlib import closing

import pytest

from qreward_plugins.journal.audit import audit as findings
from qreward_plugins.journal.database import open_database

STEPS, GROUPS, SIBLINGS = 18, 8, 4
COLUMNS = {"recorded_at": 1.0, "process_id": 1, "run_id": "run", "data_source": "", "outcome": "scored"}
COLUMNS |= {"judge": "quality", "source": "a", "model": "judge-1", "cached": 0, "attempts": 1, "prompt_tokens": 1}
COLUMNS |= {"completion_tokens": 1, "latency_s": 1.0, "cost_usd": 0.0}


def clean(rng, step):
    """A sample of a run that learns: correctness rises, and length has nothing to do with it."""
    right = float(rng.random() < 0.3 + 0.4 * step / STEPS)
    return {"score": 0.8 * right + 0.2 * rng.random(), "response_chars": round(rng.gauss(800, 150))}


def write(path, seed, sample=clean, **further):
    """Write a run; `sample` draws columns of the journal."""
    rng = random.Random(seed)
    rows = []
    for step in range(STEPS):
        for group in range(GROUPS):
            for number in range(SIBLINGS):
                place = {"sample_id": f"{step}-{group}-{number}", "group_id": f"g{group}", "step": step}
                rows.append({**COLUMNS, **place, "key": place["sample_id"], **sample(rng, step), **further})
    with closing(open_database(str(path))) as connection:
        connection.execute("BEGIN")
        values = ", ".join(f":{name}" for name in rows[0])
        connection.executemany(f"INSERT INTO outcomes ({', '.join(rows[0])}) VALUES ({values})", rows)
        connection.execute("COMMIT")
    return path


def change(path, query):
    with closing(open_database(str(path))) as connection:
        connection.execute(query)


def longer(rng, step):
    """Later responses are longer, and the judge likes long ones."""
    chars = round(rng.gauss(800 + 40 * step, 150))
    return {"response_chars": chars, "score": 0.3 * rng.random() + (chars / 1000 if step > 9 else 0)}


def collapsed(rng, step):
    return {**clean(rng, step), "score": 1.0} if step > 9 else clean(rng, step)


def flipping(rng, step):
    return {**clean(rng, step), "key": f"question {rng.randrange(100)}"}


def replaced(rng, step):
    return {**clean(rng, step), "model": "judge-2" if step > 9 else "judge-1"}


def audit(run_cli, path, *options):
    """The word of each check, and the exit code."""
    result = run_cli("audit", path, *options)
    lines = [line.split() for line in result.stdout.splitlines()]
    return {line[0]: line[2] for line in lines if len(line) > 3 and line[0] in FAULTS}, result.exit_code


FAULTS = {"length": longer, "groups": collapsed, "flips": flipping, "models": replaced}


@pytest.mark.parametrize("check", FAULTS)
def test_a_planted_fault_is_found(run_cli, tmp_path, check):
    found, code = audit(run_cli, write(tmp_path / "run.sqlite", 0, FAULTS[check]))
    assert (found[check], code) == ("ALARM", 1), found
    steps = {finding.check: finding.step for finding in findings([str(tmp_path / "run.sqlite")])[1]}
    assert steps[check] == {"flips": None, "models": 10}.get(check, STEPS - STEPS // 3), "where to look first"


def test_clean_runs_raise_no_alarm(run_cli, tmp_path):
    expected = {"length": "ok", "groups": "ok", "flips": "-", "models": "ok"}
    for seed in range(5):
        assert audit(run_cli, write(tmp_path / f"{seed}.sqlite", seed)) == (expected, 0)


def test_only_the_latest_run_counts_unless_another_is_named(run_cli, tmp_path):
    path = write(tmp_path / "run.sqlite", 0, replaced)
    write(path, 1)
    change(path, f"UPDATE outcomes SET run_id = 'first', recorded_at = 0 WHERE id <= {STEPS * GROUPS * SIBLINGS}")
    assert audit(run_cli, path)[0]["models"] == "ok"
    assert audit(run_cli, path, "--run", "first")[0]["models"] == "ALARM"
    assert "no training sample of run none has a reward" in run_cli("audit", path, "--run", "none").stderr


def test_another_reward_range_is_no_flip(run_cli, tmp_path):
    path = write(tmp_path / "run.sqlite", 0, key="k")
    change(path, "UPDATE outcomes SET key = 'k' || (id / 2), raw_score = 8")
    assert audit(run_cli, path)[0]["flips"] == "ok"


def test_a_journal_without_steps_or_training(run_cli, tmp_path):
    path = write(tmp_path / "run.sqlite", 0)
    change(path, "UPDATE outcomes SET step = NULL")
    assert audit(run_cli, path) == ({"length": "-", "groups": "-", "flips": "-", "models": "ok"}, 0)
    change(path, "UPDATE outcomes SET split = 'val'")
    assert "has a reward" in run_cli("audit", path).stderr
