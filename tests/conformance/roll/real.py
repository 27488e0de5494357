"""Plays scenarios on ROLL: keys, judge servers, and the process in which ROLL runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

import qreward_plugins

from ..judges import GROUP_SIZE, ITEMS, Draft, RunningJudge, dying, read_response
from ..played import Played, PlayedSample, PlayedStep
from ..processes import PlayerProcess
from ..scenarios import Scenario
from .scenarios import DOMAIN, LOOP, OWN_LOOP, TAG, VAL_ITEMS, WATCHDOG_S, WORKER, masks, tree_of

HERE = Path(__file__).parent
PROJECT = Path(qreward_plugins.__file__).parents[1]
START_S = 180.0
"""Importing torch, transformers and ROLL from a cold disk, and starting Ray."""
SCRIPT = "tests/conformance/roll/environment.sh"


def why_not(environment: Mapping[str, str] = os.environ) -> str | None:
    """Why ROLL cannot be played here, None if it can."""
    path = environment.get("QREWARD_ROLL_SRC")
    if not path:
        return f"QREWARD_ROLL_SRC is not set: point it to a checkout of ROLL and run {SCRIPT}"
    if not (Path(path) / "roll" / "pipeline" / "rlvr" / "rlvr_pipeline.py").is_file():
        return f"QREWARD_ROLL_SRC={path} is not a checkout of ROLL: it has no roll/pipeline/rlvr/rlvr_pipeline.py"
    unmet = list(_unmet())
    if unmet:
        return f"ROLL needs other packages than are installed here ({', '.join(unmet)}): run {SCRIPT}"
    return None


def _unmet() -> Iterator[str]:
    lines = (line.partition("#")[0].strip() for line in (HERE / "requirements.txt").read_text().splitlines())
    for line in ("gem-llm==0.0.4", *filter(None, lines)):
        wanted = Requirement(line)
        try:
            found = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            yield f"{wanted} is not there"
            continue
        if not wanted.specifier.contains(found, prereleases=True):
            yield f"{wanted} is {found}"


def environment(source: Path, folder: Path) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ROLL_", "QREWARD_", "RAY_", "PYTHONPATH"))
    }
    ours = (source, PROJECT, HERE.parents[1])
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(map(str, ours)),
        "ROLL_LOG_DIR": str(folder / "logs"),
        "MODEL_DOWNLOAD_TYPE": "HUGGINGFACE_HUB",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "datasets"),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "NO_PROXY": "127.0.0.1,localhost",
    }


class Player(PlayerProcess):
    """The process in which ROLL plays, with its Ray. A context manager."""

    def __init__(self, source: Path, folder: Path) -> None:
        super().__init__(
            "ROLL",
            "conformance.roll.player",
            folder,
            environment(source, folder),
            start_s=START_S,
            watchdog_s=WATCHDOG_S,
        )

    def __enter__(self) -> Player:
        # Ray's sockets are in it, whose paths must be short; a test's folder is not.
        self._session = tempfile.TemporaryDirectory(prefix="roll-", ignore_cleanup_errors=True)
        self.arguments += (self._session.name,)
        super().__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._session.cleanup()


def scenario_keys(scenario: Scenario, base_url: str) -> dict[str, Any]:
    """ROLL's keys for a scenario."""
    worker = {
        "worker_cls": WORKER,
        "model_args": {"model_name_or_path": "${pretrain}"},
        "tag_included": [TAG],
        "world_size": scenario.workers,
        "reward_manager_config": [tree_of(scenario, base_url)],
    }
    keys: dict[str, Any] = {
        "rewards": {DOMAIN: worker},
        "is_num_return_sequences_expand": scenario.mode == "single",
        "generate_opt_level": 0 if scenario.mode == "batch" else 1,
        "async_generation_ratio": int(scenario.asynchronous),
        "rollout_batch_size": scenario.prompts,
        "user_defined_rollout_loop_cls": LOOP if scenario.hook else OWN_LOOP,
    }
    if scenario.evaluate:
        keys["validation"] = {"generating_args": {"max_new_tokens": 16, "num_return_sequences": GROUP_SIZE}}
    return keys


