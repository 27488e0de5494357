"""The metrics that slime logs, and how it calls its log hooks.

If a log hook returns a true value, slime logs nothing. A hook that adds its numbers to slime's changes
`rollout_extra_metrics` in place and returns False. In an evaluation that argument is None.
"""

from __future__ import annotations

import math
import statistics
import zlib
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .hooks import HookLoader
from .samples import SlimeSample


def log_rollout(
    args: Namespace,
    loader: HookLoader,
    rollout_id: int,
    samples: list[SlimeSample],
    extra_metrics: dict[str, Any] | None,
    rollout_time_s: float,
) -> dict[str, Any]:
    """The metrics that slime logs for one rollout; none if a custom log function returns True."""
    path = args.custom_rollout_log_function_path
    if path is not None and loader.load(path)(rollout_id, args, samples, extra_metrics, rollout_time_s):
        return {}
    if args.load_debug_rollout_data:
        return {}
    return {
        **(extra_metrics or {}),
        **_prefixed("rollout/", sample_metrics(args, samples)),
        **_prefixed("perf/", _speed_metrics(args, samples, rollout_time_s)),
        "rollout/step": rollout_step(args, rollout_id),
    }


def log_evaluation(
    args: Namespace,
    loader: HookLoader,
    rollout_id: int,
    data: dict[str, dict[str, Any]],
    extra_metrics: dict[str, Any] | None,
) -> dict[str, Any]:
    """The metrics that slime logs for one evaluation; none if a custom log function returns True.

    The log function is called first, so the means are of `data` as it leaves them. Raises `ZeroDivisionError` for a
    data set without rewards.
    """
    path = args.custom_eval_rollout_log_function_path
    if path is not None and loader.load(path)(rollout_id, args, data, extra_metrics):
        return {}
    logged = extra_metrics or {}
    for name, results in data.items():
        rewards = results["rewards"]
        logged[f"eval/{name}"] = sum(rewards) / len(rewards)
        if (samples := results.get("samples")) is not None:
            logged |= _prefixed(f"eval/{name}/", sample_metrics(args, samples))
        if "truncated" in results:
            logged[f"eval/{name}-truncated_ratio"] = sum(results["truncated"]) / len(results["truncated"])
        if args.log_passrate:
            logged |= _prefixed(f"eval/{name}-", pass_rates(rewards, args.n_samples_per_eval_prompt))
    logged["eval/step"] = rollout_step(args, rollout_id)
    return logged


def sample_metrics(args: Namespace, samples: Sequence[SlimeSample]) -> dict[str, Any]:
    """Lengths, groups without spread, cache, reward categories, repetition and truncation."""
    cached = sum(sample.prefix_cache_info.cached_tokens for sample in samples)
    prompted = sum(sample.prefix_cache_info.total_prompt_tokens for sample in samples)
    return {
        **_spread("response_len", [sample.effective_response_length for sample in samples]),
        **_zero_std(args, samples),
        "prefix_cache_hit_rate": cached / prompted if prompted else 0.0,
        "avg_cached_tokens_per_sample": cached / len(samples),
        **_categories(args, samples),
        "repetition_frac": statistics.fmean(_repeats(sample.response) for sample in samples),
        "truncated_ratio": statistics.fmean(sample.status is SlimeSample.Status.TRUNCATED for sample in samples),
    }


def pass_rates(rewards: Sequence[float], group_size: int) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, ... up to the group's size, where a reward of 1 is a pass.

    Raises `AssertionError` if the rewards do not make whole groups.
    """
    if group_size == 1:
        return {}
    count = len(rewards) // group_size
    assert len(rewards) == count * group_size, f"{len(rewards)} rewards are no whole groups of {group_size}"
    passed = [sum(reward == 1 for reward in rewards[at : at + group_size]) for at in range(0, len(rewards), group_size)]

    def at_least_one(k: int, right: int) -> float:
        return 1.0 - math.comb(group_size - right, k) / math.comb(group_size, k)

    sizes = [2**power for power in range(int(math.log2(group_size)) + 1)]
    return {f"pass@{k}": statistics.fmean(at_least_one(k, right) for right in passed) for k in sizes}


def _zero_std(args: Namespace, samples: Sequence[SlimeSample]) -> dict[str, int]:
    if args.advantage_estimator == "ppo":
        return {}
    groups: dict[int | None, list[Any]] = {}
    for sample in samples:
        groups.setdefault(sample.group_index, []).append(sample.get_reward_value(args))
    equal = [rewards[0] for rewards in groups.values() if all(rewards[0] == reward for reward in rewards)]
    counts = Counter(str(round(reward, 1)) for reward in equal)
    return {f"zero_std/count_{reward}": count for reward, count in counts.items()}


def _categories(args: Namespace, samples: Sequence[SlimeSample]) -> dict[str, float]:
    key = args.log_reward_category
    if key is None:
        return {}
    counts = Counter(sample.reward[key] for sample in samples)
    return {f"error_cat/{category}": count / len(samples) for category, count in counts.items()}


def _speed_metrics(args: Namespace, samples: Sequence[SlimeSample], rollout_time_s: float) -> dict[str, float]:
    waited = [sample.non_generation_time for sample in samples]
    metrics = {"rollout_time": rollout_time_s}
    if max(waited) > 0:
        metrics |= _spread("non_generation_time", waited)
    for prefix, lengths in (
        ("", [sample.response_length for sample in samples]),
        ("effective_", [sample.effective_response_length for sample in samples]),
    ):
        longest = max(lengths)
        if args.rollout_num_gpus:
            metrics[f"{prefix}tokens_per_gpu_per_sec"] = sum(lengths) / rollout_time_s / args.rollout_num_gpus
        metrics[f"longest_{prefix}sample_tokens_per_sec"] = longest / rollout_time_s
        if max(waited) > 0:
            of_longest = statistics.fmean(s for s, length in zip(waited, lengths, strict=True) if length == longest)
            metrics[f"longest_{prefix}sample_non_generation_time"] = of_longest
            metrics[f"longest_{prefix}sample_tokens_per_sec_without_non_generation"] = longest / (
                rollout_time_s - of_longest
            )
    return metrics


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    numbers = [float(value) for value in values]
    return {
        f"{name}/mean": statistics.fmean(numbers),
        f"{name}/median": statistics.median(numbers),
        f"{name}/max": max(values),
        f"{name}/min": min(values),
    }


def _repeats(text: str) -> bool:
    tail = text[-10_000:].encode()
    return len(text) > 10_000 and len(tail) > 10 * len(zlib.compress(tail, 9))


def rollout_step(args: Namespace, rollout_id: int) -> int:
    """The step of the metrics: the rollout's number, or with a flag the training step's."""
    if not args.wandb_always_use_train_step:
        return rollout_id
    step: int = rollout_id * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size
    return step


def _prefixed(prefix: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in metrics.items()}
