"""The recipes for GPUs compose over verl's own configuration, and every key in them is one that verl knows. The recipe
for a CPU: its questions, tokenizer, model and grading rule, what the demo tells, and the real trainer for two steps,
rewarded through qreward in two reward workers, by judges that fail now and then.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
from contextlib import nullcontext
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from qreward_plugins import load_config
from qreward_plugins.testing import Faults, JudgeServer, ServerLimits

from ..kit import each_of, imported, later, record, sql

later("verl")

RECIPES = Path(__file__).parents[2] / "recipes" / "verl"
CPU = RECIPES / "cpu"


@pytest.fixture(scope="module")
def verl_recipe(recipe_tools):
    imported("verl")
    return importlib.import_module("dryrun.verl_recipe")


@pytest.mark.parametrize("name", ["grpo", "grpo_colocated", "grpo_sleeping", "ppo"])
def test_every_key_is_one_of_verls(verl_recipe, name):
    assert "keys of the recipe are verl's or qreward's" in verl_recipe._known(RECIPES, name)


def test_the_line_for_a_cpu_is_complete(verl_recipe, monkeypatch):
    root = RECIPES.parents[1]
    monkeypatch.setenv("PWD", str(root))
    monkeypatch.delenv("QREWARD_CONFIG", raising=False)
    page = (root / "docs" / "verl.md").read_text().partition("## On a CPU")[2]
    (line,) = (block for block in page.split("```bash\n") if block.startswith("PYTHONPATH="))
    command = line.partition("```")[0].replace("\\\n", " ")
    words = shlex.split(os.path.expandvars(command))
    at = words.index("verl.trainer.main_ppo") + 1
    assert words[: at - 3] == [f"PYTHONPATH={CPU}", "VERL_USE_EXTERNAL_MODULES=verl_cpu", "OMP_NUM_THREADS=1"]
    assert words[at : at + 4] == ["--config-dir", "recipes/verl/cpu", "--config-name", "grpo"]
    config = verl_recipe.compose(CPU, "grpo", words[at + 4 :])
    ours = ("data", "actor_rollout_ref.model", "trainer", "qreward", "reward.reward_manager")
    assert [key for key in OmegaConf.missing_keys(config) if key.startswith(ours)] == []
    assert (config.trainer.device, config.actor_rollout_ref.rollout.name) == ("cpu", "cpu_hf")
    assert (config.reward.reward_manager.name, config.qreward.config) == ("qreward", f"{root}/judges.yaml")
    assert config.data.train_files == f"{root}/demo/assets/train.parquet"


def test_a_key_that_verl_does_not_have_is_found_with_the_one_that_was_meant(verl_recipe, tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ndata: {train_batch_sise: 3}\n")
    with pytest.raises(ValueError, match=r"data\.train_batch_sise \(did you mean data\.train_batch_size\?\)"):
        verl_recipe._known(tmp_path, "mine")


@pytest.fixture
def prepared(tmp_path, recipe_tools):
    """Data sets, a model's folder with a tokenizer, and the overrides that name them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "<a>": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}<a>"
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    rows = [{"question": f"What is {number}+1?", "answer": f"{number + 1}"} for number in range(8)]
    for split, part in (("train", rows[:6]), ("val", rows[6:])):
        source = tmp_path / f"{split}.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in part))
        arguments = ["verl", "--from", str(source), "--to", str(tmp_path / f"{split}.parquet"), "--name", "sums"]
        assert recipe_tools.prepare_data.main([*arguments, "--instruction", ""]) == 0
    return tmp_path


