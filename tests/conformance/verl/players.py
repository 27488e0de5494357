"""One scenario, two players: a training in verl, and the same in its stand-in, as tables of the same form.

The model's answers are scripted in both, so every row of every batch can be compared. Nothing else is played in verl.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from qreward_plugins.testing import FakeVerlTrainer, JudgeServer, VerlOutput
from qreward_plugins.testing.generation import WordTokenizer

from .agreement import note
from .runs import CONFIGURATIONS, CPU, EXPERIMENTAL, RECORDER, recipe

sys.path.insert(0, str(RECORDER))
try:
    import verl_script
finally:
    sys.path.remove(str(RECORDER))

SCRIPT = RECORDER / "verl_script.py"
GRPO = "algorithm.adv_estimator=grpo"
LEGACY = "trainer.use_v1=False"

FUNCTION = """
sources:
  compute_score: {kind: function, function: "verl_adapter:compute_score", mode: thread}
judges:
  compute_score: {kind: function, sources: [compute_score]}
engine: {max_attempts: 1, seed: 0}
"""

RANKED = """
sources:
  compute_score: {{kind: function, function: "verl_adapter:compute_score", mode: thread}}
  hosted: {{kind: openai, base_url: "{judge}", model: judge}}
judges:
  right: {{kind: function, sources: compute_score}}
  quality: {{kind: llm, sources: hosted, reward_range: [0.5, 1]}}
  ranked: {{kind: rank, judge: quality}}
  reward: {{kind: gate, when: right, at_least: 0.5, then: ranked}}
engine: {{max_attempts: 1, seed: 0}}
"""
"""Of the right answers, those that a judge prefers. `judge`: the URL of a judge server."""

SCREENED = """
sources:
  compute_score: {{kind: function, function: "verl_adapter:compute_score", mode: thread}}
  hosted: {{kind: openai, base_url: "{judge}", model: judge}}
judges:
  right: {{kind: function, sources: compute_score}}
  monitor: {{kind: llm, sources: hosted}}
  reward: {{kind: screen, judge: right, monitor: monitor, at: 1}}
engine: {{max_attempts: 1, seed: 0}}
"""
"""A monitor that takes out what scores 1."""

IN_PARTS = """
sources:
  compute_score: {{kind: function, function: "verl_adapter:compute_score", mode: thread}}
judges:
  turn: {{kind: function, sources: compute_score}}
  reward: {{kind: turns, judge: turn, reduce: sum}}
