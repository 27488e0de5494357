"""Rows of ROLL's batches as samples, where the settings of a worker come from, the advantages in the journal, and
rewards of finished trajectories in agentic pipelines.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf

from qreward_plugins import ConfigurationError, RewardMissing, Sample
from qreward_plugins.adapters import RunningMeans
from qreward_plugins.engine.process_portals import close_process_portals
from qreward_plugins.samples.check import Rejected, read_sample
from qreward_plugins.samples.images import Image
from qreward_plugins.testing import RollDataProto
from qreward_plugins.testing.generation import WordTokenizer
from qreward_plugins.testing.roll.generation import torch
from qreward_plugins.testing.roll.scheduler import response_batch
from roll_adapter import barrier
from roll_adapter.rollouts import to_samples
from roll_adapter.settings import load_settings
from tests.kit import each_of, make_config

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
    return make_config({"judge": url}, **more)


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
        source = {"kind": "function", "function": "builtins:dict"}
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


# Trajectories


LONG_S = 60.0
SYSTEM, USER = {"role": "system", "content": "Play."}, {"role": "user", "content": "How much?"}


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(barrier, "POLL_S", 0.01)
    monkeypatch.setattr(barrier, "_here", barrier.Barrier())
    yield
    close_process_portals()


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


class Manager:
    """ROLL's `TrajEnvManager` as a mixin sees it: the policy says `said`, and each turn gives 0.125."""

    def __init__(self, *said: str, size: int, mode: str, **config: Any) -> None:
        self.env_config = OmegaConf.create({"tag": "talk", "group_id": 0, "env_id": 0, **config})
        self.said, self.mode, self.running = said, mode, True
        self.worker_config = SimpleNamespace(group_size=size)
        self.group_seed = config.get("group_seed", 0)

    def play(self, episode_id: int = 0) -> RollDataProto:
        self.episode_id = episode_id
        opened = [[SYSTEM, USER], *[[{"role": "user", "content": "And now?"}] for _ in self.said[1:]]]
        turns = [(text, [*asked, answer(text)]) for text, asked in zip(self.said, opened, strict=True)]
        names = ("tag", "group_id", "env_id")
        return self.formulate_rollouts(cache_of(*turns, **{name: self.env_config[name] for name in names}))

    def formulate_rollouts(self, cache: Any) -> RollDataProto:
        rewards = [turn["reward"] for turn in cache.history[:-1]]
        tensors = {"scores": torch.tensor([[sum(rewards)]]), "response_mask": torch.ones(1, 2)}
        metrics = {f"env/talk/{name}": value for name, value in cache.history[-2]["metrics"].items()}
        return RollDataProto.from_dict(tensors, {"step_scores": [rewards]}, {"metrics": metrics})


def cache_of(*turns: Any, **place: Any) -> Any:
    """A trajectory of turns, each with its response and messages."""
    more = {"reward": 0.125, "metrics": {"asked": 1.0}}
    history = [{"llm_response": said, "messages": messages, **more} for said, messages in turns]
    place = {"tag": "t", "group_id": 1, "env_id": 1, **place}
    return SimpleNamespace(history=[*history, {"observation": "over", "messages": None}], **place)


@pytest.fixture
def manager_of(make_tree) -> Any:
    from roll_adapter import QRewardTrajectoryMixin

    class Judged(QRewardTrajectoryMixin, Manager):
        pass

    def make(*said: str, tree: Any = None, size: int = 1, mode: str = "train", **config: Any) -> Any:
        node = tree if tree is not None else make_tree()
        return Judged(*said, size=size, mode=mode, **{"qreward": node, **config})

    return make


def told(rollout: Any) -> Any:
    """The score of a rollout, and whether it is trained."""
    return pytest.approx(float(rollout.batch["scores"].sum())), bool(rollout.batch["response_mask"].any())


def test_the_judges_reward_is_added_to_that_of_the_last_step(manager_of, judge) -> None:
    rollout = manager_of("3", "8").play()
    assert judge.report().requests == 1
    assert rollout.non_tensor_batch["step_scores"].tolist() == [[0.125, pytest.approx(0.925)]]
    assert told(rollout) == (1.05, True)
    metrics = {name.removeprefix("env/talk/"): value for name, value in rollout.meta_info["metrics"].items()}
    assert metrics.pop("qreward_latency_s") > 0
    assert metrics == {"asked": 1.0, "qreward_reward": 0.8, "qreward_failed": 0.0}


