"""`qreward ui`: what the page says of a journal, who may open it, and foreign text that stays text."""

from __future__ import annotations

import asyncio
import html
import json
import multiprocessing
import os
import re
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from html.parser import HTMLParser
from urllib.parse import urlencode

import aiohttp
import pytest
from aiohttp import web

from qreward_plugins.errors import JournalError
from qreward_plugins.journal import Journal, Trained, TrainingLog
from qreward_plugins.samples import Cause, Failed, Sample, Scored, Verdict
from qreward_plugins.samples.spent import NO_USAGE, Spent, Usage
from qreward_plugins.scheduling.history import PastAttempt
from qreward_plugins.sources.base import Request
from qreward_plugins.ui import figures, pages, samples
from qreward_plugins.ui.figures import Figures
from qreward_plugins.ui.pages import RunPage

PAYLOADS = [
    "<script>alert(1)</script>",
    '"><svg onload=alert(1)>',
    "</pre></section><a href='javascript:alert(1)'>click</a>",
    "{{ 7 * 7 }}{% for x in () %}",
    "<style>*{display:none}</style><link rel=stylesheet href=//evil.example>",
    "\x1b[2J\u202eright to left\u2066\u0000",
]


class Elements(HTMLParser):
    """The elements of a page, with what could run or load something."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.links, self.handlers = set(), [], [], []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        attributes = dict(attrs)
        self.handlers += [name for name in attributes if name.startswith("on") or name == "style"]
        self.scripts += [attributes.get("src")] if tag == "script" else []
        self.links += [attributes[name] for name in ("href", "action") if attributes.get(name)]

    def handle_data(self, data):
        self.text += data


@asynccontextmanager
async def opened(*paths):
    """A client of the page over these journals."""
    page = RunPage([str(path) for path in paths])
    await page.load()
    runner = web.AppRunner(page.application(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            yield client
    finally:
        await runner.cleanup()


def read(*paths, urls):
    """The status and the text of each of these URLs."""

    async def main():
        async with opened(*paths) as client:
            return [await whole(client, url) for url in urls]

    return asyncio.run(main())


async def whole(client, url):
    """The status and the text of a page, once nothing of it is being computed."""
    while True:
        # Each answer waits for a while itself.
        async with client.get(url) as answer:
            text = await answer.text()
        if 'aria-busy="true"' not in text:
            return answer.status, text


def write(path, *entries, run_id="run", **options):
    """Record (step, number, outcome, fields of the sample) in a journal."""

    async def main():
        book = Journal(path, run_id=run_id, keep="all", **options)
        for step, number, outcome, fields in entries:
            given = {"response": f"response {number}", "group_id": f"g{number // 2}", "data_source": "math", **fields}
            question = [{"role": "user", "content": f"question {number}"}]
            await book.put(None, Sample(question, step=step, split="train", id=f"s{number}", **given), outcome)
        await book.aclose()

    asyncio.run(main())


def scored(score, **fields):
    spent = Spent(1, Usage(100, 20), latency_s=1.5, cost_usd=0.25)
    return Scored(
        Verdict(score, **{"judge": "quality", "source": "a", "rationale": "because", "spent": spent, **fields})
    )


FAILED = Failed(Cause.INFRA, "deadline", "it took too long", judge="quality", spent=Spent(2, latency_s=9.0))


@pytest.fixture
def path(tmp_path):
    """Two steps: one of four samples in two groups, and one of eight, of which one failed."""
    path = tmp_path / "journal.sqlite"
    first = [(1, number, scored(score), {}) for number, score in enumerate((0.5, 0.5, 0.0, 1.0))]
    second = [(2, number, scored(number / 10), {"data_source": "code"}) for number in range(1, 8)]
    write(path, *first, *second, (2, 8, FAILED, {}))
    log = TrainingLog(str(path), run_id="run")
    log.add(
        [Trained(f"s{number}", f"g{number // 2}", 2, number / 10, number - 4.0, number == 8) for number in range(1, 9)]
    )
    log.flush()
    return path


def test_the_trend_has_each_step_with_its_numbers(path):
    ((status, text),) = read(path, urls=["/"])
    page = Elements(text)
    assert status == 200
    assert "quality: 2 steps" in page.text
    rows = [line.split("<td") for line in text.splitlines() if line.startswith("<tr><td><a")]
    cells = [[Elements(f"<td{cell}").text.strip() for cell in row[2:]] for row in rows]
    # samples, mean, p10, p50, p90, no reward, floors, flat groups, p95
    assert cells == [
        ["8", "0.4", "0.1", "0.4", "0.7", "1", "0", "0", "9.00 s"],
        ["4", "0.5", "0", "0.5", "1", "0", "0", "0.5", "1.50 s"],
    ]
    assert any(link.startswith("/step/2?run=run&split=train&judge=quality") for link in page.links)
    assert "US dollars a step" in page.text
    ((_, text),) = read(path, urls=["/?data=code"])
    assert "quality: 1 step" in Elements(text).text


@pytest.mark.parametrize(
    ("query", "numbers"),
    [
        ("", [8, 1, 2, 3, 4, 5, 6, 7]),
        ("?down=1", [8, 7, 6, 5, 4, 3, 2, 1]),
        ("?sort=advantage&down=1", [8, 7, 6, 5, 4, 3, 2, 1]),
        ("?sort=row", [1, 2, 3, 4, 5, 6, 7, 8]),
        ("?cause=infra", [8]),
        ("?cause=any%2C+without+a+reward", [8]),
        ("?cause=floor", []),
        ("?data=code&source=a", [1, 2, 3, 4, 5, 6, 7]),
        ("?text=s3", [3]),
        ("?text=too+long", [8]),
        ("?low=0.25&high=0.45", [3, 4]),
        ("?low=nan&high=x&page=-1&sort=drop+table", [8, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_the_samples_of_a_step_are_found_filtered_and_sorted(path, query, numbers):
    ((status, text),) = read(path, urls=[f"/step/2{query}"])
    assert status == 200
    found = [cell.partition("<")[0] for cell in text.split('<td class="cut">s')[1:]]
    assert [int(number) for number in found] == numbers
    assert ("No sample is like this" in text) == (not numbers)


def test_a_bar_of_the_histogram_shows_its_samples(path):
    ((_, text),) = read(path, urls=["/step/2"])
    bars = [link for link in Elements(text).links if "low=" in link]
    assert len(bars) == samples.BINS
    ((_, text),) = read(path, urls=[f"/step/2{bars[-1]}"])
    assert [cell.partition("<")[0] for cell in text.split('<td class="cut">s')[1:]] == ["7"], "the highest reward, too"


def test_equal_rewards_are_one_bar_and_none_are_no_histogram(tmp_path):
    path = tmp_path / "journal.sqlite"
    write(path, *[(1, number, scored(1.0), {}) for number in range(4)], *[(2, 9, FAILED, {})])
    (_, equal), (_, none) = read(path, urls=["/step/1", "/step/2"])
    assert equal.count('class="bar"') == 2, "the bar, and the form"
    assert "1 to 1: 4" in equal
    assert "<h2>Rewards</h2>" not in none
    assert 'href="?run=run&amp;split=train&amp;judge=quality&amp;cause=any%2C+without+a+reward"' in none


def test_a_long_table_has_pages(path, monkeypatch):
    monkeypatch.setattr(samples, "PAGE", 3)
    monkeypatch.setattr(pages, "PAGE", 3)
    answers = read(path, urls=[f"/step/2?sort=row&page={page}" for page in range(4)])
    found = [[cell.partition("<")[0] for cell in text.split('<td class="cut">s')[1:]] for _, text in answers]
    assert found == [["1", "2", "3"], ["4", "5", "6"], ["7", "8"], []]
    assert "4 to 6 of 8 samples" in answers[1][1]


def test_a_sample_has_its_texts_its_group_and_its_advantage(path):
    with closing(sqlite3.connect(path)) as connection:
        rows = dict(connection.execute("SELECT sample_id, id FROM outcomes WHERE step = 2"))
    (status, text), (_, failed) = read(path, urls=[f"/sample/0/{rows['s5']}", f"/sample/0/{rows['s8']}"])
    page = Elements(text)
    assert status == 200
    for part in ("Sample s5 · reward 0.5", "response 5", "question 5", "got 0.5, advantage 1", "because", "100 + 20"):
        assert part in page.text
    assert f"/sample/0/{rows['s4']}" in {link.partition("?")[0] for link in page.links}, "its sibling"
    assert "no reward" in failed
    assert "infra/deadline: it took too long" in failed
    assert "left it out" in failed


def test_a_sample_leads_to_those_before_and_after_it_in_the_list_that_led_to_it(path):
    """By its reward among the samples of one source, from the highest on: 7 to 1."""
    query = "?run=run&split=train&judge=quality&source=a&low=0.15&high=0.65&sort=reward&down=1"
    ((_, step),) = read(path, urls=[f"/step/2{query}"])
    listed = [link for link in Elements(step.partition('id="rows"')[2]).links if link.startswith("/sample/")]
    assert len(listed) == 5
    answers = read(path, urls=listed)
    found = [re.findall(r'<a id="(back|previous|next)" href="([^"]*)"', html.unescape(text)) for _, text in answers]
    ways = [dict(links) for links in found]
    assert [way["back"] for way in ways] == [f"/step/2{query}"] * 5
    assert [way.get("previous") for way in ways] == [None, *listed[:-1]]
    assert [way.get("next") for way in ways] == [*listed[1:], None]
    # One that the list does not have is shown all the same.
    ((status, text),) = read(path, urls=[listed[0].replace("low=0.15", "low=0.65")])
    assert status == 200
    assert 'id="next"' not in text
    assert "low=0.65" in text


def test_a_step_shows_what_it_waited_for(path):
    """The failed sample took longest, and all ended at about the same time: it was submitted first."""
    ((_, text),) = read(path, urls=["/step/2?judge=quality"])
    chart = html.unescape(text.partition("What the step waited for")[2].partition("</figure>")[0])
    lanes = re.findall(r"<title>(s\d): ([\d.]+) s, (\d) attempts</title><rect class=\"before\" x=\"([\d.]+)\"", chart)
    assert sorted(name for name, *_ in lanes) == [f"s{number}" for number in range(1, 9)]
    ends = {name: (took, float(x)) for name, took, _, x in lanes}
    assert ends["s8"] == ("9.00", min(x for _, x in ends.values()))
    assert {took for name, (took, _) in ends.items() if name != "s8"} == {"1.50"}
    ((_, cached),) = read(path, urls=["/step/2?low=5&high=6"])
    assert "What the step waited for" not in cached


def test_two_judges_are_compared_on_the_same_samples(path, tmp_path):
    ((status, alone),) = read(path, urls=["/compare"])
    assert (status, "There is one judge in one run" in alone) == (200, True)
    again = tmp_path / "again.sqlite"
    scores = {number: (1 - number / 10 if number > 5 else number / 10) for number in range(1, 8)}
    write(again, *((2, number, scored(score, rationale="now"), {}) for number, score in scores.items()), run_id="again")
    names = {"a": "quality in run", "b": "quality in again"}
    urls = [f"/compare?{urlencode({**names, 'at': at})}" for at in ("0.5", "nan", "x")]
    answers = read(path, again, urls=[*urls, f"/compare?{urlencode({'a': 'none', 'b': names['b']})}"])
    assert [status for status, _ in answers] == [200] * 4
    page = Elements(answers[0][1])
    text = " ".join(page.text.split())
    assert "7 samples with a reward in both" in text
    assert "Without a reward: 1 in A, 0 in B. 2 change sides at 0.5: 2 fall below it, 0 rise to it." in text
    assert "mean of B - A-0.0857" in text
    assert "0.70.3s7becausenow 0.60.4s6becausenow" in text
    linked = [link for link in page.links if link.startswith("/sample/")]
    assert [link.partition("?")[0] for link in linked[:2]] == ["/sample/0/11", "/sample/1/7"]
    assert [status for status, _ in read(path, again, urls=linked)] == [200] * 4
    assert answers[1][1].count("mean of A") == answers[2][1].count("mean of A") == 1
    write(tmp_path / "other.sqlite", (7, 1, scored(1.0), {}), run_id="other")
    ((_, apart),) = read(path, tmp_path / "other.sqlite", urls=["/compare?b=quality+in+other"])
    assert "no sample has a reward in both" in apart


def test_the_audit_is_a_page(path, tmp_path):
    ((_, text),) = read(path, urls=["/audit"])
    rows = re.findall(r"<tr><td>(\w+)</td>", text)
    assert rows == ["length", "component", "groups", "phrases"]
    write(tmp_path / "none.sqlite", (1, 1, FAILED, {}))
    ((status, none),) = read(tmp_path / "none.sqlite", urls=["/audit"])
    assert (status, "no training sample has a reward" in none) == (200, True)


def test_what_takes_seconds_is_computed_aside_and_shown_later(path, monkeypatch):
    """The first answer comes at once. Later ones show the last figures until there are newer ones."""
    may_end = threading.Event()
    monkeypatch.setattr(figures, "REST", 0.0)
    monkeypatch.setattr(figures, "process_pool", ThreadPoolExecutor)
    for name in ("comparison", "audited"):
        function = getattr(pages, name)
        monkeypatch.setattr(pages, name, lambda *given, function=function: may_end.wait(60) and function(*given))
    write(path, *((2, number, scored(1.0, judge="other"), {}) for number in range(1, 8)))

    async def main():
        async with opened(path) as client:
            urls = ("/compare", "/audit")
            early = [await (await client.get(url)).text() for url in urls]
            may_end.set()
            early += [(await whole(client, url))[1] for url in urls]
            may_end.clear()
            await asyncio.to_thread(write, path, (2, 8, scored(1.0), {}), (2, 8, scored(1.0, judge="other"), {}))
            stale = await (await client.get("/compare")).text()
            may_end.set()
            return *early, stale, (await whole(client, "/compare"))[1]

    compare, audit, compared, audited, stale, fresh = asyncio.run(main())
    for first in (compare, audit):
        assert "This is being computed" in first
        assert "<table" not in first
    assert "7 samples with a reward in both" in compared
    assert "<table" in audited
    assert "this is being computed again" in stale
    assert "7 samples with a reward in both" in stale
    assert "8 samples with a reward in both" in fresh


def test_a_computation_that_is_killed_is_said_and_the_next_one_works(path, monkeypatch):
    monkeypatch.setattr(figures, "WAIT_S", 60.0)
    os.mkfifo(fifo := str(path.parent / "kill"))

    async def main():
        kept = Figures()
        assert kept.last(1, open, fifo) is None
        (process,) = multiprocessing.active_children()
        process.kill()
        with pytest.raises(JournalError, match="the process that computes this died"):
            await kept.of(1, open, fifo)
        again = await kept.of(1, len, "abc")
        kept.last(1, open, fifo)
        await kept.aclose()
        return again

    assert asyncio.run(main()) == (3, False)
    assert multiprocessing.active_children() == [], "although one of them was busy"


def test_a_killed_page_leaves_no_process(tmp_path):
    os.mkfifo(fifo := str(tmp_path / "busy"))
    program = f"""
