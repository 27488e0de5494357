"""Kinds of sources that other packages bring: found, checked, opened and scheduled as ours are."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qreward_plugins import ConfigurationError, Failed, InputError, RewardEngine, Sample, Scored, load_config
from qreward_plugins.cli.app import app
from qreward_plugins.config import registry
from qreward_plugins.judges import Judge
from qreward_plugins.sharing.channels import source_keys
from qreward_plugins.sources import Request, SourceKind, open_source

CORE = Path(__file__).parents[1] / "qreward_plugins"
OURS = {**registry.sources._ours, **registry.judges._ours}

LENGTH = '''
    """A kind of source for tests."""
    from __future__ import annotations
    from typing import Annotated, Literal
    from pydantic import BaseModel, Field, SecretStr, field_validator, model_validator
    from qreward_plugins.errors import TransientError
    from qreward_plugins.samples.spent import Usage
    from qreward_plugins.sources import VALUE, FreeMapping, Reply, SourceConfig, SourceKind


    class Cube(BaseModel, extra="forbid"):
        of: Literal["cube"]
        side: float


    class Ball(BaseModel, extra="forbid"):
        of: Literal["ball"]
        radius: Annotated[float, Field(gt=0)]


    class LengthSource(SourceKind):
        """Scores the length of a response.

        More about it.
        """

        class Config(SourceConfig):
            factor: Annotated[float, Field(gt=0)]
            """Points for a character."""
            unit: Literal["chars", "words"] = "chars"
            token: SecretStr | None = None
            tokens: dict[str, SecretStr] = {}
            even: int = 0
            solid: Annotated[Cube | Ball, Field(discriminator="of")] | None = None
            options: FreeMapping = {}
            db_password: str = ""
            odd: str = ""

            @field_validator("odd")
            @classmethod
            def _is_odd(cls, value: str) -> str:
                return {"": ""}[value]

            @field_validator("even")
            @classmethod
            def _is_even(cls, value: int) -> int:
                if value % 2:
                    raise ValueError(f"{value} is odd; give an even number")
                return value

            @model_validator(mode="after")
            def _fits(self) -> Config:
                if self.factor > 100 and self.unit == "words":
                    raise ValueError("words score at most 100 each")
                return self

        answers = (VALUE,)

        def __init__(self, name: str, config: Config) -> None:
            super().__init__(name, config)
            self._config = config

        async def send(self, request, *, on_sent):
            on_sent()
            return Reply(value=self._config.factor * len(request.sample.response), usage=Usage(3, 0))


    class Float(LengthSource):
        async def send(self, request, *, on_sent):
            return 0.5


    class Unready(LengthSource):
        """Raises when it is opened."""

        def __init__(self, name: str, config) -> None:
            raise RuntimeError("no such\\nroom")


    class Nameless(LengthSource):
        """Forgets its base class."""

        def __init__(self, name: str, config) -> None:
            pass


    class Unsure(LengthSource):
        """Cannot tell its provider."""

        @classmethod
        def provider(cls, config, environment):
            return environment["NO_SUCH_VARIABLE"]


    class Silent(SourceKind):
        """Cannot be asked."""


    class Loose(LengthSource):
        class Config:
            pass


    class Plain:
        pass
'''
TWICE = '''
    """A kind of judge for tests."""
    from __future__ import annotations
    from qreward_plugins import Verdict
    from qreward_plugins.judges import AskingConfig, Call, Judge, JudgeConfig
    from qreward_plugins.sources import VALUE, Request


    class TwiceJudge(Judge):
        """Asks twice, and takes the mean."""

        class Config(AskingConfig):
            factor: float = 1.0

        asks = VALUE

        def __init__(self, name, config, opening):
            super().__init__(name)
            self._config = config
            self._sources = opening.sources

        async def judge(self, sample, ask):
            call = Call(self._sources, lambda attempt: Request(sample, judge=self.name), self._read, name=self.name)
            answers = [await ask(call) for _ in range(2)]
            return Verdict(self._config.factor * sum(answer.value for answer in answers) / 2, judge=self.name)

        def _read(self, request, reply):
            return float(reply.value)


    class Unready(TwiceJudge):
        def __init__(self, name, config, opening):
            raise RuntimeError("not today")


    class Nameless(TwiceJudge):
        def __init__(self, name, config, opening):
            super().__init__("x", config, opening)


    class Broken(TwiceJudge):
        async def judge(self, sample, ask):
            raise KeyError("response")


    class Float(TwiceJudge):
        async def judge(self, sample, ask):
            return 0.5


    class Silent(Judge):
        """Has no verdict."""
'''
JUDGES = "qreward_plugins.judges"
SOURCES = "qreward_plugins.sources"
NODE = {"kind": "length", "factor": 2}


@pytest.fixture
def length(install):
    names = ("LengthSource", "Unready", "Unsure", "Nameless", "Silent", "Loose", "Plain")
    kinds = {name.lower(): f"length_kind:{name}" for name in names} | {"length": "length_kind:LengthSource"}
    install(
        "length-kind",
        "length_kind",
        LENGTH,
        {SOURCES: {**kinds, "gone": "length_kind:Gone", "broken": "no_such_module:X"}},
    )


@pytest.fixture
def twice(install, length):
    names = ("TwiceJudge", "Unready", "Nameless", "Broken", "Float", "Silent")
    kinds = {name.lower(): f"twice_kind:{name}" for name in names} | {"twice": "twice_kind:TwiceJudge"}
    install("twice-kind", "twice_kind", TWICE, {JUDGES: kinds})


def judged(**judge):
    return {"sources": {"a": NODE}, "judges": {"j": {"kind": "twice", **judge}}}


def tree(node, **judge):
    return {"sources": {"a": node}, "judges": {"j": {"kind": "function", **judge}}}


def mistakes(node):
    with pytest.raises(ConfigurationError) as caught:
        load_config(tree(node))
    assert caught.value.__context__ is None
    return {mistake.path: f"{mistake.problem} {mistake.remedy}".strip() for mistake in caught.value.mistakes}


def sample(response):
    return Sample([{"role": "user", "content": "?"}], response)


def scored(config, samples):
    async def score():
        async with RewardEngine(config) as engine:
            return await engine.score_all(samples)

    return asyncio.run(score())


def opened(node):
    return open_source("a", load_config(tree(node)).sources["a"])


def test_a_source_that_returns_a_number_is_told_what_to_return(length, caplog):
    [outcome] = scored(tree({**NODE, "kind": "length_kind:Float"}), [sample("abc")])
    assert "its `send` returned a float; it must return a Reply" in outcome.detail
    assert "Traceback" not in caplog.text


def test_a_kind_of_another_package_scores(length):
    outcomes = scored(
        tree({**NODE, "limits": {"concurrency": 1}}),
        [sample("x" * n) for n in (1, 2, 3)],
    )
    assert [outcome.verdict.score for outcome in outcomes if isinstance(outcome, Scored)] == [2.0, 4.0, 6.0]


def test_a_class_that_nobody_registered_is_named_by_its_path(length):
    (outcome,) = scored(tree({**NODE, "kind": "length_kind:LengthSource"}), [sample("abc")])
    assert isinstance(outcome, Scored)
    assert outcome.verdict.score == 6.0


@pytest.mark.parametrize(
    ("change", "place", "text"),
    [
        ({"points": 1}, "points", "unknown key. Allowed here: kind, factor, limits, timeouts, "),
        ({"facter": 1}, "facter", "unknown key. Did you mean `factor`?"),
        ({"factor": ...}, "factor", "the key is missing. Points for a character."),
        ({"factor": "much"}, "factor", "must be a number."),
        ({"factor": 0}, "factor", "must be above 0, not 0."),
        ({"limits": {"concurency": 1}}, "limits.concurency", "unknown key. Did you mean `concurrency`?"),
        ({"token": 3}, "token", "must be text. Put it in quotes."),
        ({"even": 3}, "even", "3 is odd; give an even number."),
        ({"factor": 101, "unit": "words"}, "", "words score at most 100 each."),
        ({"odd": "x"}, "", "its kind cannot read it: a validator raised KeyError."),
        ({"solid": {"of": "ball", "radius": -1}}, "solid.radius", "must be above 0, not -1."),
        ({"solid": {"side": 1}}, "solid", "the key 'of' is missing."),
    ],
)  # fmt: skip
def test_mistakes_are_reported_as_ours_are(length, change, place, text):
    node = {key: value for key, value in {**NODE, **change}.items() if value is not ...}
    found = mistakes(node)
    assert list(found) == [f"sources.a.{place}".rstrip(".")]
    assert text in found[f"sources.a.{place}".rstrip(".")]


def test_no_secret_of_a_foreign_kind_is_shown(length):
    for change in ({"token": ["sk-SECRET"]}, {"db_password": ["sk-SECRET"]}, {"odd": "sk-SECRET"}):
        assert "SECRET" not in str(mistakes({**NODE, **change}))
    assert "SECRET" not in str(mistakes({**NODE, "tokens": {"a": ["sk-SECRET"]}}))
    assert "SECRET" not in repr(load_config(tree({**NODE, "token": "sk-SECRET"})))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("silent", r"the kind 'silent' of length-kind 1\.2: the class length_kind:Silent lacks answers, send\."),
        ("plain", r"length_kind:Plain does not inherit qreward_plugins\.sources\.SourceKind\."),
        ("loose", r"length_kind:Loose has no `Config` that inherits qreward_plugins\.sources\.SourceConfig\."),
        ("gone", r"length-kind 1\.2: the class length_kind:Gone cannot be imported: AttributeError: .* 'Gone'\. Fix"),
        ("broken", r"length-kind 1\.2: .* cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("no_such_module:X", r"the class no_such_module:X cannot be imported: ModuleNotFoundError"),
        ("os:path", r"does not inherit"),
        ("lenght", r"unknown kind `lenght`\. Did you mean `length`\? Allowed here: openai, reward_model, http, "),
    ],
)
def test_a_kind_that_cannot_be_used_is_one_mistake(length, kind, text):
    found = mistakes({**NODE, "kind": kind})
    assert list(found) == ["sources.a.kind"]
    assert re.search(text, found["sources.a.kind"]), found


def test_a_broken_package_hurts_nobody_who_does_not_use_it(length):
    load_config(tree({"kind": "function", "function": "os.path:basename"}))
    assert "length_kind" not in sys.modules


def test_broken_metadata_of_another_package_hurts_nobody(length, monkeypatch, caplog):
    def broken(**_):
        raise KeyError("Name")

    monkeypatch.setattr(registry.metadata, "entry_points", broken)
    registry._registered.cache_clear()
    try:
        load_config(tree({"kind": "function", "function": "os.path:basename"}))
        assert "unknown kind. Allowed here: openai" in mistakes(NODE)["sources.a.kind"]
    finally:
        registry._registered.cache_clear()
    assert "entry points of installed packages cannot be read: KeyError: 'Name'" in caplog.text


def test_a_name_that_two_packages_register(length, install):
    install("second", "other_kind", "", {SOURCES: {"length": "other_kind:LengthSource", "openai": "other_kind:X"}})
    found = mistakes(NODE)["sources.a.kind"]
    assert found == (
        "several packages register the kind 'length': length-kind 1.2 (length_kind:LengthSource) and second 1.2 "
        "(other_kind:LengthSource). Uninstall all but one, or name the class: `kind: length_kind:LengthSource`."
    )
    assert "qreward-plugins" in mistakes({"kind": "openai", "base_url": "http://a", "model": "m"})["sources.a.kind"]
    load_config(tree({**NODE, "kind": "length_kind:LengthSource"}))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("unready", r"sources\.a: length-kind 1\.2 cannot open the source: RuntimeError: no such\\nroom\."),
        ("nameless", r"sources\.a: length-kind 1\.2 cannot open the source: AttributeError"),
        ("unsure", r"sources\.a: length-kind 1\.2 cannot identify its provider: KeyError: 'NO_SUCH_VARIABLE'\."),
    ],
)
def test_a_kind_that_does_not_open(length, kind, text):
    with pytest.raises(ConfigurationError, match=text) as caught:
        RewardEngine(tree({**NODE, "kind": kind}))
    assert caught.value.__context__ is None


def test_what_the_journal_knows_of_a_foreign_kind(length):
    """Everything of its configuration but secrets, limits and prices; two kinds never share an answer."""
    request = Request(sample=sample("abc"))
    plain = opened(NODE).question(request)
    assert opened({**NODE, "limits": {"concurrency": 3}, "token": "sk-1"}).question(request) == plain
    for other in ({"factor": 3}, {"unit": "words"}, {"version": "2"}, {"options": {"a": 1}}):
        assert opened({**NODE, **other}).question(request) != plain
    assert opened(NODE).question(Request(sample=sample("abd"))) != plain
    assert "sk-1" not in repr(opened({**NODE, "token": "sk-1", "tokens": {"a": "sk-1"}}).question(request))


def test_who_shares_the_limits_of_a_foreign_kind(length):
    config, same = load_config(tree(NODE)), load_config(tree({**NODE, "limits": {"concurrency": 2}}))
    other = load_config(tree({**NODE, "token": "sk-SECRET"}))
    assert source_keys(config) == source_keys(same)
    assert source_keys(config) != source_keys(other)
    assert "SECRET" not in repr(source_keys(other))


def test_what_a_kind_answers_decides_which_judges_may_ask_it(length):
    with pytest.raises(ConfigurationError) as caught:
        load_config({"sources": {"a": NODE}, "judges": {"j": {"kind": "llm"}, "k": {"kind": "llm", "sources": "a"}}})
    told = {mistake.path: f"{mistake.problem} {mistake.remedy}" for mistake in caught.value.mistakes}
    assert told["judges.j"].startswith(
        "there is no source of kind openai or replicas to answer this judge of kind llm."
    )
    assert told["judges.k.sources"].startswith(
        "`a` is a source of kind length, which cannot answer a judge of kind llm."
    )


@pytest.mark.parametrize("kind", ["twice", "twice_kind:TwiceJudge"])
def test_a_judge_of_another_package_asks(twice, kind):
    (outcome,) = scored(judged(kind=kind, factor=10), [sample("abc")])
    assert isinstance(outcome, Scored)
    assert outcome.verdict.score == 60.0
    assert outcome.verdict.spent.attempts == 2


@pytest.mark.parametrize(
    ("change", "place", "text"),
    [
        ({"facter": 1}, "facter", "unknown key. Did you mean `factor`?"),
        ({"factor": "x"}, "factor", "must be a number."),
        ({"kind": "twcie"}, "kind", "unknown kind `twcie`. Did you mean `twice`? Allowed here: llm, reward_model, "),
        ({"kind": "silent"}, "kind", "the kind 'silent' of twice-kind 1.2: the class twice_kind:Silent lacks judge."),
    ],
)  # fmt: skip
def test_mistakes_of_a_foreign_judge_are_reported_as_ours_are(twice, change, place, text):
    with pytest.raises(ConfigurationError) as caught:
        load_config(judged(**change))
    told = {mistake.path: f"{mistake.problem} {mistake.remedy}".strip() for mistake in caught.value.mistakes}
    assert list(told) == [f"judges.j.{place}"]
    assert text in told[f"judges.j.{place}"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("unready", r"judges\.j: twice-kind 1\.2 cannot open the judge: RuntimeError: not today\."),
        ("nameless", r"judges\.j: twice-kind 1\.2 cannot open the judge: it has another name"),
    ],
)
def test_a_judge_that_does_not_open(twice, kind, text):
    with pytest.raises(ConfigurationError, match=text) as caught:
        RewardEngine(judged(kind=kind))
    assert caught.value.__context__ is None


def test_a_bug_in_a_foreign_judge_costs_its_own_samples(twice):
    config = judged(kind="broken")
    config["judges"]["k"] = {"kind": "twice"}
    config["routes"] = {"bad": "j", "*": "k"}
    outcomes = scored(config, [replace(sample("abc"), data_source=name) for name in ("bad", "good")])
    assert [type(outcome) for outcome in outcomes] == [Failed, Scored]
    assert "unexpected KeyError" in outcomes[0].detail


def test_a_judge_that_returns_a_number_is_told_what_to_return(twice, caplog):
    [outcome] = scored(judged(kind="float"), [sample("abc")])
    assert (outcome.reason, outcome.detail) == ("bug", "it returned a float; it must return a Verdict")
    assert "Traceback" not in caplog.text


def test_a_foreign_judge_that_cannot_be_rehearsed_cannot_be_planned(twice, tmp_path):
    path = tmp_path / "judges.json"
    path.write_text(json.dumps(judged()))
    result = CliRunner().invoke(app, ["plan", str(path), "--samples", "8"])
    assert result.exit_code == 2
    assert "judge 'j' cannot be planned: its kind 'twice' defines no `rehearsed`" in " ".join(result.output.split())
    with pytest.raises(InputError, match="TwiceJudge defines no `rehearsed`"):
        registry.judges.load("twice").rehearsed(None, None, 0.5)


def test_every_kind_of_ours_describes_itself():
    for kinds, base in ((registry.sources, SourceKind), (registry.judges, Judge)):
        for one, description, problem in kinds.described():
            assert issubclass(kinds.load(one.name), base)
            assert description
            assert (one.package, problem) == ("qreward-plugins", "")


def test_no_other_file_of_the_core_names_a_kind():
    """A kind is known in its own file and in the registry. The public names are listed where they are exported, and
    trees of configurations (`"kind": "openai"`) are written by simulations, test tools and `qreward init` as users
    write them."""
    paths = [path for kinds in (registry.sources, registry.judges) for path in kinds._ours.values()]
    homes = {path.partition(":")[0].split(".")[-1] + ".py" for path in paths}
    homes |= {"registry.py", "__init__.py", "adapters.py", "init.py"}
    classes = {path.partition(":")[2] for path in paths}
    wrong = []
    for path in sorted(CORE.rglob("*.py")):
        if path.name in homes or path.relative_to(CORE).parts[0] in ("testing", "simulation"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            named = {
                ast.Name: lambda node: node.id,
                ast.Attribute: lambda node: node.attr,
                ast.alias: lambda node: node.name,
            }.get(type(node), lambda node: "")(node)
            parts = ast.walk(node) if isinstance(node, ast.Compare) else ()
            compared = [part.value for part in parts if isinstance(part, ast.Constant)]
            if named in classes or (OURS.keys() & {word for word in compared if isinstance(word, str)}):
                if compared and "https" in compared:
                    continue  # the scheme of a URL
                wrong.append(f"{path.relative_to(CORE)}:{node.lineno}")
    assert wrong == []
