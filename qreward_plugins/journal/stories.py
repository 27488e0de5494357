"""Reads the whole story of a sample from journals: who judged it, what was sent, what was replied, and its siblings.

A sample has an entry for each judge that asked about it. They are found by the sample's id, its step and its run. An
answer that came from the journal has no attempts of its own: they are those of the entry that was recorded first.
"""

from __future__ import annotations

import itertools
import json
import os
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from ..errors import InputError, JournalError
from ..samples.check import text_of
from ..secrets import one_line
from .database import is_journal, reading
from .entries import COLUMNS, Entry, Trained
from .texts import restored

LOOKED_AT = 20_000
"""Most entries of a journal, the latest or the worst, among which samples are chosen."""

NOT_KEPT = "(this text is not kept any more)"


_COLUMNS = ", ".join(["id", *COLUMNS])
_REWARD = "coalesce(score, floor)"
_TEXTS = ("request", "reply", "thinking", "said")
_PLACE = "step, split, coalesce(sample_id, id)"
"""What tells the samples of a run apart."""


@dataclass(frozen=True)
class Story:
    """A sample: its entries in the order of writing, the attempts of each, and the entries of its siblings."""

    entries: tuple[Entry, ...]
    attempts: tuple[tuple[Mapping[str, Any], ...], ...]
    """Of each entry, its attempts as in the column `history`, with texts in place of hashes. If an equal question was
    asked for it, the attempts of that."""
    siblings: tuple[Entry, ...]
    """The entries of all samples of its group, its own included; empty if it has no group."""
    trained: Mapping[str, Trained]
    """What the trainer made of the samples of its group, or of itself, by their ids; empty if that is not recorded."""

    @property
    def sample(self) -> Entry:
        """An entry that has the sample's texts, if one does: each judge keeps them or not."""
        return next((entry for entry in self.entries if entry.prompt is not None), self.entries[0])


@dataclass(frozen=True)
class Wanted:
    """Which samples to find. None is no condition. `worst`: the lowest rewards first, of the latest step if no step and
    no sample is named.
    """

    sample: str | None = None
    row: int | None = None
    step: int | None = None
    failed: bool = False
    worst: bool = False


def journals_in(paths: Sequence[str]) -> list[str]:
    """Return the journals at these paths: files, and all journals of this version in directories.

    Raises `JournalError` for a path without any.
    """
    found: list[str] = []
    for path in paths:
        if not os.path.isdir(path):
            if not os.path.isfile(path):
                raise JournalError(f"there is no journal at {path}; engine.journal.path names the one of a run")
            found.append(path)
            continue
        files = [entry.path for entry in os.scandir(path) if entry.is_file() and is_journal(entry.path)]
        if not files:
            raise JournalError(f"there is no journal in the directory {path}")
        found += sorted(files)
    return found


