"""Renders a conversation with the chat template of a model, for servers that only take finished texts.

The template is the one that the model's tokenizer ships (`chat_template` in `tokenizer_config.json`, or the file
`chat_template.jinja` beside it). It is rendered as transformers renders it (`utils/chat_template_utils.py`): in a
sandbox, with the special tokens, `raise_exception`, `strftime_now` and the tag `generation`. The messages are values of
the template and never parsed as one.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from ..errors import ConfigurationError, InputError, Mistake
from ..samples import Message

CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
_REMEDY = f"Name the folder of the model, its {CONFIG_FILE}, or a Jinja file."
_TEXTS = ("what is 17 plus 25?", "it is 42.")
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
        problem = ""
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            problem = f"line {getattr(error, 'lineno', 1)} of the chat template: {_said(error)}"
        if problem:
            raise ConfigurationError([Mistake(where, f"{problem}.")])
        if self._drops_texts():
            problem = f"{path!r} is no chat template: what it writes does not hold the texts of the conversation."
            raise ConfigurationError([Mistake(where, problem, _REMEDY)])

    def _drops_texts(self) -> bool:
        try:
            text = self.render([Message(role="user", content=_TEXTS[0]), Message(role="assistant", content=_TEXTS[1])])
        except InputError:
            return False
        return not all(part in text for part in _TEXTS)

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
        if not path.is_dir() and path.name != CONFIG_FILE:
            config = {**config, **json.loads(path.read_text(encoding="utf-8"))}
        elif (folder / TEMPLATE_FILE).is_file():
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
