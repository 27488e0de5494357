"""What ROLL and the fake make of the same data, responses and rewards, and where they differ. For ROLL's process.

The fake promises what a reward can change: the rows that a worker is handed, the responses that a loop makes, which
groups a query filter keeps, and masks, normalised rewards and advantages, within 1e-6. Each function returns the
differences by name; an empty text says that there is none.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from roll.distributed.scheduler import generate_scheduler, user_defined_rollout_loop
from roll.distributed.scheduler.protocol import DataProto

from qreward_plugins.testing.generation import WordTokenizer
from qreward_plugins.testing.roll import estimates, rollout_loop
from qreward_plugins.testing.roll.generation import collate, encode_row
from qreward_plugins.testing.roll.protocol import RollDataProto

from . import rollouts

KINDS = (DataProto, RollDataProto)
LOOPS = (user_defined_rollout_loop, rollout_loop)
PROMPTS, GROUP_SIZE = 6, 4
PROMPT_LENGTH, SEQUENCE_LENGTH = 32, 48
_WORDS = range(2, 30)
_META = {"step": 1, "metrics": {"took": 1.0}}
_TRAINED = ("response_level_rewards", "final_response_mask", "token_level_rewards", "advantages")


def _prompts(kind: Any, meta_info: Mapping[str, Any] = _META) -> Any:
    """Six prompts of two domains, each longer than the one before."""
    rows = [
        encode_row(
            {"messages": [{"role": "user", "content": "word " * number}], "length": number},
            number,
            domain="ab"[number % 2],
            tag="tag",
            tokenizer=WordTokenizer(),
            prompt_length=PROMPT_LENGTH,
        )
        for number in range(1, PROMPTS + 1)
    ]
    collated = collate(rows, pad_token_id=0, length=PROMPT_LENGTH)
    return kind.from_single_dict(collated, meta_info=copy.deepcopy(dict(meta_info)))


def _difference(real: Any, fake: Any, only: tuple[str, ...] = ()) -> str:
    """The first difference of two batches; `only` names the tensors that count, else all do, and all columns."""
    names = set(only) or set(real.batch.keys()) | set(fake.batch.keys())
    for name in sorted(names):
        if name not in set(real.batch.keys()) & set(fake.batch.keys()):
            return f"the tensor {name} is on one side only"
        wanted, found = real.batch[name].double(), fake.batch[name].double()
        if wanted.shape != found.shape or not torch.allclose(found, wanted, atol=1e-6, equal_nan=True):
            return f"{name}: {found.tolist()}, not {wanted.tolist()}"
    columns, found = real.non_tensor_batch, fake.non_tensor_batch
    if not only and {name: list(values) for name, values in columns.items()} != {
        name: list(values) for name, values in found.items()
    }:
        return f"columns: {found}, not {columns}"
    return "" if only or real.meta_info == fake.meta_info else f"meta_info: {fake.meta_info}, not {real.meta_info}"


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "a slice": lambda data: data[1:4],
    "rows": lambda data: data[[3, 1]],
    "rows of a mask": lambda data: data[torch.tensor([1, 0, 1, 0, 0, 1]).bool()],
    "repeat": lambda data: data.repeat(3),
    "repeat as a whole": lambda data: data.repeat(2, interleave=False),
    "pop": lambda data: data.pop(["input_ids"], ["length"]),
    "rename": lambda data: data.rename("input_ids", "tokens"),
    "the last of four chunks": lambda data: data.chunk(4)[-1],
    "a domain": lambda data: data.group_by("domain")["a"],
    "union": lambda data: data.union(
        type(data).from_dict({"new": torch.arange(PROMPTS)}, {"letter": list("abcdef")}, {"step": 1, "more": [1]})
    ),
    "concat": lambda data: type(data).concat(
        [_with_metrics(data[[row]], {"number": float(row), "word": "text"}) for row in range(PROMPTS)]
    ),
}

REFUSED: dict[str, Callable[[Any], Any]] = {
    "more chunks than rows": lambda data: data.chunk(PROMPTS + 1),
    "a union of other length": lambda data: data.union(
        type(data).from_dict({"new": torch.zeros(PROMPTS - 1)}, meta_info={})
    ),
    "a union of meta_info that differs": lambda data: data.union(
        type(data).from_dict({"new": torch.zeros(PROMPTS)}, meta_info={"step": 2})
    ),
    "a tensor of other length": lambda data: data.batch.__setitem__("new", torch.zeros(PROMPTS - 1)),
    "no tensors": lambda data: type(data).from_dict({}),
    "a concatenation of other tensors": lambda data: type(data).concat(
        [data[:2], data[2:].rename("input_ids", "tokens")]
    ),
}


def _with_metrics(data: Any, metrics: Mapping[str, Any]) -> Any:
    data.meta_info = {"metrics": dict(metrics)}
    return data


def data() -> dict[str, str]:
    """Results of operations; and errors, which have the same type."""
    told = {name: _difference(*(act(_prompts(kind)) for kind in KINDS)) for name, act in OPERATIONS.items()}
    for name, act in REFUSED.items():
        real, fake = (_error(act, _prompts(kind)) for kind in KINDS)
        told[name] = "" if real == fake != "none" else f"{fake}, not {real}"
    return told


def _error(act: Callable[[Any], Any], data: Any) -> str:
    try:
        act(data)
    except Exception as error:
        return type(error).__name__
    return "none"


def responses() -> dict[str, str]:
    """Requests of a prompt, and what becomes of the engine's answers to them."""
    rng = random.Random(5)
    told = {}
    for expanded, count, row in itertools.product((True, False), (1, 3), range(PROMPTS)):
        answers = [[*_answer(rng, 15), 1] for _ in range(count)]
        expanders = (generate_scheduler.expand_requests, rollout_loop.expand_requests)
        real, fake = (
            _responses(kind, row, answers, expanded, expand, loop)
            for kind, expand, loop in zip(KINDS, expanders, LOOPS, strict=True)
        )
        for place, pair in enumerate(zip(real, fake, strict=True)):
            told[f"{count} of row {row}, {'expanded' if expanded else 'together'}, {place}"] = _difference(*pair)
    return told