class Stories:
    """Reads stories from open journals. Use it as a context manager.

    Raises `JournalError` for a file that is no journal of this version, or that cannot be read.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = journals_in(paths)
        self._open = ExitStack()
        self._connections: dict[str, sqlite3.Connection] = {}

    def __enter__(self) -> Stories:
        with ExitStack() as opened:
            for path in self._paths:
                self._connections[path] = opened.enter_context(reading(path))
            self._open = opened.pop_all()
        return self

    def __exit__(self, *raised: Any) -> bool | None:
        # `reading` explains errors of SQLite.
        return self._open.__exit__(*raised)

    def find(self, wanted: Wanted, most: int) -> tuple[list[Story], int]:
        """Return the stories of at most `most` samples, and how many there are among the entries that are looked at.
        The latest come first, or the worst.
        """
        found: dict[tuple[Any, ...], tuple[str, int]] = {}
        whole = self._with_wholes(wanted) if wanted.failed or wanted.worst else set()
        for *_, path, number, run_id, step, split, sample_id, source in sorted(
            self._ranked(wanted), key=lambda row: row[:4]
        ):
            if source and (run_id, step, split, sample_id) in whole:
                continue  # a part that failed or scored low, and the sample has the reward of the whole
            found.setdefault((run_id, step, split, sample_id or (path, number)), (path, number))
        chosen = itertools.islice(found.values(), most)
        stories = [self.story(path, number) for path, number in chosen]
        return [story for story in stories if story is not None], len(found)

    def count(self, where: str) -> int:
        """How many samples have an entry that is `where`, a condition of SQL. Raises `InputError` for another text."""
        query = f"SELECT count(*) FROM (SELECT 1 FROM outcomes WHERE ({where}\n) GROUP BY {_PLACE})"
        try:
            return sum(self._value(path, query, []) for path in self._paths)
        except (sqlite3.Error, UnicodeError) as error:
            told = one_line(where, 200)
            raise InputError(f"{told!r} is no condition: {error}; docs/journal.md has the columns") from None

    def every(self, where: str, *, latest: bool = False) -> Iterator[Story]:
        """Yield the stories of all samples that have an entry which is `where`, a condition of SQL, by step and id;
        without siblings. A sample of several runs has a story in each, or with `latest` in the last one only.

        Entries under one id that have other responses are other samples.
        """
        for path, connection in self._connections.items():
            query = f"SELECT ({where}\n), {_COLUMNS} FROM outcomes ORDER BY {_PLACE}, id"
            rows = ((Entry(*(*row[1:], path)), row[0]) for row in connection.execute(query))
            for _, group in itertools.groupby(rows, lambda row: _place(row[0])):
                for entries in _samples(list(group), latest=latest):
                    first = entries[0]
                    yield self._story(entries, (), {first.sample_id})

    def _ranked(self, wanted: Wanted) -> Iterator[tuple[Any, ...]]:
        """The entries that are wanted: what they are ordered by, and what tells their sample from others."""
        where, values = _where(wanted)
        order = f"{_REWARD}, -id" if wanted.worst else "-recorded_at, -id"
        if wanted.worst and wanted.step is None and wanted.sample is None:
            steps = [self._value(path, f"SELECT max(step) FROM outcomes WHERE {where}", values) for path in self._paths]
            latest = max((step for step in steps if step is not None), default=None)
            where, values = f"{where} AND step IS ?", [*values, latest]
        columns = f"{order}, id, run_id, step, split, sample_id, source"
        for path, connection in self._connections.items():
            query = f"SELECT {columns} FROM outcomes WHERE {where} ORDER BY {order} LIMIT {LOOKED_AT}"
            yield from ((*row[:2], path, *row[2:]) for row in connection.execute(query, values))

    def _with_wholes(self, wanted: Wanted) -> set[tuple[Any, ...]]:
        """The samples with an entry of a judge that asks other judges."""
        where, values = ("step = ?", [wanted.step]) if wanted.step is not None else ("1", [])
        query = f"SELECT run_id, step, split, sample_id FROM outcomes WHERE source = '' AND {where}"
        return {row for connection in self._connections.values() for row in connection.execute(query, values)}

    def _value(self, path: str, query: str, values: Sequence[Any]) -> Any:
        return self._connections[path].execute(query, values).fetchone()[0]

    def story(self, path: str, row: int) -> Story | None:
        """Return the story of the sample of a row of one of the journals; None if there is no such row."""
        entry = next(self._select("id = ?", [row], path), None)
        if entry is None:
            return None
        of_sample = "run_id = ? AND step IS ? AND split IS ? AND "
        place = [entry.run_id, entry.step, entry.split]
        if entry.sample_id is None:
            entries = [entry]
        else:
            entries = list(self._select(f"{of_sample} sample_id = ? ORDER BY id", [*place, entry.sample_id]))
        siblings: list[Entry] = []
        if entry.group_id is not None:
            siblings = list(self._select(f"{of_sample} group_id = ? ORDER BY id", [*place, entry.group_id]))
        names = {each.sample_id for each in siblings or entries}
        return self._story(entries, siblings, names)

    def _story(self, entries: Sequence[Entry], siblings: Sequence[Entry], names: set[str | None]) -> Story:
        """The story of entries. `names`: the samples whose advantages it reads."""
        first = entries[0]
        return Story(
            tuple(map(self._with_texts, entries)),
            tuple(tuple(self._attempts(each)) for each in entries),
            tuple(siblings),
            {} if first.split == "val" else self._trained(first, names - {None}),
        )

    def _trained(self, entry: Entry, names: set[str | None]) -> dict[str, Trained]:
        where = f"run_id = ? AND sample_id IN ({', '.join('?' * len(names))}) ORDER BY recorded_at"
        found = {}
        for connection in self._connections.values():
            columns = ", ".join(Trained._fields)
            for row in connection.execute(f"SELECT {columns} FROM trained WHERE {where}", [entry.run_id, *names]):
                trained = Trained._make((*row[:-1], bool(row[-1])))
                if entry.step is None or trained.step is None or entry.step == trained.step:
                    found[trained.sample_id] = trained
        return found

    def _select(self, where: str, values: Sequence[Any], only: str | None = None) -> Iterator[Entry]:
        """Read entries, of all journals or `only` one."""
        for path in self._paths if only is None else [only]:
            for row in self._connections[path].execute(f"SELECT {_COLUMNS} FROM outcomes WHERE {where}", values):
                yield Entry(*(*row, path))

    def _attempts(self, entry: Entry) -> Iterator[Mapping[str, Any]]:
        if entry.history is None and entry.key is not None:
            # The journal answered, or an equal question was under way.
            asked = "key = ? AND cached = 0 AND outcome = 'scored' AND history IS NOT NULL ORDER BY abs(id - ?) LIMIT 1"
            entry = next(self._select(asked, [entry.key, entry.id], entry.journal), entry)
        for attempt in json.loads(entry.history or "[]"):
            told: dict[str, Any] = {
                name: self._text(entry, each) if name in _TEXTS else each for name, each in attempt.items()
            }
            if "nonce" in told:
                told["request"] = restored(told["request"], told["nonce"], self._text(entry, entry.response))
            yield told

    def _with_texts(self, entry: Entry) -> Entry:
        return replace(
            entry,
            prompt=self._text(entry, entry.prompt),
            response=self._text(entry, entry.response),
            ground_truth=self._text(entry, entry.ground_truth),
            extras=self._text(entry, entry.extras),
        )

    def _text(self, entry: Entry, name: str | None) -> str | None:
        if name is None:
            return None
        # Journals of one run may share texts, but each has its own.
        row = self._connections[entry.journal].execute("SELECT body FROM texts WHERE hash = ?", (name,)).fetchone()
        return NOT_KEPT if row is None else zlib.decompress(row[0]).decode()


def turns_of(text: str | None) -> list[tuple[str, str]]:
    """Messages as pairs of role and content, as they are read. A text that is no JSON of messages is one without a
    role, and None is no turn.
    """
    try:
        return [
            (str(turn["role"]), text_of(turn.get("content"), turn.get("tool_calls")))
            for turn in json.loads(text or "[]")
        ]
    except (InputError, ValueError, TypeError, KeyError, AttributeError):
        return [("", text or "")]


def judge_of(entry: Entry, attempts: Sequence[Mapping[str, Any]]) -> str:
    """The judge of an entry, and the turn that it judged, if that is one of several: "quality, turn 2"."""
    turn = next((attempt["turn"] for attempt in attempts if "turn" in attempt), None)
    return (entry.judge or "no judge") + (f", turn {turn}" if turn else "")


def last_sent(attempts: Sequence[Mapping[str, Any]]) -> tuple[int, str] | None:
    """The body that was sent by the attempt that was answered, or by the last one, and its number, from 1; None if no
    body is kept.
    """
    sent = [(number, attempt) for number, attempt in enumerate(attempts, 1) if attempt.get("request")]
    chosen = [each for each in sent if each[1]["result"] == "valid"] or sent
    return (chosen[-1][0], chosen[-1][1]["request"]) if chosen else None


def lines_of(body: str) -> Iterator[str]:
    """The lines that show a body, as YAML writes it, but with each text of several lines as a block. A body that is no
    JSON, because it lost its middle, is shown as it is.
    """
    try:
        yield from _lines(json.loads(body))
    except ValueError:
        yield from body.split("\n")


def _lines(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value:
        yield from [key] if key else []
        for name, each in value.items():
            yield from (("  " if key else "") + line for line in _lines(each, f"{name}:"))
    elif isinstance(value, list) and value:
        yield from [key] if key else []
        for each in value:
            yield from (f"{'- ' if number == 0 else '  '}{line}" for number, line in enumerate(_lines(each)))
    elif isinstance(value, str) and "\n" in value:
        yield f"{key} |"
        yield from (f"  {line}" for line in value.split("\n"))
    else:
        yield f"{key} {value if isinstance(value, str) else json.dumps(value)}".lstrip()


def deciding(entries: Sequence[Entry]) -> Sequence[Entry]:
    """The entries that gave a sample its reward: that of the judge which asks the others, if there is one."""
    return [entry for entry in entries if not entry.source] or entries


def _place(entry: Entry) -> tuple[Any, ...]:
    return entry.step, entry.split, entry.sample_id or entry.id


def _samples(rows: Sequence[tuple[Entry, Any]], *, latest: bool) -> Iterator[list[Entry]]:
    """Split the entries of one place into samples: by their responses, as far as these are known, and by their runs.
    Each has an entry that is wanted.
    """
    responses = {entry.response for entry, _ in rows} - {None}
    parts: dict[str | None, dict[str, list[tuple[Entry, Any]]]] = {}
    for entry, wanted in rows:
        runs = parts.setdefault(entry.response if len(responses) > 1 else None, {})
        runs.setdefault(entry.run_id, []).append((entry, wanted))
    for runs in parts.values():
        chosen = [max(runs.values(), key=lambda part: part[-1][0].recorded_at)] if latest else list(runs.values())
        for part in chosen:
            if any(wanted for _, wanted in part):
                yield [entry for entry, _ in part]


def _where(wanted: Wanted) -> tuple[str, list[Any]]:
    conditions = [
        ("sample_id = ?", wanted.sample),
        ("id = ?", wanted.row),
        ("step = ?", wanted.step),
    ]
    chosen = [(condition, value) for condition, value in conditions if value is not None]
    reward = [f"{_REWARD} IS {'NULL' if wanted.failed else 'NOT NULL'}"] if wanted.failed or wanted.worst else []
    return " AND ".join([*(condition for condition, _ in chosen), *reward]) or "1", [value for _, value in chosen]