def test_a_dry_run_checks_everything_on_verl(verl_recipe, prepared, monkeypatch):
    monkeypatch.setenv("QREWARD_CONFIG", str(RECIPES / "judges.yaml"))
    monkeypatch.setenv("QREWARD_RULES", str(RECIPES.parent / "judges" / "rules.py"))
    for variable in ("BASE_URL", "MODEL", "API_KEY"):
        monkeypatch.setenv(f"HOSTED_{variable}", "https://judge.example/v1")
    for variable in ("CUDA_VISIBLE_DEVICES", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(variable, raising=False)
    config = verl_recipe.compose(RECIPES, "grpo", [])
    config.data.update(train_files=str(prepared / "train.parquet"), val_files=str(prepared / "val.parquet"))
    config.data.train_batch_size = 2
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 2
    config.actor_rollout_ref.model.path = str(prepared / "model")
    config.actor_rollout_ref.rollout.name = "hf"
    config.trainer.default_local_dir = str(prepared / "checkpoints")
    monkeypatch.setattr(verl_recipe, "compose", lambda folder, name, overrides: config)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    lines = verl_recipe.verl_lines(RECIPES, "grpo", [], ask=False)
    assert [line for line in lines if line.status in ("FAIL", "note")] == []
    found = {line.what: line.found for line in lines}
    assert found["training data"].endswith("train.parquet: 6 rows, prompts of 4 to 4 tokens")
    assert "on_failure: auto" in found["reward manager"]
    assert found["GPUs"] == "asks for 1 x 8; this machine shows 8"
    assert found["plan"].startswith("16 samples of a step need about")
    assert "for 9 steps" in found["plan"]

    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    config.data.train_files = str(prepared / "no.parquet")
    config.actor_rollout_ref.rollout.name = "vllm"
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 64
    config.reward.reward_manager.name = "naive"
    config.trainer.n_gpus_per_node = 8
    failed = {
        line.what: line for line in verl_recipe.verl_lines(RECIPES, "grpo", [], ask=False) if line.status == "FAIL"
    }
    expected = {"training data", "GPUs", "batches", "reward manager"}
    if importlib.util.find_spec("vllm") is None:
        expected.add("rollout engine")
    assert set(failed) == expected
    assert all(line.remedy for line in failed.values())


# The recipe for a CPU


@pytest.mark.parametrize("judge", ["rules", "llm"])
def test_the_demo_says_its_phases_and_ends_with_what_to_look_at(cpu_recipe, tmp_path, monkeypatch, capsys, judge):
    demo, training = cpu_recipe.demo, cpu_recipe.training
    used = {}

    def train(assets, out, algorithm, steps, environment, console):
        used.update(environment)
        record(Path(environment["QREWARD_JOURNAL"]), [])
        return training.Training([training.Step(1, 0.2, 1.0), training.Step(2, 0.6, 1.0)], 0.0, 0.5)

    monkeypatch.setattr(demo, "prepare", lambda folder, sizes: None)
    monkeypatch.setattr(demo, "_train", train)
    monkeypatch.setattr(demo, "served", lambda log: nullcontext("http://127.0.0.1:9"))
    monkeypatch.setattr(demo, "servers", lambda: {name: JudgeServer() for name in ("fast", "slow")})
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["demo.py", "--judge", judge, "--out", str(tmp_path)])
    assert demo.main() == 0
    told = capsys.readouterr().out
    for part in ("1/4 making", "2/4 starting", "3/4 starting", "4/4 done", "What to look at", "reward.png"):
        assert part in told
    assert f"qreward journal {tmp_path}" in told
    assert ("llama.cpp" in told) == (judge == "llm")
    assert ("qreward plan" in told, "qreward diff" in told) == (judge == "rules", judge == "llm")
    monkeypatch.delenv("FAST_JUDGE_URL", raising=False)
    config = load_config(used["QREWARD_CONFIG"])
    assert config.sources["fast"].urls == (used["FAST_JUDGE_URL"],)
    assert ("gemma" in config.sources) == (judge == "llm")


@each_of(
    ("response", "score"),
    [
        ("The answer is 7.", 10.0),
        ("The answer is -7.", 0.0),
        ("The answer is 6.", 3 * 7 / 8),
        ("The answer is 8.", 3 * 7 / 8),
        ("The answer is 11.", 1.5),
        ("The answer is 7. The answer is 6.", 0.0),
        ("7", 0.0),
        ("The answer is " + "7" * 40, 0.0),
    ],
)
def test_grades(cpu_recipe, response, score):
    assert cpu_recipe.scorer.grade(response, "7") == pytest.approx(score)


