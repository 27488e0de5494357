"""An engine that scores at a reward server: the outcomes of the server's engine, and nothing else."""

from __future__ import annotations

import asyncio
import json
import math
import threading

import pytest

from qreward_plugins import ConfigurationError, Cutoff, Failed, RewardEngine, Sample, Scored, Verdict, load_config
from qreward_plugins.client.rows import outcome_of_row
from qreward_plugins.server import engines
from qreward_plugins.server.forms import result_of

pytestmark = pytest.mark.anyio


def sample(word: object, **fields) -> Sample:
    return Sample([{"role": "user", "content": "How much?"}], f"So much: {word}", **fields)


async def test_outcomes_are_those_of_the_engine_there(serving, remote):
    with serving() as there:
        async with RewardEngine(remote(there)) as engine:
            whole = sample(0.5, id="a", group_id="g", step=3, split="val", extras={"x": [1]})
            given = [whole, sample("break"), sample(1)]
            outcomes = await engine.score_all(given)
            one = await engine.score(sample(0.25))
            facts = [engine.facts().of(outcome) for outcome in outcomes]
            counts = engine.statistics()
    assert [type(outcome) for outcome in outcomes] == [Scored, Failed, Scored]
    assert outcomes[1].label == "infra/exhausted"
    verdict = outcomes[0].verdict
    assert (verdict.score, verdict.judge, verdict.source, dict(verdict.components)) == (
        0.5,
        "quality",
        "words",
        {"clarity": 0.25},
    )
    assert one.reward == 0.25
    assert given[0] in there.source.samples
    # Failed samples have the keys of the others.
    assert len({tuple(fact) for fact in facts}) == 1
    assert "score/clarity" in facts[1]
    assert (counts.submitted, counts.scored, dict(counts.failed)) == (4, 3, {"infra/exhausted": 1})


def test_what_a_reward_function_returned_comes_along():
    given = Scored(Verdict(0.5, returned={"score": 0.5, "note": "fine", "shape": {1}, 3: None}))
    row = json.loads(json.dumps(result_of(sample(1), given)))
    outcome = outcome_of_row(row, latency_s=2.0)
    assert outcome.verdict.returned == {"score": 0.5, "note": "fine", "shape": "{1}", "3": None}
    assert outcome.verdict.latency_s == 2.0


def test_what_a_reward_function_returned_and_json_does_not_have_comes_as_text():
    returned = {"hash": 2**70, "text": "\ud800", "deep": [{"set": {1}, "nan": math.nan}], 7: b"x"}
    row = json.loads(json.dumps(result_of(sample(1), Scored(Verdict(1.0, returned=returned)))))
    assert outcome_of_row(row).verdict.returned == {
        "hash": str(2**70),
        "text": "'\\ud800'",
        "deep": [{"set": "{1}", "nan": None}],
        "7": "b'x'",
    }


async def test_what_json_does_not_have_goes_as_to_a_service(serving, remote, caplog):
    """Extras that cannot be written are left out, and the log tells once."""
    extras = {"kept": {1: "a"}, "gone": math.nan, "object": object()}
    given = [
        sample(1, extras=extras, ground_truth="\ud800"),
        sample(0.5, extras=extras, prompt="<|user|>How much?"),
        Sample((), "0.25", prompt=[1, 2]),
        sample(1, ground_truth=math.inf),
    ]
    with serving() as there:
        async with RewardEngine(remote(there)) as engine:
            outcomes = await engine.score_all(given)
    assert [outcome.reward for outcome in outcomes] == [1.0, 0.5, 0.25, None]
    assert "ground_truth: it is infinite" in outcomes[3].detail
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


