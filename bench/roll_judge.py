"""How long a batch of judged rewards takes in ROLL: its own LLMJudgeRewardWorker beside `roll_adapter.QRewardWorker`.

Both are the real thing, actors of ROLL's `Cluster` on a small local Ray, and ask the same judge server, which takes a
constant time for every answer and sets no limit. They score the same samples in the two ways in which ROLL calls reward
workers: in one call for a whole batch (`generate_opt_level: 0`), which it cuts into equal parts for the workers, and in
a call for every sample, all at once and round robin (`generate_opt_level: 1`). The prompts differ, as each asks in its
own words and reads its own kind of verdict; the answers have to be right in both.

    QREWARD_ROLL_SRC=/path/to/ROLL python bench/roll_judge.py [--samples N ...] [--workers W ...] [--json FILE]

It wants a checkout of ROLL and the packages that ROLL needs; tests/conformance/roll/environment.sh makes an environment
with both. Without it ends with exit code 2.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table

from qreward_plugins.testing import JudgeServerProcess, Latency

PROJECT = Path(__file__).resolve().parents[1]
SOURCE = "QREWARD_ROLL_SRC"
ENVIRONMENT = "tests/conformance/roll/environment.sh"
PACKAGES = ("codetiming", "dacite", "datasets", "openai", "ray", "tensordict", "torch", "transformers")

OURS = "roll_adapter.QRewardWorker"
THEIRS = "roll.pipeline.rlvr.rewards.llm_judge_reward_worker.LLMJudgeRewardWorker"
THEIR_PROMPT = "Qwen2.5-7B-Instruct-RLVR-prompt"

WAYS = ("one call", "single calls")
PROMPT_TOKENS, RESPONSE_TOKENS = 16, 8

_THEIR_PARTS = re.compile(
    r"\*\*Solution Process[^\n]*\n(.*?)\n\s*\n\*\*Reference Answer:\*\*\s*\n(.*?)\n\s*\n\*\*Output", re.S
)


def grade(call: Any) -> float | str:
    """The judge: right is the response that is the reference. ROLL asks for YES or NO, this package for a score."""
    if call.nonce is not None:
        low, high = call.score_range
        right = call.blocks["response"].strip() == call.blocks["reference"].strip()
        return float(high if right else low)
    parts = _THEIR_PARTS.search(call.prompt)
    if parts is None:
        raise ValueError("this is not ROLL's prompt")
    response, reference = (part.strip() for part in parts.groups())
    return "YES" if response == reference else "NO"


def expected(number: int) -> float:
    """The reward of a sample: every other one is right."""
    return float(number % 2)


def why_not(environment: Mapping[str, str] = os.environ) -> str | None:
    """Why ROLL cannot be measured here; None if it can."""
    source = environment.get(SOURCE)
    if not source:
        return f"{SOURCE} is not set: point it to a checkout of ROLL, and make its environment with {ENVIRONMENT}."
    if not (Path(source) / "roll" / "pipeline" / "rlvr").is_dir():
        return f"{SOURCE} is {source}, which is not a checkout of ROLL: it has no roll/pipeline/rlvr."
    absent = [name for name in PACKAGES if not find_spec(name)]
    if absent:
        return f"ROLL needs packages that are not here ({', '.join(absent)}): make its environment with {ENVIRONMENT}."
    return None


@contextmanager
def roll(source: Path, folder: Path) -> Iterator[Any]:
    """ROLL made importable here and in the workers of a small Ray. Gives the resources that workers are placed on."""
    paths = [str(source.resolve()), str(PROJECT)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ["ROLL_LOG_DIR"] = str(folder / "logs")
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"
    import ray
    from roll.distributed.scheduler.resource_manager import ResourceManager
    from roll.utils.constants import RAY_NAMESPACE

    ray.init("local", num_cpus=2, namespace=RAY_NAMESPACE, include_dashboard=False, log_to_driver=False)
    try:
        yield ResourceManager(0, 1)
    finally:
        ray.shutdown()


def make_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<pad>", "<eos>", "number", "is", "which", *(str(number) for number in range(4096))]
    whole = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=whole, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(words)}))
    return folder


def make_batch(tokenizer_path: Path, count: int) -> Any:
    """Rollouts as ROLL's scheduler hands them over: prompts padded on the left, responses on the right."""
    import numpy as np
    import torch
    from roll.distributed.scheduler.protocol import DataProto
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)

    def padded(texts: list[str], width: int, side: str) -> Any:
        tokenizer.padding_side = side
        return tokenizer(texts, padding="max_length", max_length=width, return_tensors="pt")

    def column(values: list[str]) -> Any:
        return np.array(values, dtype=object)

    numbers = range(count)
    prompts = padded([f"which number is {n}" for n in numbers], PROMPT_TOKENS, "left")
    responses = padded([f"number {n if expected(n) else n + 1}" for n in numbers], RESPONSE_TOKENS, "right")
    asked, written = prompts["attention_mask"], responses["attention_mask"]
    mask = torch.cat([asked, written], 1)
    return DataProto.from_dict(
        tensors={
            "prompts": prompts["input_ids"],
            "responses": responses["input_ids"],
            "input_ids": torch.cat([prompts["input_ids"], responses["input_ids"]], 1),
            "attention_mask": mask,
            "position_ids": mask.cumsum(-1).clip(min=1) - 1,
            "prompt_mask": torch.cat([asked, torch.zeros_like(written)], 1),
            "response_mask": torch.cat([torch.zeros_like(asked), written], 1),
        },
        non_tensors={
            "id": column([str(n) for n in numbers]),
            "ground_truth": column([f"number {n}" for n in numbers]),
            "domain": column(["judged"] * count),
            "tag": column(["judged"] * count),
        },
        meta_info={"global_step": 0},
    )


