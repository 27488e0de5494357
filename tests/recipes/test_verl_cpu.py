"""The CPU recipe: its questions, tokenizer, model and grading rule, and what the demo tells."""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager

import pytest

from qreward_plugins import load_config
from qreward_plugins.testing import JudgeServer

from ..kit import each_of


@pytest.mark.parametrize("judge", ["rules", "llm"])
def test_the_demo_says_its_phases_and_ends_with_what_to_look_at(cpu_recipe, tmp_path, monkeypatch, capsys, judge):
    demo, training = cpu_recipe.demo, cpu_recipe.training
    used = {}

    def train(assets, out, algorithm, steps, environment, console):
        used.update(environment)
        with sqlite3.connect(environment["QREWARD_JOURNAL"]) as connection:
            connection.execute(
                "CREATE TABLE outcomes (sample_id, judge, source, outcome, cause, score, service_s, cached)"
            )
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
    for part in ("1/4 making", "2/4 starting", "3/4 starting", "4/4 done", "What to look at", "reward.png"):
        assert part in told
    assert f"qreward journal {tmp_path}" in told
    assert ("llama.cpp" in told) == (judge == "llm")
    assert ("qreward plan" in told, "qreward diff" in told) == (judge == "rules", judge == "llm")
    monkeypatch.delenv("FAST_JUDGE_URL", raising=False)
    config = load_config(used["QREWARD_CONFIG"])
    assert config.sources["fast"].urls == (used["FAST_JUDGE_URL"],)
    assert ("gemma" in config.sources) == (judge == "llm")


@each_of(
    ("response", "score"),
    [
        ("The answer is 7.", 10.0),
        ("The answer is -7.", 0.0),
        ("The answer is 6.", 3 * 7 / 8),
        ("The answer is 8.", 3 * 7 / 8),
        ("The answer is 11.", 1.5),
        ("The answer is 7. The answer is 6.", 0.0),
        ("7", 0.0),
        ("The answer is " + "7" * 40, 0.0),
    ],
)
def test_grades(cpu_recipe, response, score):
    assert cpu_recipe.scorer.grade(response, "7") == pytest.approx(score)


def small(cpu_recipe, **sizes):
    fewer = {"val_questions": 4, "train_questions": 8, "warm_up_questions": 60, "learning_steps": 1, "habit_steps": 1}
    return cpu_recipe.tasks.Sizes(**{**fewer, **sizes})


def test_prepared_assets_are_what_verl_reads(cpu_recipe, tmp_path):
    import pandas
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assets = cpu_recipe.tasks.prepare(tmp_path, small(cpu_recipe))
    train, val = pandas.read_parquet(assets.train), pandas.read_parquet(assets.val)
    assert (len(train), len(val)) == (8, 4)
    assert set(train.columns) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    texts = [row["content"] for prompt in (*train.prompt, *val.prompt) for row in prompt]
    assert len(set(texts)) == 12

    tokenizer = AutoTokenizer.from_pretrained(assets.tokenizer)
    for text in (*texts, "any text: ünïcödé ✓"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(" -45")) == len(tokenizer.encode(" 45")) == 1
    model = AutoModelForCausalLM.from_pretrained(assets.model)
    assert sum(parameter.numel() for parameter in model.parameters()) < 200_000
    # The rollout server stops where the model's own configuration says that an answer ends.
    assert model.config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids(cpu_recipe.tasks.END)