dense: true
engine: {{max_attempts: 1, seed: 0}}
"""
"""Each turn has a reward of its own."""

_SHARED = (
    "data.shuffle=False",
    "data.train_batch_size=4",
    "data.max_prompt_length=64",
    "data.max_response_length=48",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.val_kwargs.n=2",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "reward.num_workers=2",
    f"reward.custom_reward_function.path={SCRIPT}",
    "reward.custom_reward_function.name=score",
)


@dataclass(frozen=True)
class Scenario:
    """A training that both play: overrides as on verl's command line, and which of the scripts the model follows.

    `experimental`: one of verl's experimental trainers.
    """

    name: str
    overrides: tuple[str, ...]
    script: str = "failing"
    experimental: str | None = None
    steps: int = 2
    configuration: str = FUNCTION


@dataclass(frozen=True)
class Outcome:
    """What a training left behind. `error`: what ended it, if anything did."""

    rows: list[dict]
    metrics: dict[int, dict]
    seconds: float
    error: str = ""

    @property
    def table(self) -> dict[tuple, dict]:
        """The rows by what the model wrote, which is never the same twice."""
        table = {tuple(row["responses"]): row for row in self.rows}
        assert len(table) == len(self.rows)
        return table


COLUMNS = ("responses", "response_mask", "token_level_scores", "token_level_rewards", "advantages", "returns")


@dataclass
class Players:
    """Plays scenarios, each once."""

    folder: Path
    outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)

    def play(self, player: str, scenario: Scenario) -> Outcome:
        """The outcome of a scenario with `player`, "verl" or "fake"."""
        key = (player, scenario.name)
        if key not in self.outcomes:
            before = time.perf_counter()
            with JudgeServer(lambda call: float(call.blocks["response"].split()[1]) * 10) as judge:
                play = self._verl if player == "verl" else self._fake
                rows, metrics, error = play(scenario, judge.base_url)
            took = time.perf_counter() - before
            note(scenario.name, player, took)
            self.outcomes[key] = Outcome(rows, metrics, took, error)
        return self.outcomes[key]

    @functools.cached_property
    def _assets(self) -> SimpleNamespace:
        pandas = pytest.importorskip("pandas", reason="install 'qreward-plugins[demo]'")
        pytest.importorskip("reasoning_gym", reason="install 'qreward-plugins[demo]'")

        modules = recipe()
        sizes = modules.tasks.Sizes(
            learning_steps=4, habit_steps=1, val_questions=4, train_questions=8, warm_up_questions=20
        )
        assets = modules.tasks.prepare(self.folder / "assets", sizes)
        for path, split, count in (
            (assets.train, "train", verl_script.QUESTIONS),
            (assets.val, "val", verl_script.HELD_OUT),
        ):
            pandas.DataFrame(verl_script.rows(split, count)).to_parquet(path)
        return SimpleNamespace(assets=assets, training=modules.training)

    @functools.cached_property
    def tokenizer(self):
        """The recipe's, in both players; where only the stand-in plays, words, which takes no time."""
        if not os.environ.get("QREWARD_VERL"):
            return WordTokenizer()
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._assets.assets.tokenizer)

    def _configuration(self, scenario: Scenario, folder: Path, judge: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "qreward.yaml"
        text = scenario.configuration
        path.write_text(text if text == FUNCTION else text.format(judge=judge))
        return path

    def _verl(self, scenario: Scenario, judge: str) -> tuple[list[dict], dict[int, dict], str]:
        out = self.folder / "verl" / scenario.name
        record = out / "rows.jsonl"
        configuration = self._configuration(scenario, out, judge)
        record.unlink(missing_ok=True)
        algorithm = scenario.experimental or "grpo"
        error = ""
        try:
            self._assets.training.train(
                self._assets.assets,
                out,
                algorithm=algorithm,
                steps=scenario.steps,
                **(
                    {"program": EXPERIMENTAL[algorithm], "configurations": CONFIGURATIONS}
                    if algorithm in EXPERIMENTAL
                    else {}
                ),
                environment={
                    "QREWARD_CONFIG": str(configuration),
                    "PYTHONPATH": os.pathsep.join((str(CPU), str(RECORDER), os.environ.get("PYTHONPATH", ""))),
                    "VERL_USE_EXTERNAL_MODULES": "verl_cpu,verl_scripted",
                    "VERL_RECORD": str(record),
                    "VERL_SCRIPT": scenario.script,
                },
                on_step=lambda step: None,
                overrides=(
                    *_SHARED,
                    "actor_rollout_ref.rollout.agent.default_agent_loop=scripted",
                    *scenario.overrides,
                ),
            )
        except self._assets.training.TrainingFailed as failure:
            error = f"{failure}\n{(out / f'{algorithm}.log').read_text(errors='replace')}"
        metrics: dict[int, dict] = {}
        log = out / f"{algorithm}.jsonl"
        for line in log.read_text().splitlines() if log.exists() else ():
            data = json.loads(line)
            metrics.setdefault(data["step"], {}).update(data["data"])
        rows = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
        return rows, metrics, error

    def _fake(self, scenario: Scenario, judge: str) -> tuple[list[dict], dict[int, dict], str]:
        configuration = self._configuration(scenario, self.folder / "fake" / scenario.name, judge)
        several = LEGACY not in scenario.overrides and scenario.experimental is None

        def respond(draft, rng):
            info = draft.columns["extra_info"]
            told = verl_script.outputs(scenario.script, info, draft.number, several=several)
            return [VerlOutput(parts, num_turns=2 if len(parts) == 1 else len(parts) + 1) for parts in told]

        rows: list[dict] = []
        metrics: dict[int, dict] = {}
        try:
            with FakeVerlTrainer(
                [GRPO, "+reward_manager=qreward", f"+qreward.config={configuration}", *_SHARED, *scenario.overrides],
                rows=verl_script.rows("train", verl_script.QUESTIONS),
                val_rows=verl_script.rows("val", verl_script.HELD_OUT),
                respond=respond,
                tokenizer=self.tokenizer,
                experimental=scenario.experimental,
            ) as trainer:
                metrics[0] = dict(trainer.validate().metrics)
                for _ in range(scenario.steps):
                    step = trainer.step()
                    rows += rows_of(step)
                    metrics[step.global_step] = dict(step.metrics)
                metrics[scenario.steps].update(trainer.validate().metrics)
        except Exception as error:
            return rows, metrics, f"{type(error).__name__}: {error}"
        return rows, metrics, ""


def rows_of(step):
    """The rows of a step of the stand-in, as they are recorded of verl."""
    data = step.batch
    lengths = data.non_tensor_batch.get("response_length")
    if lengths is None:
        lengths = np.asarray(data.batch["attention_mask"])[:, data.batch["prompts"].shape[1] :].sum(axis=1)
    columns = {name: np.asarray(data.batch[name]) for name in COLUMNS}
    return [
        {
            "step": step.global_step,
            "uid": uid,
            "info": step.extra_info[row],
            **{name: values[row][: int(lengths[row])].tolist() for name, values in columns.items()},
        }
        for row, uid in enumerate(step.uids)
        if not step.padding[row]
    ]
