"""verl's reward managers on the stand-in against verl's own: the same rows, the same results, the same errors."""

from __future__ import annotations

import asyncio
import copy
import math

import numpy as np
import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl", reason="verl is not installed (pip install 'qreward-plugins[demo]')")
torch = pytest.importorskip("torch")

from qreward_plugins.testing.tokenizer import WordTokenizer  # noqa: E402
from qreward_plugins.testing.verl import agent_loop, batch_contract, reward_managers  # noqa: E402
from qreward_plugins.testing.verl.engine import AgentOutput  # noqa: E402

from .agreement import VERLS_WARNINGS, as_real, both, same  # noqa: E402
from .test_fake_agrees import COLUMNS  # noqa: E402

pytestmark = VERLS_WARNINGS


@pytest.mark.parametrize("name", ["naive", "dapo", "gdpo", "rate_limited"])
@pytest.mark.parametrize("kind", ["number", "mapping", "async", "raises", "hangs"])
def test_verls_own_managers(name, kind):
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls

    def number(data_source, solution_str, ground_truth, extra_info):
        return float(len(solution_str)) + (extra_info.get("num_turns") or 0)

    def mapping(data_source, solution_str, ground_truth, extra_info):
        return {"score": 1.0, "text": solution_str, "truth": ground_truth}

    async def later(data_source, solution_str, ground_truth, extra_info):
        return 0.5

    def raises(**_):
        raise ValueError("no")

    async def hangs(**_):
        await asyncio.sleep(0.05)
        return 1.0

    function = {"number": number, "mapping": mapping, "async": later, "raises": raises, "hangs": hangs}[kind]
    config = OmegaConf.create(
        {
            "trainer": {"experiment_name": "mine"},
            "reward": {
                "timeout": 0.01 if kind == "hangs" else 60.0,
                "reward_kwargs": {
                    "max_resp_len": 4,
                    "overlong_buffer_cfg": {"enable": True, "len": 3, "penalty_factor": 1.0, "log": True},
                },
            },
        }
    )
    tokenizer = WordTokenizer()
    ids = tokenizer("What is it ? It is forty two")["input_ids"]
    outputs = [AgentOutput(ids[:4], ids[4:6], [1, 1], 2), AgentOutput(ids[:4], ids[4:], [1] * 4, 2)]

    def play(cls, data):
        async def main():
            return await cls(config, tokenizer, function).run_single(data)

        return asyncio.run(main())

    fake_data = agent_loop.reward_input(outputs, copy.deepcopy(COLUMNS))
    fake_cls = reward_managers.MANAGERS[name]
    one, other = both(
        lambda: play(get_reward_manager_cls(name), as_real(agent_loop.reward_input(outputs, copy.deepcopy(COLUMNS)))),
        lambda: play(fake_cls, fake_data),
    )
    assert plain(one) == other


def plain(value):
    """Without tensors: verl's penalty is one, as it is made of a length that is one."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return value.item() if isinstance(value, torch.Tensor) else value


OVERLONG = OmegaConf.create({"enable": True, "len": 3, "penalty_factor": 1.0, "log": True})
SCORES = [
    [1.0, 2.0, 0.5],
    [{"score": 1.0, "style": 3}, {"score": 0.5, "style": 4}, {"score": 0.0, "more": 1}],
    [1.0, {"score": 0.5, "style": 4}, 0.25],
    [1.0, math.nan, math.inf],
    [1.0, 1e39, 0.0],
    [1.0, None, 0.0],
    ["high", 1.0, 0.0],
    [{"value": 1.0}, 1.0, 0.0],
]


@pytest.mark.parametrize("scores", SCORES, ids=str)
@pytest.mark.parametrize("name", ["naive", "dapo", "batch"])
def test_the_managers_of_whole_batches(name, scores):
    """Those of verl 0.4 to 0.7, which 0.9.1 still has."""
    from verl.workers.reward_manager import get_reward_manager_cls

    seen, calls = [], []

    def one(data_source, solution_str, ground_truth, extra_info):
        calls.append((data_source, solution_str, ground_truth, dict(extra_info)))
        return scores[(len(calls) - 1) % 3]

    def whole(data_sources, solution_strs, ground_truths, extra_infos):
        calls.append((list(data_sources), solution_strs, ground_truths, [dict(each) for each in extra_infos]))
        return scores

    tokenizer = WordTokenizer()
    ids = tokenizer("What is it ? It is forty two")["input_ids"]
    outputs = [AgentOutput(ids[:4], ids[4 : 6 + row], [1] * (2 + row), 2) for row in range(3)]
    kwargs = {"max_resp_len": 4, "overlong_buffer_cfg": OVERLONG} if name == "dapo" else {}

    def play(cls, data):
        calls.clear()
        manager = cls(tokenizer, 0, whole if name == "batch" else one, **kwargs)
        try:
            first = manager(data, return_dict=True)
        finally:
            seen.append(repr(calls))
        assert same(manager(data), first["reward_tensor"])
        return first["reward_tensor"], {key: list(each) for key, each in first["reward_extra_info"].items()}

    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"prompt_length": 6, "response_length": 5}}})
    rows = {key: np.array([copy.deepcopy(value)] * 3 + [None], dtype=object)[:3] for key, value in COLUMNS.items()}

    def data():
        for output in outputs:
            output.extra_fields = {"raw_prompt": ["p"]}
        columns = {key: copy.deepcopy(each) for key, each in rows.items()}
        batch = agent_loop.postprocess(config, outputs, columns, streamed=False)
        for name, values in batch.batch.items():
            batch.batch[name] = np.ascontiguousarray(values)
        return batch

    real, fake = both(
        lambda: play(get_reward_manager_cls(name), as_real(data())),
        lambda: play(batch_contract.batch_registry().get(name), data()),
    )
    assert seen[0] == seen[1]
    if isinstance(real, str):
        assert fake == real
        return
    assert same(real[0], fake[0])
    assert fake[0].dtype == np.float32
    assert list(real[1]) == list(fake[1])
    for key, values in real[1].items():
        assert [plain(each) for each in values] == fake[1][key]
