"""What this package's reward manager costs in verl, beside verl's own `naive` manager, with a trivial reward function.

Both score the same rollouts in verl's real reward workers on a real Ray, in turns, so that other work on the machine
slows both alike. What counts is the processor time of all processes of the job, by rollout, and the memory that the
reward workers and their descendants hold in the end (PSS: shared pages count once).

    python bench/adapter.py [--rollouts 4096] [--tokens 2000] [--workers 1] [--rounds 3] [--json FILE]

It needs verl and this package as it is installed (`pip install .`), because every process of verl loads the manager.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import common
import psutil
import ray
from rich.console import Console
from rich.table import Table

MANAGERS = ("naive", "qreward")
PROMPT_TOKENS = 100
WARM_UP = 64
"""Rollouts before the measurement: workers import what they need, and processes of functions start."""
FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 2)
"""


@dataclass(frozen=True)
class Cost:
    """One round of one manager."""

    manager: str
    cpu_ms: float
    """Processor time of a rollout, in milliseconds, over all processes of the job."""
    wall_s: float
    memory_mb: float


def make_tokenizer(directory: Path) -> int:
    """Save a tokenizer of a thousand words; return how many tokens it knows."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"word{number}": number for number in range(1000)} | {"<eos>": 1000, "<unk>": 1001}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>")
    fast.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    fast.save_pretrained(directory)
    return len(words) - 2


def make_rollouts(count: int, tokens: int, vocabulary: int) -> Any:
    """The rows that verl hands to its reward workers."""
    import numpy as np
    import torch
    from verl import DataProto

    drawn = torch.Generator().manual_seed(0)
    responses = torch.randint(0, vocabulary, (count, tokens), generator=drawn)
    prompts = torch.randint(0, vocabulary, (count, PROMPT_TOKENS), generator=drawn)

    def column(values: Sequence[Any]) -> Any:
        made = np.empty(count, dtype=object)
        made[:] = values
        return made

    return DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "attention_mask": torch.ones(count, PROMPT_TOKENS + tokens, dtype=torch.long),
        },
        non_tensors={
            "data_source": column(["bench"] * count),
            "reward_model": column([{"ground_truth": str(number)} for number in range(count)]),
            "extra_info": column([{"index": number} for number in range(count)]),
            "raw_prompt": column([[{"role": "user", "content": f"Question {number}?"}] for number in range(count)]),
            "uid": column([str(number // 8) for number in range(count)]),
        },
    )


def configuration(manager: str, directory: Path, workers: int) -> Any:
    """verl's configuration with one reward manager."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                f"reward.num_workers={workers}",
                f"reward.reward_manager.name={manager}",
                f"reward.custom_reward_function.path={directory / 'function.py'}",
                f"actor_rollout_ref.model.path={directory}",
                # `auto` needs a trainer of verl's, which takes failed samples out of training.
                *(["+qreward.on_failure={constant: 0}"] if manager == "qreward" else []),
            ],
        )


def measure(manager: str, directory: Path, rollouts: Any, workers: int) -> Cost:
    """Score all rollouts once. Ends the program if a reward is wrong."""
    from verl.experimental.reward_loop.reward_loop import RewardLoopManager

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        loop = RewardLoopManager(configuration(manager, directory, workers))
        loop.compute_rm_score(rollouts[:WARM_UP])
        before, started = _cpu_s(), time.perf_counter()
        scored = loop.compute_rm_score(rollouts)
        wall_s, cpu_s = time.perf_counter() - started, _cpu_s() - before
        rewards = scored.batch["rm_scores"].sum(-1).tolist()
        if not set(rewards) <= {0.0, 1.0} or len(rewards) != len(rollouts):
            raise SystemExit(f"{manager}: wrong rewards, such as {rewards[0]}")
        memory_mb = sum(process.memory_full_info().pss for process in _reward_processes()) / 2**20
    finally:
        ray.shutdown()
    return Cost(manager, 1000 * cpu_s / len(rollouts), wall_s, memory_mb)


def _cpu_s() -> float:
    """Seconds of processor time of this process and all that descend from it."""
    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in [me, *me.children(recursive=True)])


def _reward_processes() -> list[psutil.Process]:
    """The reward workers, and what descends from them."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.Process().children(recursive=True):
        if "RewardLoopWorker" in " ".join(process.cmdline()):
            found |= {one.pid: one for one in [process, *process.children(recursive=True)]}
    return list(found.values())


def table(costs: Sequence[Cost]) -> Table:
    """The median of each manager's rounds, and how many times that of `naive` it is."""
    columns = ("manager", "CPU a rollout", "x naive", "wall", "memory", "x naive")
    shown = common.table(*columns, title="Reward workers in verl")
    medians = {
        manager: [
            statistics.median(getattr(cost, field) for cost in costs if cost.manager == manager)
            for field in ("cpu_ms", "wall_s", "memory_mb")
        ]
        for manager in MANAGERS
    }
    cpu, _, memory = medians["naive"]
    for manager, (cpu_ms, wall_s, memory_mb) in medians.items():
        shown.add_row(
            manager,
            f"{cpu_ms:.2f} ms",
            f"{cpu_ms / cpu:.2f}",
            f"{wall_s:.1f} s",
            f"{memory_mb:,.0f} MB",
            f"{memory_mb / memory:.2f}",
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rollouts", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=2000, help="length of each response")
    parser.add_argument("--workers", type=int, default=1, help="verl's reward.num_workers")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts")
    chosen = parser.parse_args(arguments)
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", TOKENIZERS_PARALLELISM="false")
    console = Console()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        (directory / "function.py").write_text(FUNCTION)
        rollouts = make_rollouts(chosen.rollouts, chosen.tokens, make_tokenizer(directory))
        measures = {name: partial(measure, name, directory, rollouts, chosen.workers) for name in MANAGERS}
        costs = [cost for of_one in common.turns(chosen.rounds, measures, console).values() for cost in of_one]
    console.print(table(costs))
    common.write(chosen.json, costs)


if __name__ == "__main__":
    main()
