"""An engine that scores at a reward server (`engine.server`): the outcomes of the server's engine, and nothing else."""

from __future__ import annotations

import asyncio
import math

import pytest

from qreward_plugins import ConfigurationError, Cutoff, Failed, RewardEngine, Sample, Scored, load_config
from qreward_plugins.client import RewardClient
from qreward_plugins.client.rows import ServerFacts
from qreward_plugins.config.source_models import SourceConfig
from qreward_plugins.errors import EngineError
from qreward_plugins.samples.images import Image
from qreward_plugins.server.server import RewardServer, fingerprint_of
from qreward_plugins.sources.kind import VALUE, SourceKind
from qreward_plugins.testing import JudgeServer

from ..kit import FRAMEWORKS, comes, each_of, make_config, make_limits, make_sample, make_samples, play
from .conftest import Peer, replying

pytestmark = pytest.mark.anyio


async def test_outcomes_are_those_of_the_engine_there(serve, sample):
    async with serve() as there, there.remote_engine() as engine:
        whole = sample(0.5, id="a", group_id="g", step=3, split="val", extras={"x": [1]})
        outcomes = await engine.score_all([whole, sample("break"), sample(1)])
        one = await engine.score(sample(0.25))
        facts = [engine.facts().of(outcome) for outcome in outcomes]
        counts = engine.statistics()
        with pytest.raises(EngineError, match="the reward server has the sources"):
            engine.hold("obedient")
    assert [type(outcome) for outcome in outcomes] == [Scored, Failed, Scored]
    assert outcomes[1].label == "infra/exhausted"
    verdict = outcomes[0].verdict
    seen = (verdict.score, verdict.judge, verdict.source, dict(verdict.components))
    assert seen == (0.5, "quality", "obedient", {"clarity": 0.25})
    assert one.reward == 0.25
    assert whole in there.source.samples
    # Failed samples have the keys of the others.
    assert len({tuple(fact) for fact in facts}) == 1
    assert "score/clarity" in facts[1]
    assert (counts.submitted, counts.scored, dict(counts.failed)) == (4, 3, {"infra/exhausted": 1})


async def test_many_engines_keep_one_limit():
    """Whatever asks the server, its requests come out of one limit."""
    theirs, ours = make_limits(requests=20, tokens=10**6, concurrency=8)
    with JudgeServer(limits=theirs) as judge:
        tree = make_config({"a": judge}, limits={"a": ours}, engine={"shared": "off", "scheduling": {"hedge": False}})
        async with RewardEngine(tree) as scoring, RewardServer(scoring, port=0) as server:
            remote = {"engine": {"server": server.url}}
            engines = [await asyncio.to_thread(RewardEngine, remote) for _ in range(3)]
            asked = [engine.score_all(make_samples(12)) for engine in (*engines, scoring)]
            outcomes = [outcome for batch in await asyncio.gather(*asked) for outcome in batch]
            for engine in engines:
                await engine.aclose()
        report = judge.report()
    assert all(outcome.reward is not None for outcome in outcomes)
    assert (report.requests, report.violations_total, report.throttled) == (48, 0, 0)


async def test_what_json_does_not_have_goes_as_to_a_service(serve, sample, caplog):
    """Extras that cannot be written are left out, and the log tells once."""
    extras = {"kept": {1: "a"}, "gone": math.nan, "object": object()}
    given = [
        sample(1, extras=extras, ground_truth="\ud800"),
        sample(0.5, extras=extras, prompt="<|user|>How much?"),
        Sample((), "0.25", prompt=[1, 2]),
        sample(1, ground_truth=math.inf),
        sample(1, ground_truth={1, 2}),
        sample(None, step="x"),
        Sample((), "1", prompt=[1, math.nan]),
        sample(1, extras={"drawn": [Image(b"picture")]}),
    ]
    async with serve() as there, there.remote_engine() as engine:
        outcomes = await engine.score_all(given)
    assert [outcome.reward for outcome in outcomes] == [1.0, 0.5, 0.25, *[None] * 5]
    assert {outcome.label for outcome in outcomes[3:]} == {"infra/input"}
    assert "ground_truth: it is infinite" in outcomes[3].detail
    assert "prompt[1]: it is NaN" in outcomes[6].detail
    assert "extras['drawn'] is an image; a reward server gets those of messages and resp" in outcomes[7].detail
    seen = {each.response: each for each in there.source.samples}
    assert seen["So much: 1"].extras == {"kept": {"1": "a"}}
    assert seen["So much: 1"].ground_truth == "\ufffd"
    assert seen["So much: 0.5"].prompt == "<|user|>How much?"
    assert (seen["0.25"].prompt, seen["0.25"].messages) == ([1, 2], ())
    assert [text for text in caplog.messages if "is left out" in text] == [
        "extras['gone'] is left out of samples for the reward server: it is NaN, which JSON does not have",
        "extras['object'] is left out of samples for the reward server: it is of type object, which JSON does not "
        "have; write it as text or as a number",
    ]