async def test_streams_and_portals(serving, remote):
    with serving() as there:
        async with RewardEngine(remote(there)) as engine:
            pairs = [pair async for pair in engine.score_stream(sample(n / 4096) for n in range(300))]
        assert [outcome.reward for _, outcome in pairs] == [n / 4096 for n in range(300)]

        def blocking():
            with RewardEngine(remote(there)).portal() as portal:
                return [portal.score(sample(1)).reward, *(each.reward for each in portal.score_all([sample(0)]))]

        assert await asyncio.to_thread(blocking) == [1.0, 0.0]


async def test_a_cutoff_keeps_what_came(serving, remote):
    with serving() as there:
        async with RewardEngine(remote(there)) as engine:
            given = [sample(1, group_id="g"), sample("hold", group_id="g")]
            outcomes = await engine.score_all(given, cutoff=Cutoff(after_s=0.3, quorum=0.5))
        assert outcomes[0].reward == 1.0
        assert outcomes[1].label == "infra/cutoff"
        assert await asyncio.to_thread(there.source.cancelled.wait, 5)


async def test_cancelling_one_of_several_cancels_it_there(serving, remote):
    with serving() as there:
        async with RewardEngine(remote(there)) as engine:
            held = asyncio.ensure_future(engine.score(sample("hold")))
            other = asyncio.ensure_future(engine.score(sample(1)))
            assert await asyncio.to_thread(there.source.holding.wait, 5)
            held.cancel()
            assert (await other).reward == 1.0
            assert await asyncio.to_thread(there.source.cancelled.wait, 5)


async def test_a_sample_that_cannot_be_sent_fails_alone(serving, remote):
    with serving(max_body_bytes=200_000) as there:
        async with RewardEngine(remote(there)) as engine:
            given = [sample(1, ground_truth={1, 2}), sample("x" * 300_000 + " 1"), sample(1), sample(None, step="x")]
            outcomes = await engine.score_all(given)
    assert [outcome.failure and outcome.failure.label for outcome in outcomes] == [
        "infra/input",
        "infra/input",
        None,
        "infra/input",
    ]
    assert "ground_truth: it is a set" in outcomes[0].detail
    assert "the server takes 200,000" in outcomes[1].detail


async def test_many_large_samples_go_in_several_frames(serving, remote):
    with serving(max_body_bytes=400_000) as there:
        async with RewardEngine(remote(there)) as engine:
            outcomes = await engine.score_all(sample("y" * 100_000 + f" {n / 16}") for n in range(16))
    assert [outcome.reward for outcome in outcomes] == [n / 16 for n in range(16)]


# The server goes away


async def test_a_killed_server_is_asked_again(serving, remote):
    """What was under way is sent again, and each sample has one outcome."""
    with serving() as there:
        async with RewardEngine(remote(there)) as engine:
            asked = asyncio.ensure_future(engine.score_all([sample("hold"), sample(0.5), sample("hold")]))
            single = asyncio.ensure_future(engine.score(sample("hold")))
            assert await asyncio.to_thread(there.source.holding.wait, 5)
            await asyncio.to_thread(there.stop)
            there.source.holding.clear()
            await asyncio.to_thread(there.start)
            assert await asyncio.to_thread(there.source.holding.wait, 8)
            there.source.release.set()
            assert [outcome.reward for outcome in await asked] == [1.0, 0.5, 1.0]
            assert (await single).reward == 1.0
            assert engine.statistics().scored == 4


async def test_a_server_that_drains_hands_the_rest_to_the_next(serving, remote):
    with serving() as there:
        async with RewardEngine(remote(there)) as engine:
            asked = asyncio.ensure_future(engine.score(sample("hold")))
            assert await asyncio.to_thread(there.source.holding.wait, 5)
            assert await asyncio.to_thread(there.drain, 0.1) == 1
            refused = asyncio.ensure_future(engine.score(sample(0.5)))
            await asyncio.sleep(0.1)
            await asyncio.to_thread(there.stop, engine_first=True)
            there.source.holding.clear()
            await asyncio.to_thread(there.start)
            assert (await refused).reward == 0.5
            assert await asyncio.to_thread(there.source.holding.wait, 8)
            there.source.release.set()
            assert (await asked).reward == 1.0


