"""Reloads that one process sends to the others: in what order, to whom, and what never travels."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
import yaml
from office import Office, a_source, limits, samples

from qreward_plugins import RewardEngine
from qreward_plugins.config import load_config
from qreward_plugins.config.origin import Origin, origin_of, with_origin
from qreward_plugins.config.written_text import NotSendable, as_text, check_sendable
from qreward_plugins.engine import relay
from qreward_plugins.server.limits import LimitsDoor
from qreward_plugins.sharing.messages import Report, Revision
from qreward_plugins.sharing.revisions import MOST_LINEAGES, Revisions
from qreward_plugins.sharing.wire import dump, write_report
from qreward_plugins.simulation import run

LONG_S = 4.0
"""Longer than the keeper holds a report."""


def tree(deadline_s=100.0, per_window=None, **node):
    node = {"kind": "openai", "base_url": "http://localhost", "model": "judge", "limits": limits(per_window), **node}
    return {
        "sources": {"a": node},
        "judges": {"quality": {"kind": "llm", "score_range": [0, 1]}},
        "engine": {"seed": 7, "reload": True, "deadline_s": deadline_s, "scheduling": {"hedge": False}},
    }


class Told:
    def __init__(self):
        self.changes = asyncio.Queue()

    async def __call__(self, file):
        while True:
            yield await self.changes.get()


class Node:
    """A process with a view of its own on the file: `see` is what its file system shows it."""

    def __init__(self, office, folder, name, text, *, over=None):
        # Every process names the file alike, and reads another one.
        self.real = folder / f"{name}.yaml"
        self.real.write_text(yaml.safe_dump(text))
        self.engine = RewardEngine(self._config(over), sources={"a": a_source()}, channel=office.line())
        self.told = self.engine._reloader._watch = Told()

    def _config(self, over):
        config = load_config({**yaml.safe_load(self.real.read_text()), **(over or {})})
        node = self

        class View(Origin):
            def read_tree(self):
                return yaml.safe_load(node.real.read_text())

            def read_as(self, tree):
                return with_origin(self._read(tree), View(self.file, self._read, tree))

        return with_origin(
            config, View("/job/judges.yaml", lambda tree: load_config({**tree, **(over or {})}), view(self.real))
        )

    async def see(self, text):
        self.real.write_text(yaml.safe_dump(text))
        self.told.changes.put_nowait(None)
        for _ in range(5):
            await asyncio.sleep(0)

    @property
    def deadline_s(self):
        return self.engine.config.engine.deadline_s


def view(file):
    return yaml.safe_load(file.read_text())


def play(tmp_path, main, *texts, **options):
    """`main(office, *nodes)`: a process for each text, which have scored one sample."""

    async def runs():
        office = Office()
        nodes = [Node(office, tmp_path, str(number), text, **options) for number, text in enumerate(texts)]
        try:
            for number, node in enumerate(nodes):
                await node.engine.score_all(samples(1, number))
            await main(office, *nodes)
        finally:
            for node in nodes:
                await node.engine.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return office

    return run(runs())


def deadlines(*nodes):
    return [node.deadline_s for node in nodes]


def test_a_process_that_does_not_see_the_file_changes_with_the_one_that_does(tmp_path, caplog):
    caplog.set_level(logging.INFO, "qreward_plugins")

    async def main(office, one, two, three):
        await one.see(tree(200.0))
        await asyncio.sleep(1.0)
        assert deadlines(one, two, three) == [200.0] * 3
        at = len(office.reports)
        await asyncio.sleep(30.0)
        # No echo: a report at the end of each hold, and nothing more.
        assert len(office.reports) - at <= 3 * 11
        assert all(report.revision.text is None for _, report in office.reports[at:])

    play(tmp_path, main, tree(), tree(), tree())
    said = [line for line in caplog.messages if "was reloaded" in line]
    assert sum("from another process: engine.deadline_s: 100 -> 200" in line for line in said) == 2
    assert len(said) == 3


def test_the_lower_limit_counts_until_all_have_changed(tmp_path):
    async def main(office, one, two):
        await one.see(tree(per_window=40))
        quotas = [node.engine.upstreams["a"].quota for node in (one, two)]
        for _ in range(100):
            declared = {quota.limits()["requests"][0] for quota in quotas}
            assert sum(quota.share["requests"] for quota in quotas) <= min(declared) + 1e-6
            await asyncio.sleep(0.05)
        assert declared == {40.0}
        assert sum(quota.share["requests"] for quota in quotas) > 20

    play(tmp_path, main, tree(per_window=20), tree(per_window=20))


def test_own_overrides_stay_and_are_not_sent(tmp_path):
    async def main(office, one, two):
        await one.see(tree(200.0) | {"judges": {"other": {"kind": "llm", "score_range": [0, 1]}}})
        await asyncio.sleep(1.0)
        for node in (one, two):
            assert set(node.engine.config.judges) == {"quality"}
        assert deadlines(one, two) == [200.0, 200.0]

    play(tmp_path, main, tree(), tree(), over={"judges": {"quality": {"kind": "llm", "score_range": [0, 1]}}})


def test_a_process_that_cannot_follow_refuses_with_one_line(tmp_path, caplog):
    async def main(office, one, two):
        two.engine._wiring.config = two.engine.config.model_copy(
            update={"engine": two.engine.config.engine.model_copy(update={"seed": 8})}
        )
        await one.see(tree(200.0))
        await asyncio.sleep(LONG_S * 3)
        assert deadlines(one, two) == [200.0, 100.0]
        await one.see(tree(300.0))
        await asyncio.sleep(1.0)

    play(tmp_path, main, tree(), tree())
    refused = [line for line in caplog.messages if "was not reloaded from another process" in line]
    assert len(refused) == 2
    assert "engine.seed: this change needs a restart" in refused[0]


def test_of_two_changes_at_once_the_newer_wins_and_all_agree(tmp_path):
    async def main(office, one, two, three):
        await one.see(tree(200.0))
        await two.see(tree(300.0))
        await asyncio.sleep(2.0)
        assert len(set(deadlines(one, two, three))) == 1
        before = deadlines(one)
        at = len(office.reports)
        await asyncio.sleep(30.0)
        assert deadlines(one, two, three) == before * 3
        assert len(office.reports) - at <= 3 * 11

    play(tmp_path, main, tree(), tree(), tree())


def test_a_file_that_is_seen_late_changes_nothing_back(tmp_path):
    async def main(office, one, two):
        history = []

        async def look():
            while True:
                history.append(one.deadline_s)
                await asyncio.sleep(0.05)

        looking = asyncio.ensure_future(look())
        await one.see(tree(200.0))
        await asyncio.sleep(1.0)
        await one.see(tree(300.0))
        await asyncio.sleep(1.0)
        assert deadlines(one, two) == [300.0, 300.0]
        # Its file system is slow.
        await two.see(tree(200.0))
        await asyncio.sleep(1.0)
        await two.see(tree(300.0))
        await asyncio.sleep(20.0)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        assert deadlines(one, two) == [300.0, 300.0]
        assert list(dict.fromkeys(history)) == [100.0, 200.0, 300.0]

    play(tmp_path, main, tree(), tree())


def test_a_change_that_is_taken_back_is_taken_back_everywhere(tmp_path):
    async def main(office, one, two):
        await one.see(tree(200.0))
        await one.see(tree(100.0))
        await asyncio.sleep(2.0)
        assert deadlines(one, two) == [100.0, 100.0]
        await one.see(tree(200.0))
        await asyncio.sleep(2.0)
        assert deadlines(one, two) == [200.0, 200.0]
        # By the other one, whose file has really gone back: after a while it counts.
        await two.see(tree(100.0))
        await asyncio.sleep(relay.LATE_S + 2.0)
        assert deadlines(one, two) == [100.0, 100.0]

    play(tmp_path, main, tree(), tree())


def test_one_that_joins_later_with_an_old_file_gets_the_newest(tmp_path):
    async def main(office, one, two):
        for deadline_s in (200.0, 300.0):
            await one.see(tree(deadline_s))
            await asyncio.sleep(1.0)
        late = Node(office, tmp_path, "late", tree(100.0))
        other = Node(office, tmp_path, "other", tree(50.0))
        try:
            for node in (late, other):
                await node.engine.score_all(samples(1, 9))
            await asyncio.sleep(1.0)
            # A text that none of them has gone by may be newer, and is left alone.
            assert deadlines(late, other) == [300.0, 50.0]
        finally:
            await late.engine.aclose()
            await other.engine.aclose()

    play(tmp_path, main, tree(), tree())


@pytest.mark.parametrize("wait_s", [0.0, 0.26, 2.0], ids=["at-once", "soon", "confirmed"])
def test_a_keeper_that_dies_in_the_middle(tmp_path, wait_s):
    async def main(office, one, two, three):
        await one.see(tree(200.0))
        await asyncio.sleep(wait_s)
        office.replace()
        await asyncio.sleep(20.0)
        assert deadlines(one, two, three) == [200.0] * 3
        await two.see(tree(300.0))
        await asyncio.sleep(LONG_S)
        assert deadlines(one, two, three) == [300.0] * 3

    play(tmp_path, main, tree(), tree(), tree())


def test_both_sides_need_reload(tmp_path):
    async def main(office, one, two):
        await one.see(tree(200.0))
        await asyncio.sleep(LONG_S)
        assert deadlines(one, two) == [200.0, 100.0]
        assert {report.revision for _, report in office.sent_by(two.engine)} == {None}

    off = tree()
    off["engine"]["reload"] = False
    play(tmp_path, main, tree(), off)


def test_reload_is_turned_off_everywhere(tmp_path):
    off = tree(200.0)
    off["engine"]["reload"] = False

    async def main(office, one, two):
        await one.see(off)
        await asyncio.sleep(LONG_S)
        assert deadlines(one, two) == [200.0, 200.0]
        await asyncio.sleep(LONG_S)
        assert office.reports[-1][1].revision is None

    play(tmp_path, main, tree(), tree())


def test_secrets_do_not_travel(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("RELAY_KEY", "sk-resolved-secret")

    async def main(office, one, two):
        await one.see(tree(200.0, api_key="${oc.env:RELAY_KEY}", headers={"X-Key": "Bearer ${oc.env:RELAY_KEY}"}))
        await asyncio.sleep(1.0)
        assert deadlines(one, two) == [200.0, 200.0]
        assert two.engine.config.sources["a"].api_key.get_secret_value() == "sk-resolved-secret"
        await one.see(tree(300.0, api_key="sk-literal-secret"))
        await asyncio.sleep(LONG_S)
        assert deadlines(one, two) == [300.0, 200.0]
        # The next file without one is relayed again.
        await one.see(tree(400.0, api_key="${oc.env:RELAY_KEY}"))
        await asyncio.sleep(1.0)
        assert deadlines(one, two) == [400.0, 400.0]

    office = play(tmp_path, main, tree(), tree())
    sent = "".join(json.dumps(write_report(report)) for _, report in office.reports)
    assert "${oc.env:RELAY_KEY}" in sent
    assert "secret" not in sent
    (line,) = [line for line in caplog.messages if "not relayed" in line]
    assert "sources.a.api_key may hold a secret that is written in the file" in line
    assert "sk-" not in caplog.text


@pytest.mark.parametrize(
    "node",
    [
        {"api_key": "sk-literal-secret"},
        {"api_keys": ["${oc.env:RELAY_KEY}", "sk-literal-secret"]},
        {"api_key": "${oc.env:RELAY_KEY,sk-literal-secret}"},
        {"api_key": "sk-${oc.env:RELAY_KEY}"},
        {"headers": {"X-Team": "sk-literal-secret"}},
        {"client": "httpx", "httpx": {"proxy": "http://user:sk-literal-secret@proxy:80"}},
        {"parameters": {"user_token": "sk-literal-secret"}},
        {"parameters": {"auth": {"deep": ["sk-literal-secret"]}}},
        {"parameters": {"pin": 12345678}},
        {"parameters": {"user": "${oc.env:A_TOKEN,sk-literal-secret}"}},
        {"api_key": "${oc.env:RELAY_KEY}", "parameters": {"note": "sk-resolved-secret"}},
        {"api_key": "${sources.a.model}"},
    ],
    ids=repr,
)
def test_a_file_that_holds_a_secret_is_not_sent(tmp_path, monkeypatch, node):
    monkeypatch.setenv("RELAY_KEY", "sk-resolved-secret")
    monkeypatch.delenv("A_TOKEN", raising=False)
    for wrapped in (False, True):
        written = tree(**node)
        file = tmp_path / "judges.yaml"
        file.write_text(yaml.safe_dump({"qreward": written} if wrapped and "${s" not in repr(node) else written))
        config = load_config(file)
        with pytest.raises(NotSendable) as raised:
            check_sendable(origin_of(config).tree, config)
        assert "sk-" not in str(raised.value)


@pytest.mark.parametrize(
    "node",
    [
        {"api_key": "${oc.env:RELAY_KEY}"},
        {"api_key_env": "RELAY_KEY"},
        {"headers": {"Authorization": "Bearer ${oc.env:RELAY_KEY}"}},
        {"parameters": {"max_tokens": 9, "stop_token": "x", "auth_timeout": 30, "user": "${oc.env:TEAM,one}"}},
        {"parameters": {"user_token": "${oc.env:RELAY_KEY}"}},
    ],
    ids=repr,
)
def test_a_file_without_secrets_is_sent_without_its_comments(tmp_path, monkeypatch, node):
    monkeypatch.setenv("RELAY_KEY", "sk-resolved-secret")
    file = tmp_path / "judges.yaml"
    file.write_text("# the old key was sk-comment\n" + yaml.safe_dump(tree(**node)))
    config = load_config(file)
    check_sendable(origin_of(config).tree, config)
    text = as_text(origin_of(config).tree)
    assert "sk-" not in text
    assert json.loads(text) == tree(**node)


def test_names_of_criteria_are_no_names_of_secrets(tmp_path):
    file = tmp_path / "judges.yaml"
    written = tree()
    written["judges"]["quality"]["criteria"] = {"key_points": "It names the key points.", "token": "One token."}
    file.write_text(yaml.safe_dump(written))
    config = load_config(file)
    check_sendable(origin_of(config).tree, config)


def test_a_large_file_is_not_relayed(tmp_path, caplog):
    async def main(office, one, two):
        large = tree(200.0)
        large["judges"]["quality"]["instructions"] = "x" * 300_000
        await one.see(large)
        await asyncio.sleep(LONG_S)
        assert deadlines(one, two) == [200.0, 100.0]

    play(tmp_path, main, tree(), tree())
    assert "is larger than 256 KiB" in caplog.text


# The order of the keeper


def state(digest, version=0, before=(), change=0, received="", *, text=True):
    return Revision(digest, version, tuple(before), change, f"text of {digest}" if text else None, received)


def test_a_report_that_is_sent_twice_counts_once():
    keeper = Revisions()
    keeper.report("a", state("1", text=False))
    keeper.report("b", state("1", text=False))
    keeper.report("a", state("2", before=["1"], change=1))
    keeper.report("b", state("3", before=["1"], change=1))
    assert keeper.answer("b").version == 2
    # Its answer was lost, so it sends the change again.
    keeper.report("a", state("2", before=["1"], change=1))
    said = keeper.answer("a")
    assert (said.digest, said.version, said.text) == ("3", 2, "text of 3")


def test_a_change_to_a_state_that_is_known_as_earlier_is_stale_unless_it_follows_the_newest():
    keeper = Revisions()
    keeper.report("b", state("1", text=False))
    keeper.report("a", state("2", before=["1"], change=1))
    keeper.report("a", state("3", 1, before=["1", "2"], change=2))
    keeper.report("b", state("2", before=["1"], change=1))
    assert (keeper.answer("b").digest, keeper.answer("b").change) == ("3", 1)
    keeper.report("b", state("3", 2, before=["1", "2"], received="3", text=False))
    keeper.report("b", state("2", 2, before=["1", "3"], change=2))
    assert (keeper.answer("b").digest, keeper.answer("b").version) == ("2", 3)


def test_two_keepers_that_gave_the_same_number_twice():
    keeper = Revisions()
    keeper.report("a", state("2", 1, before=["1"]))
    keeper.report("b", state("3", 1, before=["1"]))
    assert keeper.answer("b").text == "text of 2"


def test_what_nobody_uses_is_forgotten():
    keeper = Revisions()
    for number in range(2 * MOST_LINEAGES):
        keeper.report(f"w{number}", state(f"{number}", change=1, before=["old"]))
    keeper.report("late", state("old", text=False))
    assert len(keeper._lineages) <= MOST_LINEAGES
    for worker in list(keeper._of):
        keeper.forget(worker)
    assert not keeper._lineages
    assert not keeper._ordered
    keeper.report("later", state("old", text=False))
    assert keeper.answer("later") is None


def test_a_worker_that_refused_is_not_asked_again():
    keeper = Revisions()
    keeper.report("b", state("1", text=False))
    assert set(keeper.report("a", state("2", before=["1"], change=1))) == {"a", "b"}
    assert keeper.report("b", state("1", received="2", text=False)) == []
    assert keeper.answer("b").text is None


class Recording:
    def __init__(self):
        self.reports = []

    async def exchange(self, report):
        self.reports.append(report)


def test_a_client_of_a_reward_server_changes_nobody(monkeypatch):
    """A configuration may name code to load."""
    recording = Recording()
    monkeypatch.setattr("qreward_plugins.server.limits.open_channel", lambda settings, relays: recording)
    report = Report("w", 1, {}, revision=state("2", 0, ["1"], 1))
    asyncio.run(LimitsDoor(None).answer(dump({"report": write_report(report)})))
    assert recording.reports == [report._replace(revision=None)]