import asyncio, os
from qreward_plugins.ui.figures import Figures
async def main():
    Figures().last(1, open, {fifo!r})
    open({fifo!r}, "w")
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    # It returns when nobody has its output open any more.
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert ended.returncode == -9


def test_several_journals_are_one_run(tmp_path):
    for name, score in (("a", 0.25), ("b", 0.75)):
        write(tmp_path / f"{name}.sqlite", *[(1, number + 4 * (name == "b"), scored(score), {}) for number in range(4)])
    paths = [tmp_path / "a.sqlite", tmp_path / "b.sqlite"]
    (_, trend), (_, step), (status, sample) = read(*paths, urls=["/", "/step/1?sort=reward&down=1", "/sample/1/1"])
    assert '<td class="num">8</td><td class="num">0.5</td>' in trend
    assert [cell.partition("<")[0] for cell in step.split('<td class="cut">s')[1:]] == list("45670123")
    assert (status, "Sample s4" in sample) == (200, True)


def test_new_entries_are_told_of_while_a_run_writes(path):
    async def main():
        async with opened(path) as client, client.get("/events") as events:
            told = [await events.content.readline()]
            await events.content.readline()
            await asyncio.to_thread(write, path, (3, 9, scored(1.0), {}))
            told.append(await events.content.readline())
            later = await (await client.get("/")).text()
            return told, later

    told, later = asyncio.run(main())
    assert told == [b"data: 12\n", b"data: 13\n"]
    assert "quality: 3 steps" in later


