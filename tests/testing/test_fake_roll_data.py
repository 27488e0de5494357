"""The data of the fake ROLL trainer: columns, unions, concatenations, the tokenizer and what prompts become."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from qreward_plugins.testing import RollDataProto
from qreward_plugins.testing.generation import WordTokenizer
from qreward_plugins.testing.roll.generation import RollDataset, collate, encode_row
from qreward_plugins.testing.roll.protocol import torch
from tests.kit import each_of


def make(**meta: Any) -> RollDataProto:
    return RollDataProto.from_dict(
        {"n": torch.arange(4), "m": torch.zeros(4, 2)}, {"name": ["a", "b", "a", "c"]}, {"k": 1, **meta}
    )


def test_columns_are_what_rolls_are() -> None:
    data = make()
    assert len(data) == 4
    assert data.batch.keys() == {"n", "m"}
    assert data.batch.batch_size[0] == 4
    assert data.batch.get("x", 5) == 5
    assert data.non_tensor_batch["name"].dtype == object
    assert data["n"].tolist() == [0, 1, 2, 3]
    assert data["name"].tolist() == ["a", "b", "a", "c"]
    data.batch["n"] = torch.ones(4)
    data.batch.update({"p": torch.ones(4)})
    assert data.batch.pop("p").sum() == 4
    assert data.batch.pop("p", None) is None


@each_of(
    ("break_it", "error"),
    [
        (lambda data: data.batch.__setitem__("x", torch.zeros(3)), AssertionError),
        (lambda data: data.batch.__setitem__("x", [0] * 4), AssertionError),
        (lambda data: data.batch["x"], KeyError),
        (lambda data: data.batch.pop("x"), KeyError),
        (lambda data: data.chunk(5), AssertionError),
        (lambda data: data.rename(["n"], ["x", "y"]), ValueError),
        (lambda data: RollDataProto.from_dict({}), AssertionError),
        (lambda data: RollDataProto.from_dict({"x": torch.zeros(1), "y": torch.zeros(2)}), AssertionError),
        (lambda data: RollDataProto.from_dict({"x": torch.zeros(1)}, {"x": [1]}), AssertionError),
        (lambda data: RollDataProto.from_dict({"x": torch.zeros(1)}, {"y": [1, 2]}), AssertionError),
        (lambda data: RollDataProto.concat([data, make().rename("m", "z")]), KeyError),
    ],
)
def test_what_roll_refuses_is_refused(break_it: Callable[[Any], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        break_it(make())


def test_slices_share_their_meta_information_and_copies_do_not() -> None:
    data = make()
    assert data[1:3].meta_info is data.meta_info
    assert data[[0]].meta_info is data.meta_info
    assert data[2].batch["n"].tolist() == [2]
    assert data[[True, False, False, True]].non_tensor_batch["name"].tolist() == ["a", "c"]
    assert copy.deepcopy(data).meta_info is not data.meta_info
    assert data.clone().batch["n"] is not data.batch["n"]


def test_a_union_takes_what_is_new_and_asserts_that_the_rest_is_equal() -> None:
    other = RollDataProto.from_dict(
        {"n": torch.arange(4), "x": torch.ones(4)}, {"more": [1, 2, 3, 4]}, {"k": 1, "l": 2}
    )
    data = make().union(other)
    assert data.batch.keys() == {"n", "m", "x"}
    assert data.meta_info == {"k": 1, "l": 2}
    assert data.non_tensor_batch["more"].tolist() == [1, 2, 3, 4]
    with pytest.raises(AssertionError, match="n in"):
        make().union(RollDataProto.from_dict({"n": torch.ones(4)}))
    with pytest.raises(AssertionError, match="k in"):
        make().union(RollDataProto.from_dict({"x": torch.ones(4)}, meta_info={"k": 2}))
    nan = torch.tensor([float("nan")] * 4)
    with pytest.raises(AssertionError, match="x in"):
        RollDataProto.from_dict({"x": nan}).union(RollDataProto.from_dict({"x": nan}))


def test_a_concatenation_collects_metrics_and_keeps_the_first_parts_other_meta_information() -> None:
    first = make(metrics={"a": 1.0, "b": [1, 2]}, who="first")
    second = make(metrics={"a": 2.0, "c": 5}, who="second")
    both = RollDataProto.concat([first, second])
    assert len(both) == 8
    assert both.meta_info == {"k": 1, "who": "first", "metrics": {"a": [1.0, 2.0], "b": [1, 2], "c": [5]}}
    again = RollDataProto.concat([both, both])
    assert again.meta_info["metrics"]["a"] == [1.0, 2.0, 1.0, 2.0]
    assert RollDataProto.concat([first]) is first
    with pytest.raises(TypeError, match="metrics are a dict"):
        RollDataProto.concat([first, make(metrics=[1])])


def test_rows_are_grouped_repeated_chunked_and_reordered() -> None:
    data = make()
    assert {name: part.batch["n"].tolist() for name, part in data.group_by("name").items()} == {
        "a": [0, 2],
        "b": [1],
        "c": [3],
    }
    assert data.repeat(2).batch["n"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert data.repeat(2, interleave=False).batch["n"].tolist() == [0, 1, 2, 3] * 2
    assert [part.batch["n"].tolist() for part in data.chunk(3)] == [[0, 1], [2], [3]]
    data.reorder([3, 2, 1, 0])
    assert data.non_tensor_batch["name"].tolist() == ["c", "a", "b", "a"]
    taken = data.pop(["m"], ["name"], ["k"])
    assert (taken.meta_info, data.meta_info, data.batch.keys()) == ({"k": 1}, {}, {"n"})


def test_the_tokenizer_gives_back_the_very_text() -> None:
    tokenizer = WordTokenizer()
    text = "<|im_start|>user\n  What is  1 + 2?\n\n<|im_end|>\ttail "
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(torch.tensor(ids), skip_special_tokens=True) == "user\n  What is  1 + 2?\n\n\ttail "
    assert tokenizer.batch_decode([[0, 1], ids[:1]], skip_special_tokens=True) == ["", ""]
    assert tokenizer(["a b", "c"])["input_ids"] == [tokenizer.encode("a b"), tokenizer.encode("c")]


@pytest.mark.parametrize("messages", [[{"role": "user", "content": "hi"}], '[{"role": "user", "content": "hi"}]'])
def test_messages_are_rendered_and_kept_as_they_came(messages: Any) -> None:
    tokenizer = WordTokenizer()
    row = encode_row({"messages": messages, "extra": 7}, 3, domain="d", tag="t", tokenizer=tokenizer, prompt_length=20)
    assert tokenizer.decode(row["input_ids"]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert row["messages"] == messages
    assert (row["id"], row["domain"], row["tag"], row["ground_truth"], row["extra"]) == ("3", "d", "t", None, 7)


def test_a_prompt_that_roll_would_leave_out_is_an_error() -> None:
    options = {"domain": "d", "tag": "t", "tokenizer": WordTokenizer(), "prompt_length": 3}
    with pytest.raises(ValueError, match="leaves out what is longer than prompt_length"):
        encode_row({"prompt": "a b c d"}, 0, **options)
    with pytest.raises(ValueError, match="needs 'messages' or a 'prompt'"):
        encode_row({"question": "a"}, 0, **options)


def test_prompts_are_padded_on_the_left() -> None:
    batch = collate([{"input_ids": [7, 8], "id": "a"}, {"input_ids": [9], "id": "b"}], pad_token_id=0, length=3)
    assert batch["input_ids"].tolist() == [[0, 7, 8], [0, 0, 9]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1], [0, 0, 1]]
    assert batch["position_ids"].tolist() == [[0, 0, 1], [0, 0, 0]]
    assert batch["id"].tolist() == ["a", "b"]


def test_rows_are_drawn_in_rolls_order() -> None:
    # What `random.seed(seed + epoch); random.shuffle(indices)` gives, epoch after epoch on the same list.
    dataset = RollDataset([{"n": number} for number in range(5)], 42)
    drawn = [dataset.next()["n"] for _ in range(10)]
    assert sorted(drawn[:5]) == sorted(drawn[5:]) == [0, 1, 2, 3, 4]
    assert drawn == [3, 1, 2, 4, 0, 1, 0, 4, 2, 3]
