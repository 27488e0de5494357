"""`run_single` for the rollouts of `FakeVerlTrainer`, which hands out what verl does, against judge servers; and the
sync contract of older versions of verl, on the registry that verl still carries.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import sys
import threading
import time
from contextlib import aclosing
from functools import partial

import numpy as np
import pytest

from qreward_plugins import ConfigurationError, RewardMissing
from qreward_plugins.adapters import close_process_portals
from qreward_plugins.samples.check import Rejected, read_sample
from qreward_plugins.samples.images import Image
from qreward_plugins.testing import FakeVerlTrainer, Faults, JudgeServer
from qreward_plugins.testing.generation import WordTokenizer
from qreward_plugins.testing.verl.reward_loop import load_extern_object
from verl_adapter import QRewardBatchManager
from verl_adapter.rollouts import to_sample

from ..kit import each_of, make_config
from .conftest import said

Pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

IN_A_THREAD = "+qreward.sources.compute_score.mode=thread"
ONE_WORKER = "+qreward.sources.compute_score.workers=1"


def right(call):
    return 10.0 if call.blocks["reference"] in call.blocks["response"] else 0.0


def custom(path):
    """The overrides that let our manager call a function of one's own, in one worker process."""
    node = "reward.custom_reward_function"
    return ["reward.reward_manager.name=qreward", ONE_WORKER, f"{node}.path={path}", f"{node}.name=rule"]


@pytest.mark.parametrize("constant", [None, -0.5])
def test_a_failed_sample_returns_at_once_with_a_stand_in_that_is_marked(run, judge_overrides, constant):
    more = ["+qreward.judges.quality.correct_at=0.5", "+qreward.judges.quality.criteria.style='is it well written?'"]
    more += [] if constant is None else [f"+qreward.on_failure.constant={constant}"]
    with JudgeServer(right, faults=Faults(script=["error_400"])) as server:
        results = run(["It is 42."] * 2, *judge_overrides(a=server), *more)
    failed, scored = sorted(results, key=lambda result: -result["reward_extra_info"]["qreward/missing"])
    assert (scored["reward_score"], scored["reward_extra_info"]["qreward/missing"]) == (1.0, 0.0)
    assert failed["reward_score"] in ((0.0, 1.0) if constant is None else (constant,)), "a mean of its process, or that"
    info = failed["reward_extra_info"]
    facts = (info["qreward/missing"], info["qreward/failed"], info["qreward/cause"])
    assert facts == (1.0, 1.0, "infra/no_source")
    assert info.keys() == scored["reward_extra_info"].keys() >= {"acc", "qreward/score/style", "qreward/latency_s"}
    assert all(isinstance(value, (float, str)) for value in info.values())


def test_raise_ends_the_run_with_one_clear_exception(run, judge_overrides):
    with JudgeServer(right, faults=Faults(script=["error_400"])) as server:
        results = run(["It is 42."] * 2, *judge_overrides(a=server), "+qreward.on_failure=raise")
    (failure,) = [result for result in results if isinstance(result, RewardMissing)]
    assert "leave it out of training" in str(failure)
    assert "400" in str(failure)


def test_a_row_that_cannot_be_read_is_its_own_failure(run, judge_overrides):
    broken = [("extra_info", 7), ("raw_prompt", 7), ("reward_model", 7), ("extra_info", None), ("reward_model", None)]

    def respond(draft, rng):
        if draft.number < len(broken):
            column, value = broken[draft.number]
            draft.columns[column] = value
        return "It is 42."

    with JudgeServer(lambda call: 5.0) as server:
        results = run([""] * 6, *judge_overrides(a=server), respond=respond)
    causes = [result["reward_extra_info"]["qreward/cause"] for result in results]
    assert causes == ["infra/input"] * 3 + [""] * 3


def test_the_limits_are_shared_by_the_reward_workers(judge_overrides):
    with JudgeServer(right) as server:
        limits = ["+qreward.sources.a.limits.requests_per_minute=600", "+qreward.sources.a.limits.concurrency=9"]
        local = "+qreward.engine.shared=local"
        with FakeVerlTrainer([*judge_overrides(a=server), *limits, local, "reward.num_workers=4"]) as fake:
            for manager in fake.reward_managers:
                quota = manager.engine.upstreams["a"].quota
                assert (quota.burst, quota.concurrency) == (150, 2)
        with pytest.raises(ConfigurationError, match="at most 9 processes"):
            FakeVerlTrainer([*judge_overrides(a=server), *limits, local, "reward.num_workers=10"])


