"""Orders the changes of configuration files, so that every worker gets the newest one. The keeper's part of a reload.

A state of a file is known by its digest, which covers the path. States that followed each other are one lineage. A
worker gets the newest state only if it goes by an earlier one of the same lineage. So processes with other files are
left alone, and so is a file that differs between two nodes on purpose.

The order is that in which changes arrive. A worker's change is numbered, so that a report that is sent twice counts
once. A worker may see an older state of its file later than another worker sees the newer one, as on a network file
system. Its change is then ignored, and it gets the newest state.

A new keeper has no versions. Workers with a higher version than the keeper's send their text again.
"""

from __future__ import annotations

from collections.abc import Collection

from .messages import Revision

MOST_BEFORE = 64
"""Most earlier states of a file that are remembered."""
MOST_TEXT_BYTES = 2**18
"""Size of the longest configuration that is relayed, in bytes."""
MOST_LINEAGES = 256


class _Lineage:
    """The states of one file."""

    def __init__(self) -> None:
        self.newest = Revision("")
        self.author = ""
        """The worker that made the newest change."""
        self.before: dict[str, None] = {}

    def add_before(self, digests: Collection[str]) -> None:
        self.before.update(dict.fromkeys(digests))
        self.before.pop(self.newest.digest, None)
        for digest in list(self.before)[:-MOST_BEFORE]:
            del self.before[digest]

    def advance(self, revision: Revision, version: int, author: str) -> None:
        before = [self.newest.digest] if self.newest.digest else []
        self.newest, self.author = Revision(revision.digest, version, text=revision.text), author
        self.add_before([*revision.before, *before])

    def is_behind(self, revision: Revision) -> bool:
        """Whether a worker must get the newest state."""
        return revision.digest in self.before and revision.received != self.newest.digest


class Revisions:
    """The newest state of each file that workers share reloads of."""

    def __init__(self) -> None:
        self._lineages: list[_Lineage] = []
        self._of: dict[str, Revision] = {}
        self._ordered: dict[str, int] = {}

    def report(self, worker: str, revision: Revision | None) -> list[str]:
        """Record what a worker goes by. Return the workers to answer now."""
        if revision is None:
            self.forget(worker)
            return []
        self._of[worker] = revision._replace(text=None)
        lineage, known = self._lineage(revision), 0
        if lineage is not None:
            known = lineage.newest.version
        newest = None if lineage is None else lineage.newest
        is_new = revision.change > self._ordered.get(worker, 0) and revision.text is not None
        if is_new or (revision.text is not None and revision.version > known):
            if lineage is None:
                lineage = _Lineage()
                self._lineages = [*self._lineages, lineage][-MOST_LINEAGES:]
            if is_new:
                self._ordered[worker] = revision.change
            if not is_new:
                lineage.advance(revision, revision.version, worker)
            elif revision.digest != lineage.newest.digest and not _is_stale(worker, revision, lineage):
                lineage.advance(revision, max(known, revision.version) + 1, worker)
        elif lineage is None:
            # It was changed under an earlier keeper: the answer lets the worker send its text.
            return [worker] if revision.version > 0 else []
        elif revision.digest not in (lineage.newest.digest, *lineage.before):
            # Two keepers have ordered two changes of the same state. This one has seen the other change.
            lineage.add_before([revision.digest])
        # Without a change, the others have it already, or get it with their next report.
        receivers = [worker] if lineage.newest is newest else list(self._of)
        wait = [other for other in receivers if lineage.is_behind(self._of[other])]
        return [*wait, worker] if is_new or revision.version > known else wait

    def answer(self, worker: str) -> Revision | None:
        """Return the newest state for a worker, with its text if the worker goes by an earlier one."""
        revision = self._of.get(worker)
        lineage = None if revision is None else self._lineage(revision)
        if revision is None or lineage is None:
            return None
        newest = lineage.newest._replace(change=self._ordered.get(worker, 0))
        if lineage.is_behind(revision):
            return newest._replace(before=tuple(lineage.before))
        return newest._replace(text=None)

    def forget(self, worker: str) -> None:
        """Remove a worker that has left, and the lineages that no worker is part of any more."""
        if self._of.pop(worker, None) is None:
            return
        self._ordered.pop(worker, None)
        used = [self._lineage(revision) for revision in self._of.values()]
        self._lineages = [lineage for lineage in self._lineages if lineage in used]

    def _lineage(self, revision: Revision) -> _Lineage | None:
        """Return the lineage of a state: where it is the newest, otherwise where it is known, or where it came from."""
        found = [lineage for lineage in self._lineages if lineage.newest.digest == revision.digest]
        found = found or [lineage for lineage in self._lineages if revision.digest in lineage.before]
        found = found or [
            lineage
            for lineage in self._lineages
            if lineage.newest.digest in revision.before or not lineage.before.keys().isdisjoint(revision.before)
        ]
        return max(found, key=lambda lineage: lineage.newest.version, default=None)


def _is_stale(worker: str, revision: Revision, lineage: _Lineage) -> bool:
    """Whether a worker has seen an earlier state of its file late, before it learned of the newest one."""
    return revision.digest in lineage.before and worker != lineage.author and revision.version < lineage.newest.version
