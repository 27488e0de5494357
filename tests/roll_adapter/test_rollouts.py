"""Rows of ROLL's batches as samples: prompts, responses, and the columns that a judge may use."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qreward_plugins import Sample
from qreward_plugins.samples.check import Rejected, read_sample
from qreward_plugins.samples.images import Image
from qreward_plugins.testing import RollDataProto
from qreward_plugins.testing.generation import WordTokenizer
from qreward_plugins.testing.roll.generation import torch
from qreward_plugins.testing.roll.scheduler import response_batch
from roll_adapter.rollouts import to_samples
from tests.kit import each_of

TOKENIZER = WordTokenizer()


def batch(*turns: tuple[str, str], columns: dict[str, list[Any]] | None = None, **meta: Any) -> RollDataProto:
    """Prompts, padded on the left to 24 tokens, and their responses."""
    ids = torch.zeros(len(turns), 24, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, _) in enumerate(turns):
        tokens = TOKENIZER.encode(prompt)
        ids[row, -len(tokens) :] = torch.tensor(tokens)
        mask[row, -len(tokens) :] = 1
    prompts = RollDataProto.from_dict({"input_ids": ids, "attention_mask": mask})
    responses = [[*TOKENIZER.encode(response), TOKENIZER.eos_token_id] for _, response in turns]
    tensors = response_batch(prompts, responses, sequence_length=40, pad_token_id=TOKENIZER.pad_token_id)
    return RollDataProto.from_dict(tensors, columns or {}, meta)


def test_texts_come_without_padding_and_end_tokens() -> None:
    samples = to_samples(batch(("Q: 1 + 1?", "2"), ("A much longer question, is it not?", "yes  it\nis")), TOKENIZER)
    assert [sample.response for sample in samples] == ["2", "yes  it\nis"]
    assert [sample.messages for sample in samples] == [
        [{"role": "user", "content": "Q: 1 + 1?"}],
        [{"role": "user", "content": "A much longer question, is it not?"}],
    ]

    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    text = TOKENIZER.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    (sample,) = to_samples(batch((text, "2")), TOKENIZER)
    assert sample.messages == chat


CHAT = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "the reference"},
    {"role": "user", "content": "never asked"},
]


@each_of(
    ("column", "content"),
    [
        *[(column, "1 + 1?") for column in (CHAT, json.dumps(CHAT))],
        *[(column, "something else") for column in ("no json", "[1, 2]", None, 3, [], "null")],
    ],
)
def test_the_messages_column_wins_up_to_the_first_answer_if_it_is_one(column: Any, content: str) -> None:
    (sample,) = to_samples(batch(("something else", "2"), columns={"messages": [column]}), TOKENIZER)
    assert sample.messages == [{"role": "user", "content": content}]


def test_columns_become_what_they_are() -> None:
    columns = {
        "id": ["row 7"],
        "ground_truth": ["2"],
        "domain": ["math"],
        "tag": ["gsm8k"],
        "rollout_id": ["r-1"],
        "prompt": ["the same again"],
        "difficulty": [torch.tensor(3).numpy()],
        "multi_modal_inputs": [object()],
    }
    (sample,) = to_samples(batch(("1 + 1?", "2"), columns=columns, global_step=5), TOKENIZER)
    assert (sample.ground_truth, sample.data_source, sample.id, sample.step) == ("2", "gsm8k", "r-1", 5)
    assert sample.group_id == "row 7"
    assert sample.extras == {"difficulty": 3}
    assert type(sample.extras["difficulty"]) is int


def test_images_take_their_places_in_the_prompt() -> None:
    pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    picture = pillow.new("RGB", (8, 6), "red")
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    columns = {"messages": [asked], "multi_modal_data": [{"multi_modal_data": {"image": [picture] * 2}}]}
    (sample,) = to_samples(batch(("What?", "it is"), columns=columns), TOKENIZER)
    assert Image.of(sample.messages[0]["content"][0]) == Image.of(picture)
    assert sample.response_images == [Image.of(picture)]


def test_a_row_whose_columns_are_broken_is_its_own_failure() -> None:
    columns = {"messages": [[{"from": "human"}], [{"role": "user", "content": "1?"}]], "tag": [["math"], "math"]}
    broken, good = (
        read_sample(sample) for sample in to_samples(batch(("1?", "2"), ("1?", "2"), columns=columns), TOKENIZER)
    )
    assert isinstance(broken, Rejected)
    assert broken.problem == "messages[0] needs a role that is a text"
    assert isinstance(good, Sample)
