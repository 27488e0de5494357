"""Renders the Jinja2 templates of judges, with every text of the sample in a fence.

The author of a template is trusted; the texts of the sample are not. No template may write such a text without a fence.
So a template has only what cannot undo one: it writes variables, their parts and constants, and it has `if` with
comparisons. Everything else of Jinja2 (filters, calls, loops, arithmetic, macros) is refused when the judge is opened.
A text of the sample is not a string here but an `Untrusted`, and writing it fences it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2 import nodes

from ..config.findings import cut, nearest
from ..errors import ConfigurationError, InputError, Mistake
from ..samples.json_values import json_text
from .fence import TURN, cap, fence, neutralise, readable

# A role has no line break, so a marker that was cut spoils no later one.
_ROLE = re.compile(f"{TURN}([^{TURN}\n]*){TURN}")

_AVAILABLE = (
    *(nodes.Output, nodes.TemplateData, nodes.If, nodes.CondExpr, nodes.And, nodes.Or, nodes.Not, nodes.Neg),
    *(nodes.Compare, nodes.Operand, nodes.Name, nodes.Getattr, nodes.Getitem, nodes.Const, nodes.List, nodes.Tuple),
)
_TESTS = ("defined", "none")
_REMEDY = (
    "Templates of judges write variables and their parts, and have if, and, or, not, comparisons and `is defined`. A "
    "list is written whole, as in {{ extras.NAME }}, or by its items, as in {{ extras.NAME[0] }}."
)
_ALIASES = {"ground_truth": "reference", "extra_info": "extras"}
"""Names of columns of training data, which stand for our variables."""
_FORMAT = re.compile(r"(?<![{\w])\{(\w+)\}(?!\})")
"""A variable as `str.format` writes it. Prompts that come from other tools have them."""


class Untrusted:
    """A text, a list or a mapping of the sample. A template can test and compare it, take a part of it, and write it;
    writing fences it.
    """

    __slots__ = ("_label", "_max_chars", "_page", "_value")

    def __init__(self, page: Page, label: str, value: Any, max_chars: int) -> None:
        self._page = page
        self._label = label
        self._value = value
        self._max_chars = max_chars

    def text(self) -> str:
        """Return what is written. Raises `InputError` for a value that JSON cannot hold."""
        return self._value if isinstance(self._value, str) else readable(json_text(self._value, self._label))

    def part(self, key: Any) -> Any:
        """Return an item, wrapped. Raises LookupError."""
        if isinstance(self._value, Mapping):
            return self._page.value(f"{self._label}_{key}", self._value[key], max_chars=self._max_chars)
        if isinstance(self._value, (list, tuple)) and isinstance(key, int):
            return self._page.value(self._label, self._value[key], max_chars=self._max_chars)
        raise LookupError

    def __bool__(self) -> bool:
        return bool(self._value)

    def __contains__(self, part: object) -> bool:
        return (part._value if isinstance(part, Untrusted) else part) in self._value

    def __eq__(self, other: object) -> bool:
        return bool(self._value == (other._value if isinstance(other, Untrusted) else other))

    def __hash__(self) -> int:
        return hash(self._value)

    def __str__(self) -> str:
        raise TypeError(f"the {self._label} can only be written in its fence")

    def __repr__(self) -> str:
        return f"the {self._label}"


class Page:
    """The state of rendering one message: its nonces, and the texts written so far.

    `nonce` fences the response, and `shared` all other texts (default: `nonce`). `shown` holds the labels and `texts`
    the untrusted texts that were written, as they were given and as they are shown. `cut` maps the label of each
    truncated text to its full length in characters. `rewritten` is true if control tokens in any text were neutralised,
    and `marks_turns` if the roles of turns carry the shared nonce. `hidden` maps further words, which are no control
    tokens, to what is written instead of them.
    """

    def __init__(self, nonce: str, *, shared: str = "", hidden: Mapping[str, str] | None = None) -> None:
        self.nonce = nonce
        self.shared = shared or nonce
        self.hidden = hidden or {}
        self.shown: set[str] = set()
        self.texts: list[str] = []
        self.cut: dict[str, int] = {}
        self.rewritten = False
        self.marks_turns = False
        self._shares = False

    def text(self, label: str, text: str, *, max_chars: int) -> Untrusted:
        """Wrap a text with its label; at most `max_chars` characters of it are written."""
        return Untrusted(self, label, text, max_chars)

    def value(self, label: str, value: Any, *, max_chars: int) -> Any:
        """Wrap any value of the sample; numbers, booleans and None are returned unchanged."""
        if hasattr(value, "tolist") and hasattr(value, "shape"):
            value = value.tolist()
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if not isinstance(value, (str, Mapping, list, tuple, bytes)):  # bytes are refused when they are written
            value = str(value)
        value = readable(value) if isinstance(value, str) else value
        return Untrusted(self, re.sub(r"[^a-z0-9_]+", "_", label[:64].lower()), value, max_chars)

    def show(self, text: Untrusted) -> str:
        """Return a text in its fence; for a text that was written before, return a reference to it.

        Texts are identified by their label, except in `extras`, where several may have the same label.
        """
        if text._label in self.shown and not text._label.startswith("extras"):
            return f"(the {text._label} between the markers above)"
        self.shown.add(text._label)
        whole = text.text()
        self.texts.append(whole)
        capped = whole
        if len(whole) > text._max_chars:
            self.cut[text._label] = len(whole)
            capped = cap(whole, text._max_chars)
        shown = neutralise(capped)
        if self.hidden:
            for word, instead in self.hidden.items():
                shown = shown.replace(word, instead)
        if shown is not whole and shown != whole:
            self.texts.append(shown)
            self.rewritten = self.rewritten or shown != capped
        if TURN in shown:
            self.marks_turns = True
            shown = _ROLE.sub(lambda found: f"[{found[1]} {self.shared}]", shown).replace(TURN, "")
        if text._label == "response" or text._label.startswith("response_"):
            return fence(text._label, shown, self.nonce)
        self._shares = True
        return fence(text._label, shown, self.shared)

    @property
    def ids(self) -> str:
        """The nonces of the fences that were written, in words."""
        return f"{self.shared} or {self.nonce}" if self._shares and self.shared != self.nonce else self.nonce


class Template:
    """A compiled template. `path` is its place in the configuration, and `variables` are the names that it looks up.

    `constants` are the variables whose values are the same in every rendering. Raises `ConfigurationError` for a syntax
    error, for what is not available in templates of judges, and for a variable that is not in `allowed`.
    """

    def __init__(self, path: str, source: str, *, allowed: Sequence[str], constants: Collection[str] = ()) -> None:
        self.path = path
        self.tests: tuple[str, ...] | None = None
        """The changing variables, if all that the template does with them is to test whether they are empty. What it
        renders then depends on that alone. None: it does more."""
        self._rendered: dict[tuple[bool, ...], str] = {}
        try:
            tree = _ENVIRONMENT.parse(source)
            for node in tree.find_all(nodes.Node):
                if not _is_available(node):
                    problem = f"`{type(node).__name__.lower()}` is not available here."
                    raise _mistake(path, f"line {node.lineno} of the template: {problem}", _REMEDY)
            for name in tree.find_all(nodes.Name):
                name.name = _ALIASES.get(name.name, name.name)
                if name.name not in allowed:
                    near = nearest(name.name, allowed)
                    remedy = f"Did you mean `{near}`? " if near else ""
                    problem = f"line {name.lineno} of the template: unknown variable `{cut(name.name)}`."
                    raise _mistake(path, problem, f"{remedy}Available: {', '.join(allowed)}.")
            for written in _FORMAT.findall(source):
                if _ALIASES.get(written, written) in allowed:
                    problem = f"`{{{written}}}` is plain text to a template, not the variable."
                    raise _mistake(path, problem, f"Write {{{{ {written} }}}}.")
            self.variables = frozenset(name.name for name in tree.find_all(nodes.Name))
            self._template = _ENVIRONMENT.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise _mistake(path, f"line {error.lineno} of the template: {error.message}") from None
        changing = self.variables.difference(constants)
        if all(map(_only_tests, tree.iter_child_nodes(), itertools.repeat(changing))):
            self.tests = tuple(sorted(changing))

    def render(self, values: Mapping[str, object]) -> str:
        """Render with these values. Raises `InputError` if the template fails on them."""
        try:
            return self._render(values)
        except Exception as error:
            # Any error concerns this template and this sample. Messages name types and never quote texts.
            raise InputError(f"{self.path}: {_message(error)}") from None

    def try_out(self, values: Mapping[str, object]) -> None:
        """Render to test the template. Raises `ConfigurationError` if that fails."""
        try:
            self._render(values)
        except Exception as error:
            raise _mistake(self.path, f"{_message(error)}.") from None

    def _render(self, values: Mapping[str, object]) -> str:
        tested = None if self.tests is None else tuple([bool(values[name]) for name in self.tests])
        if tested is not None and (known := self._rendered.get(tested)) is not None:
            return known
        # `generate` does the same, and also rewrites tracebacks, which are not shown here.
        context = self._template.new_context(dict(values), shared=True)
        text = "".join(self._template.root_render_func(context))
        if tested is not None:
            self._rendered[tested] = text
        return text


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        # Only items: an attribute of a wrapper would be the text itself.
        return self.getitem(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        try:
            return obj.part(argument) if isinstance(obj, Untrusted) else dict(obj)[argument]
        except (LookupError, TypeError, ValueError):
            return self.undefined(hint=f"there is no {argument!r} in {obj!r}"[:200], name=argument)


def _is_available(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const)
    if isinstance(node, nodes.Test):
        return node.name in _TESTS and not node.args
    return isinstance(node, _AVAILABLE)


def _only_tests(node: nodes.Node, changing: Set[str]) -> bool:
    """Whether a part of a template uses these variables only as conditions of an `if`."""
    if isinstance(node, nodes.Name):
        return node.name not in changing
    parts = list(node.iter_child_nodes())
    if isinstance(node, (nodes.If, nodes.CondExpr)) and isinstance(node.test, nodes.Name):
        parts.remove(node.test)
    return all(_only_tests(part, changing) for part in parts)


def _write(value: Any) -> Any:
    if isinstance(value, Untrusted):
        return value._page.show(value)
    if value is None:
        return ""
    if isinstance(value, (str, int, float, jinja2.Undefined)):
        return str(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be written; write one of its items")


def _message(error: Exception) -> str:
    return str(error)[:500] or type(error).__name__


def _mistake(path: str, problem: str, remedy: str = "") -> ConfigurationError:
    return ConfigurationError([Mistake(path, problem, remedy)])


_ENVIRONMENT = _Environment(
    autoescape=False,
    undefined=jinja2.StrictUndefined,
    finalize=_write,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.globals.clear()
