"""The fingerprint of a served configuration: what may change a reward changes it, and nothing else does."""

from __future__ import annotations

from qreward_plugins.config import load_config
from qreward_plugins.config.source_models import SourceConfig
from qreward_plugins.server.server import fingerprint_of
from qreward_plugins.sources.kind import VALUE, SourceKind

from ..kit import each_of


class Own(SourceKind):
    """A kind of another package."""

    class Config(SourceConfig):
        """Its keys."""

        key: int

    answers = (VALUE,)

    async def send(self, request, *, on_sent):
        raise NotImplementedError


HTTP = {"kind": "http", "url": "http://a.invalid/score", "batch": {"max_size": 4}}
CHAT = {"kind": "openai", "base_url": "http://a.invalid/v1", "model": "m"}
MODEL = {"kind": "reward_model", "base_url": "http://a.invalid", "model": "m"}
FUNCTION = {"kind": "function", "function": "json:loads"}
OWN = {"kind": f"{__name__}:Own", "key": 1}
JUDGES = {"openai": {"kind": "llm", "criteria": {"right": "Is it right?"}}, "reward_model": {"kind": "reward_model"}}


def fingerprint(source, **changed):
    judge = JUDGES.get(source["kind"], {"kind": "function"})
    return fingerprint_of(load_config({"sources": {"s": {**source, **changed}}, "judges": {"j": judge}}))


@each_of(
    ("source", "changed"),
    [
        (FUNCTION, {"function": "json:dumps"}),
        (FUNCTION, {"kwargs": {"strict": True}}),
        (FUNCTION, {"version": "2"}),
        (HTTP, {"score_key": "data.score"}),
        (CHAT, {"model": "n"}),
        (CHAT, {"parameters": {"reasoning_effort": "low"}}),
        (CHAT, {"dialect": "responses"}),
        (MODEL, {"chat_template": "template.jinja"}),
        (OWN, {"key": 2}),
    ],
)
def test_what_may_change_a_reward_counts(source, changed):
    assert fingerprint(source, **changed) != fingerprint(source)


@each_of(
    ("source", "changed"),
    [
        (HTTP, {"url": ["http://b.invalid/score", "http://c.invalid/score"]}),
        (CHAT, {"base_url": "http://b.invalid/v1"}),
        (CHAT, {"api_key": "sk-another"}),
        (CHAT, {"api_key_env": "HOME"}),
        (CHAT, {"limits": {"requests_per_minute": 5}, "price": {"per_request": 1.0}, "weight": 2.0}),
        (CHAT, {"timeouts": {"total_s": 5.0}, "routing": "round_robin", "client": "httpx", "verify_tls": False}),
        (FUNCTION, {"workers": 3, "timeouts": {"total_s": 5.0}}),
    ],
)
def test_what_cannot_does_not(source, changed):
    assert fingerprint(source, **changed) == fingerprint(source)
