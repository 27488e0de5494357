"""Finds the kinds of sources and judges: ours, those of installed packages, and classes that a configuration names.

A kind is one class. Ours are listed below by their paths. Other packages register theirs as entry points of the groups
`qreward_plugins.sources` and `qreward_plugins.judges`. A configuration may also name an unregistered class: `kind:
package.module:Class`.

A kind is imported when a configuration names it, and entry points are read on the first look-up of a kind. So the
import of this module is cheap.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Generic, TypeVar

from ..errors import ConfigurationError, Mistake
from ..secrets import described_error, one_line

T = TypeVar("T")
_log = logging.getLogger("qreward_plugins.registry")

_DISTRIBUTION = "qreward-plugins"
_MESSAGE_CHARS = 200


@dataclass(frozen=True)
class Registration:
    """A name, the path of its class (`package.module:Class`), and the package that registered it. `package` is "" for a
    class that a configuration names by its path.
    """

    name: str
    path: str
    package: str = ""
    version: str = ""

    @property
    def origin(self) -> str:
        """The package and its version, or the path if no package registered it."""
        return f"{self.package} {self.version}".strip() or self.path


class KindError(Exception):
    """A kind cannot be used. `problem` is a phrase that follows the place in a message; `remedy` is a sentence."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}. {remedy}".rstrip())
        self.problem = problem
        self.remedy = remedy


class Kinds(Generic[T]):
    """The kinds of sources, or the kinds of judges. `room` is "sources" or "judges".

    `ours` maps names to paths of classes. `base` is the path of the class that every kind must inherit.
    """

    def __init__(self, room: str, base: str, ours: Mapping[str, str]) -> None:
        self.room = room
        self.group = f"qreward_plugins.{room}"
        self._base = base
        self._ours = ours

    @property
    def names(self) -> tuple[str, ...]:
        """The registered names: ours first, then those of other packages in alphabetical order."""
        return tuple(self._registered())

    def registrations(self, name: str) -> tuple[Registration, ...]:
        """Return the registrations of `name`: none if it is unknown, one if it is valid, several in a conflict.

        A path (`package.module:Class`) counts as its own registration.
        """
        return (Registration(name, name),) if ":" in name else self._registered().get(name, ())

    def load(self, name: str) -> type[T]:
        """Return the class of a kind: a registered name, or `package.module:Class`.

        Raises `KindError` for an unknown name, if several packages register it, and if the class cannot be imported or
        has a missing member.
        """
        found = self.registrations(name)
        if not found:
            remedy = f"Allowed here: {', '.join(self.names)}. `qreward check --kinds` says what each is."
            raise KindError("unknown kind", remedy)
        if len(found) > 1:
            origins = " and ".join(f"{one.origin} ({one.path})" for one in found)
            remedy = f"Uninstall all but one, or name the class: `kind: {found[0].path}`."
            raise KindError(f"several packages register the kind {name!r}: {origins}", remedy)
        what = "class" if not found[0].package else f"kind {name!r} of {found[0].origin}: the class"
        loaded, problem = _import(found[0].path)
        remedy = _REMEDY if found[0].package else (_ON_THE_PATH if problem.startswith("cannot be imported") else "")
        if problem := problem or self._lack(loaded):
            raise KindError(f"the {what} {found[0].path} {problem}", remedy)
        return loaded  # type: ignore[no-any-return]

    def loadable(self) -> Iterator[tuple[str, type[T]]]:
        """Yield every registered kind that can be used, with its name."""
        for name in self.names:
            try:
                yield name, self.load(name)
            except KindError:
                continue

    def described(self) -> Iterator[tuple[Registration, str, str]]:
        """Yield every registration with the first sentence about its kind, and the reason why it cannot be used ("" if
        it can). A name that several packages register has one for each of them.
        """
        for name in self.names:
            description = problem = ""
            try:
                # Read from the class itself, because an inherited docstring would describe another kind.
                description = _first_sentence(self.load(name).__dict__.get("__doc__"))
            except KindError as error:
                problem = str(error)
            yield from ((one, description, problem) for one in self.registrations(name))

    def _lack(self, loaded: Any) -> str:
        base, _ = _import(self._base)
        if not (isinstance(loaded, type) and issubclass(loaded, base)):
            return f"does not inherit {self.group}.{base.__name__}"
        lacking = sorted(getattr(loaded, "__abstractmethods__", ()))
        lacking += [name for name in base.REQUIRED if not getattr(loaded, name, None)]
        if lacking:
            return f"lacks {', '.join(sorted(lacking))}"
        model = inspect.getattr_static(loaded, "Config", None)
        if not (isinstance(model, type) and issubclass(model, base.Config)):
            return f"has no `Config` that inherits {self.group}.{base.Config.__name__}"
        return ""

    def _registered(self) -> Mapping[str, tuple[Registration, ...]]:
        # `sys.path` is part of the cache key, because a test or a notebook may install a package while it runs.
        return _registered(self.group, tuple(sys.path), tuple(self._ours.items()))