@pytest.mark.parametrize("payload", PAYLOADS)
def test_foreign_text_is_text_wherever_it_comes_from(tmp_path, payload):
    path = tmp_path / "journal.sqlite"
    verdict = scored(0.5, judge=payload, source=payload, model=payload, rationale=payload, components={payload: 1.0})
    failed = Failed(Cause.VERDICT, payload, payload, judge=payload, source=payload, spent=Spent(1))
    fields = {"response": payload, "ground_truth": payload, "group_id": payload, "data_source": payload}

    async def main():
        book = Journal(path, run_id=payload, keep="all")
        for number, outcome in enumerate((verdict, failed)):
            sample = Sample([{"role": payload, "content": payload}], step=1, id=f"{payload}{number}", **fields)
            await book.put(None, sample, outcome)
        await book.aclose()

    asyncio.run(main())
    urls = ["/", "/step/1", "/sample/0/1", "/sample/0/2", f"/step/{payload[:5]}", "/compare", "/audit"]
    for status, text in read(path, urls=urls):
        page = Elements(text)
        assert status in (200, 404)
        assert page.scripts == ["/static/page.js"]
        assert page.handlers == []
        assert not page.tags & {"img", "iframe", "style", "base", "object", "embed"}
        assert {link[0] for link in page.links} <= {"/", "?", "#"}
        assert not any(character in page.text for character in "\x1b\u202e\u2066\x00")
        assert "49" not in page.text or "{{" not in payload


