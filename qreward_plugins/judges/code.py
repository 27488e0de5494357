"""Defines `CodeJudge`: it runs the policy's program against the tests of its row, in a sandbox.

Each test is a call of its own, so it has its own retries, hedges and journal entry. What is expected never goes to the
sandbox: outputs are compared here. So a program cannot look its answer up. An assert is the exception: it runs in the
program's own process, which may cheat it, for example by an object that equals everything.

Tests have the forms of verl's `sandbox_fusion` and of PRIME's `prime_code` (in `verl/utils/reward_score`), and outputs
are compared as PRIME does: line by line, without white space around the text and around each line. What a function
returns is compared as JSON.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from ..config.models import AskingConfig, Interval
from ..config.nodes import Flag, PositiveFloat, PositiveInt
from ..errors import ConfigurationError, InputError, InvalidReply, Mistake, input_problem, kind_of
from ..samples import Cause, Failed, RawScore, Sample, Verdict
from ..scheduling.calls import Call
from ..sources.base import Reply, Request
from ..sources.kind import RUN
from .base import Ask, Judge, JudgeFailed, Opening, reaches
from .fence import draw_nonce, readable
from .leaf import Leaf, fingerprint, number_mistakes
from .parts import combined, verdicts_of
from .verdicts import Scale, after_thoughts, excerpt
from .views import json_column

ENDS = ("passed", "wrong_output", "run_error", "timeout", "compile_error")
"""The components: the share of the tests that were run which ended so."""

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`\n]*$")
_ALIASES: Mapping[str, Sequence[str]] = {
    "python": ("py", "python3"), "cpp": ("c++", "cc"), "nodejs": ("js", "javascript"), "typescript": ("ts",),
    "csharp": ("cs", "c#"), "bash": ("sh",), "rust": ("rs",), "kotlin_script": ("kotlin",), "python_gpu": ("python",),
}  # fmt: skip
_IMPORTED = [
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "typing",
]  # fmt: skip
_IMPORTS = "\n".join(f"import {name}\nfrom {name} import *" for name in _IMPORTED) + "\nfrom builtins import *"
"""What programs of LeetCode's form expect to be imported; the list is that of verl's `sandbox_fusion`."""

_HARNESS = """\
import json, sys, types
module = sys.modules["solution"] = types.ModuleType("solution")
exec({imports!r}, module.__dict__)
exec(compile({program!r}, "solution.py", "exec"), module.__dict__)
{call}
print("\\n" + {nonce!r} + json.dumps(result))
"""
_FUNCTION = """\
owner = module if hasattr(module, {name!r}) else module.Solution()
result = getattr(owner, {name!r})(*json.loads({arguments!r}))"""
_ASSERT = """\
exec(compile({text!r}, "test.py", "exec"), module.__dict__)
result = True"""

_FORM = "write {inputs: [...], outputs: [...]}, with fn_name for a function, or a list of asserts"


@dataclass(frozen=True)
class CodeTest:
    """One test of a program: what it is given, and what it must print or return.

    `call` is the line of Python that calls a function of the program; "" for a program that reads `stdin`. The result
    must equal one of `expected`.
    """

    stdin: str
    expected: tuple[Any, ...]
    call: str = ""

    def source(self, program: str, nonce: str) -> str:
        """Return what the sandbox runs. `nonce` marks the line of the result, so that a program that prints, or that
        ends early, does not pass for one that returned.
        """
        if not self.call:
            return program
        return _HARNESS.format(imports=_IMPORTS, program=program, call=self.call, nonce=nonce)

    def passes(self, printed: str, nonce: str) -> bool:
        """Whether the output is right."""
        if not self.call:
            return _lines(printed) == _lines(self.expected[0])
        marked = [line for line in printed.split("\n") if line.startswith(nonce)]
        if len(marked) != 1:
            return False
        try:
            result = json.loads(marked[0].removeprefix(nonce))
        except (ValueError, RecursionError):
            return False
        return any(_equal(result, expected) for expected in self.expected)


def _equal(a: Any, b: Any) -> bool:
    """Whether two values of JSON are equal. In Python, true is 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return bool(a == b)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def program_of(response: str, language: str) -> str | None:
    """Return the program of a response: after its thoughts, the last fenced code block that names the language, or
    otherwise the last one; None if there is none. A block that does not end is none.
    """
    names = {language.lower(), *_ALIASES.get(language, ())}
    blocks: list[tuple[str, str]] = []
    inside: list[str] | None = None
    fence = tag = ""
    for line in after_thoughts(response).replace("\r\n", "\n").split("\n"):
        mark = line.strip()
        if inside is None:
            if opening := _FENCE.match(line):
                fence, tag, inside = opening[1], opening[2].lower(), []
        elif mark.startswith(fence) and not mark.strip(fence[0]):
            blocks.append((tag, "\n".join(inside)))
            inside = None
        else:
            inside.append(line)
    own = [text for tag, text in blocks if tag in names]
    return next(reversed(own or [text for _, text in blocks]), None)