@functools.lru_cache(maxsize=8)
def _registered(
    group: str, _: tuple[str, ...], ours: tuple[tuple[str, str], ...]
) -> Mapping[str, tuple[Registration, ...]]:
    from .. import __version__ as version

    found = {name: (Registration(name, path, _DISTRIBUTION, version),) for name, path in ours}
    try:
        theirs = sorted(metadata.entry_points(group=group), key=lambda point: (point.name, point.value))
    except Exception as error:
        # The metadata of any package may be broken. Our own kinds do not need it.
        _log.warning("the entry points of installed packages cannot be read: %s", described_error(error))
        theirs = []
    for point in theirs:
        package = (point.dist.name, point.dist.version) if point.dist else ("a package without a name", "")
        one = Registration(point.name, point.value.partition("[")[0].strip(), *package)
        if one not in found.get(point.name, ()):
            found[point.name] = (*found.get(point.name, ()), one)
    return found


def _first_sentence(doc: object) -> str:
    paragraph = inspect.cleandoc(doc).partition("\n\n")[0] if isinstance(doc, str) else ""
    return one_line(" ".join(paragraph.split()).partition(". ")[0], _MESSAGE_CHARS).rstrip(".")


def _import(path: str) -> tuple[Any, str]:
    """Import the object at `package.module:Class`. Returns it and ""; or None and the reason for the failure."""
    module, _, dotted = path.partition(":")
    try:
        imported: Any = importlib.import_module(module)
        found = functools.reduce(lambda owner, name: getattr(owner, name, None), dotted.split("."), imported)
    except (Exception, SystemExit) as error:
        return None, f"cannot be imported: {described_error(error)}"
    return found, "" if found is not None else f"does not exist: the module has no `{dotted}`"


def kind_or_mistake(kinds: Kinds[T], name: str) -> type[T]:
    """Return the class of a kind. Raises ConfigurationError if it cannot be used."""
    try:
        return kinds.load(name)
    except KindError as error:
        mistake = Mistake(kinds.room, f"{error.problem} (kind {name!r}).", error.remedy)
    raise ConfigurationError([mistake])


_REMEDY = "Fix or uninstall the package, or use another kind."
_ON_THE_PATH = "Write `package.module:Class`; the folder of the module must be in PYTHONPATH, in every process."

sources: Kinds[Any] = Kinds(
    "sources",
    "qreward_plugins.sources.kind:SourceKind",
    {
        "openai": "qreward_plugins.sources.openai:OpenAISource",
        "reward_model": "qreward_plugins.sources.reward_model:RewardModelSource",
        "http": "qreward_plugins.sources.service:HTTPSource",
        "function": "qreward_plugins.sources.function:FunctionSource",
        "sandbox": "qreward_plugins.sources.sandbox:SandboxSource",
        "embeddings": "qreward_plugins.sources.embeddings:EmbeddingsSource",
        "replicas": "qreward_plugins.sources.replica_set:ReplicaSet",
    },
)
"""The kinds of sources, subclasses of `sources.SourceKind`."""

judges: Kinds[Any] = Kinds(
    "judges",
    "qreward_plugins.judges.base:Judge",
    {
        "llm": "qreward_plugins.judges.llm:LLMJudge",
        "reward_model": "qreward_plugins.judges.reward_model:RewardModelJudge",
        "function": "qreward_plugins.judges.function:FunctionJudge",
        "code": "qreward_plugins.judges.code:CodeJudge",
        "similarity": "qreward_plugins.judges.similarity:SimilarityJudge",
        "sum": "qreward_plugins.judges.sums:SumJudge",
        "gate": "qreward_plugins.judges.cascades:GateJudge",
        "cascade": "qreward_plugins.judges.cascades:CascadeJudge",
        "panel": "qreward_plugins.judges.panels:PanelJudge",
        "screen": "qreward_plugins.judges.panels:ScreenJudge",
        "rank": "qreward_plugins.judges.ranks:RankJudge",
        "turns": "qreward_plugins.judges.turns:TurnsJudge",
    },
)
"""The kinds of judges, subclasses of `judges.Judge`."""

rooms: Mapping[str, Kinds[Any]] = {"sources": sources, "judges": judges}
"""All kinds, by their top-level key in the configuration."""
