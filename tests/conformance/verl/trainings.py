"""Trainings with a real verl trainer on the CPU, and what each left behind. And one scenario, two players: a training
in verl, and the same in its stand-in, as tables of the same form.

The model's answers are scripted in both, so every row of every batch can be compared. Nothing else is played in verl.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qreward_plugins.testing import FakeVerlTrainer, JudgeServer, VerlOutput
from qreward_plugins.testing.generation import WordTokenizer

CPU = Path(__file__).parents[3] / "recipes" / "verl" / "cpu"
RECORDER = Path(__file__).with_name("recorder")
CONFIGURATIONS = Path(__file__).with_name("config")

sys.path.insert(0, str(RECORDER))
try:
    import verl_script
finally:
    sys.path.remove(str(RECORDER))


EXPERIMENTAL = {
    "one_step_off": "verl.experimental.one_step_off_policy.main_ppo",
    "fully_async": "verl.experimental.fully_async_policy.fully_async_main",
}
"""verl's experimental trainers, which are made of the legacy one, and the programs that run them."""

NEEDS_VERL = [
    pytest.mark.trainer,
    pytest.mark.skipif(not os.environ.get("QREWARD_VERL"), reason="set QREWARD_VERL=1 to train with the real verl"),
]


@dataclass(frozen=True)
class Outcome:
    """What a training left behind. `rows`: every sample that was trained. `records`: what the tracker got."""

    rows: list[dict]
    records: list[dict]
    log: str
    error: str = ""
    """What ended it, if anything did."""

    @property
    def metrics(self) -> dict[int, dict]:
        """One mapping a step; the fully asynchronous trainer writes several lines."""
        metrics: dict[int, dict] = {}
        for record in self.records:
            metrics.setdefault(record["step"], {}).update(record["data"])
        return metrics

    @property
    def table(self) -> dict[tuple, dict]:
        """The rows by what the model wrote, where that is never the same twice."""
        table = {tuple(row["responses"]): row for row in self.rows}
        assert len(table) == len(self.rows)
        return table

    def told(self, name: str) -> list[Any]:
        """A metric, in the order in which the tracker got it."""
        return [record["data"][name] for record in self.records if name in record["data"]]


def recipe() -> SimpleNamespace:
    """The recipe's modules, which are scripts beside each other."""
    pytest.importorskip("verl", reason="verl is not installed (pip install 'qreward-plugins[demo]')")
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (pip install 'qreward-plugins[demo]')")
    sys.path.insert(0, str(CPU))
    try:
        return SimpleNamespace(**{name: importlib.import_module(name) for name in ("scorer", "tasks", "training")})
    finally:
        sys.path.remove(str(CPU))


def prepared(folder: Path, **sizes: int) -> Any:
    """The recipe's data and its model, which has learned little."""
    tasks = recipe().tasks
    return tasks.prepare(folder / "assets", tasks.Sizes(**{"learning_steps": 5, "habit_steps": 2, **sizes}))


def train(
    assets: Any,
    out: Path,
    configuration: str,
    *overrides: str,
    steps: int,
    trainer: str = "",
    **environment: str,
) -> Outcome:
    """Train with GRPO. `trainer`: one of verl's experimental ones."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "judges.yaml").write_text(configuration)
    record = out / "rows.jsonl"
    record.write_text("")
    named = {"program": EXPERIMENTAL[trainer], "configurations": CONFIGURATIONS} if trainer else {}
    algorithm, training, error = trainer or "grpo", recipe().training, ""
    try:
        training.train(
            assets,
            out,
            algorithm=algorithm,
            steps=steps,
            environment={
                "QREWARD_CONFIG": str(out / "judges.yaml"),
                "PYTHONPATH": os.pathsep.join((str(CPU), str(RECORDER), os.environ.get("PYTHONPATH", ""))),
                "VERL_USE_EXTERNAL_MODULES": "verl_cpu,verl_scripted",
                "VERL_RECORD": str(record),
                **environment,
            },
            on_step=lambda step: None,
            overrides=overrides,
            **named,
        )
    except training.TrainingFailed as failure:
        error = str(failure)
    tracked, log = out / f"{algorithm}.jsonl", (out / f"{algorithm}.log").read_text(errors="replace")
    records = tracked.read_text().splitlines() if tracked.exists() else []
    rows = record.read_text().splitlines()
    return Outcome([*map(json.loads, rows)], [*map(json.loads, records)], log, error and f"{error}\n{log}")


# Two players

SCRIPT = RECORDER / "verl_script.py"
GRPO = "algorithm.adv_estimator=grpo"
LEGACY = "trainer.use_v1=False"
NO_VALIDATION = "trainer.val_before_train=False"

_FUNCTION = 'compute_score: {kind: function, function: "verl_adapter:compute_score", mode: thread}'
_JUDGE = 'hosted: {kind: openai, base_url: "${oc.env:JUDGE_URL}", model: judge}'
FUNCTION = f"""
sources: {{{_FUNCTION}}}
judges:
  compute_score: {{kind: function, sources: [compute_score]}}
