"""Plays scenarios on slime: flags, servers, and the process in which slime runs."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import qreward_plugins

from ..judges import GROUP_SIZE, ITEMS, Draft, RunningJudge, dying, label_of, prompt_of, read_response
from ..played import Played, PlayedSample, PlayedStep
from ..processes import PlayerProcess, Reply
from ..scenarios import Scenario
from .scenarios import EVAL_DRAFTS, EVAL_ITEMS, WATCHDOG_S
from .servers import ROLLOUT_SEED, GenerateServer

HERE = Path(__file__).parent
PROJECT = Path(qreward_plugins.__file__).parents[1]
START_S = 180.0
"""Importing torch, transformers and slime from a cold disk."""

PACKAGES = {
    "torch": "torch==2.13.0",
    "ray": "ray",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "httpx": "httpx",
    "pylatexenc": "pylatexenc",
    "PIL": "pillow",
    "numpy": "numpy",
    "tqdm": "tqdm",
    "omegaconf": "omegaconf",
    "aiohttp": "aiohttp",
    "yaml": "pyyaml",
}
"""What slime imports on a CPU, and the packages that bring it."""


def why_not(environment: Mapping[str, str] = os.environ) -> str | None:
    """Why slime cannot be played here, None if it can."""
    path = environment.get("QREWARD_SLIME_SRC")
    if not path:
        return "QREWARD_SLIME_SRC is not set: point it to a checkout of slime (git tag v0.3.1)"
    if not (Path(path) / "slime" / "rollout" / "sglang_rollout.py").is_file():
        return f"QREWARD_SLIME_SRC={path} is not a checkout of slime: it has no slime/rollout/sglang_rollout.py"
    missing = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        return f"slime needs packages that are not installed: pip install {' '.join(missing)}"
    return None


def python_path(source: Path) -> str:
    """Stubs first: they stand in for packages that may be installed."""
    return os.pathsep.join(map(str, (HERE / "stubs", source, PROJECT, HERE.parents[1])))


def environment(source: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLIME_", "QREWARD_"))}
    return {
        **kept,
        "PYTHONPATH": python_path(source),
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "WANDB_MODE": "disabled",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        **more,
    }


class Player(PlayerProcess):
    """The process in which slime plays. A context manager."""

    def __init__(self, source: Path, folder: Path) -> None:
        super().__init__(
            "slime",
            "conformance.slime.player",
            folder,
            environment(source),
            start_s=START_S,
            watchdog_s=WATCHDOG_S,
        )


@dataclass
class Stage:
    """The servers around one job, and the requests to it."""

    player: Player
    judge: RunningJudge
    scenario: Scenario
    _ended: list[Reply]

    def ask(self, do: str, **fields: Any) -> Any:
        reply = self.player.ask(do, **fields)
        self._ended.append(reply)
        if reply.error is not None:
            raise JobEnded(reply)
        return reply.result

    def step(self, number: int) -> PlayedStep:
        return _step(self.ask("step", rollout_id=number), self.scenario)

    def evaluate(self, number: int) -> PlayedStep:
        return _step(self.ask("eval", rollout_id=number), self.scenario)


class JobEnded(Exception):
    """An error ended the job."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"{reply.error}: {reply.text}")
        self.reply = reply


Script = Callable[[Stage], Sequence[tuple[str, PlayedStep]]]


def play(
    scenario: Scenario,
    player: Player,
    *,
    script: Script | None = None,
    flags: Sequence[str] = (),
    tree: Mapping[str, Any] | None = None,
    loses: Callable[[Draft], bool] | None = None,
    env: Mapping[str, str] | None = None,
    custom_rm: str | None = "slime_adapter.reward",
) -> Played:
    """Play a scenario on slime.

    Args:
        script: what to do with the open job; returns its steps, each as ("step" or "eval", step). Default: as many
            steps as the scenario has, each after an evaluation where it has those.
        flags: further flags.
        tree: another configuration than the scenario's; an empty one sets no `--custom-config-path`.
        loses: drafts whose generation the server ends early.
        env: environment variables of the job.
        custom_rm: the reward function, None for the one that `--rm-type` names.
    """
    steps: list[tuple[str, PlayedStep]] = []
    replies: list[Reply] = []
    error: Reply | None = None
    with ExitStack() as stack:
        judge = stack.enter_context(scenario.judge.start())
        lost = {"loses": loses} if loses is not None else {}
        generator = stack.enter_context(GenerateServer(holds=scenario.never_generated, **lost))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=player.folder)))
        stage = Stage(player, judge, scenario, replies)
        config = scenario.config(judge.base_url) if tree is None else tree
        try:
            all_flags = [*job_flags(scenario, folder, generator.port, config), *flags]
            if custom_rm is not None:
                all_flags += ["--custom-rm-path", custom_rm]
            stage.ask("open", flags=all_flags, environment=dict(env or {}), timeout_s=START_S)
            steps.extend((script or _all_steps)(stage))
        except JobEnded as ended:
            error = ended.reply
        finally:
            if player.alive:
                replies.append(player.ask("close"))
    closed = replies[-1]
    assert closed.error is None, f"{closed.error}: {closed.text}"
    return Played(
        tuple(step for kind, step in steps if kind == "step"),
        tuple(step for kind, step in steps if kind == "eval"),
        None if error is None else error.error,
        "" if error is None else error.text,
        tuple(text for reply in replies for text in reply.said),
        tuple(text for reply in replies for text in reply.complaints),
    )


