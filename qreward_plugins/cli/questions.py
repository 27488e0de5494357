"""Asks questions at a terminal, for `qreward init`: one line each, repeated until the answer can be used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from rich.console import Console

from ..errors import InputError
from .running import say

T = TypeVar("T")

_MOST_TRIES = 20
_MOST_SHOWN = 20


class Questions:
    """Asks at the terminal. `read` shows a prompt and returns a line; it raises EOFError at the end of the input.

    Messages never repeat an answer, because it may be a secret.
    """

    def __init__(self, out: Console, read: Callable[[str], str] = input) -> None:
        self._out = out
        self._read = read

    def heading(self, text: str) -> None:
        """Print the title of a question."""
        self._out.print()
        self._out.print(text, style="bold", markup=False, highlight=False)

    def note(self, text: str) -> None:
        """Print a remark."""
        say(self._out, f"  {text}")

    def ask(self, label: str, parse: Callable[[str], T], *, default: str | None = None) -> T:
        """Return the parsed answer. An empty answer is `default`; with None, it is refused.

        `parse` raises ValueError with what is wrong, and the question is asked again. Raises `InputError` if the input
        ends, or if no answer can be used.
        """
        shown = f" [{default}]" if default else ""
        for _ in range(_MOST_TRIES):
            try:
                answer = self._read(f"  {label}{shown}: ").strip()
            except EOFError:
                self._out.print()
                raise InputError("the input ended before the last question; nothing was written") from None
            except UnicodeDecodeError:
                self.note("that is not readable text")
                continue
            if not answer:
                if default is None:
                    self.note("an answer is needed")
                    continue
                answer = default
            try:
                return parse(answer)
            except ValueError as error:
                self.note(str(error))
        raise InputError(f"no usable answer to {label!r} in {_MOST_TRIES} tries; nothing was written")

    def choose(self, label: str, choices: Mapping[str, str], *, default: str) -> str:
        """Return one of the keys of `choices`, which map to their descriptions. A number or a unique beginning counts,
        too.
        """
        names = list(choices)
        for number, (name, description) in enumerate(choices.items(), 1):
            self.note(f"{number} {name:<12} {description}".rstrip())

        def parse(answer: str) -> str:
            if answer.isascii() and answer.isdigit() and 1 <= int(answer) <= len(names):
                return names[int(answer) - 1]
            near = [name for name in names if name.startswith(answer.lower())]
            if len(near) != 1 and answer.lower() not in names:
                raise ValueError(f"answer with one of: {', '.join(names)}")
            return answer.lower() if answer.lower() in names else near[0]

        return self.ask(label, parse, default=default)

    def pick(self, label: str, names: tuple[str, ...], parse: Callable[[str], str]) -> str:
        """Return one of the names of a list that a server gave, or another name."""
        if len(names) > 1:
            for number, name in enumerate(names[:_MOST_SHOWN], 1):
                self.note(f"{number} {name}")
            if len(names) > _MOST_SHOWN:
                self.note(f"and {len(names) - _MOST_SHOWN} more")

        def of_list(answer: str) -> str:
            if answer not in names and answer.isascii() and answer.isdigit() and 1 <= int(answer) <= len(names):
                return names[int(answer) - 1]
            return parse(answer)

        return self.ask(label, of_list, default=names[0] if names else None)

    def confirm(self, label: str) -> bool:
        """Return whether the answer is yes; an empty answer is no."""
        answers = {"y": True, "yes": True, "n": False, "no": False}

        def parse(answer: str) -> bool:
            if answer.lower() not in answers:
                raise ValueError("answer with y or n")
            return answers[answer.lower()]

        return self.ask(f"{label} (y/n)", parse, default="n")