engine: {{max_attempts: 1, seed: 0}}
"""
JUDGE = f"""
sources: {{{_JUDGE}}}
judges:
  quality: {{kind: llm, instructions: "Is the answer right?"}}
"""
RANKED = f"""
sources: {{{_FUNCTION}, {_JUDGE}}}
judges:
  right: {{kind: function, sources: compute_score}}
  quality: {{kind: llm, sources: hosted, reward_range: [0.5, 1]}}
  ranked: {{kind: rank, judge: quality}}
  reward: {{kind: gate, when: right, at_least: 0.5, then: ranked}}
engine: {{max_attempts: 1, seed: 0}}
"""
"""Of the right answers, those that a judge prefers."""
SCREENED = f"""
sources: {{{_FUNCTION}, {_JUDGE}}}
judges:
  right: {{kind: function, sources: compute_score}}
  monitor: {{kind: llm, sources: hosted}}
  reward: {{kind: screen, judge: right, monitor: monitor, at: 1}}
engine: {{max_attempts: 1, seed: 0}}
"""
"""A monitor that takes out what scores 1."""
IN_PARTS = f"""
sources: {{{_FUNCTION}}}
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
_REWARD_MODEL = (
    "reward.reward_model.enable=True",
    "reward.reward_model.rollout.name=idle",
    "reward.reward_model.rollout.tensor_model_parallel_size=1",
)
COLUMNS = ("responses", "response_mask", "token_level_scores", "token_level_rewards", "advantages", "returns")


@dataclass(frozen=True)
class Scenario:
    """A training that both play: overrides as on verl's command line, and which of the scripts the model follows."""

    name: str
    overrides: tuple[str, ...] = ()
    script: str = "failing"
    configuration: str = FUNCTION
    trainer: str = ""
    """One of verl's experimental trainers."""
    reward_model: bool = False
    """Whether verl has a reward model on the rollout's GPUs, which no judge asks."""
    ends: str = ""
    """What the error says that ends it; empty where it goes on to its end."""
    steps: int = 2


def played(*scenarios: Scenario, by: tuple[str, ...] = ("fake", "verl")) -> pytest.MarkDecorator:
    """Run a test with the `outcome` of each scenario: in the stand-in always, and in verl with QREWARD_VERL=1."""
    cases = [
        pytest.param(player, each, id=f"{each.name}-{player}", marks=NEEDS_VERL if player == "verl" else ())
        for each in scenarios
        for player in by
    ]
    return pytest.mark.parametrize(("player", "scenario"), cases)


