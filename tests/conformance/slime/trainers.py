"""Plays scenarios: on slime, whose process asks a server of this one for its generations, and on `FakeSlimeTrainer`."""

from __future__ import annotations

import asyncio
import copy
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

import slime_adapter
from qreward_plugins.testing import FakeSlimeTrainer, SlimeSample, slime_stand_in
from qreward_plugins.testing.fake_trainer import BackgroundLoop

from .. import processes
from ..judges import EOS, GROUP_SIZE, ITEMS, Draft, RunningJudge, decode, dying, encode, item_of, never, read_response
from ..played import Played, PlayedSample, PlayedStep
from ..processes import PlayerProcess, Reply
from ..scenarios import Scenario, shorter
from .scenarios import EVAL_DRAFTS, EVAL_ITEMS, PARTS, WATCHDOG_S, flags_of, rows

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

    def step(self, number: int) -> None:
        self.steps.append(_step(self.ask("step", rollout_id=number), self.scenario))

    def evaluate(self, number: int) -> None:
        self.evaluations.append(_step(self.ask("eval", rollout_id=number), self.scenario))


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
) -> Played:
    """Play a scenario on slime.

    Args:
        script: what to do with the open job. Default: as many steps as the scenario has, each after an evaluation where
            it has those.
        flags: further flags. The reward function is ours where these have no `--rm-type`.
        tree: another configuration than the scenario's; an empty one sets no `--custom-config-path`.
        loses: drafts whose generation the server ends early.
    """
    error: Reply | None = None
    with (
        scenario.judge.start() as judge,
        GenerateServer(holds=scenario.never_generated, loses=loses) as generator,
        tempfile.TemporaryDirectory(dir=player.folder) as folder,
    ):
        stage = Stage(player, judge, scenario)
        config = scenario.config(judge.base_url) if tree is None else tree
        own = [] if "--rm-type" in flags else ["--custom-rm-path", "slime_adapter.reward"]
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
        "custom_generate_function_path": "conformance.slime.trainers.fan_out" if scenario.mode == "fan_out" else None,
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
    numbers = zip(train["raw_reward"], train["rewards"], told["advantages"], train["loss_masks"], strict=True)
    samples = tuple(map(played_sample, told["samples"], numbers))
    return PlayedStep(samples, told["metrics"], default=told["default"] and tuple(told["default"]))


ROLLOUT_SEED = 42