async def test_a_server_that_stays_away(serving, remote):
    with serving() as there:
        async with RewardEngine(remote(there)) as engine:
            await engine.score(sample(1))
            await asyncio.to_thread(there.stop)
            began_at = asyncio.get_running_loop().time()
            outcomes = await engine.score_all([sample(1), sample(2)], deadline_s=1.0)
            took_s = asyncio.get_running_loop().time() - began_at
    assert [outcome.label for outcome in outcomes] == ["infra/unreachable"] * 2
    assert "cannot be reached" in outcomes[0].detail
    assert 0.9 < took_s < 3


async def test_the_deadline_is_kept_by_the_server(serving, remote):
    with serving() as there:
        async with RewardEngine(remote(there)) as engine:
            outcome = await engine.score(sample("hold"), deadline_s=0.6)
            assert await asyncio.to_thread(there.source.cancelled.wait, 5)
    assert outcome.label == "infra/deadline"
    assert outcome.source == "words"


async def test_a_sample_without_a_deadline_costs_the_others_nothing(serving, remote):
    with serving(max_samples=2) as there:
        async with RewardEngine(remote(there)) as engine:
            given = [engine.score(sample(0.5), deadline_s=math.inf) for _ in range(6)]
            outcomes = await asyncio.wait_for(asyncio.gather(*given, engine.score(sample(1))), 10)
    assert [outcome.reward for outcome in outcomes] == [0.5] * 6 + [1.0]


async def test_a_full_server_is_asked_for_room_before_it_is_sent_anything_large(serving, remote, monkeypatch):
    frames = []
    asked_often = threading.Event()
    take = engines._Connection._take

    async def noted(connection, text):
        frames.append(len(text))
        if sum(size < 1000 for size in frames) >= 5:
            asked_often.set()
        await take(connection, text)

    monkeypatch.setattr(engines._Connection, "_take", noted)
    monkeypatch.setattr(engines, "FULL_RETRY_S", 0.01)
    with serving(max_samples=1) as there:
        async with RewardEngine(remote(there)) as engine:
            held = asyncio.ensure_future(engine.score(sample("hold")))
            assert await asyncio.to_thread(there.source.holding.wait, 5)
            large = asyncio.ensure_future(engine.score(sample("x" * 100_000 + " 0.5")))
            assert await asyncio.to_thread(asked_often.wait, 60)
            later = asyncio.ensure_future(engine.score(sample("y" * 100_000 + " 0.25")))
            while len(engine._binding.scoring._backlog) < 2:  # noqa: ASYNC110 -- until it waits for room, too
                await asyncio.sleep(0.001)
            there.source.release.set()
            outcomes = await asyncio.wait_for(asyncio.gather(held, large, later), 60)
    assert [outcome.reward for outcome in outcomes] == [1.0, 0.5, 0.25]
    # Once in vain, and once each when there was room.
    assert sum(size > 100_000 for size in frames) == 3


async def test_cancelling_what_waits_for_room(serving, remote):
    with serving(max_samples=1) as there:
        async with RewardEngine(remote(there)) as engine:
            held = asyncio.ensure_future(engine.score(sample("hold")))
            assert await asyncio.to_thread(there.source.holding.wait, 5)
            waiting = [asyncio.ensure_future(engine.score(sample(0.5), deadline_s=s)) for s in (60, 0.3)]
            assert (await waiting[1]).reward is None
            waiting[0].cancel()
            there.source.release.set()
            assert (await held).reward == 1.0
    assert [each.response for each in there.source.samples] == ["So much: hold"]


