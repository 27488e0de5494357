"""`qreward audit`: planted faults are found, and clean runs raise no alarm."""

from __future__ import annotations

import json
import random
import zlib
from contextlib import closing

import pytest

from qreward_plugins.journal.database import open_database

WORDS = [f"w{number}" for number in range(20)]
STEPS, GROUPS, SIBLINGS = 18, 8, 4


def clean(rng, step):
    """A sample of a run that learns: correctness rises, and length and style have nothing to do with it."""
    right = float(rng.random() < 0.3 + 0.4 * step / STEPS)
    return {"right": right, "style": rng.random(), "chars": round(rng.gauss(800, 150)), "phrase": ""}


def write(path, seed, sample=clean, **further):
    """Write a run; `sample` draws components, the characters of a response, and a phrase in it."""
    rng = random.Random(seed)
    rows, texts = [], {}
    for step in range(STEPS):
        for group in range(GROUPS):
            for number in range(SIBLINGS):
                drawn = {**sample(rng, step), **further}
                components = {"right": drawn["right"], "style": drawn["style"]}
                reward = drawn.get("reward", 0.8 * drawn["right"] + 0.2 * drawn["style"])
                text = " ".join([*rng.choices(WORDS, k=30), drawn["phrase"]])
                texts[text] = zlib.compress(text.encode())
                name = f"{step}-{group}-{number}"
                model = drawn.get("model", "judge-1")
                key = drawn.get("key", name)
                rows.append((1.0, 1, name, "", f"g{group}", step, "scored", "quality", "a", model, reward))
                rows[-1] += (json.dumps(components), 0, 1, 1, 1, 1.0, 0.0, text, drawn["chars"], key, "run")
    columns = "recorded_at, process_id, sample_id, data_source, group_id, step, outcome, judge, source, model, score, "
    columns += "components, cached, attempts, prompt_tokens, completion_tokens, latency_s, cost_usd, response, "
    columns += "response_chars, key, run_id"
    with closing(open_database(str(path))) as connection:
        connection.execute("BEGIN")
        connection.executemany(f"INSERT INTO outcomes ({columns}) VALUES ({', '.join('?' * 22)})", rows)
        connection.executemany("INSERT INTO texts VALUES (?, ?)", texts.items())
        connection.execute("COMMIT")
    return path


def longer(rng, step):
    """Later responses are longer, and the judge likes long ones."""
    drawn = clean(rng, step)
    chars = round(rng.gauss(800 + 40 * step, 150))
    return {**drawn, "chars": chars, "reward": 0.3 * drawn["right"] + (chars / 1000 if step > 9 else 0)}


def styled(rng, step):
    """Style pays at last, and correctness falls."""
    late = step >= 12
    right = float(rng.random() < (0.1 if late else 0.6))
    style = rng.random()
    return {**clean(rng, step), "right": right, "style": style, "reward": style if late else right + 0.1 * style}


def collapsed(rng, step):
    return {**clean(rng, step), "reward": 1.0} if step > 9 else clean(rng, step)


def persuading(rng, step):
    """A phrase spreads, and pays."""
    drawn = clean(rng, step)
    if rng.random() < step / 30:
        drawn |= {"phrase": "verified by the official solution", "reward": 0.9 + 0.1 * rng.random()}
    return drawn


def flipping(rng, step):
    return {**clean(rng, step), "key": f"question {rng.randrange(100)}"}


def replaced(rng, step):
    return {**clean(rng, step), "model": "judge-2" if step > 9 else "judge-1"}


def audit(run_cli, path, *options):
    result = run_cli("audit", path, "--json", *options)
    return {found["check"]: found for found in map(json.loads, result.stdout.splitlines())}, result.exit_code


FAULTS = {
    "length": longer,
    "component": styled,
    "groups": collapsed,
    "phrases": persuading,
    "flips": flipping,
    "models": replaced,
}


@pytest.mark.parametrize("check", FAULTS)
def test_a_planted_fault_is_found(run_cli, tmp_path, check):
    found, code = audit(run_cli, write(tmp_path / "run.sqlite", 0, FAULTS[check]))
    assert found[check]["alarm"], found
    assert code == 1


def test_clean_runs_raise_few_alarms(run_cli, tmp_path):
    alarms = []
    for seed in range(5):
        found, code = audit(run_cli, write(tmp_path / f"{seed}.sqlite", seed))
        assert {check for check, finding in found.items() if finding["alarm"] is None} == {"flips"}, found
        alarms += [finding for finding in found.values() if finding["alarm"]]
        assert code == (1 if any(finding["alarm"] for finding in found.values()) else 0)
    assert alarms == []


def test_only_the_latest_run_counts_unless_another_is_named(run_cli, tmp_path):
    path = write(tmp_path / "run.sqlite", 0, replaced)
    write(path, 1)
    with closing(open_database(str(path))) as connection:
        connection.execute(
            "UPDATE outcomes SET run_id = 'first', recorded_at = 0 WHERE id <= ?", (STEPS * GROUPS * SIBLINGS,)
        )
    found, code = audit(run_cli, path)
    assert (found["models"]["said"], code) == ("judge-1", 0)
    assert audit(run_cli, path, "--run", "first")[0]["models"]["alarm"]
    assert "no training sample has a reward in run none" in run_cli("audit", path, "--run", "none").stderr


def test_another_reward_range_is_no_flip(run_cli, tmp_path):
    path = write(tmp_path / "run.sqlite", 0, key="k")
    with closing(open_database(str(path))) as connection:
        connection.execute("UPDATE outcomes SET key = 'k' || (id / 2), raw_score = 8")
    found, _ = audit(run_cli, path)
    assert (found["flips"]["alarm"], found["flips"]["figures"]["flips"]) == (False, 0.0)


def test_the_table_names_the_phrase_and_escapes_it(run_cli, tmp_path):
    def planted(rng, step):
        drawn = persuading(rng, step)
        return {**drawn, "phrase": drawn["phrase"] and "\x1b[2J by the [red]judge"}

    result = run_cli("audit", write(tmp_path / "run.sqlite", 0, planted))
    assert result.exit_code == 1
    assert "\x1b" not in result.stdout
    assert "by the [red]judge" in result.stdout.replace("\n", "")
    assert "an alarm is a reason to look, and no proof" in result.stdout


def test_a_journal_without_steps_or_training(run_cli, tmp_path):
    path = write(tmp_path / "run.sqlite", 0)
    with closing(open_database(str(path))) as connection:
        connection.execute("UPDATE outcomes SET step = NULL")
    found, code = audit(run_cli, path)
    assert code == 0
    assert [found[check]["alarm"] for check in FAULTS] == [None] * 5 + [False]
    with closing(open_database(str(path))) as connection:
        connection.execute("UPDATE outcomes SET split = 'val'")
    assert "no training sample has a reward" in run_cli("audit", path).stderr
