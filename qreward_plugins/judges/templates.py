"""Renders the Jinja2 templates of judges, with every text of the sample in a fence.

The author of a template is trusted; the texts of the sample are not. No template may write such a text without a fence.
So a text of the sample is not a string here but an `Untrusted`. A template can test and compare it, and write it in one
way only: `{{ response }}`, which fences it. Filters, `~`, slices and methods that would return a string fail, if
possible when the judge is opened. Statements that give rendered text back to the template (macros, captures, filter
blocks) are not available, so a template cannot remove a fence.

The sandbox denies templates access to Python's internals. Three rules bound their work and their output: a limit on
loop steps, arithmetic for numbers only, and a limit on the rendered size that is checked while rendering.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from ..errors import ConfigurationError, InputError, Mistake
from .control_tokens import neutralise
from .fence import cap, fence
from .sample_texts import TURN, readable

# A role has no line break, so a marker that was cut spoils no later one.
_ROLE = re.compile(f"{TURN}([^{TURN}\n]*){TURN}")

MAX_STEPS = 10_000
"""Most loop steps of one rendering, over all loops."""

_STATEMENTS = (jinja2.nodes.Output, jinja2.nodes.For, jinja2.nodes.If, jinja2.nodes.Assign, jinja2.nodes.With)

_ONLY_UNCHANGED = (
    "a text of the sample can only be written unchanged, as in {{ name }}: a filter, `~`, a slice or a method would "
    "remove its fence"
)


class Untrusted:
    """A text of the sample. A template can test, compare, measure and write it; writing fences it."""

    __slots__ = ("_label", "_max_chars", "_page", "_text")

    def __init__(self, page: Page, label: str, text: str, max_chars: int) -> None:
        self._page = page
        self._label = label
        self._text = text
        self._max_chars = max_chars

    def startswith(self, prefix: str) -> bool:
        return self._text.startswith(str(prefix))

    def endswith(self, suffix: str) -> bool:
        return self._text.endswith(str(suffix))

    def __bool__(self) -> bool:
        return bool(self._text)

    def __len__(self) -> int:
        return len(self._text)

    def __int__(self) -> int:
        return int(float(self))

    def __float__(self) -> float:
        try:
            return float(self._text)
        except ValueError:
            # Python's message would quote the text.
            raise ValueError(f"the {self._label} is not a number") from None

    def __contains__(self, part: object) -> bool:
        return isinstance(part, str) and part in self._text

    def __eq__(self, other: object) -> bool:
        return self._text == (other._text if isinstance(other, Untrusted) else other)

    def __hash__(self) -> int:
        return hash(self._text)

    def __iter__(self) -> Iterator[str]:
        raise TypeError(_ONLY_UNCHANGED)

    def __str__(self) -> str:
        raise TypeError(_ONLY_UNCHANGED)

    def __repr__(self) -> str:
        return f"<untrusted {self._label}>"


class _Several:
    """A list or a mapping of the sample, with its label."""

    __slots__ = ("_label", "_max_chars", "_page", "_values")

    def __init__(self, page: Page, label: str, values: Any, max_chars: int) -> None:
        self._page = page
        self._label = label
        self._values = values
        self._max_chars = max_chars


class Items(_Several, Sequence[Any]):
    """A list of the sample, or a `range`. It wraps elements on access and counts loop steps."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        value = self._values[index]
        if isinstance(index, slice):
            return Items(self._page, self._label, value, self._max_chars)
        return self._page.value(self._label, value, max_chars=self._max_chars)

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            self._page.step()
            yield self._page.value(self._label, value, max_chars=self._max_chars)


