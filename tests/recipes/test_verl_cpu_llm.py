"""The language model as judge of the CPU recipe: how its log probabilities are read, and what is told of it."""

from __future__ import annotations

import asyncio
import math
import runpy
import sqlite3
import subprocess
from pathlib import Path

import pytest
from aiohttp import web


def reply(true: float, false: float):
    tokens = [{"token": "True", "logprob": math.log(true)}, {"token": " False", "logprob": math.log(false)}]
    return {"completion_probabilities": [{"top_logprobs": [*tokens, {"token": "\n", "logprob": -9.0}]}]}


def test_the_confidence_grows_with_the_odds_of_true(cpu_recipe):
    confidence = cpu_recipe.llm_judge.confidence
    levels = [confidence(reply(true, 1 - true)) for true in (0.5, 0.7, 0.77, 0.85, 0.9)]
    assert levels == sorted(levels)
    assert 0.0 <= levels[0] < 0.1
    assert 0.9 < levels[-1] <= 1.0
    with pytest.raises(ValueError, match="likely tokens"):
        confidence({"completion_probabilities": [{"top_logprobs": [{"token": "True", "logprob": 0.0}]}]})


def test_the_judge_asks_for_one_token_and_not_about_a_response_without_an_answer(cpu_recipe):
    asked = []

    async def complete(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response(reply(0.9, 0.1))

    async def score(text: str) -> float:
        app = web.Application()
        app.router.add_post("/completion", complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = site._server.sockets[0].getsockname()
        try:
            return await cpu_recipe.llm_judge.same_number(text, "5", url=f"http://{host}:{port}", data_source="x")
        finally:
            await runner.cleanup()

    assert asyncio.run(score("I do not know.")) == 0.0
    assert asked == []
    assert asyncio.run(score("2 + 3 = 5. The answer is 5.")) > 0.9
    assert asked[0]["n_predict"] == 1
    assert asked[0]["prompt"].endswith(">>> 5 == 5\n")


def test_the_agreement_of_two_judges(cpu_recipe, tmp_path):
    journal = tmp_path / "journal"
    connection = sqlite3.connect(journal)
    connection.execute("CREATE TABLE outcomes (sample_id, judge, score, service_s, cached)")
    scores = {"a": (0.9, 1.0), "b": (0.2, 0.3), "c": (0.8, 0.0), "d": (None, 1.0)}
    for sample, (llm, rule) in scores.items():
        connection.execute("INSERT INTO outcomes VALUES (?, 'language_model', ?, 0.5, 0)", (sample, llm))
        connection.execute("INSERT INTO outcomes VALUES (?, 'rule', ?, 0.1, 0)", (sample, rule))
    connection.execute("INSERT INTO outcomes VALUES ('a', 'rule', 1.0, 0.1, 1)")
    connection.commit()
    connection.close()
    found = cpu_recipe.verdicts.agreement(journal)
    assert (found.samples, found.right, found.wrong, found.call_s) == (3, 0.9, 0.5, 0.5)
    assert found.same == pytest.approx(2 / 3)
    assert "agreed with the rule on 67% of 3 samples" in found.text


@pytest.mark.parametrize("judge", ["rules", "llm"])
def test_the_demo_installs_once(tmp_path, judge):
    root = Path(__file__).parents[2]
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((root / name).read_text())
    command = ["make", "--dry-run", "demo", f"JUDGE={judge}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.count("environment.py") == 1
    assert f"demo.py --judge {judge}" in done.stdout


def test_pip_s_settings_are_handed_to_uv(tmp_path):
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "environment.py"))
    listed = (
        f":env:.cert='/c.pem'\nglobal.index-url='https://me:pw@index/simple'\nglobal.find-links='{tmp_path} /no/such'\n"
        "global.extra-index-url='file:///no/such https://more/simple'\nbroken\nglobal.timeout='9'\n"
    )
    assert script["uv_settings"](listed) == {
        "SSL_CERT_FILE": "/c.pem",
        "UV_DEFAULT_INDEX": "https://me:pw@index/simple",
        "UV_FIND_LINKS": str(tmp_path),
        "UV_INDEX": "https://more/simple",
    }


@pytest.mark.parametrize("judge", ["rules", "llm"])
def test_the_demo_says_its_phases_and_ends_with_three_things_to_look_at(
    cpu_recipe, tmp_path, monkeypatch, capsys, judge
):
    from contextlib import contextmanager

    from qreward_plugins import load_config
    from qreward_plugins.testing import JudgeServer

    demo, training = cpu_recipe.demo, cpu_recipe.training
    used = {}

    def train(assets, out, algorithm, steps, environment, console):
        used.update(environment)
        with sqlite3.connect(environment["QREWARD_JOURNAL"]) as connection:
            connection.execute("CREATE TABLE outcomes (sample_id, judge, source, outcome, score, service_s, cached)")
        connection.close()
        return training.Training([training.Step(1, 0.2, 1.0), training.Step(2, 0.6, 1.0)], 0.0, 0.5)

    @contextmanager
    def served(log):
        yield "http://127.0.0.1:9"

    monkeypatch.setattr(demo, "prepare", lambda folder, sizes: None)
    monkeypatch.setattr(demo, "_train", train)
    monkeypatch.setattr(demo, "served", served)
    monkeypatch.setattr(demo, "servers", lambda: {name: JudgeServer() for name in ("fast", "slow")})
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["demo.py", "--judge", judge, "--out", str(tmp_path)])
    assert demo.main() == 0
    told = capsys.readouterr().out
    for part in ("1/4 making", "2/4 starting", "3/4 starting", "4/4 done", "Five things to look at", "reward.png"):
        assert part in told
    assert f"qreward journal {tmp_path}" in told
    assert ("language model" in told) == (judge == "llm")
    monkeypatch.delenv("FAST_JUDGE_URL", raising=False)
    config = load_config(used["QREWARD_CONFIG"])
    assert config.sources["fast"].urls == (used["FAST_JUDGE_URL"],)
    assert ("gemma" in config.sources) == (judge == "llm")
