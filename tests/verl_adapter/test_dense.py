"""Rewards in parts: what each turn or step adds stands at its last token, and the sum is the reward."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from qreward_plugins import ConfigurationError
from qreward_plugins.testing import FakeVerlTrainer, VerlOutput
from qreward_plugins.testing.generation import WordTokenizer

BOTH = pytest.mark.parametrize("trainer", ["trainer.use_v1=True", "trainer.use_v1=False"], ids=["v1", "legacy"])
TURNS = [
    "reward.reward_manager.name=qreward",
    "reward.num_workers=2",
    "algorithm.adv_estimator=gae",
    "data.train_batch_size=2",
    "+qreward.sources.f={kind: function, function: 'verl_adapter:compute_score'}",
    "+qreward.judges.turn={kind: function, sources: f}",
    "+qreward.judges.whole={kind: turns, judge: turn, reduce: sum}",
    "+qreward.dense=true",
]
ROWS = [{"prompt": "What is 6 x 7?", "ground_truth": "42"}] * 2
TOOL = "<|im_start|>tool\n41<|im_end|>\n<|im_start|>assistant\n"
SAID = ("I try 41<|im_end|>\n", TOOL, "then it is 42")


def called(numbers):
    """A reward function that notes what it was asked, and gives each turn of the policy a number by its last word."""
    asked = []

    def score(data_source, solution_str, ground_truth, extra_info):
        asked.append(solution_str)
        return numbers[solution_str.split()[-1]]

    return score, asked


@BOTH
def test_each_turn_has_its_reward_at_its_last_token(trainer):
    score, asked = called({"41": 0.25, "42": 1.0})
    output = VerlOutput(list(SAID))
    with FakeVerlTrainer([*TURNS, trainer], rows=ROWS, reward=score, respond=lambda draft, rng: output) as fake:
        step = fake.step()
    assert sorted(set(asked)) == ["I try 41\n", "then it is 42"]
    assert set(step.scores) == {1.25}
    mask, rewards = (np.asarray(step.batch.batch[name]) for name in ("response_mask", "token_level_rewards"))
    for row in range(len(mask)):
        first = int(np.flatnonzero(mask[row] == 0)[0]) - 1
        last = int(np.flatnonzero(mask[row])[-1])
        assert {int(token): float(rewards[row, token]) for token in np.flatnonzero(rewards[row])} == {
            first: 0.25,
            last: 1.0,
        }
    # With a gamma of 1 and no critic, the tokens of the first turn see both rewards, and those of the last one its own.
    returns = np.asarray(step.batch.batch["returns"])
    assert returns[0, 0] == pytest.approx(1.25)
    assert returns[0, int(np.flatnonzero(mask[0])[-1])] == pytest.approx(1.0)


@BOTH
def test_a_failed_turn_takes_the_whole_sample_out(trainer):
    score, _ = called({"41": 0.25, "42": float("nan")})
    respond = lambda draft, rng: VerlOutput(list(SAID)) if draft.number % 2 else VerlOutput(["only 41"])  # noqa: E731
    with FakeVerlTrainer([*TURNS, trainer], rows=ROWS, reward=score, respond=respond) as fake:
        step = fake.step()
    missing = [info["qreward/missing"] for info in step.extra_info]
    assert sorted(set(missing)) == [0.0, 1.0]
    returns = np.asarray(step.batch.batch["returns"])
    for row, is_missing in enumerate(missing):
        assert returns[row].any() != bool(is_missing)


def test_a_step_of_a_process_reward_model_ends_at_the_token_that_completes_it():
    """What tools said is not trained, so a step that ends in it belongs to the policy's token before it."""
    from verl_adapter.response_tokens import POLICY, ResponseTokens

    tokenizer = WordTokenizer()
    ids = tokenizer.encode("one two three") + tokenizer.encode(" four five") + tokenizer.encode(" six<|im_end|>")
    item = SimpleNamespace(batch={}, non_tensor_batch={"tool_extra_fields": {POLICY: [(0, 3), (5, 7)]}})
    tokens = ResponseTokens(item, ids, tokenizer)
    assert tokens.text == "one two three four five six"
    ends = {
        "one": 0,
        "one t": 1,
        "one two": 1,
        "one two three": 2,
        "one two three four": 2,
        "one two three four five s": 5,
    }
    for text, token in ends.items():
        assert tokens.placed([(len(text), 0.5)])[0] == (token, 0.5)
    # From the end of the text on, it is the last token, whose reward verl has put there itself.
    assert tokens.placed([(len("one two"), 0.5), (len(tokens.text), 0.25)]) == [(1, 0.5), (6, 0.25), (6, -0.75)]
    assert tokens.placed([]) == []


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["algorithm.adv_estimator=gdpo", "+algorithm.gdpo_reward_keys=[turns]"],
            "dense: rewards cannot come in parts: `gdpo`",
        ),
        (["~qreward.judges.whole"], "dense: no judge says what each step adds"),
        (
            ["+qreward.judges.best={kind: rank, judge: whole}"],
            "dense: rewards cannot come in parts: a judge of kind `rank`",
        ),
    ],
)
def test_where_rewards_cannot_come_in_parts_the_start_says_so(overrides, problem):
    with pytest.raises(ConfigurationError, match=problem):
        FakeVerlTrainer([*TURNS, "trainer.use_v1=False", *overrides], rows=ROWS).close()


def test_the_trainers_of_verl_0_7_get_parts_too():
    score, _ = called({"41": 0.25, "42": 1.0})
    tree = [each.replace("+qreward", "+reward_model.reward_kwargs.qreward") for each in TURNS if "+" in each]
    overrides = [
        *tree,
        "reward_model.reward_manager=qreward",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=2",
    ]
    respond = lambda draft, rng: VerlOutput(list(SAID))  # noqa: E731
    with FakeVerlTrainer(overrides, version="0.7", rows=ROWS, reward=score, respond=respond) as fake:
        rewards = np.asarray(fake.step().batch.batch["token_level_rewards"])
    assert {tuple(row[row != 0]) for row in rewards} == {(0.25, 1.0)}
