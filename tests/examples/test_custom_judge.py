"""`examples/custom_judge`: a kind of judge of another package, which awaits other judges."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from qreward_plugins import ConfigurationError, RewardEngine, Sample, Scored, load_config
from qreward_plugins.config import registry
from qreward_plugins.sources import Reply


class Rule:
    """A source that gives the score that a sample carries for it, and raises what it carries in its place."""

    slots = None
    model = "rule"

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[str] = []

    async def send(self, request, *, on_sent):
        on_sent()
        self.asked.append(request.sample.response)
        score = request.sample.extras[self.name]
        if isinstance(score, Exception):
            raise score
        return Reply(value=score)

    async def aclose(self) -> None: ...


def tree(**relay: Any) -> dict[str, Any]:
    node = {"kind": "function", "function": "os.path:basename"}
    return {
        "sources": {"rules": node, "expert": node},
        "judges": {
            "cheap": {"kind": "function", "sources": "rules"},
            "dear": {"kind": "function", "sources": "expert"},
            "both": {"kind": "relay", "stages": ["cheap", "dear"], **relay},
        },
    }


def sample(response: str, rules: Any, expert: Any = 0.5) -> Sample:
    return Sample([{"role": "user", "content": "?"}], response, extras={"rules": rules, "expert": expert})


def score(samples: list[Sample], config: Any = None) -> tuple[list[Any], Rule, Rule]:
    rules, expert = Rule("rules"), Rule("expert")

    async def ask() -> list[Any]:
        async with RewardEngine(config or tree(), sources={"rules": rules, "expert": expert}) as engine:
            return await engine.score_all(samples, deadline_s=20)

    return asyncio.run(ask()), rules, expert


def test_it_is_registered_with_its_package():
    (found,) = registry.judges.registrations("relay")
    assert (found.package, found.version) == ("qreward-relay", "0.1.0")


def test_the_expensive_judge_is_asked_only_where_the_cheap_one_is_not_sure():
    outcomes, rules, expert = score([sample("good", 0.9), sample("bad", 0.1), sample("hm", 0.5, 0.7)])
    verdicts = [outcome.verdict for outcome in outcomes if isinstance(outcome, Scored)]
    assert [(verdict.score, verdict.components["stage"]) for verdict in verdicts] == [(0.9, 1), (0.1, 1), (0.7, 2)]
    assert {verdict.judge for verdict in verdicts} == {"both"}
    assert sorted(rules.asked) == ["bad", "good", "hm"]
    assert expert.asked == ["hm"]


@pytest.mark.parametrize(
    ("change", "place", "text"),
    [
        ({"stages": ["cheap", "daer"]}, "stages[1]", "there is no judge `daer`. Did you mean `dear`? Judges: `cheap`"),
        ({"stagse": 1}, "stagse", "unknown key. Did you mean `stages`?"),
        ({"sources": "rules"}, "sources", "unknown key. Allowed here: kind, stages, priority, unclear."),
    ],
)  # fmt: skip
def test_mistakes_are_reported_as_ours_are(change, place, text):
    with pytest.raises(ConfigurationError) as caught:
        load_config(tree(**change))
    told = {mistake.path: f"{mistake.problem} {mistake.remedy}".strip() for mistake in caught.value.mistakes}
    assert list(told) == [f"judges.both.{place}"]
    assert text in told[f"judges.both.{place}"]