def test_what_the_judge_sees_of_a_dialogue(manager_of) -> None:
    """Some managers show the whole conversation in each step. Examples of answers are part of the prompt."""
    manager = manager_of()
    manager.episode_id = 6
    example = [SYSTEM, {"role": "user", "content": "2?"}, answer("2"), {"role": "user", "content": "3?"}]
    more = [{"role": "user", "content": "And 8?"}, answer("8")]
    for later in (more, [*example, answer("3"), *more]):
        sample = manager.trajectory_sample(cache_of(("3", [*example, answer("3")]), ("8", later)))
        assert sample.messages == example
        assert sample.response == "assistant: 3\n\nuser: And 8?\n\nassistant: 8"
        assert [turn["content"] for turn in sample.turns] == ["3", "And 8?", "8"]
        assert (sample.data_source, sample.group_id, sample.id) == ("t", "t/1/6", "t/1/6/1")
        assert sample.extras == {"steps": 2, "env_rewards": [0.125, 0.125]}
    # A policy that makes the same call again gets the same observation again.
    said = [{"role": "user", "content": "Move."}, answer("left")]
    sample = manager.trajectory_sample(cache_of(*[("left", list(said))] * 3))
    assert [turn["content"] for turn in sample.turns] == ["left", "Move.", "left", "Move.", "left"]


def test_a_dialogue_that_cannot_be_read_is_the_failure_of_its_sample(manager_of) -> None:
    tool = {"role": "tool", "content": "", "tool_calls": [object()]}
    read = read_sample(manager_of().trajectory_sample(cache_of(("a", [USER, answer("a")]), ("b", [tool, answer("b")]))))
    assert isinstance(read, Rejected)
    assert "messages.tool_calls" in read.problem


def test_what_later_turns_showed_is_of_the_response(manager_of) -> None:
    """A manager for vision models keeps no messages."""
    pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    red, blue = (np.full((6, 8, 3), colour, dtype=np.uint8) for colour in ((255, 0, 0), (0, 0, 255)))
    prompt = [SYSTEM, {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "go"}]}]
    cache = cache_of(("left", None), ("right", None))
    cache.history[0]["observation"], cache.history[1]["observation"] = {"prompt": prompt, "image": [red]}, blue
    sample = manager_of().trajectory_sample(cache)
    assert Image.of(sample.messages[1]["content"][0]) == Image.of(pillow.fromarray(red))
    assert sample.response == "assistant: left\n\nuser: [image]\n\nassistant: right"
    assert sample.response_images == [Image.of(pillow.fromarray(blue))]


def test_in_parts_each_turn_adds_to_its_own_step(manager_of, make_tree, judge, monkeypatch) -> None:
    """A manager with a row for each step, as ROLL's `StepEnvManager`: the judge's reward is where it was earned."""
    turns = {"kind": "turns", "judge": "quality", "reduce": "sum"}
    tree = {**make_tree(judges={"quality": {"kind": "llm"}, "whole": turns}), "dense": True}
    with pytest.raises(ConfigurationError, match="dense: rewards cannot come in parts: this environment manager makes"):
        manager_of("3", "8", tree=tree).play()

    def by_step(self: Any, cache: Any) -> Any:
        rewards = torch.tensor([[turn["reward"]] for turn in cache.history[:-1]])
        return RollDataProto.from_dict({"scores": rewards, "response_mask": torch.ones(rewards.shape)})

    monkeypatch.setattr(Manager, "formulate_rollouts", by_step)
    rollout = manager_of("3", "8", tree=tree, qreward_weight=0.5).play()
    assert rollout.batch["scores"][:, 0].tolist() == pytest.approx([0.125 + 0.5 * 0.3, 0.125 + 0.5 * 0.8])
    assert judge.report().requests == 4


def test_a_constant_trains_and_raise_raises(manager_of, make_tree) -> None:
    assert told(manager_of("break", tree=make_tree(on_failure={"constant": -1.0})).play()) == (-0.875, True)
    with pytest.raises(RewardMissing, match="infra"):
        manager_of("break", tree=make_tree(on_failure="raise")).play()