def test_no_answer_lets_a_browser_run_or_load_anything_else(path):
    async def main():
        async with opened(path) as client:
            return [
                await client.get(url)
                for url in ("/", "/step/1", "/compare", "/audit", "/step/9", "/sample/0/1", "/static/page.js", "/none")
            ]

    answers = asyncio.run(main())
    assert [answer.status for answer in answers] == [200, 200, 200, 200, 404, 200, 200, 404]
    for answer in answers:
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'self'; frame-ancestors 'none'")
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    ],
)
def test_a_web_page_reads_nothing(path, headers):
    async def main():
        async with opened(path) as client:
            answer = await client.get("/sample/0/1", headers=headers)
            return answer.status, await answer.text()

    status, text = asyncio.run(main())
    assert (status, "response" in text) == (403, False)


def test_what_is_not_there(path, tmp_path):
    urls = ["/step/7", "/step/none", "/sample/0/99", "/sample/9/1", f"/sample/0/{2**70}", "/step/--5", "/static/"]
    answers = read(path, urls=urls)
    assert [status for status, _ in answers] == [404] * 6 + [403]
    assert "no step 7 of this judge in run run" in answers[0][1]
    write(tmp_path / "empty.sqlite")
    assert "No entries yet" in read(tmp_path / "empty.sqlite", urls=["/"])[0][1]