def reward_config(worker_cls: str, workers: int, base_url: str, tokenizer_path: Path) -> Any:
    """A domain as a user of either writes it. There are no limits to declare but that nothing has to wait."""
    from roll.configs import ModelArguments
    from roll.pipeline.rlvr.rlvr_config import RewardConfig

    mine: dict[str, Any] = {
        "judge_model_type": "api",
        "judge_prompt": THEIR_PROMPT,
        "judge_model_name": "judge",
        "judge_api_url": base_url,
        "judge_api_key": "none",
    }
    if worker_cls == OURS:
        source = {"kind": "openai", "base_url": base_url, "model": "judge", "limits": {"concurrency": 1024}}
        judges = {"quality": {"kind": "llm", "response_format": "json_schema"}}
        mine = {"reward_manager_config": [{"sources": {"judge": source}, "judges": judges}]}
    return RewardConfig(
        worker_cls=worker_cls,
        world_size=workers,
        model_args=ModelArguments(model_name_or_path=str(tokenizer_path)),
        tag_included=["judged"],
        **mine,
    )


@contextmanager
def workers_of(config: Any, resources: Any) -> Iterator[Any]:
    """A `Cluster` of reward workers, initialised as the pipeline does it."""
    import ray
    from roll.distributed.executor.cluster import Cluster

    name = f"reward-{config.worker_cls.rpartition('.')[2]}-{config.world_size}"
    cluster = Cluster(name=name, worker_cls=config.worker_cls, resource_manager=resources, worker_config=config)
    try:
        pipeline = SimpleNamespace(
            actor_train=SimpleNamespace(model_args=config.model_args),
            rewards={"judged": config},
            rpc_timeout=3600,
            resume_from_checkpoint=False,
        )
        cluster.initialize(pipeline_config=pipeline, blocking=True)
        yield cluster
    finally:
        for worker in cluster.workers:
            ray.kill(worker)


def score(cluster: Any, batch: Any, way: str) -> list[float]:
    """The rewards of a batch, asked for in one of the two ways."""
    import numpy as np
    import ray

    if way == "one call":
        return list(cluster.compute_rewards(batch, blocking=True).batch["response_level_rewards"].tolist())
    calls = []
    for number in range(len(batch)):
        sample = batch[[number]]
        sample.non_tensor_batch["rollout_id"] = np.array([f"rollout-{number}"], dtype=object)
        calls.append(cluster.workers[number % len(cluster.workers)].compute_rewards.remote(sample))
    return [float(rewards.batch["response_level_rewards"][0]) for rewards in ray.get(calls)]