def read_tests(sample: Sample, config: CodeJudge.Config) -> list[CodeTest]:
    """Return the tests of a sample, `config.max_tests` at most. Raises `InputError` for tests that cannot be read."""
    where = "the ground truth" if config.column is None else f"the column {config.column}"
    value = json_column(sample, config.column, where)
    inputs, outputs, name = value, value, None
    if isinstance(value, Mapping):
        inputs, outputs, name = value.get("inputs"), value.get("outputs"), value.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise InputError(f"{where} holds no tests; {_FORM}")
    if config.language != "python" and (name is not None or not isinstance(value, Mapping)):
        raise InputError(f"{where} calls functions of the program, which works in python only, not {config.language}")
    try:
        pairs = zip(inputs[: config.max_tests], outputs, strict=False)
        if not isinstance(value, Mapping):
            return [CodeTest("", (True,), _ASSERT.format(text=_text(text))) for text, _ in pairs]
        if name is not None:
            return [_function(str(name), given, output) for given, output in pairs]
        return [CodeTest(_text(given), (_text(output),)) for given, output in pairs]
    except ValueError as error:
        raise InputError(f"{where} holds a test that cannot be read ({error}); {_FORM}") from None


def _text(value: Any) -> str:
    """A text, the lines of one, or a number. Raises ValueError."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        value = "\n".join(value)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{kind_of(value)} where a text is expected")
    return readable(str(value))


def _function(name: str, given: Any, output: Any) -> CodeTest:
    """A call of a function. Arguments are a list, or a text with one JSON value a line; then the output is JSON, too.
    Raises ValueError.
    """
    if isinstance(given, str):
        arguments = [json.loads(line) for line in given.split("\n") if line.strip()]
        try:
            expected = (json.loads(output),)
        except (ValueError, TypeError):
            expected = (output,)
    elif isinstance(given, list):
        arguments = given
        # APPS wraps what a function returns in a list of one.
        expected = (output, *output) if isinstance(output, list) and len(output) == 1 else (output,)
    else:
        raise ValueError(f"{kind_of(given)} where a list of arguments is expected")
    return CodeTest("", expected, _FUNCTION.format(name=name, arguments=json.dumps(arguments)))


class CodeJudge(Judge):
    """Runs the program of the response against the tests of its row, in a sandbox.

    The program is the last fenced code block that names the language, or otherwise the last one; without one, the
    response gets the floor. A program that does not compile, crashes, takes too long or prints something else fails the
    test. A fault of the sandbox fails the sample.
    """

    class Config(AskingConfig):
        """Runs the program of the response against the tests of its row, in a source of kind `sandbox`. The reward is
        the share of the tests that it passes."""

        on_invalid: Literal["missing"] = "missing"
        """A fault of the sandbox is never a score, so there is only `missing`: no reward."""

        reward_range: Interval = (0.0, 1.0)
        """The range that the share of the tests is mapped to, linearly. Default: 0 to 1."""

        language: Annotated[str, Field(min_length=1)] = "python"
        """The language of the programs, by SandboxFusion's names: `python`, `cpp`, `java`, `go` ... Default: python."""

        column: Annotated[str, Field(min_length=1)] | None = None
        """The column of the data set (a key of the extras) with the tests: `{inputs: [...], outputs: [...]}`, with
        `fn_name` if a function is called, or a list of asserts; or JSON of these. Default: the ground truth."""

        all: Flag = False
        """Whether a program must pass every test: the reward is the high or the low end of the range. The first test is
        then run alone, so a program that fails it costs one call. Default: false."""

        max_tests: PositiveInt = 20
        """Most tests of a row, each a call; the first ones are run. Default: 20."""

        run_timeout_s: PositiveFloat = 10.0
        """Seconds that a program may run. Default: 10."""

        compile_timeout_s: PositiveFloat = 10.0
        """Seconds that a program may take to compile. Default: 10."""

        memory_limit_mb: PositiveInt = 1024
        """Memory of a program, in MB of 1,048,576 bytes. Default: 1,024."""

    asks = RUN

    @classmethod
    def rehearsed(cls, config: Any, request: Request, share: float) -> Reply:
        return _Run.rehearsed(config, request, share)

    def __init__(self, name: str, config: Config, opening: Opening) -> None:
        needs_s = config.compile_timeout_s + config.run_timeout_s
        problem = f"a program may take {needs_s:g} s (compile_timeout_s and run_timeout_s of judge {name})."
        remedy = "Raise it above that, or a program that hangs counts as a fault of the sandbox."
        timeouts = {each: opening.config.sources[each].timeouts.total_s for each in opening.sources}
        short = [f"sources.{each}.timeouts.total_s" for each, total_s in timeouts.items() if total_s <= needs_s]
        mistakes = [*number_mistakes(name, config), *(Mistake(path, problem, remedy) for path in short)]
        if mistakes:
            raise ConfigurationError(mistakes)
        super().__init__(name)
        self.config = config
        self.sources = opening.sources
        self.key = opening.key
        self._scale = Scale((0.0, 1.0), config.reward_range)

    @property
    def calls(self) -> int:
        return self.config.max_tests

    @property
    def reward_range(self) -> tuple[float, float]:
        return self.config.reward_range

    @property
    def defines_correct(self) -> bool:
        return True

    def component_names(self) -> tuple[str, ...]:
        return ENDS

    async def judge(self, sample: Sample, ask: Ask) -> Verdict:
        try:
            tests = read_tests(sample, self.config)
            program = program_of(sample.response, self.config.language)
        except Exception as error:
            raise JudgeFailed(Failed(Cause.INFRA, "input", input_problem(error), judge=self.name)) from None
        leaves = [_Run(self, number, test, readable(program or "")) for number, test in enumerate(tests, 1)]
        if program is None:
            empty = Failed(Cause.POLICY, "empty", "the response has no whole code block", judge=self.name)
            return replace(leaves[0].instead(empty), correct=False, judge=self.name)
        # Where one test may decide, it goes first: its program is compiled for every test, or must pass all.
        alone = 1 if self.config.all or self.config.language != "python" else len(leaves)
        verdicts: dict[str, Verdict] = {}
        for several in (leaves[:alone], leaves[alone:]):
            running = {test.name: test.judge(sample, ask) for test in several}
            verdicts |= (await verdicts_of(self.name, running))[0]
            ends = Counter(end for verdict in verdicts.values() for end in verdict.components)
            if ends["compile_error"] or (self.config.all and not ends["passed"]):
                break
        share = ends["passed"] / len(tests)
        reward = self._scale.reward(float(share == 1) if self.config.all else share)
        bar = self.config.correct_at
        whole = combined(self.name, verdicts, reward, correct=share == 1 if bar is None else reaches(reward, bar))
        return replace(whole, components={end: ends[end] / len(verdicts) for end in ENDS})


