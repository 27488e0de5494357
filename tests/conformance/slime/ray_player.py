"""slime's rollout manager as the Ray actor that it is, with the trackers and the dumps that a user would switch on.

    python -m conformance.slime.ray_player JOB    (JOB: a JSON file with `flags`, `environment`, `steps` and `folder`)

Prints one JSON line: the error that ended the job or None, what each data-parallel rank of the trainer got, and how
long the steps took.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import ray

from .rollout_manager import make_args, make_tokenizer

RANKS = 2


def play(job: dict[str, Any]) -> dict[str, Any]:
    from slime.ray.placement_group import create_placement_groups, create_rollout_manager

    args = make_args([*job["flags"], "--hf-checkpoint", str(make_tokenizer(Path(job["folder"]) / "tokenizer"))])
    args.debug_rollout_only = True
    groups = create_placement_groups(args)
    args.debug_rollout_only = False
    manager, _ = create_rollout_manager(args, groups["rollout"])
    parallel = {"dp_size": RANKS, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    ray.get(manager.set_train_parallel_config.remote(parallel))
    steps, seconds = [], []
    for number in range(job["steps"]):
        ray.get(manager.eval.remote(number))
        began = time.monotonic()
        boxes = ray.get(manager.generate.remote(number))
        seconds.append(time.monotonic() - began)
        steps.append([_rank(ray.get(box.inner)) for box in boxes])
    ray.get(manager.dispose.remote())
    return {"error": None, "steps": steps, "seconds": seconds}


def _rank(data: dict[str, Any]) -> dict[str, Any]:
    return {
        "rewards": data["rewards"],
        "raw_reward": data["raw_reward"],
        "samples": data["sample_indices"],
        "masks": [mask.tolist() for mask in data["loss_masks"]],
    }


def main() -> None:
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    job = json.loads(Path(sys.argv[1]).read_text())
    # As a user would submit it: what the actor is to see stands in the job's runtime environment.
    variables = {"PYTHONPATH": os.environ["PYTHONPATH"], **job["environment"]}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True, runtime_env={"env_vars": variables})
    try:
        told = play(job)
    except Exception as error:
        traceback.print_exc()
        told = {"error": type(error).__name__, "text": str(error), "steps": []}
    finally:
        ray.shutdown()
    replies.write(json.dumps(told) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
