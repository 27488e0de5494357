"""The examples are run, so that they cannot go stale: kinds of other packages, installed by pip, the adapter of the
README, and the rewards of a task of verifiers.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qreward_plugins import Failed, RewardEngine, Sample, Scored, load_config
from qreward_plugins.engine.process_portals import close_process_portals
from qreward_plugins.errors import InvalidReply, SourceUnusable, Throttled, TransientError
from qreward_plugins.simulation import SimulatedSource
from qreward_plugins.sources import Reply, Request, open_source
from qreward_plugins.testing import Faults, JudgeServer, ServerLimits

from ..kit import each_of, mistakes_of

EXAMPLES = Path(__file__).parents[2] / "examples"
KEY = "sk-messages-0123456789"
QUESTION = [{"role": "user", "content": "What is right?"}]


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    """A folder with both packages in it; without the network."""
    folder = tmp_path_factory.mktemp("examples")
    packages = []
    for path in sorted(EXAMPLES.glob("*/pyproject.toml")):
        # Building writes beside the source.
        packages.append(str(shutil.copytree(path.parent, folder / "source" / path.parent.name)))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-index", "--no-build-isolation", "--no-deps", "--target", str(folder / "site")]
    subprocess.run([*pip, *offline, *packages], check=True, timeout=120)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder / "site"))
        yield


def relay_tree(**relay: Any) -> dict[str, Any]:
    node = {"kind": "function", "function": "os.path:basename"}
    return {
        "sources": {"rules": node, "expert": node},
        "judges": {
            "cheap": {"kind": "function", "sources": "rules"},
            "dear": {"kind": "function", "sources": "expert"},
            "both": {"kind": "relay", "stages": ["cheap", "dear"], **relay},
        },
    }


def messages_tree(url="http://judge", **node):
    source = {"kind": "messages", "url": url, "model": "judge-1", "api_key": KEY, **node}
    return {"sources": {"judge": source}, "judges": {"quality": {"kind": "llm"}}, "engine": {"seed": 1}}


def test_the_expensive_judge_is_asked_only_where_the_cheap_one_is_not_sure():
    asked: list[tuple[str, str]] = []

    def rule(name):
        """Gives the score that a sample carries for it."""

        def answer(request):
            asked.append((name, request.sample.response))
            return Reply(value=request.sample.extras[name])

        return SimulatedSource(name, behaviour=lambda *_: 0.0, answer=answer)

    async def ask() -> list[Any]:
        told = {"good": (0.9, 0.5), "bad": (0.1, 0.5), "hm": (0.5, 0.7)}
        samples = [Sample(QUESTION, text, extras={"rules": one, "expert": two}) for text, (one, two) in told.items()]
        sources = {name: rule(name) for name in ("rules", "expert")}
        async with RewardEngine(relay_tree(), sources=sources) as engine:
            return await engine.score_all(samples, deadline_s=20)

    verdicts = [outcome.verdict for outcome in asyncio.run(ask()) if isinstance(outcome, Scored)]
    assert [(verdict.score, verdict.components["stage"]) for verdict in verdicts] == [(0.9, 1), (0.1, 1), (0.7, 2)]
    assert {verdict.judge for verdict in verdicts} == {"both"}
    assert {text for name, text in asked if name == "expert"} == {"hm"}


def test_a_stage_that_is_no_judge_is_reported_as_ours_are():
    [(path, said)] = mistakes_of(load_config, relay_tree(stages=["cheap", "daer"])).items()
    assert path == "judges.both.stages[1]"
    assert "there is no judge `daer`. Did you mean `dear`? Judges: `cheap`" in said


def messages_server(**options):
    """Anthropic's messages, for this key only."""
    settings = {"models": ["judge-1"], "protocols": ["anthropic"], "api_key": KEY, **options}
    return JudgeServer(lambda call: 10.0 if "right" in call.blocks.get("response", "") else 0.0, **settings)