def _answer(rng: random.Random, longest: int) -> list[int]:
    return [rng.choice(_WORDS) for _ in range(rng.randint(1, longest))]


def _responses(kind: Any, row: int, answers: list[list[int]], expanded: bool, expand: Any, loop: Any) -> list[Any]:
    prompt = _prompts(kind, {"generation_config": {"num_return_sequences": len(answers)}})[[row]]
    made = []
    for place, request in enumerate(expand(prompt, len(answers), expanded)):
        own = [answers[place]] if expanded else answers
        request.meta_info.update(
            output_token_ids=own, finish_reasons=["stop"] * len(own), eos_token_id=[1, 0], pad_token_id=0
        )
        made.append(loop.postprocess_output_data(request, kind(meta_info=request.meta_info), SEQUENCE_LENGTH))
    return made


def filters() -> dict[str, str]:
    """Which groups ROLL's query filter keeps."""
    settings = (
        ("no_filter", {}),
        ("mean_filter", {"threshold_up": 0.9, "threshold_down": 0.1}),
        ("std_filter", {"std_threshold": 0}),
    )
    rewards = ([1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [math.nan, 1.0], [1.0])
    told = {}
    for (kind, arguments), group in itertools.product(settings, rewards):
        config = Namespace(rewards={"a": Namespace(query_filter_config=Namespace(type=kind, filter_args=arguments))})
        real, fake = (
            bool(loop.query_filter([_rewarded(proto, reward) for reward in group], config))
            for proto, loop in zip(KINDS, LOOPS, strict=True)
        )
        told[f"{kind} {arguments} {group}"] = "" if real == fake else f"{fake}, not {real}"
    return told


def _rewarded(kind: Any, reward: float) -> Any:
    return kind.from_dict({"response_level_rewards": torch.tensor([reward])}, {"domain": ["a"]})


def training(settings: Mapping[str, Any]) -> dict[str, str]:
    """Masks, normalised rewards and advantages of three batches: a plain one, one with a NaN, and one of which a sample
    and a whole group are masked.
    """
    told = {}
    for name in ("plain", "a NaN", "masked"):
        real, fake = (_batch(kind, name) for kind in KINDS)
        with torch.no_grad():
            real, _ = rollouts.train_batch(real, _config(settings))
            fake, _ = estimates.train_batch(fake, _config(settings))
        told[name] = _difference(real, fake, _TRAINED)
    return told


def _batch(kind: Any, name: str) -> Any:
    rng = random.Random(0)
    size = PROMPTS * GROUP_SIZE
    answers = [_answer(rng, 16) for _ in range(size)]
    tensors = rollout_loop.response_batch(_prompts(kind), answers, sequence_length=SEQUENCE_LENGTH, pad_token_id=0)
    rewards = torch.tensor([rng.randint(0, 2) / 2 for _ in range(size)])
    if name == "a NaN":
        rewards[3] = math.nan
    if name == "masked":
        tensors["response_mask"][5] = 0
        tensors["response_mask"][8:12] = 0
    tensors |= {
        "response_level_rewards": rewards,
        "scores": rewards.clone(),
        "token_level_rewards": torch.zeros(size, tensors["responses"].shape[-1]),
    }
    return kind.from_dict(tensors, {"domain": np.array(["ab"[row // 12] for row in range(size)], dtype=object)})


def _config(settings: Mapping[str, Any]) -> Namespace:
    defaults: dict[str, Any] = {
        "adv_estimator": "grpo",
        "norm_mean_type": None,
        "norm_std_type": None,
        "reward_clip": None,
        "max_len_mask": False,
        "difficulty_mask": False,
        "difficulty_low_threshold": 0.3,
        "difficulty_high_threshold": 0.7,
        "error_max_len_clip": False,
        "error_max_len_threshold": 6,
        "gamma": 1,
        "lambd": 0.95,
        "advantage_clip": None,
        "whiten_advantages": False,
        "whiten_rewards": False,
        "add_token_level_kl": False,
        "kl_penalty": "kl",
        "init_kl_coef": 0.2,
        "target_kl": None,
        "kl_horizon": None,
        "actor_infer": Namespace(generating_args=Namespace(num_return_sequences=GROUP_SIZE)),
    }
    return Namespace(**{**defaults, **settings})


COMPARISONS: dict[str, Callable[..., dict[str, str]]] = {
    "data": data,
    "responses": responses,
    "filters": filters,
    "training": training,
}
