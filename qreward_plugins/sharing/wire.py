"""The messages of shared limits as JSON, for sockets and HTTP.

What is read is checked as a whole: types, ranges and sizes. A peer that sends anything else gets an `Unreadable`, and
the state of the keeper does not change. Nothing is unpickled. Sources have hashes for names, so no key is in a message;
a file with a key in it is not sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast, get_args

import orjson

from ..quotas.shared import Resource
from .messages import Answer, Charged, Grant, Part, Report, Revision, SourceAnswer, SourceNews, SourceReport
from .revisions import MOST_BEFORE, MOST_TEXT_BYTES

MOST_BYTES = 4 * 2**20
"""Largest message. A report of 1,000 sources with full windows has about 2 MB."""
MOST_SOURCES = 4096
MOST_SPENT = 4096
"""Most entries of one limit's spending; a ledger reports about 100."""
MOST_WORKERS = 65_536
"""Most workers in a keeper's last state."""
_LONGEST_NAME = 80
_LARGEST = 1e15
_RESOURCES: tuple[Resource, ...] = get_args(Resource)


class Unreadable(ValueError):
    """Bytes that are not the expected message."""


def write_report(report: Report) -> dict[str, Any]:
    """Return a report as a JSON value."""
    return _with_revision(report.revision) | {
        "worker": report.worker,
        "number": report.number,
        "leaves": report.leaves,
        "accepted": report.accepted,
        "sources": {
            key: {
                "limits": {resource: list(limit) for resource, limit in source.limits.items()},
                "parts": {resource: _part(part) for resource, part in source.parts.items()},
                "news": _news(source.news),
            }
            for key, source in report.sources.items()
        },
    }


def read_report(value: Any) -> Report:
    """Return the report in a JSON value. Raises `Unreadable`."""
    node = _mapping(value, 6)
    sources = {}
    for key, source in _mapping(node.get("sources"), MOST_SOURCES).items():
        source = _mapping(source, 3)
        limits: dict[Resource, tuple[float, float]] = {}
        for name, limit in _mapping(source.get("limits"), len(_RESOURCES)).items():
            amount, window_s = _items(limit, 2)
            limits[_resource(name)] = (_number(amount, least=1e-9), _number(window_s))
        parts = {
            _resource(name): _read_part(part) for name, part in _mapping(source.get("parts"), len(_RESOURCES)).items()
        }
        if set(parts) != set(limits):
            raise Unreadable("the limits and the parts of a source differ")
        sources[_name(key)] = SourceReport(limits, parts, _read_news(source.get("news")))
    number, accepted = _whole(node.get("number")), _whole(node.get("accepted"))
    leaves, revision = _flag(node.get("leaves")), _read_revision(node.get("revision"))
    return Report(_name(node.get("worker")), number, sources, leaves, accepted, revision)


def write_answer(answer: Answer) -> dict[str, Any]:
    """Return an answer as a JSON value."""
    return _with_revision(answer.revision) | {
        "boot": answer.boot,
        "number": answer.number,
        "sources": {
            key: {
                "workers": source.workers,
                "grants": {resource: list(grant) for resource, grant in source.grants.items()},
                "news": _news(source.news),
            }
            for key, source in answer.sources.items()
        },
    }


def read_answer(value: Any) -> Answer:
    """Return the answer in a JSON value. Raises `Unreadable`."""
    node = _mapping(value, 4)
    sources = {}
    for key, source in _mapping(node.get("sources"), MOST_SOURCES).items():
        source = _mapping(source, 3)
        grants: dict[Resource, Grant] = {}
        for name, grant in _mapping(source.get("grants"), len(_RESOURCES)).items():
            share, target, recall, scarce = _items(grant, 4)
            grants[_resource(name)] = Grant(_number(share), _number(target), _flag(recall), _flag(scarce))
        sources[_name(key)] = SourceAnswer(_whole(source.get("workers")), grants, _read_news(source.get("news")))
    revision = _read_revision(node.get("revision"))
    return Answer(_name(node.get("boot")), _whole(node.get("number")), sources, revision)


def write_charged(charged: Mapping[str, Mapping[Resource, Charged]]) -> dict[str, Any]:
    """Return the state of a keeper that ends as a JSON value."""
    return {
        key: {
            resource: {
                "limit": [amounts.limit, amounts.window_s],
                "workers": {name: list(held) for name, held in amounts.workers.items()},
                "unknown": [max(amounts.unknown[0], 0.0), amounts.unknown[1]],
            }
            for resource, amounts in resources.items()
        }
        for key, resources in charged.items()
    }