def test_rollouts_are_scored_within_its_limits():
    with messages_server(limits=ServerLimits(concurrency=3)) as server:
        with RewardEngine(messages_tree(server.root_url, limits={"concurrency": 3})).portal() as engine:
            outcomes = engine.score_all([Sample(QUESTION, text) for text in ("right", "wrong") * 8])
        report = server.report()
    verdicts = [outcome.verdict for outcome in outcomes if isinstance(outcome, Scored)]
    assert [verdict.score for verdict in verdicts] == [1.0, 0.0] * 8
    assert (report.answered, report.violations_total, report.peak_concurrency <= 3) == (16, 0, True)
    assert verdicts[0].model == "judge-1"
    assert sum(verdict.usage.completion_tokens for verdict in verdicts) == report.completion_tokens


@each_of(
    ("fault", "error"),
    [
        ("error_529", Throttled),
        ("error_401", SourceUnusable),
        ("wrong_json_type", TransientError),
        ("refusal", InvalidReply),
    ],
)
def test_every_failure_has_its_class(fault, error):
    async def ask():
        source = open_source("judge", load_config(messages_tree(server.root_url)).sources["judge"])
        try:
            messages = ({"role": "user", "content": "?"},)
            await source.send(Request(Sample(QUESTION, "x"), messages=messages), on_sent=lambda: None)
        finally:
            await source.aclose()

    with messages_server(faults=Faults(script=[fault])) as server, pytest.raises(error) as caught:
        asyncio.run(ask())
    assert type(caught.value) is error
    assert KEY not in str(caught.value)


# The adapter in `examples/README.md`


TEXT = (Path(__file__).parents[2] / "examples" / "README.md").read_text()

RULES = """
def score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "?":
        raise ValueError("no answer")
    return float(solution_str == ground_truth)
"""


def test_the_adapter_of_the_readme_scores(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, object] = {"__name__": "adapter"}
    exec(program, names)
    (tmp_path / "rules.py").write_text(RULES)
    path = tmp_path / "judges.json"
    source = {"kind": "function", "function": f"{tmp_path / 'rules.py'}:score", "mode": "thread"}
    path.write_text(json.dumps({"sources": {"rules": source}, "judges": {"exact": {"kind": "function"}}}))
    rollouts = [
        {"messages": [{"role": "user", "content": "1 + 1?"}], "response": text, "answer": "2", "prompt_id": prompt}
        for prompt, text in (("a", "2"), ("a", "3"), ("a", "?"), ("b", "2"))
    ]
    try:
        filled, trained = names["rewards"](rollouts, path)  # type: ignore[operator]
    finally:
        close_process_portals()
    assert filled == [1.0, 0.0, 0.5, 1.0]
    assert trained == [True, True, False, True]


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[2].glob("examples/**/README.md")), ids=str)
def test_every_link_of_the_readmes_leads_somewhere_and_every_program_compiles(path):
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target
    for program in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        compile(program, str(path), "exec")


# `examples/verifiers_rewards`, where verifiers is installed


EXAMPLE = Path(__file__).parents[2] / "examples" / "verifiers_rewards"
TASK = """
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str
    bonus: float = 0.0


class Task(vf.Task[Data]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if "raise" in trace.last_message.content:
            raise RuntimeError("a bug")
        return float(trace.last_message.content.endswith(self.data.answer))

    @vf.reward(weight=0.5)
    async def extra(self, trace: vf.Trace) -> float:
        return self.data.bonus * (self.data.prompt_text == "2 + 2?") * trace.num_turns

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_message.content))
"""


def score(*responses: str) -> list[Any]:
    source = {
        "kind": "function",
        "function": f"{EXAMPLE / 'verifiers_rewards.py'}:rewards",
        "arguments": "sample",
        "kwargs": {"task": "my_verifiers_task:Task"},
    }
    tree = {"sources": {"task": source}, "judges": {"task": {"kind": "function"}}, "engine": {"deadline_s": 60}}
    question = [{"role": "user", "content": "2 + 2?"}]
    with RewardEngine(tree).portal() as portal:
        return portal.score_all([Sample(question, text, "4", extras={"bonus": 0.5, "more": 1}) for text in responses])


@pytest.fixture
def task_of_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers.v1")
    (tmp_path / "my_verifiers_task.py").write_text(TASK)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("task_of_verifiers")
def test_a_task_of_verifiers_scores_a_response() -> None:
    right, wrong, broken = score("It is 4", "5", "raise")
    assert (right.reward, wrong.reward) == (1.25, 0.25)
    assert right.verdict.components == {"right": 1.0, "extra": 0.25, "length": 7.0}
    assert isinstance(broken, Failed)
