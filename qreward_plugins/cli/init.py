"""`qreward init`: asks a few questions, fills the template `init.yaml.jinja`, and checks the file.

Every question has a flag. The models of the configuration validate the answers. The file is written in one step or not
at all, and never holds a key.

The list of models at `/models` differs between OpenAI-compatible servers, Anthropic and Gemini, and so tells the
dialect of an endpoint.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

import aiohttp
import jinja2
import typer
import yaml  # type: ignore[import-untyped]
from pydantic import TypeAdapter, ValidationError
from yarl import URL

from ..config import Config, load_config
from ..config.source_models import ModelName, ServiceURL
from ..errors import ConfigurationError, InputError
from ..judges.prompt import DEFAULT_INSTRUCTIONS
from ..sources.dialects import DIALECTS
from ..sources.function_arguments import arguments_taken
from ..sources.http import proxy_for
from ..sources.replies import json_of
from ..system.functions import PathLoader, load
from ..system.output_files import check_writable
from .check import check_config, without_servers
from .console import ERRORS, OUT, replaced, run, say
from .engines import open_engine
from .training_lines import Framework, installed

Score = Literal["judge", "reward-model", "function", "mixture"]

_INTERRUPTED = 130
_QUESTIONS = {"framework": "trains", "score": "scores a response"}
_VARIABLES = {
    "api.openai.com": "OPENAI_API_KEY",
    "api.anthropic.com": "ANTHROPIC_API_KEY",
    "generativelanguage.googleapis.com": "GEMINI_API_KEY",
    "openrouter.ai": "OPENROUTER_API_KEY",
}
_OTHER_VARIABLE = "JUDGE_API_KEY"
_PATHS = re.compile(r"/(chat/completions|completions|messages|responses|models|classify|pooling|score)/?$")
"""Ends of URLs that are copied from examples; a base URL does not have them."""
_KEY = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:sk|xai|pplx|rk)-[A-Za-z0-9_-]{12,}|(?:gsk|hf|ghp|r8)_[A-Za-z0-9]{12,}|AIza[A-Za-z0-9_-]{12,}"
    r"|AKIA[A-Z0-9]{12,})"
)
CONNECT_S = 5.0
"""Most seconds to connect."""
LIST_S = 5.0
"""Most seconds for a list of models. Servers have it at hand, so one that takes longer hangs."""
_MOST_BYTES = 4_194_304
_LONGEST_NAME_CHARS = 200
_COMPATIBLE = "openai"
_LISTING = (_COMPATIBLE, "anthropic", "gemini")
"""The dialects that have a list of models of their own form."""
_LOCAL_CONCURRENCY = 64
_MOST_LISTED = 8
_CORRECT_AT = 0.6


def command(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="File to write. Default: judges.yaml; for slime, qreward.yaml."),
    ] = None,
    framework: Annotated[
        Framework | None,
        typer.Option(help="Framework that trains; none: files and Python. Default: the installed one, or verl."),
    ] = None,
    score: Annotated[
        Score | None,
        typer.Option(help="What scores; mixture: the sum of a function and a judge. Default: judge, or by --function."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Base URL of the endpoint. Default: http://localhost:8000/v1.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model. Default: the only one that the endpoint lists.")] = None,
    function: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="Reward function; file.py:name works too. It is imported."),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Environment variable that holds the API key. Default: chosen by the host."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; take defaults.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Send nothing; validate the file only.")] = False,
) -> int:
    """Write a configuration with comments, check it, and print the line to train with.

    At a terminal it asks at most five questions: the framework, what scores a response, and its function, its URL and
    its model. A flag answers its question. The endpoint is asked for its models and its dialect; if it does not answer
    yet, the file is validated without it.

    A key is never written: the file names the environment variable that holds it. An existing file is replaced only
    with --overwrite.

    Exit codes: 0 written, and every source gave a valid verdict or was not asked; 1 written, and a source gave none; 2
    an answer is wrong or missing, and nothing was written; 130 stopped with Ctrl-C.
    """
    given = {
        "framework": framework,
        "score": score,
        "url": url,
        "model": model,
        "function": function,
        "api_key_env": api_key_env,
    }
    try:
        answers = _Answers(given, asks=has_terminal() and not yes, offline=offline)
        path = answers.collect(file, overwrite=overwrite)
    except typer.Abort:
        say(ERRORS, "\nstopped; nothing was written")
        return _INTERRUPTED
    text = answers.text()
    asyncio.run(_check_opens(load_config(yaml.safe_load(text), origin=str(path)), path))
    with replaced(path) as partial:
        partial.write_text(text, encoding="utf-8")
    say(OUT, f"wrote {path}")
    return run(check_config(path, offline=answers.offline, framework=answers.values["framework"]))


def has_terminal() -> bool:
    """Whether standard input is a terminal, at which questions can be answered."""
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


class _Answers:
    """What the template gets: from flags, from the terminal if it `asks`, from the endpoint, and from defaults."""

    def __init__(self, given: Mapping[str, Any], *, asks: bool, offline: bool) -> None:
        self.values = {name: value for name, value in given.items() if value is not None}
        self._asks = asks
        self.offline = offline

    def collect(self, file: Path | None, *, overwrite: bool) -> Path:
        """Collect the answers, and return the path of the file. Raises `InputError`."""
        values = self.values
        here = installed()
        framework = self._choose("framework", Framework, default=here[0] if here else "verl")
        path = file or Path("qreward.yaml" if framework == "slime" else "judges.yaml")
        if os.path.lexists(path) and not overwrite:
            raise InputError(f"{path} exists; add --overwrite, or name another file")
        check_writable(path)
        if "function" in values:
            values.setdefault("score", "mixture" if "url" in values else "function")
        score = self._choose("score", Score, default="judge")
        without = {"function": ("url", "model", "api_key_env"), "mixture": ()}.get(score, ("function",))
        for name in without:
            if name in values:
                raise InputError(f"{_flag(name)} has no effect with --score {score}; leave it out")
        if score in ("function", "mixture"):
            function = self._ask("function", "Function (module:name, or file.py:name)", _path)
            values["arguments"] = arguments_taken(load(PathLoader(function), key="function"))
        if score != "function":
            self._endpoint(score)
        # ROLL's val_correct counts scores of exactly 1, so without a threshold the scores of a model read as 0.
        values |= {"correct_at": _CORRECT_AT if framework == "roll" else None}
        return path

    def text(self) -> str:
        """Return the text of the file."""
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
        environment.filters["yaml"] = _quoted
        template = environment.from_string(Path(__file__).with_name("init.yaml.jinja").read_text(encoding="utf-8"))
        text = template.render(self.values, default_instructions=DEFAULT_INSTRUCTIONS)
        return "qreward:\n" + textwrap.indent(text, "  ") if self.values["framework"] == "slime" else text

    def _ask(self, name: str, question: str, check: Callable[[str], str], *, default: str | None = None) -> str:
        """Return the value of a flag, what is typed at the terminal, or the default. A typed answer is asked again
        until it can be used.
        """
        given = self.values.get(name, None if self._asks else default)
        if given is None and not self._asks:
            raise InputError(f"{_flag(name)} is missing")

        def checked(answer: str) -> str:
            if _KEY.search(answer):
                raise typer.BadParameter("that holds something that looks like an API key; no key is written")
            return check(answer)

        try:
            answer = typer.prompt(question, default=default, value_proc=checked) if given is None else checked(given)
        except typer.BadParameter as error:
            raise InputError(f"{_flag(name)}: {error}") from None
        self.values[name] = answer
        return str(answer)

    def _choose(self, name: str, form: Any, *, default: str) -> str:
        choices = get_args(form)

        def check(answer: str) -> str:
            if answer.lower() not in choices:
                raise typer.BadParameter(f"answer with one of: {', '.join(choices)}")
            return answer.lower()

        return self._ask(name, f"What {_QUESTIONS[name]} ({', '.join(choices)})", check, default=default)

    def _endpoint(self, score: str) -> None:
        """Ask the endpoint what it serves. A key is used and not kept."""
        values, of_rewards = self.values, score == "reward-model"
        default = "http://localhost:8000" if of_rewards else "http://localhost:8000/v1"
        url = self._ask("url", "URL", _url, default=default)
        variable, found = self._variable(url), Discovered(url, answers=False, problem="not asked")
        key = os.environ.get(variable, "").strip()
        if variable and not key:
            say(OUT, f"{variable} is not set here, so the endpoint is not asked; set it where you train")
        elif not self.offline and not url.startswith("framework://"):
            say(OUT, f"asking {url} for its models ...")
            found = asyncio.run(discover(url, key))
            serves = f"it serves {', '.join(found.models[:_MOST_LISTED]) or f'no list of models ({found.problem})'}"
            silent = f"{found.problem}; the file is checked without it. Start it before you train"
            if found.answers or self._asks or "model" in values:
                say(OUT, serves if found.answers else silent)
        self.offline = self.offline or not found.answers
        if "model" not in values and len(found.models) == 1:
            values["model"] = found.models[0]
        elif "model" not in values and not self._asks:
            listed = ", ".join(found.models[:_MOST_LISTED]) or f"none ({found.problem})"
            raise InputError(f"--model is missing; {url} lists {listed}. Add --model NAME")
        self._ask("model", "Model", _valid(ModelName), default=found.models[0] if found.models else None)
        if _is_local(url):
            values.setdefault("concurrency", _LOCAL_CONCURRENCY)
        if of_rewards:
            values["url"] = url.removesuffix("/v1")  # their protocols add the whole path
        else:
            values |= {"url": found.url, "dialect": None if found.dialect == "openai" else found.dialect}

    def _variable(self, url: str) -> str:
        """Return the name of the variable of the API key; "" for none. An answer that may be a key is refused."""
        usual = _VARIABLES.get(urlsplit(url).hostname or "", "" if _is_local(url) else _OTHER_VARIABLE)
        variable = str(self.values.get("api_key_env", usual))
        if not variable:
            return ""
        if _KEY.search(variable) or not re.fullmatch("[A-Z][A-Z0-9_]*", variable):
            raise InputError("--api-key-env: write the name of an environment variable, in capitals, and no key")
        self.values["api_key_env"] = variable
        return variable


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _valid(form: Any) -> Callable[[str], str]:
    def check(answer: str) -> str:
        try:
            return str(TypeAdapter(form).validate_python(answer.strip()))
        except ValidationError as error:
            problem = error.errors(include_input=False, include_url=False, include_context=False)[0]["msg"]
        raise typer.BadParameter(problem.removeprefix("Value error, "))

    return check


def _url(answer: str) -> str:
    return _valid(ServiceURL)(_PATHS.sub("", answer.strip()).rstrip("/,"))


def _path(answer: str) -> str:
    """The path of a function that can be loaded. A file's path becomes absolute, for other processes."""
    where, _, name = answer.rpartition(":")
    path = f"{Path(where).expanduser().absolute()}:{name}" if where.endswith(".py") else answer
    try:
        arguments_taken(load(PathLoader(path), key="function"))
    except ConfigurationError as error:
        raise typer.BadParameter(error.mistakes[0].problem) from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return path