class Companies:
    """Reward workers and their judges, shared by the scenarios that they cannot tell apart. A context manager.

    A worker takes seconds to start, and nothing of a scenario stays in it that another of the same company would see.
    """

    def __init__(self, player: Player, scenarios: Sequence[Scenario]) -> None:
        self.player = player
        self._hired: dict[tuple[Any, ...], _Company] = {}
        self._waiting: dict[tuple[Any, ...], list[Scenario]] = {}
        for scenario in scenarios:
            self._waiting.setdefault(scenario.company, []).append(scenario)

    def __enter__(self) -> Companies:
        return self

    def __exit__(self, *_: object) -> None:
        for company in self._hired.values():
            company.judge.__exit__()
        self._hired.clear()

    @contextmanager
    def company(self, scenario: Scenario) -> Iterator[_Company]:
        """The workers of a scenario, and their judge. They are let go after the last scenario of theirs."""
        if scenario.company not in self._hired:
            self._hire(scenario)
        company = self._hired[scenario.company]
        try:
            yield company
        finally:
            waiting = self._waiting.get(scenario.company, [])
            if scenario in waiting:
                waiting.remove(scenario)
            if not waiting and self.player.alive:
                self.player.must("let_go", key=company.key)
                self._hired.pop(scenario.company).judge.__exit__()

    def _hire(self, scenario: Scenario) -> None:
        """Start the workers of a scenario, and with them those that are needed next: two start as fast as one."""
        parties = {}
        for each in (scenario, *self._next(scenario)):
            judge = each.judge.start().__enter__()
            self._hired[each.company] = company = _Company(str(each.company), judge)
            parties[company.key] = scenario_keys(each, judge.base_url)
        wrong = self.player.must("hire", parties=parties)
        assert not any(wrong.values()), wrong

    def _next(self, scenario: Scenario) -> list[Scenario]:
        companies = list(self._waiting)
        place = companies.index(scenario.company) if scenario.company in companies else len(companies)
        later = (self._waiting[company] for company in companies[place + 1 :] if company not in self._hired)
        return [scenarios[0] for scenarios in later if scenarios][:1]


@dataclass
class _Company:
    key: str
    judge: RunningJudge
    said: list[str] = field(default_factory=list)
    """All that its workers have warned of."""


def play(scenario: Scenario, companies: Companies) -> Played:
    """Play a scenario on ROLL's scheduler and reward workers. What its workers have said before counts as said."""
    with companies.company(scenario) as company, dying(company.judge):
        reply = companies.player.ask(
            "play",
            key=company.key,
            keys=scenario_keys(scenario, company.judge.base_url),
            steps=scenario.steps,
            validation=scenario.evaluate,
            items=VAL_ITEMS if scenario.evaluate else ITEMS,
        )
        company.said.extend(reply.said)
    steps = tuple(_step(told, scenario) for told in reply.result or ())
    return Played(steps, (), reply.error, reply.text, tuple(company.said), reply.complaints)


def _step(told: Mapping[str, Any], scenario: Scenario) -> PlayedStep:
    samples = tuple(played_sample(sample, scenario) for sample in told["samples"])
    return PlayedStep(samples, told["metrics"], tuple(told["columns"]))


def played_sample(told: Mapping[str, Any], scenario: Scenario) -> PlayedSample:
    """A sample as the player describes it."""
    draft = read_response(told["response"]) if told["response"] else Draft(-1, -1)
    trains = told["advantage"] is not None
    return PlayedSample(
        draft,
        told["score"],
        told.get("raw"),
        told["reward"] if trains else None,
        (told["advantage"],) if trains else (),
        (1,) * told["mask"],
        not told["mask"] if masks(scenario) else scenario.fails(draft),
        group=told["domain"],
    )