async def test_closing_fails_what_waits(serving, remote):
    with serving() as there:
        engine = RewardEngine(remote(there))
        asked = asyncio.ensure_future(engine.score(sample("hold")))
        assert await asyncio.to_thread(there.source.holding.wait, 5)
        await engine.aclose()
        assert (await asked).label == "infra/closed"
        assert await asyncio.to_thread(there.source.cancelled.wait, 5)


# Other judges


@pytest.mark.parametrize("may_change", [False, True])
async def test_a_server_with_other_judges(serving, remote, may_change):
    with serving() as there:
        async with RewardEngine(remote(there, judges_may_change=may_change)) as engine:
            assert (await engine.score(sample(1))).reward == 1.0
            await asyncio.to_thread(there.stop)
            await asyncio.to_thread(there.start, correct_at=0.5)
            outcome = await engine.score(sample(1), deadline_s=8)
            if may_change:
                assert outcome.reward == 1.0
                return
            assert outcome.label == "infra/other_judges"
            assert "judges_may_change" in outcome.detail
            # The former judges are welcome again.
            await asyncio.to_thread(there.stop)
            await asyncio.to_thread(there.start)
            assert (await engine.score(sample(1), deadline_s=12)).reward == 1.0


async def test_a_server_without_the_token(serving, remote, monkeypatch):
    with serving(token="right") as there:
        monkeypatch.setenv("REWARD_TOKEN", "right")
        async with RewardEngine(remote(there, token_env="REWARD_TOKEN")) as engine:
            assert (await engine.score(sample(1))).reward == 1.0
        for server in ({"token": "wrong-secret"}, {"start_s": 1}):
            with pytest.raises(ConfigurationError, match="it answered 401") as error:
                await asyncio.to_thread(RewardEngine, remote(there, **server))
            assert "wrong-secret" not in str(error.value)
            assert error.value.__context__ is None
        monkeypatch.delenv("REWARD_TOKEN")
        with pytest.raises(ConfigurationError, match="REWARD_TOKEN is not set"):
            RewardEngine(remote(there, token_env="REWARD_TOKEN"))


def test_no_server():
    with pytest.raises(ConfigurationError, match="cannot be reached"):
        RewardEngine({"engine": {"server": {"url": "http://127.0.0.1:9", "start_s": 0.1}}})


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"sources": {"a": {"kind": "http", "url": "http://h"}}}, "sources: the reward server of `engine.server` has"),
        ({"judges": {"a": {"kind": "llm"}}}, "judges: the reward server of `engine.server` has its own"),
        ({"routes": {"*": "a"}}, "routes: the reward server of `engine.server` has its own"),
        ({"engine": {"journal": {"path": "x"}}}, "engine.journal: the reward server of `engine.server` has its own"),
        ({"engine": {"max_attempts": 3}}, "engine.max_attempts: the reward server of `engine.server` has its own"),
        ({"engine": {"server": {"url": "http://h", "tokn": "abc"}}}, "unknown key"),
        ({"engine": {"server": "http://me:secret@h"}}, "a URL must not have credentials"),
        ({"engine": {"server": 3}}, "engine.server: must be"),
        ({"engine": {"server": ""}}, "engine.server: must be"),
        ({"engine": {"server": {}}}, "engine.server.url: the key is missing"),
        ({"engine": {"server": {"token_env": "X"}}}, "engine.server.url: the key is missing"),
    ],
)
def test_mistakes(tree, said):
    engine = {"server": "http://127.0.0.1:9", **tree.pop("engine", {})}
    with pytest.raises(ConfigurationError) as error:
        load_config({**tree, "engine": engine})
    assert said in str(error.value)
    assert "secret" not in str(error.value)
    assert len(error.value.mistakes) == 1


def test_the_tree_is_read_back():
    config = load_config({"engine": {"server": {"url": "http://h:1/", "token": "abc"}}, "on_failure": "raise"})
    assert "abc" not in repr(config)
    assert load_config(config) == config
    assert not config.sources
    assert not config.judges
    assert math.isfinite(config.engine.deadline_s)
