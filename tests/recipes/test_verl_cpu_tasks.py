"""The CPU recipe's questions, tokenizer, model and grading rule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@settings(max_examples=200, deadline=None)
@given(right=st.integers(-9, 18), stated=st.integers(-9, 18), other=st.integers(-9, 18))
def test_the_right_answer_beats_all_and_nearer_is_not_worse(cpu_recipe, right, stated, other):
    grades = [cpu_recipe.scorer.grade(f"The answer is {number}.", str(right)) for number in (stated, other)]
    assert all(0 <= grade <= 10 for grade in grades)
    assert (grades[0] == 10) == (stated == right)
    if abs(stated - right) <= abs(other - right):
        assert grades[0] >= grades[1]


def small(cpu_recipe, **sizes):
    fewer = {"val_questions": 4, "train_questions": 8, "warm_up_questions": 60, "learning_steps": 1, "habit_steps": 1}
    return cpu_recipe.tasks.Sizes(**{**fewer, **sizes})


def test_questions_are_those_of_reasoning_gym_in_an_order_of_the_seed(cpu_recipe):
    first, again, other = (cpu_recipe.tasks.questions(small(cpu_recipe, seed=seed)) for seed in (0, 0, 1))
    assert first == again != other
    assert len({question.text for question in first}) == len(first) == 72
    for question in first:
        total = 0
        for term in question.expression.replace("- ", "-").replace("+ ", "").split():
            total += int(term)
        assert question.answer == total
        assert question.expression in question.text


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