def read_charged(value: Any) -> dict[str, dict[Resource, Charged]]:
    """Return the state of an earlier keeper in a JSON value. Raises `Unreadable`."""
    charged: dict[str, dict[Resource, Charged]] = {}
    for key, resources in _mapping(value, MOST_SOURCES).items():
        pools = charged[_name(key)] = {}
        for name, amounts in _mapping(resources, len(_RESOURCES)).items():
            node = _mapping(amounts, 3)
            limit, window_s = _items(node.get("limit"), 2)
            workers = {
                _name(worker): _held(held) for worker, held in _mapping(node.get("workers"), MOST_WORKERS).items()
            }
            unknown = _held(node.get("unknown"))
            pools[_resource(name)] = Charged(_number(limit, least=1e-9), _number(window_s), workers, unknown)
    return charged


def dump(value: Mapping[str, Any]) -> bytes:
    """Return a JSON value as bytes."""
    return orjson.dumps(value)


def load(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`. Raises `Unreadable`."""
    if len(data) > MOST_BYTES:
        raise Unreadable(f"a message has at most {MOST_BYTES:,} bytes")
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise Unreadable(f"not JSON: {error.msg}") from None
    if not isinstance(value, dict):
        raise Unreadable("not a JSON object")
    return value


def _part(part: Part) -> dict[str, Any]:
    # JSON has no infinity: null stands for it.
    spent = [[None if left_s == math.inf else left_s, amount] for left_s, amount in part.spent]
    return {"share": part.share, "spent": spent, "more": min(part.more, _LARGEST), "unit": min(part.unit, _LARGEST)}


def _read_part(value: Any) -> Part:
    node = _mapping(value, 4)
    entries = node.get("spent")
    if not isinstance(entries, list) or len(entries) > MOST_SPENT:
        raise Unreadable("the amounts spent are no list, or too many")
    spent = []
    for entry in entries:
        left_s, amount = _items(entry, 2)
        spent.append((math.inf if left_s is None else _number(left_s), _number(amount)))
    return Part(_number(node.get("share")), tuple(spent), _number(node.get("more")), _number(node.get("unit")))


def _news(news: SourceNews) -> dict[str, Any]:
    return {
        "pause_s": min(news.pause_s, _LARGEST),
        "open_s": min(news.open_s, _LARGEST),
        "recovered": news.recovered,
        "typical": list(news.typical) if news.typical is not None else None,
    }


def _read_news(value: Any) -> SourceNews:
    node = _mapping(value, 4)
    typical = node.get("typical")
    if typical is not None:
        size, latency_s = _items(typical, 2)
        typical = (_number(size), _number(latency_s))
    return SourceNews(_number(node.get("pause_s")), _number(node.get("open_s")), _flag(node.get("recovered")), typical)


def _with_revision(revision: Revision | None) -> dict[str, Any]:
    if revision is None:
        return {}
    digest, version, before, *rest = revision
    return {"revision": [digest, version, list(before), *rest]}


def _read_revision(value: Any) -> Revision | None:
    if value is None:
        return None
    digest, version, before, change, text, received = _items(value, 6)
    if not isinstance(before, list) or len(before) > MOST_BEFORE:
        raise Unreadable("the earlier states are no list, or too many")
    if text is not None and not (isinstance(text, str) and len(text) <= MOST_TEXT_BYTES):
        raise Unreadable("a configuration is no text, or too long")
    earlier = tuple(map(_name, before))
    return Revision(_name(digest), _whole(version), earlier, _whole(change), text, _name(received) if received else "")


def _held(value: Any) -> tuple[float, float]:
    until, amount = _items(value, 2)
    return _number(until), _number(amount)


def _mapping(value: Any, most: int) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > most:
        raise Unreadable("an object is missing, or has too many keys")
    return value


def _items(value: Any, count: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != count:
        raise Unreadable(f"a list of {count} is missing")
    return value


def _number(value: Any, *, least: float = 0.0) -> float:
    # Sums of floats may be a little below zero.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e-6 <= value <= _LARGEST:
        raise Unreadable("a number is missing or out of range")
    return max(least, float(value))


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
        raise Unreadable("a whole number is missing or out of range")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Unreadable("true or false is missing")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_NAME:
        raise Unreadable("a name is missing or too long")
    return value


def _resource(value: Any) -> Resource:
    if value not in _RESOURCES:
        raise Unreadable("an unknown limit")
    return cast(Resource, value)