class _Run(Leaf):
    """One test of one program."""

    def __init__(self, whole: CodeJudge, number: int, test: CodeTest, program: str) -> None:
        identity = fingerprint("code", bool(test.call), json.dumps(test.expected))
        super().__init__(f"test {number}", whole.config, sources=whole.sources, fingerprint=identity)
        self._whole = whole
        self._test = test
        self._program = program

    def call(self, sample: Sample) -> Call[Verdict]:
        call = super().call(sample)
        # One name for all tests: names are labels of metrics.
        call.name = f"{self._whole.name}/test"
        return call

    def request(self, sample: Sample, *, attempt: int) -> Request:
        config, test, nonce = self._whole.config, self._test, ""
        if test.call:
            nonce = draw_nonce(self._whole.key, [self._program, test.call], attempt=attempt)
        parameters = {
            "code": test.source(self._program, nonce),
            "language": config.language,
            "stdin": test.stdin,
            "compile_timeout": config.compile_timeout_s,
            "run_timeout": config.run_timeout_s,
            "memory_limit_MB": config.memory_limit_mb,
            "files": {},
            "fetch_files": [],
        }
        return Request(sample=sample, parameters=parameters, nonce=nonce, judge=self._whole.name)

    def verdict(self, request: Request, reply: Reply) -> Verdict:
        end, said = reply.finish_reason, reply.value
        if end == "finished":
            end, said = "wrong_output", reply.text
            if self._test.passes(reply.text, request.nonce):
                end, said = "passed", ""
        if end not in ENDS:
            raise InvalidReply(f"the sandbox does not say how the program ended: {excerpt(end)}")
        rationale = "" if end == "passed" else reply.cleaned(f"{end}: {excerpt(str(said)[-200:])}")
        return replace(self.mapped(RawScore(float(end == "passed"), {end: 1.0})), rationale=rationale)

    def rehearsed_verdict(self, request: Request, share: float) -> Verdict:
        end = ENDS[0] if share >= 0.5 else ENDS[1]
        return self.mapped(RawScore(float(share >= 0.5), {end: 1.0}))

    def mapped(self, raw: RawScore) -> Verdict:
        return Verdict(raw.score, raw.components, correct=raw.score == 1, judge=self.name, raw=raw)
