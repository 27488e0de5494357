"""`qreward ui`: what the page says of a journal, who may open it, and foreign text that stays text."""

from __future__ import annotations

import asyncio
import html
import multiprocessing
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from urllib.parse import urlencode

import aiohttp
import pytest
from aiohttp import web

from qreward_plugins.errors import JournalError
from qreward_plugins.journal import Trained, TrainingLog
from qreward_plugins.samples import Cause, Failed, Sample, Scored, Verdict
from qreward_plugins.samples.spent import Spent, Usage
from qreward_plugins.system.processes import process_pool
from qreward_plugins.ui import figures, pages, samples
from qreward_plugins.ui.figures import Figures
from qreward_plugins.ui.pages import RunPage

from ..kit import record, sql, write_live

PAYLOADS = [
    "<script>alert(1)</script>",
    '"><svg onload=alert(1)>',
    "</pre></section><a href='javascript:alert(1)'>click</a>",
    "{{ 271828 * 3 }}{% for x in () %}",
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


def using(main, *paths):
    """What `main(client)` returns of the page over these journals."""

    async def opens():
        page = RunPage([str(path) for path in paths])
        await page.load()
        runner = web.AppRunner(page.application(), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
                return await main(client)
        finally:
            await runner.cleanup()

    return asyncio.run(opens())


def read(*paths, urls):
    """The status and the text of each of these URLs."""

    async def main(client):
        return [await whole(client, url) for url in urls]

    return using(main, *paths)


def listed(text):
    """The numbers of the samples in the table of a step."""
    return [int(cell.partition("<")[0]) for cell in text.split('<td class="cut">s')[1:]]


async def whole(client, url):
    """The status and the text of a page, once nothing of it is being computed."""
    while True:
        # Each answer waits for a while itself.
        async with client.get(url) as answer:
            text = await answer.text()
        if 'aria-busy="true"' not in text:
            return answer.status, text


def write(path, *entries, run_id="run"):
    """Record (step, number, outcome, fields of the sample) in a journal."""
    samples = []
    for step, number, outcome, fields in entries:
        given = {"response": f"response {number}", "group_id": f"g{number // 2}", "data_source": "math", **fields}
        question = [{"role": "user", "content": f"question {number}"}]
        samples.append((Sample(question, step=step, split="train", id=f"s{number}", **given), outcome))
    record(path, samples, run_id=run_id, keep="all")


def scored(score, **fields):
    spent = Spent(1, Usage(100, 20), latency_s=1.5, cost_usd=0.25)
    told = {"judge": "quality", "source": "a", "rationale": "because", "spent": spent, **fields}
    return Scored(Verdict(score, **told))


FAILED = Failed(Cause.INFRA, "deadline", "it took too long", judge="quality", spent=Spent(2, latency_s=9.0))


@pytest.fixture(autouse=True)
def aside(monkeypatch):
    """What takes seconds is computed in threads, where no test is about the processes."""
    monkeypatch.setattr(figures, "process_pool", ThreadPoolExecutor)


@pytest.fixture
def path(tmp_path):
    """Two steps: one of four samples in two groups, and one of eight, of which one failed."""
    path = tmp_path / "journal.sqlite"
    first = [(1, number, scored(score), {}) for number, score in enumerate((0.5, 0.5, 0.0, 1.0))]
    second = [(2, number, scored(number / 10), {"data_source": "code"}) for number in range(1, 8)]
    write(path, *first, *second, (2, 8, FAILED, {}))
    log = TrainingLog(str(path), run_id="run")
    log.add([Trained(f"s{n}", f"g{n // 2}", 2, n / 10, n - 4.0, n == 8) for n in range(1, 9)])
    log.flush()
    return path


def test_the_trend_has_each_step_with_its_numbers(path):
    ((status, text),) = read(path, urls=["/"])
    page = Elements(text)
    assert status == 200
    assert "quality: 2 steps" in page.text
    rows = [line.split("<td") for line in text.splitlines() if line.startswith("<tr><td><a")]
    cells = [[Elements(f"<td{cell}").text.strip() for cell in row[2:]] for row in rows]
    assert cells == [
        ["8", "0.4", "0.1", "0.4", "0.7", "1", "0", "0", "9.00 s"],
        ["4", "0.5", "0", "0.5", "1", "0", "0", "0.5", "1.50 s"],
    ]
    assert any(link.startswith("/step/2?run=run&split=train&judge=quality") for link in page.links)
    assert "US dollars a step" in page.text


FOUND = {
    "": [8, 1, 2, 3, 4, 5, 6, 7],
    "?sort=advantage&down=1": [8, 7, 6, 5, 4, 3, 2, 1],
    "?cause=any%2C+without+a+reward": [8],
    "?cause=floor": [],
    "?data=code&source=a": [1, 2, 3, 4, 5, 6, 7],
    "?text=s3": [3],
    "?text=too+long": [8],
    "?low=0.25&high=0.45": [3, 4],
    "?low=nan&high=x&page=-1&sort=drop+table": [8, 1, 2, 3, 4, 5, 6, 7],
}


def test_the_samples_of_a_step_are_found_filtered_and_sorted(path, monkeypatch):
    answers = read(path, urls=[f"/step/2{query}" for query in FOUND])
    for (status, text), numbers in zip(answers, FOUND.values(), strict=True):
        assert (status, listed(text)) == (200, numbers)
        assert ("No sample is like this" in text) == (not numbers)
    for module in (samples, pages):
        monkeypatch.setattr(module, "PAGE", 3)
    answers = read(path, urls=[f"/step/2?sort=row&page={page}" for page in range(4)])
    assert [listed(text) for _, text in answers] == [[1, 2, 3], [4, 5, 6], [7, 8], []]
    assert "4 to 6 of 8 samples" in answers[1][1]


def test_a_bar_of_the_histogram_shows_its_samples(path, tmp_path):
    ((_, text),) = read(path, urls=["/step/2"])
    bars = [link for link in Elements(text).links if "low=" in link]
    assert len(bars) == samples.BINS
    ((_, text),) = read(path, urls=[f"/step/2{bars[-1]}"])
    assert listed(text) == [7], "the highest reward, too"
    # Equal rewards are one bar, and none are no histogram.
    other = tmp_path / "other.sqlite"
    write(other, *[(1, n, scored(0.97), {}) for n in range(18)], (2, 99, FAILED, {}))
    (_, equal), (_, none) = read(other, urls=["/step/1", "/step/2"])
    assert "0.97 to 0.97: 18" in equal
    assert "<h2>Rewards</h2>" not in none


def test_a_sample_has_its_texts_its_group_and_its_advantage(path):
    rows = dict(sql(path, "SELECT sample_id, id FROM outcomes WHERE step = 2"))
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
    links = [link for link in Elements(step.partition('id="rows"')[2]).links if link.startswith("/sample/")]
    assert len(links) == 5
    answers = read(path, urls=links)
    found = [re.findall(r'<a id="(back|previous|next)" href="([^"]*)"', html.unescape(text)) for _, text in answers]
    ways = [dict(each) for each in found]
    assert [way["back"] for way in ways] == [f"/step/2{query}"] * 5
    assert [way.get("previous") for way in ways] == [None, *links[:-1]]
    assert [way.get("next") for way in ways] == [*links[1:], None]


def test_a_step_shows_what_it_waited_for(path):
    """The failed sample took longest, and all ended at about the same time: it was submitted first."""
    ((_, text),) = read(path, urls=["/step/2?judge=quality"])
    chart = html.unescape(text.partition("What the step waited for")[2].partition("</figure>")[0])
    lanes = re.findall(r"<title>(s\d): ([\d.]+) s, (\d) attempts</title><rect class=\"before\" x=\"([\d.]+)\"", chart)
    assert sorted(name for name, *_ in lanes) == [f"s{number}" for number in range(1, 9)]
    ends = {name: (took, float(x)) for name, took, _, x in lanes}
    assert ends["s8"] == ("9.00", min(x for _, x in ends.values()))
    assert {took for name, (took, _) in ends.items() if name != "s8"} == {"1.50"}


def test_two_judges_are_compared_on_the_same_samples(path, tmp_path):
    ((status, alone),) = read(path, urls=["/compare"])
    assert (status, "There is one judge in one run" in alone) == (200, True)
    again, names = tmp_path / "again.sqlite", {"a": "quality in run", "b": "quality in again"}
    scores = {number: (1 - number / 10 if number > 5 else number / 10) for number in range(1, 8)}
    write(again, *((2, number, scored(score, rationale="now"), {}) for number, score in scores.items()), run_id="again")
    write(again, (7, 1, scored(1.0), {}), run_id="other")
    urls = [f"/compare?{urlencode({**names, 'at': at})}" for at in ("0.5", "nan", "x")]
    urls += [f"/compare?{urlencode({'a': 'none', 'b': names['b']})}", "/compare?b=quality+in+other"]
    (_, text), (_, nan), (_, x), _, (_, apart) = answers = read(path, again, urls=urls)
    assert [status for status, _ in answers] == [200] * 5
    page = Elements(text)
    text = " ".join(page.text.split())
    assert "7 samples with a reward in both" in text
    assert "Without a reward: 1 in A, 0 in B. 2 change sides at 0.5: 2 fall below it, 0 rise to it." in text
    assert "mean of B - A-0.0857" in text
    assert "0.70.3s7becausenow 0.60.4s6becausenow" in text
    linked = [link for link in page.links if link.startswith("/sample/")]
    assert [link.partition("?")[0] for link in linked[:2]] == ["/sample/0/11", "/sample/1/7"]
    assert [status for status, _ in read(path, again, urls=linked)] == [200] * 4
    assert nan.count("mean of A") == x.count("mean of A") == 1
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
    for name in ("comparison", "audited"):
        function = getattr(pages, name)
        monkeypatch.setattr(pages, name, lambda *given, function=function: may_end.wait(60) and function(*given))
    write(path, *((2, number, scored(1.0, judge="other"), {}) for number in range(1, 8)))

    async def main(client):
        urls = ("/compare", "/audit")
        found = [await (await client.get(url)).text() for url in urls]
        may_end.set()
        found += [(await whole(client, url))[1] for url in urls]
        may_end.clear()
        await asyncio.to_thread(write, path, (2, 8, scored(1.0), {}), (2, 8, scored(1.0, judge="other"), {}))
        found.append(await (await client.get("/compare")).text())
        may_end.set()
        return *found, (await whole(client, "/compare"))[1]

    compare, audit, compared, audited, stale, fresh = using(main, path)
    for first in (compare, audit):
        assert ("This is being computed" in first, "<table" in first) == (True, False)
    assert "7 samples with a reward in both" in compared
    assert "<table" in audited
    assert "this is being computed again" in stale
    assert "7 samples with a reward in both" in stale
    assert "8 samples with a reward in both" in fresh


@pytest.mark.anyio
async def test_a_computation_that_is_killed_is_said_and_the_next_one_works(path, monkeypatch):
    monkeypatch.setattr(figures, "WAIT_S", 60.0)
    monkeypatch.setattr(figures, "process_pool", lambda _: process_pool(1))
    os.mkfifo(fifo := str(path.parent / "kill"))
    kept = Figures()
    assert kept.last(1, open, fifo) is None
    (process,) = multiprocessing.active_children()
    process.kill()
    with pytest.raises(JournalError, match="the process that computes this died"):
        await kept.of(1, open, fifo)
    again, _ = await kept.of(1, figures.audited, str(path))
    kept.last(1, open, fifo)
    await kept.aclose()
    assert again["audited_run"] == "run"
    assert multiprocessing.active_children() == [], "although one of them was busy"


def test_new_entries_are_told_of_while_a_run_writes(path):
    async def main(client):
        async with client.get("/events") as events:
            told = [await events.content.readline()]
            await events.content.readline()
            await asyncio.to_thread(write, path, (3, 9, scored(1.0), {}), (1, 9, scored(1.0), {}))
            told.append(await events.content.readline())
            return told, (await whole(client, "/"))[1]

    told, later = using(main, path)
    assert told == [b"data: 12\n", b"data: 14\n"]
    assert "quality: 3 steps" in later
    assert '<td class="num">5</td><td class="num">0.6</td>' in later, "of step 1"


def test_foreign_text_is_text_wherever_it_comes_from(tmp_path):
    path, payload = tmp_path / "journal.sqlite", " ".join(PAYLOADS)
    verdict = scored(0.5, judge=payload, source=payload, model=payload, rationale=payload, components={payload: 1.0})
    failed = Failed(Cause.VERDICT, payload, payload, judge=payload, source=payload, spent=Spent(1))
    fields = {"response": payload, "ground_truth": payload, "group_id": payload, "data_source": payload}
    question = [{"role": payload, "content": payload}]
    outcomes = {f"{payload}0": verdict, f"{payload}1": failed}
    samples = [(Sample(question, step=1, id=name, **fields), each) for name, each in outcomes.items()]
    record(path, samples, run_id=payload, keep="all")
    urls = ["/", "/step/1", "/sample/0/1", "/sample/0/2", "/step/<scr", "/compare", "/audit"]
    for status, text in read(path, urls=urls):
        page = Elements(text)
        assert status in (200, 404)
        assert page.scripts == ["/static/page.js"]
        assert page.handlers == []
        assert not page.tags & {"img", "iframe", "style", "base", "object", "embed"}
        assert {link[0] for link in page.links} <= {"/", "?", "#"}
        assert not any(character in page.text for character in "\x1b\u202e\u2066\x00")
        assert "815484" not in page.text


MISSING = ["/step/7", "/step/none", "/sample/0/99", "/sample/9/1", f"/sample/0/{2**70}", "/step/--5", "/none"]
CROSS_SITE = {"Sec-Fetch-Site": "cross-site"}
FOREIGN = [{"Host": "evil.example"}, {"Origin": "https://evil.example"}, {**CROSS_SITE, "Sec-Fetch-Mode": "no-cors"}]


def test_no_answer_lets_a_browser_run_or_load_anything_else_and_a_web_page_reads_nothing(path, tmp_path):
    there = ["/", "/step/1", "/compare", "/audit", "/sample/0/1", "/static/page.js"]

    async def main(client):
        answers = [await client.get(url) for url in (*there, *MISSING, "/static/")]
        refused = [await client.get("/sample/0/1", headers=headers) for headers in FOREIGN]
        return answers, await answers[6].text(), [(each.status, "response" in await each.text()) for each in refused]

    answers, missing, refused = using(main, path)
    assert [answer.status for answer in answers] == [200] * 6 + [404] * 7 + [403]
    for answer in answers[:-1]:
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'self'; frame-ancestors 'none'")
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert refused == [(403, False)] * 3
    assert "no step 7 of this judge in run run" in missing
    write(tmp_path / "empty.sqlite")
    assert "No entries yet" in read(tmp_path / "empty.sqlite", urls=["/"])[0][1]


def test_a_journal_that_breaks_is_said(path):
    async def main(client):
        sql(path, "DROP TABLE outcomes")
        return await whole(client, "/")

    status, text = using(main, path)
    assert (status, "is damaged; move it away" in text) == (500, True)


def test_the_sources_of_a_run_that_goes_on_can_be_held(path):
    assert "No run is under way" in read(path, urls=["/sources"])[0][1]
    write_live(path, "run", 1, "a & b", learned="<b>at most 5</b>")
    ((status, text),) = read(path, urls=["/sources"])
    row = re.findall(r"<td[^>]*>(.*?)</td>", text, re.S)
    assert status == 200
    assert [row[place] for place in (0, 1, 3, 5, 6, 10, 11)] == ["a &amp; b", "up", "3", "8", "-", "1.5", "-"]
    assert "&lt;b&gt;at most 5" in text

    async def press(client, name="", **headers):
        async with client.get("/sources") as sources:
            # Without it, browsers send `Origin: null` from the page's own buttons.
            assert sources.headers["Referrer-Policy"] == "same-origin"
            action = re.search(r'action="([^"]*)"', await sources.text())[1]
        answer = await client.post(name or html.unescape(action), headers=headers)
        return answer.status, "Release" in await answer.text(), sql(path, "SELECT * FROM holds")

    async def main(client):
        assert await press(client, Origin="http://evil.example") == (403, False, [])
        assert await press(client, **CROSS_SITE, **{"Sec-Fetch-Mode": "navigate"}) == (403, False, [])
        assert await press(client, "/sources/hold?name=c") == (404, False, [])
        assert await press(client) == (200, True, [("run", "a & b")])
        assert await press(client) == (200, False, [])

    using(main, path)


def marked(text):
    """The steps at which a line of the trend stands, and what it says."""
    slots = re.findall(r'<title>step (\d+): [^<]*</title><rect class="slot" x="([\d.]+)"', text)
    steps = {x: step for step, x in slots}
    lines = re.findall(r'<line class="mark" x1="([\d.]+)"', text)
    return {steps[x] for x in lines}, set(re.findall(r'<text class="mark"[^>]*>([^<]*)<', text))


def test_alarms_and_new_weights_are_on_the_trend_at_their_step(tmp_path):
    path, other = tmp_path / "a.sqlite", tmp_path / "b.sqlite"
    write(path, *[(step, step, scored(0.5, model="m" if step < 4 else "n"), {}) for step in range(1, 7)])
    (_, _), (_, text) = read(path, urls=["/audit", "/"])
    assert "Alarm from step 4: models of a: m, then n." in text
    assert marked(text)[0] == {"4"}
    versions = {1: "7", 2: "7", 3: "<8>", 4: "<8>", 5: "7+9"}
    write(other, *((step, step, scored(0.5, weight_version=version), {}) for step, version in versions.items()))
    ((_, text),) = read(other, urls=["/"])
    assert marked(text) == ({"3", "5"}, {"weights &lt;8&gt;", "weights 9"})