class GenerateServer:
    """The router and the worker in one, on a loopback port: /generate, /workers, /abort_request and /v1/loads. A
    context manager.
    """

    def __init__(self, *, holds: Callable[[Draft], bool] = never, loses: Callable[[Draft], bool] = never) -> None:
        """`holds`: drafts whose generation lasts until the first abort. `loses`: drafts whose generation ends as if
        it had been aborted, though nobody asked for that."""
        self._loop = BackgroundLoop("generate-server", type(self).__name__)
        self._holds = holds
        self._loses = loses
        self._in_flight = 0
        self._aborts = 0

    def __enter__(self):
        self._loop.run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._runner.cleanup())
        self._loop.close()

    async def _start(self) -> None:
        self._aborted, self._idle = asyncio.Event(), asyncio.Event()
        application = web.Application()
        application.router.add_post("/generate", self._generate)
        application.router.add_get("/workers", self._workers)
        application.router.add_post("/abort_request", self._abort)
        application.router.add_get("/v1/loads", self._loads)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]

    async def _generate(self, request: web.Request) -> web.Response:
        asked = await request.json()
        seed = asked["sampling_params"]["sampling_seed"]
        draft = Draft(item_of(decode(asked["input_ids"])), seed - ROLLOUT_SEED)
        self._in_flight += 1
        try:
            if self._holds(draft) and not self._aborts:
                await self._aborted.wait()
                return self._answer(asked, "", "abort")
            if self._loses(draft):
                return self._answer(asked, "", "abort")
            return self._answer(asked, draft.response, "stop")
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    def _answer(self, asked: dict, text: str, reason: str) -> web.Response:
        tokens = [*encode(text), *([EOS] if reason == "stop" else [])]
        meta = {
            "id": "0",
            "finish_reason": {"type": reason},
            "weight_version": "1",
            "prompt_tokens": len(asked["input_ids"]),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "e2e_latency": 0.01,
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        }
        return web.json_response({"text": text, "meta_info": meta})

    async def _workers(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"url": f"http://{request.host}"}]})

    async def _abort(self, request: web.Request) -> web.Response:
        self._aborts += 1
        self._aborted.set()
        while self._in_flight:
            self._idle.clear()
            await self._idle.wait()
        return web.json_response({})

    async def _loads(self, request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": self._in_flight, "num_waiting_reqs": 0}]})


def play_fake(scenario: Scenario) -> Played:
    """Play a scenario on the fake trainer."""
    steps: list[PlayedStep] = []
    evaluations: list[PlayedStep] = []
    error: Exception | None = None
    with slime_stand_in(), shorter(scenario.judge).start() as judge, dying(judge):
        config = scenario.config(judge.base_url)
        with FakeSlimeTrainer(**_fake_flags(scenario), qreward=config, timeout_s=WATCHDOG_S) as trainer:
            if scenario.mode == "fan_out":

                async def fan_out(args: Any, sample: Any, sampling_params: dict[str, Any]) -> list[Any]:
                    return parts_of(args, await trainer.generate(args, sample, sampling_params))

                trainer.args.custom_generate_function_path = fan_out
            try:
                for number in range(scenario.steps):
                    if scenario.evaluate:
                        evaluations.append(_evaluation(trainer, number))
                    steps.append(_fake_step(trainer, number))
            except Exception as raised:
                error = raised
            finally:
                slime_adapter.close()
    return Played(tuple(steps), tuple(evaluations), type(error).__name__ if error else None, str(error or ""))


def _fake_flags(scenario: Scenario) -> dict[str, Any]:
    return {
        **flags_of(scenario),
        "prompts": rows(ITEMS),
        "respond": lambda sample, rng: _draft_of(sample).response,
        "hold": lambda sample: scenario.never_generated(_draft_of(sample)),
        "custom_rm_path": "slime_adapter.reward",
        "eval_datasets": {"sums": rows(EVAL_ITEMS)} if scenario.evaluate else None,
    }


def _draft_of(sample: SlimeSample) -> Draft:
    assert sample.index is not None
    drafts = EVAL_DRAFTS if sample.group_index is None else GROUP_SIZE
    return Draft(item_of(str(sample.prompt)), sample.index % drafts)


def _fake_step(trainer: FakeSlimeTrainer, number: int) -> PlayedStep:
    step = trainer.rollout(number)
    # Every token has the reward that trains.
    tokens = [[float(reward)] * len(mask) for reward, mask in zip(step.rewards, step.loss_masks, strict=True)]
    told = zip(step.raw_rewards, step.rewards, tokens, step.loss_masks, strict=True)
    return PlayedStep(tuple(map(played_sample, map(describe, step.samples), told)), step.metrics)


def _evaluation(trainer: FakeSlimeTrainer, number: int) -> PlayedStep:
    seen: list[Any] = []

    def log(rollout_id: int, args: Any, data: dict[str, Any], extra: dict[str, Any] | None) -> bool:
        # The log hook takes failed samples out of the data in place.
        seen.extend(data["sums"]["samples"])
        return slime_adapter.log_eval(rollout_id, args, data, extra)

    trainer.args.custom_eval_rollout_log_function_path = log
    metrics = trainer.evaluate(number).metrics
    return PlayedStep(tuple(played_sample(describe(sample)) for sample in seen), metrics)


def describe(sample: Any) -> dict[str, Any]:
    """What a test looks at."""
    return {
        "group": sample.group_index,
        "response": sample.response,
        "reward": sample.reward,
        "removed": sample.remove_sample,
        "status": sample.status.value,
        "record": (sample.metadata or {}).get("qreward"),
    }


def played_sample(sample: Mapping[str, Any], numbers: tuple[Any, ...] = (None, None, (), ())) -> PlayedSample:
    """A sample as `describe` tells it, and what trains: raw and normalised reward, advantages, mask."""
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
    )


async def fan_out(args: Any, sample: Any, sampling_params: dict[str, Any]) -> list[Any]:
    """slime's own generation, and what becomes of its answer."""
    from slime.rollout.sglang_rollout import generate

    return parts_of(args, await generate(args, sample, sampling_params))


def parts_of(args: Any, answered: Any) -> list[Any]:
    """An answer, and it again with each further part appended; one rollout id for all."""
    answered.rollout_id = answered.index
    samples = [answered]
    if answered.status.value != "completed":
        return samples
    for part in range(1, PARTS):
        sibling = copy.deepcopy(answered)
        tokens = encode(f"part {part}")
        sibling.append_response_tokens(args, tokens=tokens, log_probs=[-0.5] * len(tokens), text=f" part {part}")
        samples.append(sibling)
    return samples