# The server goes away


async def test_a_server_that_stays_away(serve, sample, caplog):
    async with serve() as there, there.remote_engine() as engine:
        await engine.score(sample(1))
        await there.stop()
        began_at = asyncio.get_running_loop().time()
        outcomes = await engine.score_all([sample(1), sample(2)], deadline_s=1.0)
        took_s = asyncio.get_running_loop().time() - began_at
    assert [outcome.label for outcome in outcomes] == ["infra/unreachable"] * 2
    assert "cannot be reached" in outcomes[0].detail
    assert 0.9 < took_s < 3
    assert sum("is asked again" in text for text in caplog.messages) == 1


async def test_an_outcome_comes_as_soon_as_it_is_known_and_a_cutoff_ends_the_rest(serve, sample):
    async with serve() as there, there.remote_engine() as engine:
        given = [sample(1, group_id="g"), sample("hold", group_id="g")]
        first, held = await engine.score_each(given, deadline_s=120)
        assert (await first).reward == 1.0
        held.cancel()
        await comes(there.source.cancelled.is_set, 60.0)
        there.source.cancelled.clear()
        good, cut = await engine.score_all(given, cutoff=Cutoff(after_s=0.3, quorum=0.5), deadline_s=120)
        assert (good.reward, cut.label) == (1.0, "infra/cutoff")
        await comes(there.source.cancelled.is_set, 60.0)


async def test_priorities_are_those_of_the_server_unless_this_side_has_its_own(serve, sample, monkeypatch):
    given, submit = [], RewardClient.submit

    def submitted(self, *asked, priority, **more):
        given.append(priority)
        return submit(self, *asked, priority=priority, **more)

    monkeypatch.setattr(RewardClient, "submit", submitted)
    async with serve() as there:
        own = {"engine": {**there.remote()["engine"], "priority": {"train": 7, "validation": -1}}}
        async with there.remote_engine() as engine, await asyncio.to_thread(RewardEngine, own) as other:
            for each, split, priority in ((engine, "val", None), (other, "train", None), (other, "val", None)):
                await each.score(sample(1, split=split), priority=priority)
            await other.score(sample(1, split="val"), priority=20)
    assert given == [None, 7, -1, 20]


async def test_the_deadline_is_kept_by_the_server(serve, sample):
    async with serve() as there, there.remote_engine() as engine:
        outcome = await engine.score(sample("hold"), deadline_s=2.0)
        assert there.source.cancelled.is_set()
        assert (await engine.score(sample(0.5), deadline_s=math.inf)).reward == 0.5
    # Where this process is slow, its own deadline comes before the line of the server, which names the source.
    assert (outcome.label, outcome.source in ("", "obedient")) == ("infra/deadline", True)


# Other judges


async def test_a_server_with_other_judges(serve, sample):
    async with serve() as there, there.remote_engine() as engine:
        assert (await engine.score(sample(1))).reward == 1.0
        await there.stop()
        await there.start(correct_at=0.5)
        outcome = await engine.score(sample(1), deadline_s=8)
        assert outcome.label == "infra/other_judges"
        assert "former configuration" in outcome.detail
        # The former judges are welcome again.
        await there.stop()
        await there.start()
        assert (await engine.score(sample(1), deadline_s=12)).reward == 1.0


async def test_the_token(serve, sample, monkeypatch):
    async with serve(token="right") as there:
        monkeypatch.setenv("REWARD_TOKEN", "right")
        async with there.remote_engine(token_env="REWARD_TOKEN") as engine:
            assert (await engine.score(sample(1))).reward == 1.0
        for server in ({"token": "wrong-secret"}, {"start_s": 1}):
            with pytest.raises(ConfigurationError, match="answered 401") as error:
                await asyncio.to_thread(RewardEngine, there.remote(**server))
            assert "wrong-secret" not in str(error.value)
            assert error.value.__context__ is None
        monkeypatch.delenv("REWARD_TOKEN")
        with pytest.raises(ConfigurationError, match="REWARD_TOKEN is not set"):
            RewardEngine(there.remote(token_env="REWARD_TOKEN"))


