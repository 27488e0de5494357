"""The CPU recipe's questions, tokenizer, model and grading rule."""

from __future__ import annotations

import pytest

from ..kit import each_of


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
