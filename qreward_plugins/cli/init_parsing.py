"""Parses single answers of `qreward init`. Every function raises ValueError with what is wrong, and never repeats the
answer, which may be a secret.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ..config.registry import judges
from ..config.source_models import ModelName, ServiceURL
from ..errors import ConfigurationError
from ..judges.prompt import Prompt
from ..sources.function_arguments import arguments_taken
from ..sources.reward_protocols import PROTOCOLS
from ..system.functions import PathLoader, load
from .api_keys import is_local, without_key
from .init_answers import Function

_MOST_RUBRIC_BYTES = 262_144
_PATHS = ("/chat/completions", "/completions", "/messages", "/responses", "/models", "/classify", "/pooling", "/score")
"""Ends of URLs that are copied from examples; a base URL does not have them."""
LEARNED = "learned"


def url(answer: str) -> str:
    """A base URL. A missing scheme is added; the path of one call, and a comma that was copied with it, are removed."""
    text = without_key(answer).rstrip(",;")
    if not text.endswith("://"):
        text = text.rstrip("/")
    if "://" not in text:
        host = text.split("/", 1)[0]
        if "." not in host and ":" not in host and host != "localhost":
            raise ValueError("write a URL, as in http://localhost:8000/v1")
        text = f"{'http' if is_local(host.rpartition(':')[0] or host) else 'https'}://{text}"
    for path in _PATHS:
        text = text.removesuffix(path)
    return _valid(ServiceURL, text)


def model(answer: str) -> str:
    """The name of a model."""
    if not answer.strip():
        raise ValueError("write the name of a model, as its server lists it")
    if not answer.isprintable():
        raise ValueError("the name has characters that cannot be printed")
    return _valid(ModelName, without_key(answer.strip()))


def protocol(answer: str) -> str:
    """The protocol of a reward model's server."""
    if answer not in PROTOCOLS:
        raise ValueError(f"write one of: {', '.join(PROTOCOLS)}")
    return answer


def rate(answer: str) -> float | None:
    """A positive number; None for a limit that is learned."""
    if answer.lower() in (LEARNED, "none", "-"):
        return None
    text = answer.replace(",", "").replace("_", "")
    try:
        number = float(text) if text.isascii() else 0.0
    except ValueError:
        number = 0.0
    if not 0 < number < 1e12:
        raise ValueError(f"write a number above 0, or {LEARNED}")
    return int(number) if number == int(number) else number


def places(answer: str) -> int | None:
    """A positive whole number; None for a limit that is learned."""
    number = rate(answer)
    if number is not None and number != int(number):
        raise ValueError(f"write a whole number above 0, or {LEARNED}")
    return None if number is None else int(number)


def rubric(answer: str) -> str:
    """A rubric, or `@FILE` with one; "" for the answer "default"."""
    if answer == "default":
        return ""
    text = answer.strip()
    if answer.startswith("@"):
        try:
            data = Path(answer[1:]).expanduser().read_bytes()
        except (OSError, ValueError) as error:
            raise ValueError(f"the file cannot be read ({getattr(error, 'strerror', None) or 'no path'})") from None
        if len(data) > _MOST_RUBRIC_BYTES:
            raise ValueError(f"the file has more than {_MOST_RUBRIC_BYTES:,} bytes")
        try:
            # Some editors begin a file with a byte order mark.
            text = data.decode("utf-8-sig").strip()
        except UnicodeDecodeError:
            raise ValueError("the file is not UTF-8 text") from None
    without_key(text)
    if not text:
        raise ValueError("the rubric is empty")
    if re.fullmatch(r"https?://\S+", text):
        raise ValueError("that is a URL, and the rubric says what a good response is; the endpoint is asked for next")
    config: Any = judges.load("llm").Config.model_validate({"kind": "llm", "instructions": text})
    try:
        Prompt("quality", config)
    except ConfigurationError as error:
        raise ValueError(error.mistakes[0].problem) from None
    return text


def function(answer: str) -> Function:
    """The path of a reward function, which is imported. A file's path becomes absolute, for other processes."""
    where, _, name = without_key(answer).rpartition(":")
    if not where or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError("write package.module:function, or path/to/file.py:function")
    path = f"{Path(where).expanduser().absolute()}:{name}" if where.endswith(".py") else f"{where}:{name}"
    try:
        found = load(PathLoader(path), key="function")
    except ConfigurationError as error:
        raise ValueError(error.mistakes[0].problem) from None
    return Function(path, arguments_taken(found))


def chat_template(answer: str) -> str:
    """The folder of a reward model, or a file with its chat template."""
    path = Path(without_key(answer)).expanduser().absolute()
    if not path.exists():
        raise ValueError("there is no such folder or file")
    return str(path)


def out(answer: str) -> Path:
    """The file to write."""
    if not answer.isprintable():
        raise ValueError("the name has characters that cannot be printed")
    path = Path(without_key(answer)).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError("write the name of a file that ends in .yaml")
    try:
        os.lstat(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ValueError(f"the file cannot be written ({error.strerror})") from None
    if path.is_dir():
        raise ValueError("that is a folder")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"the folder {str(path.absolute().parent)!r} does not exist; create it, or name another file")
    return path


def _valid(form: Any, text: str) -> str:
    try:
        valid: str = TypeAdapter(form).validate_python(text)
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False, include_context=False)[0]["msg"]
    else:
        return valid
    raise ValueError(problem.removeprefix("Value error, "))


__all__ = ["LEARNED", "chat_template", "function", "model", "out", "places", "protocol", "rate", "rubric", "url"]