def test_rewards_that_differ_by_their_rounding_only_are_drawn(tmp_path):
    rewards = [(1, 0, scored(0.97), {}), *[(2, number, scored(0.97), {}) for number in range(1, 18)]]
    write(tmp_path / "journal.sqlite", *rewards)
    ((status, text),) = read(tmp_path / "journal.sqlite", urls=["/"])
    assert (status, "quality: 2 steps" in text) == (200, True)


def test_who_listens_no_more_costs_nothing(path, monkeypatch):
    monkeypatch.setattr(pages, "LOOK_EVERY_S", 0.01)

    async def main():
        async with opened(path) as client:
            before = asyncio.all_tasks()
            for _ in range(5):
                async with aiohttp.ClientSession() as other:
                    answer = await other.get(f"{client._base_url}/events")
                    await answer.content.readline()
                    answer.close()
            await asyncio.wait(asyncio.all_tasks() - before)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_journal_that_breaks_is_said(path):
    async def main():
        async with opened(path) as client:
            with closing(sqlite3.connect(path)) as connection, connection:
                connection.execute("DROP TABLE outcomes")
            answer = await client.get("/")
            return answer.status, await answer.text()

    status, text = asyncio.run(main())
    assert (status, "is damaged; move it away" in text) == (500, True)


def live(path, *, state="up", learned=""):
    """Write what a process of a run that goes on writes of its sources."""
    told = dict.fromkeys(("in_flight", "waiting", "requests", "answered", "throttled", "transient"), 3)
    told |= {"permanent": 0, "invalid": 0, "cost_usd": 0.5, "concurrency": 8, "requests_per_minute": None}
    told |= {
        "by_program": False,
        "latency_p50_s": 1.5,
        "latency_p95_s": None,
        "state": state,
        "problem": "",
        "learned": learned,
    }
    with closing(sqlite3.connect(path)) as connection, connection:
        row = ("run", 1, "a & b", time.time(), json.dumps(told))
        connection.execute("INSERT OR REPLACE INTO live VALUES (?, ?, ?, ?, ?)", row)


