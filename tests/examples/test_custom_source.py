"""`examples/custom_source`: a kind of source of another package, over a server that speaks its protocol."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins import ConfigurationError, RewardEngine, Sample, Scored, load_config
from qreward_plugins.config import registry
from qreward_plugins.errors import InvalidReply, SourceUnusable, Throttled, TransientError
from qreward_plugins.sources import Request, open_source
from qreward_plugins.testing import Faults, JudgeServer, ServerLimits

from ..kit import each_of

KEY = "sk-messages-0123456789"


def messages_server(**options):
    """Anthropic's messages, for this key only."""
    settings = {"models": ["judge-1"], "protocols": ["anthropic"], "api_key": KEY, **options}
    return JudgeServer(lambda call: 10.0 if "right" in call.blocks.get("response", "") else 0.0, **settings)


def tree(url="http://judge", **node):
    source = {"kind": "messages", "url": url, "model": "judge-1", "api_key": KEY, **node}
    return {"sources": {"judge": source}, "judges": {"quality": {"kind": "llm"}}, "engine": {"seed": 1}}


def sample(response):
    return Sample([{"role": "user", "content": "What is right?"}], response)


def test_it_is_registered_with_its_package():
    (found,) = registry.sources.registrations("messages")
    assert (found.package, found.version) == ("qreward-messages", "0.1.0")


def test_rollouts_are_scored_within_its_limits():
    with messages_server(limits=ServerLimits(concurrency=3)) as server:
        with RewardEngine(tree(server.root_url, limits={"concurrency": 3})).portal() as engine:
            outcomes = engine.score_all([sample(text) for text in ("right", "wrong") * 8])
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
        ("error_429_seconds", Throttled),
        ("error_401", SourceUnusable),
        ("error_500", TransientError),
        ("wrong_json_type", TransientError),
        ("refusal", InvalidReply),
    ],
)
def test_every_failure_has_its_class(fault, error):
    async def ask():
        source = open_source("judge", load_config(tree(server.root_url)).sources["judge"])
        try:
            messages = ({"role": "user", "content": "?"},)
            await source.send(Request(sample("x"), messages=messages), on_sent=lambda: None)
        finally:
            await source.aclose()

    with messages_server(faults=Faults(script=[fault], retry_after_s=7)) as server, pytest.raises(error) as caught:
        asyncio.run(ask())
    assert type(caught.value) is error
    assert KEY not in str(caught.value)
    assert fault != "error_429_seconds" or caught.value.retry_after_s == 7.0


def test_mistakes_are_found_when_the_configuration_is_read():
    with pytest.raises(ConfigurationError) as caught:
        load_config(tree(modle="x", thinking_tokens=10, url="judge.example"))
    assert {mistake.path: f"{mistake.problem} {mistake.remedy}".strip() for mistake in caught.value.mistakes} == {
        "sources.judge.url": "a URL must start with http:// or https:// and have a host.",
        "sources.judge.modle": "unknown key. Did you mean `model`?",
        "sources.judge.thinking_tokens": "must be 1024 or more, not 10.",
    }
