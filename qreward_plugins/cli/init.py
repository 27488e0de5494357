"""`qreward init`: asks five questions, writes a commented configuration, checks it, and prints the line to train with.

Every question has a flag. The file is written in one step or not at all, and never holds a key.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import yaml  # type: ignore[import-untyped]
from rich.console import Console

from ..config import Config, load_config
from ..errors import InputError
from ..sources.endpoint_settings import can_be_sent
from . import init_parsing as parsing
from .api_keys import is_local_url, is_variable, usual_variable, variable_for_key
from .check import check_config
from .discovery import Discovered, discover, survey
from .init_answers import SCORES, Answers, Endpoint, Function, RateLimits, Score
from .offline import without_servers
from .questions import Questions
from .running import open_engine, run, say
from .training_lines import Framework, installed

T = TypeVar("T")

_DEFAULT_URL = {"reward-model": "http://localhost:8000"}
_FRAMEWORKS = {"verl": "", "slime": "", "roll": "ROLL", "none": "files, Python, or a trainer of your own"}
_PROTOCOLS = {"vllm": "", "sglang": "sglang_classify", "tei": "tei_predict"}
"""The protocol of a reward model behind each server; "" for the default one."""
_RENDERED_HERE = ("sglang_classify", "sglang_embeddings", "tei_predict", "openrlhf")
"""Protocols that need the chat template of the model."""
_OF_ENDPOINTS = ("url", "model", "api_key_env", "rpm", "tpm", "concurrency")
_FLAGS: Mapping[str, tuple[str, ...]] = {
    "judge": ("rubric", *_OF_ENDPOINTS),
    "reward-model": ("protocol", "chat_template", *_OF_ENDPOINTS),
    "function": ("function",),
    "mixture": ("rubric", "function", *_OF_ENDPOINTS),
}
"""The flags that have an effect, for each choice of what scores."""
_LOCAL_CONCURRENCY = "64"
_MOST_LISTED = 8


@dataclass(frozen=True)
class InitOptions:
    """The flags; None for a question that has no answer yet."""

    framework: str | None = None
    score: str | None = None
    url: str | None = None
    model: str | None = None
    api_key_env: str | None = None
    protocol: str | None = None
    chat_template: str | None = None
    rubric: str | None = None
    function: str | None = None
    rpm: float | None = None
    tpm: float | None = None
    concurrency: int | None = None
    out: str | None = None
    yes: bool = False
    overwrite: bool = False
    offline: bool = False


def has_terminal() -> bool:
    """Whether standard input is a terminal, at which questions can be answered."""
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


def init(options: InitOptions, out: Console, errors: Console) -> int:
    """Collect the answers, write the file, and check it. Returns the exit code of the check.

    Raises `InputError` and `ConfigurationError`. Nothing is written then, unless the final check raised.
    """
    questions = Questions(out) if has_terminal() and not options.yes else None
    collecting = _Collecting(options, questions, out)
    if questions is None and not options.yes:
        collecting.require_flags()
    answers, path, overwrite = collecting.answers()
    text = answers.text()
    asyncio.run(_check_opens(load_config(yaml.safe_load(text), origin=str(path)), path))
    _write(path, text, overwrite=overwrite)
    say(out, f"\nwrote {path}\n" if questions else f"wrote {path}")
    return run(check_config(path, None, out, errors, offline=collecting.offline, framework=answers.framework))


class _Collecting:
    """Collects the answers from flags, from the terminal, and from defaults."""

    def __init__(self, options: InitOptions, questions: Questions | None, out: Console) -> None:
        self._options = options
        self._questions = questions
        self._out = out
        self.offline = options.offline

    def require_flags(self) -> None:
        """Raise `InputError` with all missing flags. Call it where there is no terminal."""
        given, score = self._options, self._implied_score() or "judge"
        missing = [] if given.framework else ["--framework"]
        if score != "function":
            missing += [f"--{name}" for name in ("url", "model") if getattr(given, name) is None]
        if score in ("function", "mixture") and given.function is None:
            missing.append("--function")
        if missing:
            raise InputError(
                f"there is no terminal to ask questions at; add {', '.join(missing)}, or --yes for the defaults "
                "(qreward init --help)"
            )

    def answers(self) -> tuple[Answers, Path, bool]:
        """Return the answers, the file, and whether it may be overwritten."""
        self._heading("1. Which framework trains?")
        here = installed()
        default = here[0] if here else "verl"
        framework = cast(Framework, self._choice("framework", _FRAMEWORKS, default))
        name = "qreward.yaml" if framework == "slime" else "judges.yaml"
        # A flag or default that cannot be used is refused here, before anything is sent.
        file = self._path(name) if self._questions is None or self._options.out is not None else None
        self._heading("2. What scores a response?")
        score = cast(Score, self._implied_score() or self._choice("score", SCORES, "judge"))
        self._check_flags(score)
        rubric = function = None
        if score in ("judge", "mixture"):
            label = "what counts, in a line, or @FILE"
            rubric = self._answer("rubric", label, parsing.rubric, default="default")
        if score in ("function", "mixture"):
            function = self._function()
        endpoint, limits = None, RateLimits()
        if score != "function":
            self._heading("3. Where is it served?")
            endpoint, limits = self._endpoint(score)
        self._heading("5. Which file shall be written?" if endpoint else "3. Which file shall be written?")
        path, overwrite = file or self._path(name)
        return Answers(framework, score, endpoint, limits, rubric or "", function), path, overwrite

    def _implied_score(self) -> str | None:
        given = self._options
        if given.score is not None or self._questions is not None or given.function is None:
            return given.score
        return "mixture" if given.url is not None else "function"

    def _check_flags(self, score: Score) -> None:
        """Refuse flags that have no effect or cannot be read, before anything is sent. Raises `InputError`."""
        parsers: Mapping[str, Callable[[str], object]] = {
            "url": parsing.url,
            "model": parsing.model,
            "protocol": parsing.protocol,
            "chat_template": parsing.chat_template,
            "rpm": parsing.rate,
            "tpm": parsing.rate,
            "concurrency": parsing.places,
        }
        given = [flag for flags in _FLAGS.values() for flag in flags if getattr(self._options, flag) is not None]
        for flag in dict.fromkeys(given):
            if flag not in _FLAGS[score]:
                users = " or ".join(f"--score {name}" for name, flags in _FLAGS.items() if flag in flags)
                raise InputError(f"{_option(flag)} has no effect with --score {score}; leave it out, or use {users}")
            if flag in parsers:
                self._parsed(flag, parsers[flag], getattr(self._options, flag))

    def _parsed(self, flag: str, parse: Callable[[str], T], given: object) -> T:
        try:
            return parse(str(given))
        except ValueError as error:
            raise InputError(f"{_option(flag)}: {error}") from None

    def _heading(self, text: str) -> None:
        if self._questions is not None:
            self._questions.heading(text)

    def _note(self, text: str) -> None:
        if self._questions is not None:
            self._questions.note(text)
        else:
            say(self._out, text)

    def _choice(self, flag: str, choices: Mapping[str, str], default: str) -> str:
        given: str | None = getattr(self._options, flag)
        if given is not None:
            return given
        return self._questions.choose(flag, choices, default=default) if self._questions else default

    def _answer(self, flag: str, label: str, parse: Callable[[str], T], *, default: str | None) -> T:
        """Return the answer of a flag, of the terminal, or the default. Raises `InputError` for a flag that cannot be
        read, and for a missing one without a default where there is no terminal.
        """
        given = getattr(self._options, flag)
        if given is None and self._questions is not None:
            return self._questions.ask(label, parse, default=default)
        if given is None and default is None:
            raise InputError(f"{_option(flag)} is missing: {label}")
        return self._parsed(flag, parse, default if given is None else given)

    def _function(self) -> Function:
        found = self._answer("function", "module:function, or file.py:function", parsing.function, default=None)
        if found.arguments == "sample":
            self._note("it is called with one Sample")
        return found

    def _endpoint(self, score: Score) -> tuple[Endpoint, RateLimits]:
        default = _DEFAULT_URL.get(score, "http://localhost:8000/v1")
        url = self._answer("url", "base URL", parsing.url, default=default)
        variable, key = self._key(url)
        found = Discovered(url, answers=False, problem="not asked")
        if not self.offline and not url.startswith("framework://"):
            self._note(f"asking {url} for its models ...")
            found = asyncio.run(discover(url, key))
            if found.answers:
                models = f"{len(found.models)} models" if len(found.models) != 1 else f"1 model ({found.models[0]})"
                self._note(f"it answers, with {models}" if found.models else f"it answers: {found.problem}")
            else:
                self._note(f"it does not answer yet ({found.problem}), so the file is checked without it")
        self.offline = self.offline or not found.answers or bool(variable and not key)
        model = self._model(found)
        if score == "reward-model":
            protocol, template = self._protocol(found)
            # The protocols of reward models add their whole path.
            endpoint = Endpoint(url.removesuffix("/v1"), model, variable, "", protocol, template)
            return endpoint, self._limits(url, {})
        dialect, announced = "" if found.dialect == "openai" else found.dialect, {}
        if not self.offline:
            self._note(f"asking {model} for a word ...")
            surveyed = asyncio.run(survey(found.url, model, key))
            if surveyed is not None:
                dialect, announced = surveyed.dialect, dict(surveyed.announced)
        if found.url != url:
            self._note(f"its API is at {found.url}")
        dialect = "" if dialect == "openai" else dialect
        return Endpoint(found.url, model, variable, dialect), self._limits(url, announced)

    def _key(self, url: str) -> tuple[str, str]:
        """Return the variable of the API key ("" for none), and the key, if it is known here."""

        def parse(answer: str) -> str:
            if answer.strip() and len(answer.split()) != 1:
                raise ValueError("write the name of one variable; neither a name nor a key has spaces")
            if not can_be_sent(os.environ.get(answer, "").strip() if is_variable(answer) else answer):
                raise ValueError("the key holds characters that a header cannot carry")
            return answer

        default = usual_variable(url) or "none"
        if self._options.api_key_env is None and url.startswith("framework://"):
            return "", ""
        answer = self._answer("api_key_env", "environment variable with its API key", parse, default=default)
        if answer in ("none", ""):
            return "", ""
        if is_variable(answer):
            key = os.environ.get(answer, "").strip()
            if not key:
                self._note(f"{answer} is not set here, so the endpoint is not asked; set it where you train")
            return answer, key
        variable = variable_for_key(url)
        # The check below needs it; child processes of this command get it as if it had been exported.
        os.environ[variable] = answer
        self._note(
            f"that looks like a key, and a key is never written to the file: the file names {variable}. "
            f"This command uses the key; before you train: export {variable}=..."
        )
        return variable, answer

    def _model(self, found: Discovered) -> str:
        if self._options.model is None and self._questions is not None:
            return self._questions.pick("model", found.models, parsing.model)
        default = found.models[0] if len(found.models) == 1 else None
        if self._options.model is None and default is None:
            why = f"it has {len(found.models)} models" if found.models else found.problem or "it names no model"
            raise InputError(f"--model is missing, and cannot be taken from the endpoint: {why}")
        model = self._answer("model", "model", parsing.model, default=default)
        if found.dialect == "gemini":
            model = model.removeprefix("models/")  # Gemini's lists and examples write it with this prefix
        if found.models and model not in found.models:
            listed = ", ".join(found.models[:_MOST_LISTED]) + (", ..." if len(found.models) > _MOST_LISTED else "")
            self._note(f"it does not list the model {model}; it lists {listed}")
        return model

    def _protocol(self, found: Discovered) -> tuple[str, str]:
        protocol = self._options.protocol
        if protocol is None:
            protocol = _PROTOCOLS.get(found.server, "")
            if protocol:
                self._note(f"it is served by {found.server}: protocol {protocol}")
        template = ""
        if protocol in _RENDERED_HERE or self._options.chat_template is not None:
            label = "folder of the model (for its chat template)"
            template = self._answer("chat_template", label, parsing.chat_template, default=None)
        return "" if protocol == "vllm_classify" else protocol, template

    def _limits(self, url: str, announced: dict[str, float]) -> RateLimits:
        self._heading("4. What are its limits?")
        stated = {what: announced.get(f"{what}_per_window") for what in ("requests", "tokens")}
        announces = [f"{limit:,.0f} {what}" for what, limit in stated.items() if limit]
        if announces:
            self._note(f"it announces {' and '.join(announces)} in a window, usually a minute")
        defaults = {what: f"{limit:.0f}" if limit else parsing.LEARNED for what, limit in stated.items()}
        places = _LOCAL_CONCURRENCY if is_local_url(url) else parsing.LEARNED
        return RateLimits(
            self._answer("rpm", "requests per minute", parsing.rate, default=defaults["requests"]),
            self._answer("tpm", "tokens per minute", parsing.rate, default=defaults["tokens"]),
            self._answer("concurrency", "requests at once", parsing.places, default=places),
        )

    def _path(self, default: str) -> tuple[Path, bool]:
        while True:
            path = self._answer("out", "file", parsing.out, default=default)
            if not os.path.lexists(path):
                return path, False
            if self._options.overwrite or (self._questions and self._questions.confirm(f"{path} exists; replace it?")):
                return path, True
            if self._questions is None or self._options.out is not None:
                raise InputError(f"{path} exists; add --overwrite, or another --out")


def _option(flag: str) -> str:
    return f"--{flag.replace('_', '-')}"


async def _check_opens(config: Config, path: Path) -> None:
    """Open the engine once, with nothing sent. Raises `ConfigurationError`."""
    async with open_engine(without_servers(config)[0], path):
        pass


def _write(path: Path, text: str, *, overwrite: bool) -> None:
    """Write the file in one step or not at all. Raises `InputError` if it cannot be written, or exists by now."""
    target = Path(os.path.realpath(path)) if overwrite else path
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        try:
            partial.write_text(text, encoding="utf-8")
            if overwrite:
                os.replace(partial, target)
            else:
                os.link(partial, target)
        finally:
            with suppress(FileNotFoundError):
                partial.unlink()
    except FileExistsError:
        raise InputError(f"{path} exists by now; it was not changed") from None
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror})") from None


__all__ = ["InitOptions", "has_terminal", "init"]