@pytest.mark.anyio
async def test_verls_own_reward_function_needs_no_configuration(compose, tokenizer, make_data):
    """In the real verl: its stand-in has none of its graders."""
    from verl.trainer.ppo.reward import load_reward_manager

    hooked = "+qreward_trainer=v1"
    manager = load_reward_manager(compose("reward.reward_manager.name=qreward", IN_A_THREAD, hooked), tokenizer)
    data = [make_data([text], data_source="openai/gsm8k") for text in ("so it is #### 42", "so it is #### 41")]
    async with aclosing(manager):
        good, bad = await asyncio.gather(*map(manager.run_single, data))
    assert type(good["reward_score"]) is float
    assert (good["reward_score"], bad["reward_score"]) == (1.0, 0.0)


def test_an_async_reward_function_needs_no_configuration(run, tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(
        "async def rule(solution_str, ground_truth, **_):\n    return float(ground_truth in solution_str)\n"
    )
    good, bad = run(["It is 42.", "It is 7."], *custom(path))
    assert (good["reward_score"], bad["reward_score"]) == (1.0, 0.0)


@pytest.mark.parametrize("words", [0, 5000], ids=["on the loop", "in the thread"])
@pytest.mark.parametrize("error", [type("Panic", (BaseException,), {}), StopIteration, OverflowError])
def test_a_row_that_a_tokenizer_chokes_on_costs_itself_only(run, tmp_path, monkeypatch, error, words):
    """A panic of a tokenizer in Rust is no `Exception`."""
    path, decode = tmp_path / "functions.py", WordTokenizer.decode
    path.write_text("async def rule(solution_str, **_):\n    return 1.0\n")

    def choking(self, ids, **options):
        if "choke" in (text := decode(self, ids, **options)) and sys._getframe(1).f_code.co_filename.endswith(
            "rollouts.py"
        ):
            raise error("out of range")
        return text

    monkeypatch.setattr(WordTokenizer, "decode", choking)
    results = run(["fine", "choke" + " word" * words, "fine"], *custom(path), "data.max_response_length=6000")
    assert sorted(result["reward_extra_info"]["qreward/cause"] for result in results) == ["", "", "infra/input"]


def test_rewards_are_asked_for_while_rows_are_still_read_and_long_ones_are_read_in_a_thread(run, tmp_path, monkeypatch):
    path, seen, decode = tmp_path / "functions.py", tmp_path / "seen", WordTokenizer.decode
    path.write_text(
        "async def rule(solution_str, **_):\n"
        f"    with open({str(seen)!r}, 'a') as file:\n"
        "        file.write('asked ')\n"
        "    return 1.0\n"
    )

    def noted(self, ids, **options):
        if sys._getframe(1).f_code.co_filename.endswith("rollouts.py"):
            with seen.open("a") as file:
                time.sleep(0.006)  # longer than a slice
                file.write("thread " if threading.current_thread().name.startswith("qreward-decode") else "here ")
        return decode(self, ids, **options)

    monkeypatch.setattr(WordTokenizer, "decode", noted)
    results = run(["It is 42."] * 40 + ["word " * 5000], *custom(path), "data.max_response_length=6000")
    assert [result["reward_score"] for result in results] == [1.0] * 41
    order = seen.read_text().split()
    assert (order.count("here"), order.count("thread"), order.count("asked")) == (40, 1, 41)
    assert order.index("asked") < 40, "before the last row was read"


@pytest.mark.parametrize("form", ["file://{folder}/telling.py", "pkg://telling"])
def test_a_worker_process_loads_a_reward_function_without_verl(run, tmp_path, monkeypatch, form):
    """verl takes seconds and 400 MB in each worker process, at each of its starts."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "telling.py").write_text(
        "import os, sys\n"
        "def rule(data_source, solution_str, ground_truth, extra_info, bonus):\n"
        "    told = {'pid': os.getpid(), 'loaded': ' '.join(sys.modules), 'truth': ground_truth, **extra_info}\n"
        "    return {'score': bonus, **told}\n"
    )
    arguments = "+reward.custom_reward_function.reward_kwargs={bonus: 0.25, ground_truth: its own}"
    (told,) = run(["It is 42."], *custom(form.format(folder=tmp_path)), arguments)
    info = json.loads(told["reward_extra_info"]["qreward/returned"])
    assert told["reward_score"] == 0.25
    assert info["truth"] == "its own", "as in verl, reward_kwargs win over the arguments of a call"
    assert (info["pid"] != os.getpid(), info["num_turns"]) == (True, 2)
    assert not {"verl", "torch", "ray"} & set(info["loaded"].split())


# Images, in the messages and of an agent loop

RED, BLUE = (Pillow.new("RGB", (8, 6), colour) for colour in ("red", "blue"))


def sample_of(make_data, **columns):
    item = make_data(["It is red."], columns={name: [value] for name, value in columns.items()})[0]
    return to_sample(item, said("It is red."))


def part(image, **more):
    return {"type": "image", "image": image, **more}


def test_an_agent_loop_can_pass_images_of_the_response(make_data):
    sample = sample_of(make_data, tool_extra_fields={"qreward_images": [BLUE], "turns": 3})
    assert sample.response_images == [Image.of(BLUE)]
    assert sample.extras["turns"] == 3
    assert "qreward_images" not in sample.extras


@each_of("images", [3, ["http://h/a.png"], [None]])
def test_odd_images_fail_their_sample(make_data, images):
    sample = sample_of(make_data, tool_extra_fields={"qreward_images": images})
    assert isinstance(read_sample(sample), Rejected)


@each_of("use_v1", [True, False])
def test_a_judge_sees_the_images_of_a_training(judge_overrides, use_v1):
    content = [part(RED), {"type": "text", "text": "What is it?"}, part(BLUE)]
    seen = []

    def score(call):
        seen.append(call.messages[-1]["content"])
        return 5.0

    with JudgeServer(score) as server:
        overrides = [
            *judge_overrides(j=server),
            "+qreward.sources.j.vision=true",
            f"trainer.use_v1={use_v1}",
            "algorithm.adv_estimator=grpo",
            "data.train_batch_size=1",
            "actor_rollout_ref.rollout.n=2",
        ]
        with FakeVerlTrainer(overrides, rows=[{"prompt": [{"role": "user", "content": content}]}]) as fake:
            step = fake.step()
    assert step.scores == [0.5, 0.5]
    for parts in seen:
        assert "[image 1 of the prompt]\nWhat is it?\n[image 2 of the prompt]" in parts[0]["text"]
        urls = [each["image_url"]["url"] for each in parts if each["type"] == "image_url"]
        shown = [Pillow.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]
        assert [found.convert("RGB").getpixel((0, 0)) for found in shown] == [(255, 0, 0), (0, 0, 255)]


# The sync contract of older versions


def graded(call):
    if "break" in call.blocks["response"]:
        return "no verdict"
    return 10.0 if call.blocks["reference"] in call.blocks["response"] else 2.0


@pytest.fixture
def make_manager(tokenizer):
    def make(server, column="data_source", **top):
        tree = {**make_config({"a": server}, judge={"invalid_retries": 0}), **top}
        return QRewardBatchManager(tokenizer, 1, None, column, qreward=tree)

    yield make
    close_process_portals()


def test_rewards_stand_at_the_last_token_of_each_response(make_manager, make_data):
    texts = ["It is 42.", "No, I am sure."]
    data = make_data(texts)
    with JudgeServer(graded) as server:
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
    with JudgeServer(graded) as server:
        rewards = make_manager(server, **top)(data).sum(-1)
    failed = [0.6] * 3 if constant is None else [constant] * 3
    assert rewards.tolist() == pytest.approx([*failed[:2], 1.0, 0.2, failed[2]])


def test_the_column_that_holds_the_data_source_chooses_the_judge(make_manager, make_data):
    data = make_data(["42", "no"], columns={"origin": ["math/x", "code/x"]})
    with JudgeServer(graded) as server:
        manager = make_manager(server, "origin", routes={"math/*": "quality"})
        infos = manager(data, return_dict=True)["reward_extra_info"]
    assert infos["qreward/cause"] == ["", "infra/no_route"]


def test_a_row_of_a_batch_that_cannot_be_read_is_its_own_failure(make_manager, make_data, tokenizer, monkeypatch):
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
    with JudgeServer(graded) as server:
        result = make_manager(server)(data, return_dict=True)
    assert result["reward_extra_info"]["qreward/cause"] == ["infra/input"] * 7 + ["", "infra/input"]
    assert result["reward_tensor"].sum(-1).tolist() == [1.0] * 9, "the mean of their group"


def test_managers_of_one_process_share_an_engine_by_their_configuration_and_function(
    make_manager, make_data, tokenizer, tmp_path
):
    with JudgeServer(graded) as server:
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
    with JudgeServer(graded) as server:
        infos = make_manager(server, **tree)(make_data(["42", "break", "no"]), return_dict=True)["reward_extra_info"]
    assert {len(values) for values in infos.values()} == {3}
    assert [infos["acc"][0], infos["acc"][2]] == [1.0, 0.0]
    assert np.isnan(infos["acc"][1]), "a failed sample is not a wrong answer"
    for values in infos.values():
        if not isinstance(values[0], str):
            np.mean(values)


def test_older_versions_of_verl_take_no_rewards_in_parts(tokenizer):
    source, whole = {"kind": "function", "function": "builtins:dict"}, {"kind": "turns", "judge": "j", "reduce": "sum"}
    tree = {"sources": {"f": source}, "judges": {"j": {"kind": "function"}, "whole": whole}, "dense": True}
    with pytest.raises(ConfigurationError, match="dense: rewards cannot come in parts: the trainers of older versions"):
        QRewardBatchManager(tokenizer, qreward=tree)