def test_prepared_assets_are_what_verl_reads(cpu_recipe, tmp_path):
    import pandas
    from transformers import AutoModelForCausalLM, AutoTokenizer

    few = {"val_questions": 4, "train_questions": 8, "warm_up_questions": 60, "learning_steps": 1, "habit_steps": 1}
    assets = cpu_recipe.tasks.prepare(tmp_path, cpu_recipe.tasks.Sizes(**few))
    train, val = pandas.read_parquet(assets.train), pandas.read_parquet(assets.val)
    assert (len(train), len(val)) == (8, 4)
    assert set(train.columns) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    texts = [row["content"] for prompt in (*train.prompt, *val.prompt) for row in prompt]
    assert len(set(texts)) == 12

    tokenizer = AutoTokenizer.from_pretrained(assets.tokenizer)
    for text in (*texts, "any text: ünïcödé ✓"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(" -45")) == len(tokenizer.encode(" 45")) == 1
    model = AutoModelForCausalLM.from_pretrained(assets.model)
    assert sum(parameter.numel() for parameter in model.parameters()) < 200_000
    # The rollout server stops where the model's own configuration says that an answer ends.
    assert model.config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids(cpu_recipe.tasks.END)


LIMITS = ServerLimits(requests_per_minute=6000, window_s=10, concurrency=16)


@pytest.mark.trainer
def test_grpo_trains_while_one_judge_is_flaky_and_some_samples_are_lost(cpu_recipe, tmp_path):
    tasks = cpu_recipe.tasks
    assets = tasks.prepare(tmp_path / "assets", tasks.Sizes(learning_steps=20, habit_steps=5))
    # A request that both judges refuse for good loses its sample; the rest of the faults are mended by another try.
    faults = {"fast": {"error_422": 0.25}, "slow": {"error_422": 0.25, "error_500": 0.2, "wrong_nonce": 0.1}}
    servers = {
        name: JudgeServer(cpu_recipe.scorer.score, limits=LIMITS, faults=Faults(rates=rates), seed=3)
        for name, rates in faults.items()
    }
    journal = tmp_path / "journal"
    with servers["fast"] as fast, servers["slow"] as slow:
        training = cpu_recipe.training.train(
            assets,
            tmp_path / "out",
            algorithm="grpo",
            steps=2,
            environment={
                "QREWARD_CONFIG": str(cpu_recipe.folder / "judges.yaml"),
                "QREWARD_JOURNAL": str(journal),
                "FAST_JUDGE_URL": fast.base_url,
                "SLOW_JUDGE_URL": slow.base_url,
            },
            on_step=lambda step: None,
        )
        reports = [server.report() for server in servers.values()]
    assert [step.number for step in training.steps] == [1, 2]
    assert all(0 < step.reward < 1 for step in training.steps)
    assert [report.violations_total for report in reports] == [0, 0]
    outcomes = dict(sql(journal, "SELECT outcome, count(*) FROM outcomes GROUP BY outcome"))
    ((floors, processes),) = sql(journal, "SELECT count(floor), count(DISTINCT process_id) FROM outcomes")
    assert sum(outcomes.values()) == 2 * 32 + 2 * 32  # two steps of 8 prompts x 4, and two validations
    assert outcomes["failed"] > 0  # they were neutral to their groups, and the training went on
    assert processes == 2
    metrics = [json.loads(line)["data"] for line in (tmp_path / "out" / "grpo.jsonl").read_text().splitlines()]
    rates = {"qreward/": "qreward/samples", "qreward/val/": "qreward/val/samples"}
    told = [(step[f"{of}failed_rate"], step[n]) for step in metrics for of, n in rates.items() if n in step]
    assert len(told) == 4
    # An empty response is the policy's own failure, and has a score.
    assert sum(rate * samples for rate, samples in told) == pytest.approx(outcomes["failed"] - floors)