def _all_steps(stage: Stage) -> Iterator[tuple[str, PlayedStep]]:
    with dying(stage.judge):
        for number in range(stage.scenario.steps):
            if stage.scenario.evaluate:
                yield "eval", stage.evaluate(number)
            yield "step", stage.step(number)


def job_flags(scenario: Scenario, folder: Path, port: int, tree: Mapping[str, Any]) -> list[str]:
    """slime's own flags for a scenario; data and configuration are written to `folder`."""
    values = {
        "--rollout-num-gpus": 0,
        "--prompt-data": _write_items(folder / "items.jsonl", ITEMS),
        "--input-key": "text",
        "--label-key": "label",
        "--metadata-key": "metadata",
        "--num-rollout": scenario.steps,
        "--rollout-batch-size": scenario.prompts,
        "--n-samples-per-prompt": GROUP_SIZE,
        "--over-sampling-batch-size": max(scenario.oversampling, scenario.prompts),
        "--global-batch-size": scenario.prompts * GROUP_SIZE,
        "--rollout-max-response-len": 32,
        "--rollout-seed": ROLLOUT_SEED,
        "--sglang-router-ip": "127.0.0.1",
        "--sglang-router-port": port,
        "--sglang-server-concurrency": 64,
        "--advantage-estimator": scenario.advantage_estimator,
        "--custom-rollout-log-function-path": "slime_adapter.log_rollout",
        "--custom-eval-rollout-log-function-path": "slime_adapter.log_eval",
    }
    flags = ["--debug-rollout-only", "--sglang-enable-deterministic-inference"]
    flags += [str(word) for pair in values.items() for word in pair]
    if scenario.normalize_advantages:
        flags += ["--normalize-advantages"]
    if tree:
        path = folder / "qreward.yaml"
        path.write_text(json.dumps({"qreward": tree}))
        flags += ["--custom-config-path", str(path)]
    if scenario.hook:
        flags += ["--custom-reward-post-process-path", "slime_adapter.post_process"]
    if scenario.drop_failed_groups:
        flags += ["--dynamic-sampling-filter-path", "slime_adapter.drop_failed_groups"]
    if scenario.mode == "group":
        flags += ["--group-rm", "--eval-function-path", "slime_adapter.eval_rollout"]
    if scenario.mode == "fan_out":
        flags += ["--custom-generate-function-path", "conformance.slime.rollouts.fan_out"]
    if scenario.partial:
        flags += ["--partial-rollout"]
    if scenario.reward_key:
        flags += ["--reward-key", scenario.reward_key]
        # What slime's own reward model says has no cause.
        flags += ["--log-reward-category", "cause"] if tree else []
    if scenario.evaluate:
        items = _write_items(folder / "eval.jsonl", EVAL_ITEMS)
        flags += ["--eval-interval", "1", "--eval-prompt-data", "sums", str(items)]
        flags += ["--n-samples-per-eval-prompt", str(EVAL_DRAFTS)]
    return flags


def _write_items(path: Path, count: int) -> Path:
    rows = ({"text": prompt_of(item), "label": label_of(item), "metadata": {"item": item}} for item in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _step(told: Mapping[str, Any], scenario: Scenario) -> PlayedStep:
    assert not told["left"] or scenario.partial, f"tasks are left on slime's loop: {told['left']}"
    train = told.get("train")
    if train is None:
        return PlayedStep(tuple(map(played_sample, told["samples"])), told["metrics"])
    assert isinstance(told["advantages"], list), f"the training ends: {told['advantages']}"
    numbers = zip(train["raw_reward"], train["rewards"], told["advantages"], train["loss_masks"], strict=True)
    samples = tuple(map(played_sample, told["samples"], numbers))
    return PlayedStep(samples, told["metrics"], default=told["default"] and tuple(told["default"]))


def played_sample(sample: Mapping[str, Any], numbers: tuple[Any, ...] = (None, None, (), ())) -> PlayedSample:
    """A sample as the player describes it, and what trains: raw and normalised reward, advantages, mask."""
    raw, trained, advantages, mask = numbers
    record = sample["record"] or {"failed": True, "cause": "no record"}
    return PlayedSample(
        read_response(sample["response"]) if sample["response"] else Draft(-1, -1),
        sample["reward"],
        raw,
        trained,
        tuple(advantages),
        tuple(mask),
        bool(record["failed"] or record.get("excluded", False)),
        record["cause"],
        sample["group"],
        sample["removed"],
        sample["status"],
        sample["seconds"],
    )