@each_of("weight", [1e39, float("nan")])
def test_what_would_be_infinite_in_32_bits_is_masked_and_adds_nothing(manager_of, weight) -> None:
    rollout = manager_of("8", qreward_weight=weight).play()
    assert told(rollout) == (0.125, False)
    assert rollout.meta_info["metrics"]["env/talk/qreward_failed"] == 1.0


def test_the_configuration_may_be_a_file_and_mistakes_name_its_place(manager_of, make_tree, tmp_path) -> None:
    file = tmp_path / "judges.yaml"
    file.write_text(yaml.safe_dump(make_tree()))
    assert told(manager_of("8", tree=str(file)).play()) == (0.925, True)
    with pytest.raises(ConfigurationError, match=r"custom_envs\.talk\.qreward"):
        manager_of("8", tree={"sources": {}}).play()
    # No environment knows how many processes there are.
    with pytest.raises(ConfigurationError, match=r"engine\.shared: .*how many processes"):
        manager_of("8", tree=make_tree(engine={"shared": "local"})).play()


@pytest.fixture
def tree_of(make_tree) -> Any:
    """The configuration of one process of several: equal but for what tells their engines apart."""

    def tree(process: int = 0, wait_s: float = LONG_S) -> Any:
        engine = {"max_attempts": 1, "seed": process, "deadline_s": 3.0}
        return make_tree(engine=engine, groups={"wait_s": wait_s})

    return tree


@each_of(
    ("size", "siblings", "mean"),
    [
        # Each configuration has an engine of its own, as in processes of their own.
        (3, [("4", {"process": 1}), ("8", {"process": 2})], 0.6),
        # Groups of other episodes and seeds do not mix.
        (2, [("2", {"episode": 1}), ("4", {"group_seed": 7}), ("8", {})], 0.8),
        # A slow sibling leaves its place to whoever asks first (ROLL, `GroupQueue.get_episode_id`).
        (3, [("2", {"env_id": 1}), ("6", {"env_id": 1})], 0.4),
    ],
)
def test_a_failed_trajectory_gets_the_mean_of_siblings_that_are_scored_later(
    manager_of, tree_of, monkeypatch, size, siblings, mean
) -> None:
    monkeypatch.setattr(barrier, "_here", barrier.Barrier())
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(manager_of("break", tree=tree_of(), size=size).play)
        for said, options in siblings:
            place = {"env_id": 1, **options}
            episode, tree = place.pop("episode", 0), tree_of(place.pop("process", 0))
            rollout = manager_of(said, tree=tree, size=size, **place).play(episode_id=episode)
            assert told(rollout) == (0.125 + int(said) / 10, True)
        rollout = waiting.result(LONG_S)
    assert told(rollout) == (0.125 + mean, False)
    assert rollout.meta_info["metrics"]["env/talk/qreward_failed"] == 1.0


@each_of("stopped", [False, True])
def test_siblings_that_never_come_are_waited_for_no_longer_than_that(manager_of, tree_of, monkeypatch, stopped) -> None:
    """ROLL's `stop` ends the waiting, too."""
    monkeypatch.setattr(barrier, "_here", barrier.Barrier())
    tree = tree_of(wait_s=LONG_S if stopped else 0.05)
    manager_of("8", tree=tree, size=3, env_id=1).play()
    failed = manager_of("break", tree=tree, size=3)
    failed.running = not stopped
    assert told(failed.play()) == (0.925, False)
    late = manager_of("2", tree=tree, size=3, env_id=2).play()
    assert told(late) == (0.925, False), "the mean was given out and must not move"
    assert late.meta_info["metrics"]["env/talk/qreward_failed"] == 0.0


def test_a_validation_waits_for_nobody(manager_of, tree_of) -> None:
    for said, score in (("8", (0.925, True)), ("break", (0.925, False)), ("2", (0.325, True))):
        assert told(manager_of(said, tree=tree_of(), size=3, env_id=int(score[0] * 10), mode="val").play()) == score


def test_without_an_actor_a_failed_trajectory_gets_the_mean_of_its_process(
    manager_of, tree_of, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(barrier, "report", lambda *_: 1 / 0)
    monkeypatch.setattr(barrier, "means", RunningMeans())
    for said, score in (("2", (0.325, True)), ("6", (0.725, True)), ("break", (0.525, False))):
        assert told(manager_of(said, tree=tree_of(), size=4).play()) == score
    assert "the barrier of groups does not answer (ZeroDivisionError" in caplog.text