@dataclass
class Players:
    """Plays scenarios, each once."""

    folder: Path
    outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)

    def play(self, player: str, scenario: Scenario) -> Outcome:
        """The outcome of a scenario with `player`, "verl" or "fake"."""
        key = (player, scenario.name)
        if key not in self.outcomes:
            with JudgeServer(_grade) as judge:
                play = self._verl if player == "verl" else self._fake
                self.outcomes[key] = play(scenario, judge.base_url)
        outcome = self.outcomes[key]
        assert bool(outcome.error) == bool(scenario.ends), outcome.error[-4000:]
        assert scenario.ends in outcome.error, outcome.error[-4000:]
        return outcome

    @functools.cached_property
    def _assets(self) -> Any:
        pandas = pytest.importorskip("pandas", reason="install 'qreward-plugins[demo]'")
        assets = prepared(self.folder, val_questions=4, train_questions=8, warm_up_questions=20)
        for path, split, count in (
            (assets.train, "train", verl_script.QUESTIONS),
            (assets.val, "val", verl_script.HELD_OUT),
        ):
            pandas.DataFrame(verl_script.rows(split, count)).to_parquet(path)
        return assets

    @functools.cached_property
    def _tokenizer(self) -> Any:
        """The recipe's, in both players; where only the stand-in plays, words, which takes no time."""
        if not os.environ.get("QREWARD_VERL"):
            return WordTokenizer()
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._assets.tokenizer)

    @functools.cached_property
    def _reward_model(self) -> Path:
        folder = shutil.copytree(self._assets.tokenizer, self.folder / "reward_model")
        return shutil.copytree(self._assets.model, folder, dirs_exist_ok=True)

    def _verl(self, scenario: Scenario, judge: str) -> Outcome:
        served = (*_REWARD_MODEL, f"reward.reward_model.model_path={self._reward_model}")
        return train(
            self._assets,
            self.folder / "verl" / scenario.name,
            scenario.configuration,
            *_SHARED,
            "actor_rollout_ref.rollout.agent.default_agent_loop=scripted",
            *scenario.overrides,
            *(served if scenario.reward_model else ()),
            # It takes prompts one by one.
            *(("data.train_batch_size=0",) if scenario.trainer == "fully_async" else ()),
            steps=scenario.steps,
            trainer=scenario.trainer,
            JUDGE_URL=judge,
            VERL_SCRIPT=scenario.script,
        )

    def _fake(self, scenario: Scenario, judge: str) -> Outcome:
        configuration = self.folder / f"{scenario.name}.yaml"
        configuration.write_text(scenario.configuration)
        several = LEGACY not in scenario.overrides and not scenario.trainer
        legacy = (LEGACY,) if scenario.trainer else ()

        def respond(draft, rng):
            info = draft.columns["extra_info"]
            told = verl_script.outputs(scenario.script, info, draft.number, several=several)
            return [VerlOutput(parts, num_turns=2 if len(parts) == 1 else len(parts) + 1) for parts in told]

        rows, records, said = [], [], []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        overrides = [GRPO, "+reward_manager=qreward", f"+qreward.config={configuration}", *_SHARED]
        overrides += [*scenario.overrides, *legacy, *(_REWARD_MODEL[:1] if scenario.reward_model else ())]
        logging.getLogger().addHandler(handler)
        try:
            with pytest.MonkeyPatch.context() as patched:
                patched.setenv("JUDGE_URL", judge)
                with FakeVerlTrainer(
                    overrides,
                    rows=verl_script.rows("train", verl_script.QUESTIONS),
                    val_rows=verl_script.rows("val", verl_script.HELD_OUT),
                    respond=respond,
                    tokenizer=self._tokenizer,
                ) as trainer:
                    validates = NO_VALIDATION not in scenario.overrides
                    if validates:
                        records.append({"step": 0, "data": dict(trainer.validate().metrics)})
                    for _ in range(scenario.steps):
                        step = trainer.step()
                        rows += rows_of(step)
                        records.append({"step": step.global_step, "data": dict(step.metrics)})
                    if validates:
                        records.append({"step": scenario.steps, "data": dict(trainer.validate().metrics)})
        except Exception as error:
            return Outcome(rows, records, "\n".join(said), f"{type(error).__name__}: {error}")
        finally:
            logging.getLogger().removeHandler(handler)
        return Outcome(rows, records, "\n".join(said))


def _grade(call):
    kind, value = call.blocks["response"].split()[:2]
    return float(value) * 10 if kind in ("number", "mapping") else 0.0


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
    ]