def test_the_sources_of_a_run_that_goes_on_can_be_held(path):
    assert "No run is under way" in read(path, urls=["/sources"])[0][1]
    live(path, learned="<b>at most 5</b>")
    ((status, text),) = read(path, urls=["/sources"])
    row = re.findall(r"<td[^>]*>(.*?)</td>", text, re.S)
    assert status == 200
    assert [row[place] for place in (0, 1, 3, 5, 6, 10, 11)] == ["a &amp; b", "up", "3", "8", "-", "1.5", "-"]
    assert "&lt;b&gt;at most 5" in text

    async def press(name, **headers):
        async with opened(path) as client:
            action = re.search(r'action="([^"]*)"', await (await client.get("/sources")).text())[1]
            # Without it, browsers send `Origin: null` from the page's own buttons.
            assert (await client.get("/sources")).headers["Referrer-Policy"] == "same-origin"
            answer = await client.post(name or html.unescape(action), headers=headers)
            return answer.status, "Release" in await answer.text()

    def held():
        with closing(sqlite3.connect(path)) as connection:
            return connection.execute("SELECT * FROM holds").fetchall()

    assert asyncio.run(press("", Origin="http://evil.example")) == (403, False)
    assert asyncio.run(press("", **{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"})) == (403, False)
    assert asyncio.run(press("/sources/hold?name=c")) == (404, False)
    assert held() == []
    assert asyncio.run(press("")) == (200, True)
    assert held() == [("run", "a & b")]
    assert asyncio.run(press("")) == (200, False)
    assert held() == []


def test_alarms_of_the_audit_are_on_the_trend_at_their_step(tmp_path):
    path = tmp_path / "journal.sqlite"
    models = [(step, step, scored(0.5, model="m" if step < 4 else "n"), {}) for step in range(1, 7)]
    write(path, *models)

    async def main():
        async with opened(path) as client:
            await whole(client, "/audit")
            return [await (await client.get(url)).text() for url in ("/", "/?split=val")]

    text, _ = asyncio.run(main())
    assert "Alarm from step 4: models of a: m, then n." in text
    lines = re.findall(r'<line class="mark" x1="([\d.]+)"', text)
    slots = re.findall(r'<title>step (\d+): [^<]*</title><rect class="slot" x="([\d.]+)"', text)
    assert set(lines) == {dict(slots)["4"]}
    assert f"Run run is in {path}." in text


def test_new_weights_of_a_judge_are_on_the_trend_at_their_first_step(tmp_path):
    path = tmp_path / "journal.sqlite"
    versions = {1: "7", 2: "7", 3: "<8>", 4: "<8>", 5: "7+9"}
    write(path, *((step, step, scored(0.5, weight_version=version), {}) for step, version in versions.items()))
    ((_, text),) = read(path, urls=["/"])
    slots = dict(re.findall(r'<title>step (\d+): [^<]*</title><rect class="slot" x="([\d.]+)"', text))
    lines = re.findall(r'<line class="mark" x1="([\d.]+)"', text)
    assert set(lines) == {slots["3"], slots["5"]}
    assert set(re.findall(r'<text class="mark"[^>]*>([^<]*)<', text)) == {"weights &lt;8&gt;", "weights 9"}


def test_what_was_sent_and_an_error_are_shown_line_by_line_and_byte_for_byte(tmp_path):
    path = tmp_path / "journal.sqlite"
    body = '{"model":"m","messages":[{"role":"user","content":"one\\ntwo <b>"}],"max_tokens":5}'
    said = '{"error": "<i>overloaded</i>"}'
    sample = Sample([{"role": "user", "content": "?"}], "r", step=1, split="train", id="s")
    attempt = PastAttempt("a", 0.0, 0.1, 1.0, "failed", False, "503", NO_USAGE, 0.0, Request(sample), None, said)
    attempt.written = lambda: body

    async def main():
        book = Journal(path, keep="all")
        await book.put(None, sample, scored(0.5), [attempt])
        await book.aclose()

    asyncio.run(main())
    ((status, text),) = read(path, urls=["/sample/0/1"])
    quoted = [html.unescape(each) for each in re.findall(r"<pre[^>]*>(.*?)</pre>", text, re.S)]
    told = "model: m\nmessages:\n- role: user\n  content: |\n    one\n    two <b>\nmax_tokens: 5"
    assert (status, {body, told, said} - set(quoted)) == (200, set()), quoted
