"""Answers the requests of the page: the trend of a run, a step, a sample, two judges compared, the audit, and the note
of new entries. The report is the trend and the audit in one file.

Only programs and browsers of this machine may ask, and a browser only for this address: a web page could read verdicts
otherwise. Texts of journals are foreign. They are escaped, also their control characters, and the pages run no script
and load nothing but the files of `static`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

from aiohttp import web
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ..errors import InputError, JournalError
from ..journal.audit import AuditFinding
from ..journal.live_sources import hold_source, live_sources
from ..journal.stories import Stories, deciding, judge_of, last_sent, lines_of, turns_of
from ..secrets import one_line
from ..server.access import Access
from ..server.forms import Refused
from . import charts
from .figures import Figures, audited, choice, comparison, name_of
from .samples import NO_REWARD, PAGE, SORTS, SampleFilter, histogram, page_of, sources_of, waits
from .totals import StepSummary, Totals

_T = TypeVar("_T")

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    # With `no-referrer`, browsers name no origin on the page's own buttons.
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
LOOK_EVERY_S = 1.0
"""Seconds between two looks for new entries, while a page is open."""
NO_STEP = "none"
"""Stands for the samples without a step in a URL."""
_LIST = ("source", "cause", "text", "low", "high", "sort", "down", "page")
"""Keys of a query that choose and order the samples of a step, beside those of `RunPage._chosen`."""
_LINE_CHARS = 400_000
_STATIC = Path(__file__).parent / "static"


class RunPage:
    """The page over the journals at `paths`. One thread reads them, and `Figures` does what takes seconds."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = list(paths)
        self._totals = Totals(paths)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="qreward-ui-reader")
        self._figures = Figures()
        self._access = Access(None, "127.0.0.1")
        templates = Environment(loader=PackageLoader(__package__), autoescape=True, undefined=StrictUndefined)
        templates.filters |= {
            "text": _text,
            "told": lambda body: "\n".join(lines_of(body)),
            "number": charts.shown,
            "seconds": "{:.2f} s".format,
        }
        templates.globals |= {"with_": _with, "files": self._paths, "figures": charts.FIGURES}
        self._templates = templates

    def application(self) -> web.Application:
        """The application, for an `aiohttp` runner."""
        app = web.Application(middlewares=[self._guarded])
        app.router.add_get("/", self._trend)
        app.router.add_get(r"/step/{step:none|-?\d{1,18}}", self._by_reader(self._step))
        app.router.add_get(r"/sample/{journal:\d{1,4}}/{row:\d{1,18}}", self._by_reader(self._sample))
        app.router.add_get("/compare", self._compare)
        app.router.add_get("/audit", self._audit)
        app.router.add_get("/sources", self._by_reader(self._sources))
        app.router.add_post("/sources/{change:hold|release}", self._by_reader(self._hold))
        app.router.add_get("/events", self._events)
        app.router.add_static("/static", _STATIC)
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, _: web.Application) -> None:
        await self._figures.aclose()
        await asyncio.to_thread(self._reader.shutdown, cancel_futures=True)

    async def load(self) -> int:
        """Read the journals; return the number of their entries. Raises `JournalError`."""
        await self._in_reader(self._load)
        return self._totals.entries

    def _load(self) -> None:
        for run, judge in self._judges():
            for split in self._totals.splits(run):
                # The summaries of a million entries take longer than a view may.
                self._totals.trend(run, split, judge)

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
        status, title, problem = 200, "", ""
        try:
            self._access.check(request)
            response: web.StreamResponse = await handler(request)
        except Refused as error:
            status, title, problem = error.status, "Refused", str(error)
        except JournalError as error:
            status, title, problem = 500, "The journal cannot be read", str(error)
        except web.HTTPException as error:
            status, title, problem = error.status, error.reason, error.text or ""
        if status != 200:
            response = self._page("problem.html", title=title, problem=problem, status=status)
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    async def _in_reader(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._reader, work)

    def _by_reader(self, answer: Callable[[web.Request], web.Response]) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.Response:
            return await self._in_reader(lambda: answer(request))

        return handle

    # Pages

    async def _trend(self, request: web.Request) -> web.Response:
        found = self._figures.last(self._totals.entries, audited, *self._paths)
        return await self._in_reader(lambda: self._trend_page(request.query, found))

    def _trend_page(self, query: Mapping[str, str], found: Mapping[str, Any] | None) -> web.Response:
        self._totals.refresh()
        chosen = self._chosen(query)
        if not chosen["run"]:
            return self._page("empty.html", title="No entries yet")
        steps = self._totals.trend(chosen["run"], chosen["split"], chosen["judge"], chosen["data"] or None)
        names = [NO_STEP if step.step is None else str(step.step) for step in steps]
        links = [f"/step/{name}?{urlencode(chosen)}" for name in names]
        alarms: list[AuditFinding] = []
        if found is not None and (chosen["run"], chosen["split"]) == (found["audited_run"], "train"):
            about = [each for each in found["findings"] if each.check == "models" or each.about == chosen["judge"]]
            alarms = [each for each in about if each.alarm]
        return self._page(
            "trend.html",
            alarms=alarms,
            title="Trend",
            chosen=chosen,
            options=self._options(chosen["run"]),
            steps=steps,
            rows=list(zip(names, links, steps, strict=True))[-10:][::-1],
            charts=charts.of_run(steps, names, links, _marks(steps, alarms)),
            entries=self._totals.entries,
        )

    def _step(self, request: web.Request) -> web.Response:
        name, query = request.match_info["step"], request.query
        self._totals.refresh()
        chosen = self._chosen(query)
        step = None if name == NO_STEP else int(name)
        summaries = self._totals.trend(chosen["run"], chosen["split"], chosen["judge"], chosen["data"] or None)
        places = [summary.step for summary in summaries]
        if step not in places:
            raise web.HTTPNotFound(text=f"no step {name} of this judge in run {chosen['run']}")
        place, (wanted, page) = places.index(step), _list(step, chosen, query)
        bins = histogram(self._paths, wanted)
        rows, count = page_of(self._paths, wanted, page)
        slowest = waits(self._paths, wanted)
        here = _here(chosen, query)
        every = {"low": "", "high": "", "page": ""}
        links = [
            _with(here, every if wanted.low == each.low else every | {"low": repr(each.low), "high": repr(each.high)})
            for each in bins
        ]
        names = [NO_STEP if each is None else str(each) for each in places]
        return self._page(
            "step.html",
            title=f"Step {name}",
            name=name,
            chosen=chosen,
            here=here,
            options=self._options(chosen["run"]) | {"sources": sources_of(self._paths, wanted)},
            summary=summaries[place],
            before=f"/step/{names[place - 1]}?{urlencode(chosen)}" if place else "",
            after=f"/step/{names[place + 1]}?{urlencode(chosen)}" if place + 1 < len(places) else "",
            histogram=charts.histogram(bins, links, wanted.low) if bins else "",
            waits=charts.waits([(f"/sample/{each.journal}/{each.id}{_with(here, {})}", each) for each in slowest]),
            no_reward=NO_REWARD,
            wanted=wanted,
            sorts=list(SORTS),
            rows=rows,
            count=count,
            page=page,
            pages=-(-count // PAGE),
            first=page * PAGE + 1,
        )

    def _sample(self, request: web.Request) -> web.Response:
        journal, row, query = int(request.match_info["journal"]), int(request.match_info["row"]), request.query
        if journal >= len(self._paths):
            raise web.HTTPNotFound(text="there is no such journal")
        path = self._paths[journal]
        with Stories(self._paths) as stories:
            story = stories.story(path, row)
        if story is None:
            raise web.HTTPNotFound(text=f"{path} has no row {row}")
        self._totals.refresh()
        first = story.sample
        numbers = {path: number for number, path in enumerate(self._paths)}
        own = next(entry for entry in story.entries if (entry.journal, entry.id) == (path, row))
        chosen = self._chosen({**query, "run": own.run_id or "", "split": own.split or "train", "judge": own.judge})
        here = _here(chosen, query)
        rows, _ = page_of(self._paths, *_list(own.step, chosen, query))
        order = [(each["journal"], each["id"]) for each in rows]
        place = order.index((journal, row)) if (journal, row) in order else None
        links = [f"/sample/{file}/{number}{_with(here, {})}" for file, number in order]
        siblings = sorted(
            (entry for entry in story.siblings if entry.judge == own.judge),
            key=lambda entry: (entry.reward is None, entry.reward or 0.0),
        )
        parts = [
            {
                "entry": entry,
                "judge": judge_of(entry, attempts),
                "components": json.loads(entry.components or "{}"),
                "attempts": attempts,
                "timeline": charts.attempts(attempts) if attempts else "",
                "sent": last_sent(attempts),
            }
            for entry, attempts in zip(story.entries, story.attempts, strict=True)
        ]
        return self._page(
            "sample.html",
            title=f"Sample {first.sample_id or first.id}",
            first=first,
            reward=deciding(story.entries)[-1].reward,
            prompt=turns_of(first.prompt),
            # What a judge made of its parts is recorded last, and read first.
            parts=parts if own.source or len(parts) == 1 else parts[::-1],
            siblings=[
                (entry, f"/sample/{numbers[entry.journal]}/{entry.id}{_with(here, {})}", entry.id == own.id)
                for entry in siblings
            ],
            judge=own.judge,
            trained={name: each._asdict() for name, each in story.trained.items()},
            back=f"/step/{NO_STEP if first.step is None else first.step}{_with(here, {})}",
            previous=links[place - 1] if place else "",
            following=links[place + 1] if place is not None and place + 1 < len(links) else "",
        )

    async def _compare(self, request: web.Request) -> web.Response:
        judges = {name_of(*judge): judge for judge in await self._in_reader(self._judges)}
        form = choice(list(judges.values()), request.query)
        found, is_computed = None, False
        if form["b"]:
            asked = (tuple(self._paths), judges[form["a"]], judges[form["b"]], form["at"])
            found, is_computed = await self._figures.of(self._totals.entries, comparison, *asked)
        return self._page("compare.html", title="Compare", **form, found=found, is_computed=is_computed)

    def _judges(self) -> list[tuple[str, str]]:
        """The runs and their judges."""
        self._totals.refresh()
        return [(run, judge) for run in self._totals.runs() for judge in self._totals.judges(run)]

    async def _audit(self, request: web.Request) -> web.Response:
        await self._in_reader(self._totals.refresh)
        found, is_computed = await self._figures.of(self._totals.entries, audited, *self._paths)
        return self._page("audit.html", title="Audit", found=found, is_computed=is_computed)

    def _sources(self, request: web.Request) -> web.Response:
        return self._page("sources.html", title="Sources", sources=live_sources(self._paths, time.time()))

    def _hold(self, request: web.Request) -> web.Response:
        held, name = request.match_info["change"] == "hold", request.query.get("name", "")
        try:
            hold_source(self._paths, name, time.time(), held=held)
        except InputError as error:
            raise web.HTTPNotFound(text=str(error)) from None
        return web.Response(status=303, headers={"Location": "/sources"})

    def report(self) -> str:
        """Return one page of HTML that needs no server: the trend of every judge of the latest run, and the audit.
        Blocks while it reads. Raises `JournalError`.
        """
        self._totals.refresh()
        chosen = self._chosen({})
        parts = []
        for split in self._totals.splits(chosen["run"]):
            for judge in self._totals.judges(chosen["run"]):
                steps = self._totals.trend(chosen["run"], split, judge)
                names = [NO_STEP if step.step is None else str(step.step) for step in steps]
                if steps:
                    made = charts.of_run(steps, names, ["#"] * len(steps), {})
                    parts.append({"split": split, "judge": judge, "steps": steps, "charts": made})
        css = Markup((_STATIC / "page.css").read_text())
        template = self._templates.get_template("report.html")
        return template.render(chosen=chosen, parts=parts, css=css, found=audited(*self._paths))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: the number of entries, whenever it has grown."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **HEADERS})
        await response.prepare(request)
        told = -1
        while True:
            await self._in_reader(self._totals.refresh)
            news = f"data: {self._totals.entries}\n\n" if self._totals.entries != told else ":\n\n"
            told = self._totals.entries
            try:
                # Without news, a comment: writing it fails once the browser has left.
                await response.write(news.encode())
            except ConnectionError:
                return response
            await asyncio.sleep(LOOK_EVERY_S)

    def _chosen(self, query: Mapping[str, str]) -> dict[str, str]:
        """The run, split, judge and data source of a request; by default where it names none that is there."""
        totals = self._totals
        run = _one_of(query.get("run"), totals.runs())
        split = _one_of(
            query.get("split"), ["train", *totals.splits(run)] if "train" in totals.splits(run) else totals.splits(run)
        )
        judge = _one_of(query.get("judge"), totals.judges(run))
        data = query.get("data", "")
        return {"run": run, "split": split, "judge": judge, "data": data if data in totals.data_sources(run) else ""}

    def _options(self, run: str) -> dict[str, list[str]]:
        totals = self._totals
        return {
            "runs": totals.runs(),
            "splits": totals.splits(run),
            "judges": totals.judges(run),
            "data_sources": totals.data_sources(run),
        }

    def _page(self, template: str, *, status: int = 200, **values: Any) -> web.Response:
        text = self._templates.get_template(template).render(values)
        return web.Response(text=text, content_type="text/html", status=status)


def _text(value: object) -> str:
    """Foreign text with its line breaks. Other control characters, and marks that turn text around, are escaped."""
    return "\n".join(one_line(line, _LINE_CHARS) for line in str(value).split("\n"))


def _with(query: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    """A query with changes, as the end of a URL; an empty value removes a key."""
    merged = {key: value for key, value in {**query, **changes}.items() if value not in ("", None)}
    return f"?{urlencode(merged)}"


def _here(chosen: Mapping[str, str], query: Mapping[str, str]) -> dict[str, str]:
    """The query that leads to the same samples in the same order."""
    return {**chosen, **{key: query[key] for key in _LIST if query.get(key)}}


def _list(step: int | None, chosen: Mapping[str, str], query: Mapping[str, str]) -> tuple[SampleFilter, int]:
    """The samples that a query asks for, and the page of them."""
    wanted = SampleFilter(
        *(chosen["run"], step, chosen["split"], chosen["judge"], chosen["data"]),
        *(query.get("source", ""), query.get("cause", ""), query.get("text", "")),
        *(_number(query.get("low"), float), _number(query.get("high"), float)),
        *(_one_of(query.get("sort"), list(SORTS)), query.get("down") == "1"),
    )
    return wanted, _number(query.get("page"), int) or 0


def _one_of(given: str | None, known: Sequence[str]) -> str:
    return given if given in known and given is not None else next(iter(known), "")


def _number(text: str | None, kind: Callable[[str], Any]) -> Any:
    """A number of a query; None for what is none, or not finite, or negative where an integer is wanted."""
    try:
        value = kind(text or "")
    except ValueError:
        return None
    if kind is int:
        return value if 0 <= value < 10**9 else None
    return value if abs(value) < float("inf") else None


def _marks(steps: Sequence[StepSummary], alarms: Sequence[AuditFinding]) -> dict[int, str]:
    """The alarms, and new weights of the judges, at each step, by its place."""
    marks: dict[int, list[str]] = {}
    seen: set[str] = set()
    for place, each in enumerate(steps):
        found = [alarm.check for alarm in alarms if alarm.step is not None and alarm.step == each.step]
        found += [f"weights {one_line(version, 20)}" for version in sorted(each.weights - seen) if seen]
        seen |= each.weights
        if found:
            marks[place] = found
    return {place: ", ".join(found) for place, found in marks.items()}
