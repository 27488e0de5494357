"""Renders a conversation with the chat template of a model, for servers that only take finished texts; and marks the
steps of a response for process reward models.

The template is the one that the model's tokenizer ships (`chat_template` in `tokenizer_config.json`, or the file
`chat_template.jinja` beside it). It is rendered as transformers renders it (`utils/chat_template_utils.py`): in a
sandbox, with the special tokens, `raise_exception`, `strftime_now` and the tag `generation`. The messages are values of
the template and never parsed as one.
"""

from __future__ import annotations

import datetime
import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from ..errors import ConfigurationError, InputError, InvalidReply, Mistake
from ..samples import Message
from .values import is_number

CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
_REMEDY = f"Name the folder of the model, its {CONFIG_FILE}, or a Jinja file."
_MESSAGE_CHARS = 200
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """The chat template of one model.

    `path` is the folder of the model, its `tokenizer_config.json`, or a Jinja file; `where` is the configuration key
    that names it. Raises `ConfigurationError` if there is no template, or if it cannot be parsed.
    """

    def __init__(self, path: str, *, where: str) -> None:
        text, config = _read(Path(path).expanduser(), where)
        self._special = {name: _token(config.get(name)) for name in _SPECIAL_TOKENS}
        self._server_adds_bos = config.get("add_bos_token", True) is not False
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=_strftime_now)
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            problem = f"line {getattr(error, 'lineno', 1)} of the chat template: {_said(error)}."
            raise ConfigurationError([Mistake(where, problem)]) from None

    def render(self, messages: Sequence[Message], *, keep_bos: bool = False) -> str:
        """Return the conversation as the text that the model was trained on, without a prompt for another turn.

        A leading BOS token is removed if the server's tokenizer adds one itself: a second one changes the scores.
        `keep_bos`: the text is tokenized here, so nothing adds one.
        Raises `InputError` if the template refuses the messages (two turns of one role, an unknown role).
        """
        problem = ""
        try:
            text = self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=False,
                **self._special,
            )
        except Exception as error:  # the code of the template may raise anything
            problem = _said(error)
        if problem:
            raise InputError(f"the chat template refuses the messages: {problem}")
        bos = self._special["bos_token"]
        return text.removeprefix(bos) if bos and self._server_adds_bos and not keep_bos else text


class _Generation(jinja2.ext.Extension):
    """The tag `generation`, by which a template marks what the model generated. It changes no text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an attribute of instances)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _read(path: Path, where: str) -> tuple[str, Mapping[str, Any]]:
    """Return the template and the configuration of the tokenizer; an empty mapping if there is none."""
    folder = path if path.is_dir() else path.parent
    problem = ""
    try:
        config: Any = {}
        path.stat()
        if (folder / CONFIG_FILE).is_file():
            config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        if not path.is_dir() and path.suffix != ".json":
            return path.read_text(encoding="utf-8"), config
        if (folder / TEMPLATE_FILE).is_file():
            return (folder / TEMPLATE_FILE).read_text(encoding="utf-8"), config
        found = _default(config.get("chat_template"))
        if found:
            return found, config
        problem = f"it has no chat template ({TEMPLATE_FILE}, or chat_template in {CONFIG_FILE})"
    except FileNotFoundError:
        problem = "it does not exist"
    except (OSError, ValueError, AttributeError, TypeError) as error:
        problem = f"it cannot be read ({type(error).__name__})"
    raise ConfigurationError([Mistake(where, f"{str(path)!r}: {problem}.", _REMEDY)])


def _default(templates: Any) -> str:
    """Return the template; of several, the one that is called `default`."""
    if isinstance(templates, list):
        named = {one.get("name"): one.get("template") for one in templates if isinstance(one, Mapping)}
        templates = named.get("default")
    return templates if isinstance(templates, str) else ""


def _token(token: Any) -> str:
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else ""


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Unlike Jinja's own filter, it does not escape HTML: the text is for a model.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


def _said(error: Exception) -> str:
    """Describe an error without the texts of the sample, as far as the template does not write them itself."""
    message = str(error) if isinstance(error, jinja2.TemplateError) else ""
    return f"{type(error).__name__}: {' '.join(message.split())[:_MESSAGE_CHARS]}".rstrip(": .")


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


def step_logits(rows: Sequence[Any], tokens: Tokens, name: str) -> list[tuple[int, dict[str, float]]]:
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
        if not isinstance(row, list) or not 0 < len(row) <= MOST_LABELS or not all(map(is_number, row)):
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
        problem = "vllm_steps needs the package tokenizers, which is not installed."
        raise ConfigurationError([Mistake(where, problem, "Install it: pip install tokenizers")]) from None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises a bare Exception
        problem = f"cannot be read ({type(error).__name__})" if file.is_file() else "does not exist"
        raise ConfigurationError([Mistake(where, f"'{file}' {problem}.", remedy)]) from None
    # A file may hold the settings of its last use.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