def _is_local(url: str) -> bool:
    """Whether a URL leads to a private network, or to a server that the trainer starts."""
    host = urlsplit(url).hostname or ""
    try:
        return not ip_address(host).is_global
    except ValueError:
        return url.startswith("framework://") or "." not in host or host.endswith((".local", ".internal"))


def _quoted(value: Any) -> str:
    # JSON is YAML; a text in quotes is never read as a number, and OmegaConf reads ${...} as an interpolation.
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    return json.dumps(value.replace("${", "\\${") if isinstance(value, str) else value, ensure_ascii=False)


async def _check_opens(config: Config, path: Path) -> None:
    """Open the engine once, with nothing sent. Raises `ConfigurationError`."""
    async with open_engine(without_servers(config)[0], path):
        pass


# What an endpoint serves


@dataclass(frozen=True)
class Discovered:
    """What an endpoint serves.

    `url` is the URL for the configuration: `/v1` is added if only there is a list of models. `models` are the names in
    that list. `dialect` is the one in whose form the list is. `answers` is false if there is no HTTP answer. `problem`
    says why `models` is empty.
    """

    url: str
    models: tuple[str, ...] = ()
    dialect: str = _COMPATIBLE
    answers: bool = True
    problem: str = ""


async def discover(url: str, key: str = "") -> Discovered:
    """Ask the endpoint at `url` for its models, with the API key `key` ("" for none). Raises nothing."""
    problems: list[str] = []
    try:
        for candidate in _candidates(url):
            for name in _LISTING:
                status, body = await _get(URL(f"{candidate}/models"), name, key)
                dialect = _lister(body) if status == 200 else None
                if dialect is not None:
                    return Discovered(candidate, _names(body), dialect)
                problems.append(f"{urlsplit(candidate).path}/models answered {status}")
                if status == 404 and not key:
                    break
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        return Discovered(url, answers=False, problem=f"no answer: {why}")
    return Discovered(url, problem=", ".join(dict.fromkeys(problems)))


