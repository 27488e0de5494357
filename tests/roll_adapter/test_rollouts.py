"""Rows of ROLL's batches as samples, where the settings of a worker come from, and the advantages in the journal."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qreward_plugins import ConfigurationError, Sample
from qreward_plugins.samples.check import Rejected, read_sample
from qreward_plugins.samples.images import Image
from qreward_plugins.testing import RollDataProto
from qreward_plugins.testing.generation import WordTokenizer
from qreward_plugins.testing.roll.generation import torch
from qreward_plugins.testing.roll.scheduler import response_batch
from roll_adapter.rollouts import to_samples
from roll_adapter.settings import load_settings
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


# Where the settings of a worker come from, what they are checked for, and who shares their limits


def reward(*trees: Any, **envs: str) -> Any:
    return SimpleNamespace(reward_manager_config=list(trees), system_envs=envs)


def tree(url: str = "http://judge.test/v1", **more: Any) -> dict[str, Any]:
    return {
        "sources": {"judge": {"kind": "openai", "base_url": url, "model": "judge"}},
        "judges": {"quality": {"kind": "llm"}},
        **more,
    }


MISSPELT = tree(engine={"deadline": 3}, judges={"quality": {"kind": "lllm"}})


@each_of(
    ("node", "told"),
    [
        # ROLL drops unknown keys, so a misspelt `reward_manager_config` looks like none.
        *[
            (node, ["rewards.maths.reward_manager_config", "may be misspelt", "[{config: /path/to/judges.yaml}]"])
            for node in (reward(), SimpleNamespace(reward_manager_config=None, system_envs=None), SimpleNamespace())
        ],
        *[
            (SimpleNamespace(reward_manager_config=config), ["reward_manager_config: must be a list with one tree"])
            for config in ([tree(), tree()], tree(), "judges.yaml")
        ],
        (
            reward(MISSPELT),
            ["2 mistakes in rewards.maths.reward_manager_config[0]", "judges.quality.kind", "engine.deadline"],
        ),
        (reward(tree("framework://reward/v1")), ["ROLL's domain maths has no server 'reward'", "Set judge_api_url"]),
    ],
)
def test_mistakes_are_told_with_their_path_and_what_to_write(monkeypatch, node, told) -> None:
    monkeypatch.delenv("QREWARD_CONFIG", raising=False)
    with pytest.raises(ConfigurationError) as raised:
        load_settings(node, domain="maths")
    text = " ".join(str(raised.value).split())
    assert [part for part in told if part not in text] == [], text


def test_the_deadline_must_stay_below_rolls_own() -> None:
    node = reward(tree(engine={"deadline_s": 100}))
    with pytest.raises(ConfigurationError, match=r"engine.deadline_s: ROLL ends the training .*Set it to 40 or less"):
        load_settings(node, domain="d", rpc_timeout_s=50)
    for timeout_s in (3600, None):
        assert load_settings(node, domain="d", rpc_timeout_s=timeout_s).engine.deadline_s == 100.0


def test_the_limits_of_a_source_are_divided_between_workers(train, words, make_tree, judge) -> None:
    node = make_tree()
    node["sources"]["judge"]["limits"] = {"concurrency": 4}
    trainer = train(words("1", "2", "3", "4"), tree=node, reward={"world_size": 4}, is_num_return_sequences_expand=True)
    judge.hold()
    running = trainer.start_step()
    judge.wait_for(lambda report: report.in_flight == 4)
    judge.release()
    assert running.result(20).raw_rewards == pytest.approx([0.1, 0.2, 0.3, 0.4] * 2)
    # Two samples for each worker, and one slot of the four.
    assert judge.report().peak_concurrency == 4


def test_the_environment_of_the_worker_may_name_the_file(tmp_path) -> None:
    (tmp_path / "judges.yaml").write_text(json.dumps(tree(engine={"deadline_s": 7})))
    assert load_settings(reward(QREWARD_CONFIG=str(tmp_path / "judges.yaml")), domain="d").engine.deadline_s == 7


def test_the_address_that_roll_knows_takes_the_place_of_its_name() -> None:
    config = reward(tree("framework://reward/v1"))
    config.judge_api_url = "http://judge.test:8000"
    assert load_settings(config, domain="maths").sources["judge"].urls == ("http://judge.test:8000/v1",)


# The advantages of ROLL's pipeline in the journal. A whole run of ROLL's own is in the conformance tests


NAME = "roll.pipeline.rlvr.rlvr_pipeline"
MASK = torch.tensor([[1, 1, 0], [0, 0, 0]])


@pytest.fixture
def compute(monkeypatch):
    """Record the advantages of a pipeline that was imported before the worker; returns what it records."""
    from roll_adapter import advantages

    def compute_advantage(data, pipeline_config, response_mask):
        data.batch["advantages"] = torch.tensor([[0.5, 1.5, 9.0], [7.0, 7.0, 7.0]])
        return data

    pipeline, recorded = SimpleNamespace(compute_advantage=compute_advantage), []
    monkeypatch.setitem(sys.modules, NAME, pipeline)
    monkeypatch.setattr(advantages, "TrainingLog", lambda path: SimpleNamespace(add=recorded.extend))
    advantages.record_advantages(lambda config: config.worker_cls == "ours")

    def computed(*, records=True, **columns):
        source = {"kind": "function", "function": "math:fsum"}
        engine = {"journal": {"path": "verdicts.sqlite"}} if records else {}
        tree = {"sources": {"a": source}, "judges": {"j": {"kind": "function"}}, "engine": engine}
        ours = SimpleNamespace(worker_cls="ours", reward_manager_config=[tree])
        config = SimpleNamespace(rewards={"ours": ours, "theirs": SimpleNamespace(worker_cls="theirs")})
        columns = {"domain": ["ours"] * 2, "rollout_id": ["r0", "r1"], "id": [7, 7], **columns}
        arrays = {name: np.array(values, dtype=object) for name, values in columns.items() if values}
        batch = {"response_level_rewards": torch.tensor([0.25, 0.75])}
        data = SimpleNamespace(batch=batch, non_tensor_batch=arrays, meta_info={})
        assert pipeline.compute_advantage(data, pipeline_config=config, response_mask=MASK) is data
        return [tuple(trained) for trained in recorded]

    return computed


@pytest.mark.parametrize(
    ("columns", "rows"),
    [
        ({}, [("r0", "7", None, 0.25, 1.0, False), ("r1", "7", None, 0.75, None, True)]),
        ({"rollout_id": None}, []),
        ({"domain": ["theirs"] * 2}, []),
    ],
)
def test_the_mean_over_the_tokens_is_recorded_of_our_samples(compute, columns, rows):
    assert compute(**columns) == rows


def test_the_next_pipeline_of_a_process_has_a_journal_of_its_own(compute):
    assert compute(records=False) == []
    assert len(compute()) == 2


def test_what_cannot_be_recorded_costs_the_record_only(compute, caplog):
    assert compute(domain=["unknown"] * 2) == []
    assert [record.getMessage() for record in caplog.records] == ["advantages are not recorded: KeyError: 'unknown'"]
