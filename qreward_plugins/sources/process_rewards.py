"""Splits a response into steps for a process reward model, and finds the tokens whose logits score them.

A process reward model gives logits for every token. It was trained to score a step at the last token of a separator
that follows the step. So the separators are put in here, the conversation is tokenized here, and the server gets token
ids: then each logit belongs to a known character, whatever the server's tokenizer would have made of the text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, InputError, InvalidReply, Mistake
from ..samples import Message
from .chat_template import ChatTemplate

TOKENIZER_FILE = "tokenizer.json"
MOST_STEPS = 1000
"""Most steps of one response; the last one holds the rest. Otherwise a response of separators would fill the memory."""
_SOME_RESPONSE = "It is 42."
MOST_LABELS = 100
"""Most logits of one token."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A conversation as token ids. `steps` has for each step the offset of its end in the response, in characters, and
    the position of the token that scores it.
    """

    ids: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]


class StepTokenizer:
    """Turns conversations into `Tokens`.

    `folder` holds the model's tokenizer. `separator` ends a step in the response. `mark` is put behind every step in
    its place (the token that the model was trained with); "": the separator itself. `where` is the configuration key
    that names the folder.

    Raises `ConfigurationError` if the tokenizer cannot be read, or the package `tokenizers` is missing.
    """

    def __init__(self, folder: str, template: ChatTemplate, *, separator: str, mark: str, where: str) -> None:
        self._template = template
        self._separator = separator
        self._mark = mark or separator
        self._tokenizer = _open(Path(folder).expanduser(), where)
        special = [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]
        longest_first = sorted({*special, mark} - {""}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._tail = self._tail_of(template)

    @staticmethod
    def _tail_of(template: ChatTemplate) -> str:
        """What the template writes after a response; "" if that cannot be told."""
        turns = [Message(role="user", content="q"), Message(role="assistant", content=_SOME_RESPONSE)]
        try:
            return template.render(turns, keep_bos=True).rpartition(_SOME_RESPONSE)[2]
        except InputError:
            return ""

    def _without_special(self, text: str) -> str:
        """Replace one character in each special token of this tokenizer. Otherwise a response could end its own turn,
        or write the token at which the model was trained to score a step.
        """
        if self._special is None:
            return text
        return self._special.sub(lambda token: f"\ufffd{token[0][1:]}", text)

    def tokens(self, messages: Sequence[Message]) -> Tokens:
        """Tokenize a conversation whose last turn is the response. Special tokens in its texts lose their meaning.

        Raises `InputError` if its template refuses it or changes the response.
        """
        turns = [Message(role=turn["role"], content=self._without_special(turn["content"])) for turn in messages]
        ends, marked, marks = self._marked(turns[-1]["content"])
        text = self._template.render([*turns[:-1], {**turns[-1], "content": marked}], keep_bos=True)
        # What the template writes after the response may contain a short one.
        last = len(text) - len(self._tail) if self._tail and text.endswith(self._tail) else len(text)
        first = text.rfind(marked, 0, last)
        if first < 0:
            # Some templates strip the text of a turn.
            stripped = marked.strip()
            at = text.rfind(stripped, 0, last)
            if at < 0:
                raise InputError(
                    "the chat template changes the response, so its steps cannot be found in the conversation"
                )
            first, last = at - (len(marked) - len(marked.lstrip())), at + len(stripped) - 1
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        starts = [start for start, _ in encoding.offsets]
        steps = tuple(
            (end, bisect_right(starts, min(first + mark, last)) - 1) for end, mark in zip(ends, marks, strict=True)
        )
        return Tokens(tuple(encoding.ids), steps)

    def _marked(self, response: str) -> tuple[list[int], str, list[int]]:
        """Return the end of each step in the response, the response with marks, and the last character of each mark."""
        ends: list[int] = []
        marks: list[int] = []
        pieces: list[str] = []
        length = 0
        for start, end in self._steps(response):
            pieces += (response[start:end], self._mark)
            length += end - start + len(self._mark)
            ends.append(end)
            marks.append(length - 1)
        return ends, "".join(pieces), marks

    def _steps(self, response: str) -> list[tuple[int, int]]:
        """Return the start and the end of each step; texts without a visible character between separators are none."""
        spans: list[tuple[int, int]] = []
        start = 0
        while start <= len(response):
            at = response.find(self._separator, start)
            end = len(response) if at < 0 or len(spans) == MOST_STEPS - 1 else at
            if response[start:end].strip():
                spans.append((start, end))
            start = end + len(self._separator)
        return spans or [(0, len(response))]


def step_logits(
    rows: Sequence[Any], tokens: Tokens, name: str, is_logit: Callable[[Any], bool]
) -> list[tuple[int, dict[str, float]]]:
    """Return the offset and the logits of each step from the numbers of every token.

    Raises `InvalidReply` if the source `name` gave numbers for other tokens, or numbers that are no logits.
    """
    if len(rows) != len(tokens.ids):
        raise InvalidReply(
            f"source {name!r} gave numbers for {len(rows):,} tokens, and was asked about {len(tokens.ids):,}; it must "
            "not truncate the text"
        )
    found: list[tuple[int, dict[str, float]]] = []
    for offset, position in tokens.steps:
        row = rows[position]
        if not isinstance(row, list) or not 0 < len(row) <= MOST_LABELS or not all(map(is_logit, row)):
            raise InvalidReply(
                f"source {name!r} gave no list of finite logits for the step that ends at character {offset:,}"
            )
        found.append((offset, {str(label): float(logit) for label, logit in enumerate(row)}))
    return found


def _open(path: Path, where: str) -> Any:
    file = (path if path.is_dir() else path.parent) / TOKENIZER_FILE
    remedy = f"Name the folder of the model, which holds {TOKENIZER_FILE}."
    try:
        from tokenizers import Tokenizer
    except ImportError:
        problem = "task: token_classify needs the package tokenizers, which is not installed."
        raise ConfigurationError([Mistake(where, problem, "Install it: pip install tokenizers")]) from None
    problem = ""
    try:
        if not file.is_file():
            problem = "does not exist"
        else:
            tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises a bare Exception
        problem = f"cannot be read ({type(error).__name__})"
    if problem:
        raise ConfigurationError([Mistake(where, f"'{file}' {problem}.", remedy)])
    # A file may hold the settings of its last use.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
