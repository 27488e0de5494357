"""Reads answers of which people have said how good they are, for `qreward bench`.

A row is either a preference (chosen answers and rejected ones, the layout of RewardBench) or one response with a label.
All rows of a file are read and checked before the first request is paid for. They stay in memory, because the figures
need them together. No judge gets to see a label.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..errors import InputError
from ..samples import Message, Sample, fits_float32
from .rollouts import message_list, sample_of
from .tables import read_rows, type_of

Layout = Literal["pairs", "yes_no", "numbers"]
"""What the rows of a file say: which answers are better, whether an answer is good, or how good it is."""

_LABELS = ("label", "score")
_DOMAINS = ("domain", "subset", "data_source")


@dataclass(frozen=True, slots=True)
class LabelledRow:
    """A question with answers, and what people have said of these.

    `samples` are the chosen answers and then the rejected ones, `chosen` is the number of the former, and `label` is
    None; or there is one sample with its `label`.
    """

    id: str
    domain: str
    samples: tuple[Sample, ...]
    chosen: int
    label: float | None


def read_labelled(path: Path) -> tuple[Layout, list[LabelledRow]]:
    """Read a `.jsonl`, `.json` or `.parquet` file. Raises `InputError` with the file and the line or row.

    Columns:
    - preferences: `chosen` and `rejected`, each an answer or a list of answers; an answer is a text, or the messages of
      a conversation that ends with it
    - labels: `response`, and `label` or `score`: a number, or true or false
    - domain: `domain`, `subset` or `data_source`; default: none
    - all others as in `read_rollouts`; the prompt may be missing where an answer brings its conversation
    """
    rows = list(_labelled(path))
    if not rows:
        raise InputError(f"{path}: has no rows")
    first = rows[0]
    for row in rows:
        if (row.label is None) != (first.label is None):
            problem = "some rows have `chosen` and `rejected`, and others a label"
            raise InputError(f"{path}, {row.id}: {problem}; make two files")
    if first.label is None:
        return "pairs", rows
    return ("yes_no" if all(row.label in (0.0, 1.0) for row in rows) else "numbers"), rows


def _labelled(path: Path) -> Iterator[LabelledRow]:
    for name, where, row in read_rows(path):
        domain = next((row[column] for column in _DOMAINS if row.get(column) is not None), "")
        if not isinstance(domain, str):
            raise InputError(f"{where}: the domain must be a text, not {type_of(domain)}")
        rest = {key: value for key, value in row.items() if key not in ("chosen", "rejected", *_LABELS)}
        chosen, answers, label = 1, [rest], None
        if row.get("chosen") is not None and row.get("rejected") is not None:
            better, worse = (_answers(row[column], f"{where}: {column}") for column in ("chosen", "rejected"))
            chosen, answers = len(better), [{**rest, **answer} for answer in (*better, *worse)]
        else:
            label = _label(row, where)
        samples = [sample_of(answer, name=name, where=where, folder=path.parent) for answer in answers]
        own = samples[0].id or name
        group = samples[0].group_id or own
        numbered = tuple(
            replace(sample, id=own if label is not None else f"{own}/{number}", group_id=group)
            for number, sample in enumerate(samples)
        )
        yield LabelledRow(own, domain, numbered, chosen, label)


def _label(row: Mapping[str, Any], where: str) -> float:
    found = next((row[column] for column in _LABELS if row.get(column) is not None), None)
    if found is None:
        raise InputError(f"{where}: needs the columns `chosen` and `rejected`, or `response` and `label` (or `score`)")
    if not isinstance(found, (bool, int, float)) or not fits_float32(found):
        given = "one that is not finite" if isinstance(found, (int, float)) else type_of(found)
        raise InputError(f"{where}: the label must be a number, or true or false, not {given}")
    return float(found)


def _answers(value: Any, where: str) -> list[dict[str, Any]]:
    """The columns that one answer, or each of several, brings."""
    if isinstance(value, list) and not value:
        raise InputError(f"{where} must be an answer or a list of answers, not an empty list")
    if isinstance(value, list) and not isinstance(value[0], Mapping):
        return [_answer(one, f"{where}[{number}]") for number, one in enumerate(value)]
    return [_answer(value, where)]


def _answer(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        return {"response": value}
    turns: Sequence[Message] = message_list(value, where)
    *before, last = turns
    if last["role"] != "assistant" or not isinstance(last.get("content"), str):
        raise InputError(f"{where} must end with a message of the assistant that is a text")
    return {"response": last["content"], **({"messages": before} if before else {})}