def seconds(cluster: Any, batch: Any, way: str) -> float:
    """Wall time of a batch. Ends the program when the rewards are not the right ones."""
    started = time.perf_counter()
    rewards = score(cluster, batch, way)
    spent = time.perf_counter() - started
    if rewards != [expected(number) for number in range(len(batch))]:
        sys.exit(f"wrong rewards, so there is nothing to measure: {rewards[:16]} ...")
    return spent


def measure(
    samples: Sequence[int], workers: Sequence[int], latency_s: float, rounds: int, source: Path
) -> dict[str, dict[str, list[float]]]:
    """Seconds of every contestant by batch, one number a round. Contestants are there one after the other, because all
    their processes at once would be in each other's way.
    """
    console = Console(stderr=True)
    spent: dict[str, dict[str, list[float]]] = {}
    contestants = [("ours, 1 worker", OURS, 1)]
    contestants += [(f"ROLL's, {count} worker{'s' * (count > 1)}", THEIRS, count) for count in workers]
    with (
        tempfile.TemporaryDirectory(prefix="roll-judge-") as folder,
        JudgeServerProcess(grade, latency=Latency(median_s=latency_s)) as server,
        roll(source, Path(folder)) as resources,
    ):
        tokenizer_path = make_tokenizer(Path(folder) / "tokenizer")
        batches = {count: make_batch(tokenizer_path, count) for count in samples}
        for name, worker_cls, count in contestants:
            console.print(f"{name} ...")
            mine = spent.setdefault(name, {})
            config = reward_config(worker_cls, count, server.base_url, tokenizer_path)
            with workers_of(config, resources) as cluster:
                seconds(cluster, make_batch(tokenizer_path, count), "single calls")  # first imports and connections
                for _ in range(rounds):
                    for size, batch in batches.items():
                        for way in WAYS:
                            mine.setdefault(f"{size} in {way}", []).append(seconds(cluster, batch, way))
    return spent


def show(spent: Mapping[str, Mapping[str, Sequence[float]]], latency_s: float, console: Console) -> None:
    ours, *theirs = spent
    table = Table(title=f"Seconds for a batch, at {latency_s:g} s an answer, and how many times as long as ours")
    for name in ("samples", *spent):
        table.add_column(name, justify="right", no_wrap=True)
    for batch in spent[ours]:
        base = statistics.median(spent[ours][batch])
        cells = [statistics.median(spent[name][batch]) for name in theirs]
        table.add_row(batch, f"{base:.2f}", *(f"{cell:.2f}  {cell / base:5.1f}x" for cell in cells))
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="How long a batch of judged rewards takes in ROLL.")
    parser.add_argument("--samples", type=int, nargs="+", default=[16, 64, 256], help="sizes of the batches")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4], help="worker processes of ROLL's own judge")
    parser.add_argument("--latency", type=float, default=0.2, metavar="S", help="seconds of every answer")
    parser.add_argument("--rounds", type=int, default=1, help="the median of so many is shown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all numbers")
    chosen = parser.parse_args(arguments)
    if uneven := [size for size in chosen.samples if any(size % count for count in chosen.workers)]:
        parser.error(f"ROLL gives every worker as much of a call; {uneven} cannot be shared so among {chosen.workers}")
    if reason := why_not():
        print(f"bench/roll_judge.py: {reason}", file=sys.stderr)
        sys.exit(2)
    spent = measure(chosen.samples, chosen.workers, chosen.latency, chosen.rounds, Path(os.environ[SOURCE]))
    show(spent, chosen.latency, Console())
    if chosen.json:
        chosen.json.write_text(json.dumps({"unit": "seconds", "latency_s": chosen.latency, "spent": spent}, indent=2))


if __name__ == "__main__":
    main()
