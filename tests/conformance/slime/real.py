"""Plays scenarios on slime: flags, servers, and the process in which slime runs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import processes
from ..judges import GROUP_SIZE, ITEMS, Draft, RunningJudge, dying, never
from ..played import Played, PlayedStep
from ..processes import PlayerProcess, Reply
from ..scenarios import Scenario
from .rollouts import flags_of, played_sample, rows
from .scenarios import EVAL_ITEMS, WATCHDOG_S
from .servers import ROLLOUT_SEED, GenerateServer

HERE = Path(__file__).parent
START_S = 180.0
"""Importing torch, transformers and slime from a cold disk."""


def environment(source: Path, **more: str) -> dict[str, str]:
    # Stubs first: they stand in for packages that may be installed.
    return processes.environment("slime", (HERE / "stubs", source), WANDB_MODE="disabled", **more)


class Player(PlayerProcess):
    """The process in which slime plays. A context manager."""

    def __init__(self, source: Path, folder: Path) -> None:
        times = {"start_s": START_S, "watchdog_s": WATCHDOG_S}
        super().__init__("slime", "conformance.slime.player", folder, environment(source), **times)


@dataclass
class Stage:
    """The servers around one job, the requests to it, and what came of them."""

    player: Player
    judge: RunningJudge
    scenario: Scenario
    steps: list[PlayedStep] = field(default_factory=list)
    evaluations: list[PlayedStep] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)

    def ask(self, do: str, **fields: Any) -> Any:
        """The result of a request. Raises `JobEnded`."""
        self.replies.append(self.player.ask(do, **fields))
        if self.replies[-1].error is not None:
            raise JobEnded
        return self.replies[-1].result

    def step(self, number: int) -> PlayedStep:
        self.steps.append(_step(self.ask("step", rollout_id=number), self.scenario))
        return self.steps[-1]

    def evaluate(self, number: int) -> PlayedStep:
        self.evaluations.append(_step(self.ask("eval", rollout_id=number), self.scenario))
        return self.evaluations[-1]


class JobEnded(Exception):
    """An error ended the job."""


def play(
    scenario: Scenario,
    player: Player,
    *,
    script: Callable[[Stage], None] | None = None,
    flags: Sequence[str] = (),
    tree: Mapping[str, Any] | None = None,
    loses: Callable[[Draft], bool] = never,
    custom_rm: str | None = "slime_adapter.reward",
) -> Played:
    """Play a scenario on slime.

    Args:
        script: what to do with the open job. Default: as many steps as the scenario has, each after an evaluation where
            it has those.
        flags: further flags.
        tree: another configuration than the scenario's; an empty one sets no `--custom-config-path`.
        loses: drafts whose generation the server ends early.
        custom_rm: the reward function, None for the one that `--rm-type` names.
    """
    error: Reply | None = None
    with (
        scenario.judge.start() as judge,
        GenerateServer(holds=scenario.never_generated, loses=loses) as generator,
        tempfile.TemporaryDirectory(dir=player.folder) as folder,
    ):
        stage = Stage(player, judge, scenario)
        config = scenario.config(judge.base_url) if tree is None else tree
        own = ["--custom-rm-path", custom_rm] if custom_rm else []
        try:
            all_flags = [*job_flags(scenario, Path(folder), generator.port, config), *flags, *own]
            stage.ask("open", flags=all_flags, timeout_s=START_S)
            (script or _all_steps)(stage)
        except JobEnded:
            error = stage.replies[-1]
        finally:
            if player.alive:
                stage.replies.append(player.ask("close"))
    closed = stage.replies[-1]
    assert closed.error is None, f"{closed.error}: {closed.text}"
    return Played(
        tuple(stage.steps),
        tuple(stage.evaluations),
        error and error.error,
        error.text if error else "",
        tuple(text for reply in stage.replies for text in reply.said),
        tuple(text for reply in stage.replies for text in reply.complaints),
    )


def _all_steps(stage: Stage) -> None:
    with dying(stage.judge):
        for number in range(stage.scenario.steps):
            if stage.scenario.evaluate:
                stage.evaluate(number)
            stage.step(number)


def job_flags(scenario: Scenario, folder: Path, port: int, tree: Mapping[str, Any]) -> list[str]:
    """slime's own flags for a scenario; data and configuration are written to `folder`."""
    values = {
        **flags_of(scenario),
        "normalize_advantages": scenario.normalize_advantages,
        "rollout_num_gpus": 0,
        "prompt_data": _write_items(folder / "items.jsonl", ITEMS),
        "input_key": "prompt",
        "label_key": "label",
        "metadata_key": "metadata",
        "num_rollout": scenario.steps,
        "global_batch_size": scenario.prompts * GROUP_SIZE,
        "rollout_max_response_len": 32,
        "rollout_seed": ROLLOUT_SEED,
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": port,
        "sglang_server_concurrency": 64,
        "debug_rollout_only": True,
        "sglang_enable_deterministic_inference": True,
        "custom_generate_function_path": "conformance.slime.rollouts.fan_out" if scenario.mode == "fan_out" else None,
        # What slime's own reward model says has no cause.
        "log_reward_category": "cause" if scenario.reward_key and tree else None,
        "eval_interval": 1 if scenario.evaluate else None,
    }
    if tree:
        values["custom_config_path"] = folder / "qreward.yaml"
        values["custom_config_path"].write_text(json.dumps({"qreward": tree}))
    flags: list[str] = []
    for name, value in values.items():
        if value is not None and value is not False:
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    if scenario.evaluate:
        flags += ["--eval-prompt-data", "sums", str(_write_items(folder / "eval.jsonl", EVAL_ITEMS))]
    return flags


def _write_items(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(count)))
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