class Table(_Several, Mapping[Any, Any]):
    """A mapping of the sample. It wraps keys and values on access and counts loop steps."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:
        plain = key._text if isinstance(key, Untrusted) else key
        return self._page.value(f"{self._label}_{plain}", self._values[plain], max_chars=self._max_chars)

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        for key in self._values:
            self._page.step()
            yield self._page.value(f"{self._label}_key", key, max_chars=self._max_chars)


class Page:
    """The state of rendering one message: its nonces, the texts written so far, and the loop steps left.

    `nonce` fences the response, and `shared` all other texts (default: `nonce`). `shown` holds the labels and `texts`
    the untrusted texts that were written, as they were given and as they are shown. `cut` maps the label of each
    truncated text to its full length in characters. `rewritten` is true if control tokens in any text were neutralised,
    and `marks_turns` if the roles of turns carry the shared nonce.
    With `fences` false, a template can test texts of the sample but not write them. `hidden` maps further words, which
    are no control tokens, to what is written instead of them.
    """

    def __init__(
        self, nonce: str, *, shared: str = "", fences: bool = True, hidden: Mapping[str, str] | None = None
    ) -> None:
        self.nonce = nonce
        self.shared = shared or nonce
        self.fences = fences
        self.hidden = hidden or {}
        self.shown: set[str] = set()
        self.texts: list[str] = []
        self.cut: dict[str, int] = {}
        self.rewritten = False
        self.marks_turns = False
        self._steps_left = MAX_STEPS

    def text(self, label: str, text: str, *, max_chars: int) -> Untrusted:
        """Wrap a text with its label; at most `max_chars` characters of it are written."""
        return Untrusted(self, label, text, max_chars)

    def value(self, label: str, value: Any, *, max_chars: int) -> Any:
        """Wrap any value of the sample; numbers, booleans and None are returned unchanged."""
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if hasattr(value, "tolist") and hasattr(value, "shape"):
            return self.value(label, value.tolist(), max_chars=max_chars)
        if isinstance(value, Mapping):
            return Table(self, label, value, max_chars)
        if isinstance(value, (list, tuple, range)):
            return Items(self, label, value, max_chars)
        text = value.decode("utf-8", "replace") if isinstance(value, (bytes, bytearray)) else str(value)
        return Untrusted(self, _as_label(label), readable(text), max_chars)

    def range(self, *bounds: Any) -> Items:
        """Python's `range`, with counted steps."""
        return Items(self, "range", range(*(int(bound) for bound in bounds)), 0)

    def show(self, text: Untrusted) -> str:
        """Return a text in its fence; for a text that was written before, return a reference to it.

        Texts are identified by their label, except in `extras`, where several may have the same label.
        """
        if not self.fences:
            raise TypeError("a text of the sample cannot be written here; write it in the instructions")
        if text._label in self.shown and not text._label.startswith("extras"):
            return f"(the {text._label} between the markers above)"
        self.shown.add(text._label)
        self.texts.append(text._text)
        if len(text._text) > text._max_chars and text._label != "data_source":
            self.cut[text._label] = len(text._text)
        capped = cap(text._text, text._max_chars)
        shown = neutralise(capped)
        for word, instead in self.hidden.items():
            shown = shown.replace(word, instead)
        if shown != text._text:
            self.texts.append(shown)
        self.rewritten = self.rewritten or shown != capped
        if TURN in shown:
            self.marks_turns = True
            shown = _ROLE.sub(lambda found: f"[{found[1]} {self.shared}]", shown).replace(TURN, "")
        return fence(text._label, shown, self.nonce if _is_response(text._label) else self.shared)

    @property
    def ids(self) -> str:
        """The nonces of the fences that were written, in words."""
        if self.shared == self.nonce or all(map(_is_response, self.shown)):
            return self.nonce
        return f"{self.shared} or {self.nonce}"

    def step(self) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise OverflowError(f"the template takes more than {MAX_STEPS:,} loop steps")


