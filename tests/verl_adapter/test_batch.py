"""The sync contract of older versions of verl, on the registry that verl still carries."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

from qreward_plugins.adapters import close_process_portals
from qreward_plugins.samples.check import read_sample
from qreward_plugins.testing import FakeVerlTrainer, Faults, JudgeServer
from qreward_plugins.testing.verl.reward_loop import load_extern_object
from verl_adapter import QRewardBatchManager
from verl_adapter.rollouts import to_sample

from .conftest import said


def right(call):
    if "break" in call.blocks["response"]:
        return "no verdict"
    return 10.0 if call.blocks["reference"] in call.blocks["response"] else 2.0


@pytest.fixture
def make_manager(tokenizer):
    def make(server, column="data_source", **top):
        tree = {
            "sources": {"a": {"kind": "openai", "base_url": server.base_url, "model": "judge"}},
            "judges": {"quality": {"kind": "llm", "invalid_retries": 0}},
            **top,
        }
        return QRewardBatchManager(tokenizer, 1, None, column, qreward=tree)

    yield make
    close_process_portals()


@contextmanager
def older(server, *overrides, **named):
    """A trainer of verl 0.5 with our manager."""
    ours = [
        "algorithm.adv_estimator=grpo",
        "reward_model.reward_manager=qreward",
        f"+reward_model.reward_kwargs.qreward.sources.a={{kind: openai, base_url: '{server.base_url}', model: judge}}",
        "+reward_model.reward_kwargs.qreward.judges.quality={kind: llm, invalid_retries: 0}",
        "actor_rollout_ref.rollout.agent.num_workers=1",
    ]
    with FakeVerlTrainer([*ours, *overrides], version="0.5", **named) as fake:
        yield fake


def saying(*words):
    return lambda draft, rng: words[draft.number % len(words)].format(draft.ground_truth)


def test_rewards_stand_at_the_last_token_of_each_response():
    named = {
        "respond": saying("It is {}.", "No, I am sure."),
        "val_rows": [{"prompt": each, "ground_truth": each} for each in "12"],
    }
    with JudgeServer(right) as server, older(server, **named) as fake:
        step, validation = fake.step(), fake.validate()
    rewards = step.batch.batch["token_level_scores"]
    last = step.batch.batch["response_mask"].sum(dim=-1) - 1
    assert rewards[range(16), last].tolist() == pytest.approx([1.0, 0.2] * 8)
    assert (rewards != 0).sum() == 16
    assert step.extra_info[0]["qreward/source"] == "a"
    assert step.reward_calls == 1
    assert validation.extra_info["qreward/missing"] == [0.0, 0.0]


def test_a_failed_sample_is_neutral_to_its_group_and_a_group_that_failed_has_one_number():
    def respond(draft, rng):
        return "break" if draft.ground_truth == "3" or draft.number > 1 else ("{}", "no")[draft.number].format("42 3 5")

    rows = [{"prompt": "a", "ground_truth": "3"}, {"prompt": "b", "ground_truth": "5"}]
    overrides = ["data.train_batch_size=2", "data.shuffle=False"]
    with JudgeServer(right) as server, older(server, *overrides, rows=rows, respond=respond) as fake:
        step = fake.step()
    assert step.scores == pytest.approx([0.6] * 4 + [1.0, 0.2, 0.6, 0.6])
    assert step.advantages == pytest.approx([0.0] * 4 + [1.2247, -1.2247, 0.0, 0.0], abs=1e-3)


def test_a_constant_is_what_a_failed_sample_trains_as():
    constant = "+reward_model.reward_kwargs.qreward.on_failure.constant=-1"
    with JudgeServer(right) as server, older(server, constant, respond=saying("{}", "break")) as fake:
        assert fake.step().scores == [1.0, -1.0] * 8


def test_the_column_that_holds_the_data_source_chooses_the_judge(make_manager, make_data):
    data = make_data(["42", "no"], columns={"origin": ["math/x", "code/x"]})
    with JudgeServer(right) as server:
        manager = make_manager(server, "origin", routes={"math/*": "quality"})
        infos = manager(data, return_dict=True)["reward_extra_info"]
    assert infos["qreward/cause"] == ["", "infra/no_route"]


def test_rewards_that_are_there_already_are_passed_on(make_manager, make_data):
    data = make_data(["42"])
    data.batch["rm_scores"] = data.batch["responses"] * 0.0 + 3
    with JudgeServer(right, faults=Faults(rates={"error_500": 1.0})) as server:
        assert make_manager(server)(data).tolist() == data.batch["rm_scores"].tolist()
        assert server.report().requests == 0


def test_a_row_whose_column_is_broken_is_its_own_failure(make_manager, make_data):
    broken = [
        ("data_source", None, "data_source"),
        ("data_source", ["math"], "data_source"),
        ("reward_model", "rule", "ground_truth"),
        ("extra_info", ["level"], "extras"),
        ("tool_extra_fields", 7, "extras"),
        ("raw_prompt", 7.5, "messages"),
        ("raw_prompt", [{"from": "human", "value": "17 + 25?"}], "messages"),
    ]
    data = make_data(["It is 42."] * 8)
    for row, (column, value, field) in enumerate(broken):
        data.non_tensor_batch[column][row] = value
        assert field in read_sample(to_sample(data[row], said("It is 42."))).problem
    with JudgeServer(right) as server:
        result = make_manager(server)(data, return_dict=True)
    assert result["reward_extra_info"]["qreward/cause"] == ["infra/input"] * 7 + [""]
    assert result["reward_tensor"].sum(-1).tolist() == [1.0] * 8


def test_a_row_whose_response_cannot_be_decoded_is_its_own_failure(make_manager, make_data, tokenizer, monkeypatch):
    data = make_data(["It is 42.", "broken", "It is 42."])
    decode = tokenizer.decode

    def decode_or_raise(ids, **kwargs):
        text = decode(ids, **kwargs)
        if text == "broken":
            raise OverflowError("out of range integral type conversion attempted")
        return text

    monkeypatch.setattr(tokenizer, "decode", decode_or_raise)
    with JudgeServer(right) as server:
        result = make_manager(server)(data, return_dict=True)
    assert result["reward_extra_info"]["qreward/cause"] == ["", "infra/input", ""]
    assert result["reward_tensor"].sum(-1).tolist() == [1.0, 1.0, 1.0], "the mean of its group"


def test_two_managers_of_one_process_keep_to_one_limit(make_manager, make_data):
    with JudgeServer(right) as server:
        train = make_manager(server)
        val = make_manager(server, on_failure={"constant": 0})
        assert train._portal is val._portal, "verl makes one for training and one for validation"
        other = make_manager(server, judges={"quality": {"kind": "llm", "reward_range": [0, 5]}})
        assert other._portal is not train._portal
        assert val(make_data(["42"])).sum() == 1.0


def test_managers_share_a_reward_function_that_was_loaded_twice_and_no_other(tokenizer, tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text("def one(*args, **kwargs):\n    return 1.0\n\n\ndef two(*args, **kwargs):\n    return 2.0\n")

    def engine(name, bonus):
        loaded = load_extern_object(module_path=str(path), object_name=name)
        return QRewardBatchManager(tokenizer, 0, partial(loaded, bonus=bonus))._portal

    first = engine("one", 1)
    assert engine("one", 1) is first
    assert engine("two", 1) is not first
    assert engine("one", 2) is not first
    close_process_portals()


def test_every_column_is_as_long_as_the_batch_and_none_of_it_breaks_a_mean(make_manager, make_data):
    tree = {"judges": {"quality": {"kind": "llm", "invalid_retries": 0, "correct_at": 0.5}}}
    with JudgeServer(right) as server:
        infos = make_manager(server, **tree)(make_data(["42", "break", "no"]), return_dict=True)["reward_extra_info"]
    assert {len(values) for values in infos.values()} == {3}
    assert [infos["acc"][0], infos["acc"][2]] == [1.0, 0.0]
    for values in infos.values():
        if not isinstance(values[0], str):
            np.mean(values)
    assert np.isnan(infos["acc"][1]), "a failed sample is not a wrong answer"