async def _get(url: URL, dialect: str, key: str) -> tuple[int, Any]:
    """Return the status and the JSON of the answer."""
    carrier, before = DIALECTS[dialect].key_header
    headers = {**DIALECTS[dialect].headers, **({carrier: f"{before}{key}"} if key else {})}
    timeout = aiohttp.ClientTimeout(total=LIST_S, connect=CONNECT_S)
    async with (
        aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), timeout=timeout, trust_env=False) as session,
        session.get(url, headers=headers, proxy=proxy_for(url), allow_redirects=False) as reply,
    ):
        text = b""
        while len(text) < _MOST_BYTES and (more := await reply.content.read(_MOST_BYTES - len(text))):
            text += more
        return reply.status, json_of(text)


def _lister(body: Any) -> str | None:
    """Return the dialect in whose form a list of models is; None for another body."""
    if not isinstance(body, dict):
        return None
    data, models = body.get("data"), body.get("models")
    if isinstance(data, list):
        first = data[0] if data else {}
        if isinstance(first, dict) and first.get("type") == "model" and "object" not in body:
            return "anthropic"
        return _COMPATIBLE if body.get("object") == "list" else None
    if isinstance(models, list) and any(isinstance(m, dict) and "supportedGenerationMethods" in m for m in models):
        return "gemini"
    return None


def _candidates(url: str) -> list[str]:
    """The URLs whose `/models` is asked for: the given one, and the usual version below a URL without a path."""
    url = url.rstrip("/")
    return [url] if urlsplit(url).path.strip("/") else [f"{url}/v1", url, f"{url}/v1beta"]


def _names(body: Any) -> tuple[str, ...]:
    """The names in a list of models; names that a terminal cannot show, or that are too long, are left out."""
    entries = body.get("data") or body.get("models") or ()
    found = (
        # Gemini writes models/NAME. Elsewhere this is a part of the name, such as a folder that vLLM serves.
        str(entry.get("id") or str(entry.get("name") or "").removeprefix("models/"))
        for entry in entries
        if isinstance(entry, dict)
    )
    return tuple(name for name in found if name and name.isprintable() and len(name) <= _LONGEST_NAME_CHARS)
