"""Shares reloads of a configuration file with the other workers: what this one tells, and what it takes from others.

`sharing/revisions.py` puts the changes in order. This worker knows the state of its file that it goes by, sends a
change until the keeper has confirmed it, and takes each newest state once.
"""

from __future__ import annotations

import hashlib
import logging
import math
from typing import Any

from ..config import Config
from ..config.origin import Origin, origin_of
from ..config.written_text import NotSendable, as_text, check_sendable
from ..sharing.messages import Revision
from ..sharing.revisions import MOST_BEFORE, MOST_TEXT_BYTES

_log = logging.getLogger("qreward_plugins.engine")

LATE_S = 5.0
"""Seconds after a reload from another worker in which an earlier state of the own file counts as seen late."""


class Relay:
    """What one engine goes by. `config` is its first configuration; `shares` says whether there are other workers."""

    def __init__(self, config: Config, *, shares: bool) -> None:
        self._shares = shares
        self._is_on = config.engine.reload
        self._version = 0
        self._before: tuple[str, ...] = ()
        self._change = 0
        self._confirmed = 0
        self._received = ""
        self._keepers_version = 0
        self._taken_at = -math.inf
        self._text: str | None = None
        self._may_be_sent = True
        origin = origin_of(config)
        self._file = "" if origin is None else origin.file
        self._digest = _digest(origin) if self._is_on else ""

    def revision(self) -> Revision | None:
        """Return what this worker goes by, for the next report; None if it shares no reloads."""
        is_open = self._change > self._confirmed
        if not (self._digest and self._may_be_sent and (self._is_on or is_open)):
            return None
        text = self._text if is_open or self._keepers_version < self._version else None
        return Revision(self._digest, self._version, self._before, self._change if is_open else 0, text, self._received)

    def answered(self, newest: Revision | None) -> Revision | None:
        """Take the keeper's answer; return the state to apply, if it is news."""
        if newest is None:
            self._keepers_version = 0
            return None
        self._keepers_version = newest.version
        self._confirmed = max(self._confirmed, min(newest.change, self._change))
        if newest.digest == self._digest:
            self._version = newest.version
        if self._change > self._confirmed or not self._is_on:
            # What has changed here meanwhile is newer.
            return None
        if newest.text is None or newest.digest in (self._digest, self._received):
            return None
        self._received = newest.digest
        return newest

    def is_same(self, config: Config) -> bool:
        """Whether the engine goes by this text of its file already."""
        return self._digest != "" and _digest(origin_of(config)) == self._digest

    def late_s(self, tree: Any, now: float) -> float:
        """Return for how many seconds more the file may hold `tree` only because an earlier state is seen late."""
        text = as_text(tree)
        seen_late = text is not None and digest_of(self._file, text) in self._before
        return max(0.0, self._taken_at + LATE_S - now) if seen_late else 0.0

    def changed(self, config: Config, now: float, *, taken: Revision | None = None) -> None:
        """Note that the engine goes by `config` from now on. `taken`: it came from another worker."""
        was_on, self._is_on = self._is_on, config.engine.reload
        origin = origin_of(config)
        before, digest = self._digest, _digest(origin) if was_on or self._is_on else ""
        if digest == before:
            return
        earlier = [*self._before, *(taken.before if taken else ()), before]
        self._before = tuple(each for each in dict.fromkeys(earlier) if each and each != digest)[-MOST_BEFORE:]
        self._digest, self._may_be_sent = digest, True
        if taken is not None:
            self._version, self._text, self._taken_at = taken.version, taken.text, now
        elif origin is not None and origin.tree is not None:
            self._text = self._sendable(origin, config)
            self._may_be_sent = self._text is not None
            self._change += self._may_be_sent

    def _sendable(self, origin: Origin, config: Config) -> str | None:
        """Return the text of the file; None if it must not be sent, which is logged."""
        text = as_text(origin.tree)
        try:
            check_sendable(origin.tree, config)
            if text is None:
                raise NotSendable("it has values that JSON does not have.")
            if len(text.encode()) > MOST_TEXT_BYTES:
                raise NotSendable(f"it is larger than {MOST_TEXT_BYTES // 1024} KiB.")
        except NotSendable as problem:
            if self._shares:
                _log.warning("%s is not relayed to the other processes: %s", origin.file, problem)
            return None
        return text


def digest_of(file: str, text: str) -> str:
    """Return the digest of a state of a file."""
    return hashlib.blake2b(f"{file}\0{text}".encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _digest(origin: Origin | None) -> str:
    text = None if origin is None or origin.tree is None else as_text(origin.tree)
    return "" if origin is None or text is None else digest_of(origin.file, text)