class Template:
    """A compiled template. `path` is its place in the configuration, and `variables` are the names that it looks up.

    `constants` are the variables whose values are the same in every rendering. `max_chars` is the longest rendered
    text. Raises `ConfigurationError` for a syntax error, a statement that is not available in templates of judges, and
    a variable that is not in `allowed`.
    """

    def __init__(
        self, path: str, source: str, *, allowed: Sequence[str], max_chars: int, constants: Collection[str] = ()
    ) -> None:
        self.path = path
        self.max_chars = max_chars
        self.tests: tuple[str, ...] | None = None
        """The changing variables, if all that the template does with them is to test whether they are empty. What it
        renders then depends on that alone. None: it does more."""
        self._rendered: dict[tuple[bool, ...], str] = {}
        try:
            tree = _ENVIRONMENT.parse(source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise _mistake(path, f"line {error.lineno} of the template: {error.message}") from None
        except (RecursionError, MemoryError, OverflowError, SyntaxError, TypeError, ValueError) as error:
            raise _mistake(path, f"the template cannot be compiled: {error}") from None
        for statement in tree.find_all(jinja2.nodes.Stmt):
            if not isinstance(statement, _STATEMENTS) or getattr(statement, "recursive", False):
                raise _mistake(
                    path,
                    f"line {statement.lineno} of the template: {type(statement).__name__} is not available here.",
                    "Templates of judges have if, for (not recursive), set (not as a block) and with.",
                )
        # Jinja2 reports a name that only one branch of an `if` sets as undeclared, but the template does set it.
        own = {name.name for name in tree.find_all(jinja2.nodes.Name) if name.ctx == "store"}
        unknown = sorted(self.variables - {*allowed, "range"} - own)
        if unknown:
            raise _mistake(
                path,
                f"unknown variable in the template: {', '.join(unknown)}.",
                f"Available: {', '.join(allowed)}.",
            )
        changing = self.variables.difference((*constants, "range"))
        if not own & changing and all(map(_only_tests, tree.iter_child_nodes(), itertools.repeat(changing))):
            self.tests = tuple(sorted(changing))

    @property
    def constant(self) -> str | None:
        """The rendered text, if it is always the same and was rendered before."""
        return self._rendered.get(())

    def render(self, page: Page, values: Mapping[str, object]) -> str:
        """Render with `page`. Raises `InputError` if the template fails on these values or its text grows too large."""
        try:
            return self._render(page, values)
        except Exception as error:
            # Any error concerns this template and this sample. Messages name types and never quote texts.
            raise InputError(f"{self.path}: {_message(error)}") from None

    def try_out(self, page: Page, values: Mapping[str, object]) -> None:
        """Render to test the template. Raises `ConfigurationError` for an error that does not depend on the sample.

        Errors that may depend on the sample (a missing key, a division by zero) are ignored.
        """
        try:
            self._render(page, values)
        except (jinja2.UndefinedError, ArithmeticError, ValueError, LookupError) as error:
            if isinstance(error, OverflowError):
                raise _mistake(self.path, f"{_message(error)}.") from None
        except Exception as error:
            raise _mistake(self.path, f"{_message(error)}.") from None

    def _render(self, page: Page, values: Mapping[str, object]) -> str:
        tested = None if self.tests is None else tuple([bool(values[name]) for name in self.tests])
        if tested is not None and (known := self._rendered.get(tested)) is not None:
            return known
        pieces: list[str] = []
        size = 0
        # `generate` does the same, and also rewrites tracebacks, which are not shown here.
        context = self._template.new_context({**values, "range": page.range}, shared=True)
        for piece in self._template.root_render_func(context):
            size += len(piece)
            if size > self.max_chars:
                raise OverflowError(f"the rendered text is longer than {self.max_chars:,} characters")
            pieces.append(piece)
        text = "".join(pieces)
        if tested is not None:
            self._rendered[tested] = text
        return text


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    # Intercepted operators are not evaluated at compile time, and not applied to strings: "x" * 10**9 is a gigabyte.
    intercepted_binops = frozenset({"*", "**", "%"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        _refuse_parts_of(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _refuse_parts_of(obj, argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        for operand in (left, right):
            if not isinstance(operand, (int, float)) or abs(operand) > 1e100:
                raise TypeError(f"`{operator}` in templates takes only numbers up to 1e100")
        if operator == "**" and abs(right) > 64:
            raise TypeError("an exponent in a template must be at most 64")
        return super().call_binop(context, operator, left, right)


def _only_tests(node: jinja2.nodes.Node, changing: Set[str]) -> bool:
    """Whether a part of a template uses these variables only as conditions of an `if`."""
    if isinstance(node, jinja2.nodes.Name):
        return node.name not in changing
    parts = list(node.iter_child_nodes())
    if isinstance(node, (jinja2.nodes.If, jinja2.nodes.CondExpr)) and isinstance(node.test, jinja2.nodes.Name):
        parts.remove(node.test)
    return all(_only_tests(part, changing) for part in parts)


def _refuse_parts_of(obj: Any, name: Any) -> None:
    if isinstance(obj, Untrusted) and name not in ("startswith", "endswith"):
        raise TypeError(_ONLY_UNCHANGED)


def _write(value: Any) -> Any:
    if isinstance(value, Untrusted):
        return value._page.show(value)
    if value is None:
        return ""
    if isinstance(value, (str, int, float, jinja2.Undefined)):
        return str(value)
    raise TypeError(
        f"a value of type {type(value).__name__} cannot be written; loop over it, or write one of its items"
    )


def _message(error: Exception) -> str:
    return str(error)[:500] or type(error).__name__


def _is_response(label: str) -> bool:
    return label == "response" or label.startswith("response_")


def _as_label(text: str) -> str:
    return re.sub(r"[^a-z0-9_]+", "_", text[:64].lower())


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
# With it, the same sample would get another prompt in each run.
del _ENVIRONMENT.filters["random"]