async def test_a_server_that_still_starts(caplog):
    facts = ServerFacts("f", ("clarity",), False, 8)
    async with Peer(facts=[b"", replying(b"", 502), replying(facts.as_row())]) as peer:
        engine = await asyncio.to_thread(RewardEngine, {"engine": {"server": peer.url}})
        assert engine.facts().components == ("clarity",)
        await engine.aclose()
    with pytest.raises(ConfigurationError, match=r"cannot be reached.*Start it with `qreward serve`"):
        RewardEngine({"engine": {"server": {"url": "http://127.0.0.1:9", "start_s": 0.3}}})
    said = f"{caplog.messages[-1]} "
    assert "at http://127.0.0.1:9 cannot be reached" in said
    assert "it is asked again for up to 0.3 s; start it with `qreward serve`, or correct its URL " in said


async def test_a_group_is_compared_at_the_server(monkeypatch):
    """Also where the client makes several requests of a batch."""
    monkeypatch.setattr("qreward_plugins.client.client.SAMPLES_A_REQUEST", 4)
    with JudgeServer(lambda call: float(call.blocks["response"].split()[-1])) as judge:
        tree = make_config({"a": judge}, engine={"shared": "off"})
        tree["judges"]["reward"] = {"kind": "rank", "judge": "quality"}
        async with (
            RewardEngine({**tree, "routes": {"*": "reward"}}) as scoring,
            RewardServer(scoring, port=0) as server,
        ):
            engine = await asyncio.to_thread(RewardEngine, {"engine": {"server": server.url}})
            samples = [
                make_sample(1, response=f"worth {worth}", group_id=group) for worth in (1, 9, 5) for group in "gh"
            ]
            assert engine.compares(samples[0])
            outcomes = await engine.score_all(samples)
            await engine.aclose()
        assert judge.report().requests == 2
    assert [outcome.reward for outcome in outcomes] == [0.0, 0.0, 1.0, 1.0, 0.5, 0.5]


WORDS = ["so: 0.25", "so: 0.5", "so: break", "so: 0.75"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_trainer(serving, framework):
    """With a reward server as its engine, no other setting changes."""
    with serving(judge={"correct_at": 0.5}) as there:
        step = play(framework, WORDS, there.remote())
        assert sorted(sample.response for sample in there.source.samples) == sorted(WORDS)
    assert [reward for number, reward in enumerate(step.rewards) if number != 2] == [0.25, 0.5, 0.75]
    assert [number for number, advantage in enumerate(step.advantages) if not advantage] == [1, 2]
    assert not step.poisoned


# The fingerprint of a served configuration: what may change a reward changes it, and nothing else does


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
    ("source", "changed", "counts"),
    [
        (FUNCTION, {"function": "json:dumps"}, True),
        (FUNCTION, {"kwargs": {"strict": True}}, True),
        (FUNCTION, {"version": "2"}, True),
        (HTTP, {"score_key": "data.score"}, True),
        (CHAT, {"model": "n"}, True),
        (CHAT, {"parameters": {"reasoning_effort": "low"}}, True),
        (CHAT, {"dialect": "responses"}, True),
        (MODEL, {"chat_template": "template.jinja"}, True),
        (OWN, {"key": 2}, True),
        (HTTP, {"url": ["http://b.invalid/score", "http://c.invalid/score"]}, False),
        (CHAT, {"base_url": "http://b.invalid/v1"}, False),
        (CHAT, {"api_key": "sk-another"}, False),
        (CHAT, {"api_key_env": "HOME"}, False),
        (CHAT, {"limits": {"requests_per_minute": 5}, "price": {"per_request": 1.0}, "weight": 2.0}, False),
        (CHAT, {"timeouts": {"total_s": 5.0}, "routing": "round_robin", "client": "httpx", "verify_tls": False}, False),
        (FUNCTION, {"workers": 3, "timeouts": {"total_s": 5.0}}, False),
    ],
)
def test_what_may_change_a_reward_counts_and_nothing_else(source, changed, counts):
    assert (fingerprint(source, **changed) != fingerprint(source)) == counts
