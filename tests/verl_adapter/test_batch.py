"""The sync contract of older versions of verl, on the registry that verl still carries."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from qreward_plugins import ConfigurationError
from qreward_plugins.adapters import close_process_portals
from qreward_plugins.samples.check import read_sample
from qreward_plugins.testing import JudgeServer
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


def test_rewards_stand_at_the_last_token_of_each_response(make_manager, make_data):
    texts = ["It is 42.", "No, I am sure."]
    data = make_data(texts)
    with JudgeServer(right) as server:
        result = make_manager(server)(data, return_dict=True)
        data.batch["rm_scores"] = data.batch["responses"] * 0.0 + 3
        assert make_manager(server)(data).tolist() == data.batch["rm_scores"].tolist(), "there already: passed on"
        assert server.report().requests == 2
    rewards = result["reward_tensor"]
    assert rewards[[0, 1], [len(text) - 1 for text in texts]].tolist() == pytest.approx([1.0, 0.2])
    assert (rewards != 0).sum() == 2
    assert result["reward_extra_info"]["qreward/source"] == ["a", "a"]


@pytest.mark.parametrize("constant", [None, -1])
def test_a_failed_sample_is_neutral_to_its_group_and_a_group_that_failed_has_one_number(
    make_manager, make_data, constant
):
    data = make_data(["break", "break", "42", "no", "break"], columns={"uid": list("aabbb")})
    top = {} if constant is None else {"on_failure": {"constant": constant}}
    with JudgeServer(right) as server:
        rewards = make_manager(server, **top)(data).sum(-1)
    failed = [0.6] * 3 if constant is None else [constant] * 3
    assert rewards.tolist() == pytest.approx([*failed[:2], 1.0, 0.2, failed[2]])


def test_the_column_that_holds_the_data_source_chooses_the_judge(make_manager, make_data):
    data = make_data(["42", "no"], columns={"origin": ["math/x", "code/x"]})
    with JudgeServer(right) as server:
        manager = make_manager(server, "origin", routes={"math/*": "quality"})
        infos = manager(data, return_dict=True)["reward_extra_info"]
    assert infos["qreward/cause"] == ["", "infra/no_route"]


def test_a_row_that_cannot_be_read_is_its_own_failure(make_manager, make_data, tokenizer, monkeypatch):
    broken = [
        ("data_source", None, "data_source"),
        ("data_source", ["math"], "data_source"),
        ("reward_model", "rule", "ground_truth"),
        ("extra_info", ["level"], "extras"),
        ("tool_extra_fields", 7, "extras"),
        ("raw_prompt", 7.5, "messages"),
        ("raw_prompt", [{"from": "human", "value": "17 + 25?"}], "messages"),
    ]
    data = make_data(["It is 42."] * 8 + ["broken"])
    for row, (column, value, field) in enumerate(broken):
        data.non_tensor_batch[column][row] = value
        assert field in read_sample(to_sample(data[row], said("It is 42."))).problem
    decode = tokenizer.decode

    def decode_or_raise(ids, **kwargs):
        if (text := decode(ids, **kwargs)) == "broken":
            raise OverflowError("out of range integral type conversion attempted")
        return text

    monkeypatch.setattr(tokenizer, "decode", decode_or_raise)
    with JudgeServer(right) as server:
        result = make_manager(server)(data, return_dict=True)
    assert result["reward_extra_info"]["qreward/cause"] == ["infra/input"] * 7 + ["", "infra/input"]
    assert result["reward_tensor"].sum(-1).tolist() == [1.0] * 9, "the mean of their group"


def test_managers_of_one_process_share_an_engine_by_their_configuration_and_function(
    make_manager, make_data, tokenizer, tmp_path
):
    with JudgeServer(right) as server:
        train, val = make_manager(server), make_manager(server)
        assert train._portal is val._portal, "verl makes one for training and one for validation"
        other = make_manager(server, judges={"quality": {"kind": "llm", "reward_range": [0, 5]}})
        assert other._portal is not train._portal
        assert val(make_data(["42"])).sum() == 1.0
    path = tmp_path / "rewards.py"
    path.write_text("def one(*args, **kwargs):\n    return 1.0\n\n\ndef two(*args, **kwargs):\n    return 2.0\n")

    def engine(name, bonus):
        loaded = load_extern_object(module_path=str(path), object_name=name)
        return QRewardBatchManager(tokenizer, 0, partial(loaded, bonus=bonus))._portal

    first = engine("one", 1)
    assert engine("one", 1) is first, "loaded twice"
    assert first not in (engine("two", 1), engine("one", 2))


def test_every_column_is_as_long_as_the_batch_and_none_of_it_breaks_a_mean(make_manager, make_data):
    tree = {"judges": {"quality": {"kind": "llm", "invalid_retries": 0, "correct_at": 0.5}}}
    with JudgeServer(right) as server:
        infos = make_manager(server, **tree)(make_data(["42", "break", "no"]), return_dict=True)["reward_extra_info"]
    assert {len(values) for values in infos.values()} == {3}
    assert [infos["acc"][0], infos["acc"][2]] == [1.0, 0.0]
    assert np.isnan(infos["acc"][1]), "a failed sample is not a wrong answer"
    for values in infos.values():
        if not isinstance(values[0], str):
            np.mean(values)


def test_older_versions_of_verl_take_no_rewards_in_parts(tokenizer):
    source, whole = {"kind": "function", "function": "math:fsum"}, {"kind": "turns", "judge": "j", "reduce": "sum"}
    tree = {"sources": {"f": source}, "judges": {"j": {"kind": "function"}, "whole": whole}, "dense": True}
    with pytest.raises(ConfigurationError, match="dense: rewards cannot come in parts: the trainers of older versions"):
        QRewardBatchManager(tokenizer, qreward=tree)
