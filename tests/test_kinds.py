"""Kinds of sources and judges that other packages bring: found, checked, opened and scheduled as ours are."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qreward_plugins import Failed, RewardEngine, Sample, Scored, load_config
from qreward_plugins.cli.app import app
from qreward_plugins.config import registry
from qreward_plugins.judges import Judge
from qreward_plugins.sharing.membership import source_keys
from qreward_plugins.sources import Request, SourceKind, open_source

from .kit import each_of, mistakes_of

CORE = Path(__file__).parents[1] / "qreward_plugins"
OURS = {**registry.sources._ours, **registry.judges._ours}

LENGTH = '''
    """Kinds of sources for tests."""
    from __future__ import annotations
    from typing import Annotated, Literal
    from pydantic import BaseModel, Field, SecretStr, field_validator, model_validator
    from qreward_plugins.config import Batch
    from qreward_plugins.samples.spent import Usage
    from qreward_plugins.sources import VALUE, FreeMapping, Reply, SourceConfig, SourceKind

    class Cube(BaseModel, extra="forbid"):
        of: Literal["cube"]
        side: float

    class Ball(BaseModel, extra="forbid"):
        of: Literal["ball"]
        radius: Annotated[float, Field(gt=0)]

    class LengthSource(SourceKind):
        """Scores the length of a response."""

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

    class Telling(LengthSource):
        class Config(LengthSource.Config):
            batch: Batch | None = None

        async def send(self, request, *, on_sent):
            given = self._config
            raise ValueError(f"cannot log in with {given.token.get_secret_value()}, {given.db_password}")

        send_batch = send

    class Unready(LengthSource):
        def __init__(self, name: str, config) -> None:
            raise RuntimeError("no such\\nroom")

    class Nameless(LengthSource):
        def __init__(self, name: str, config) -> None:
            pass

    class Unsure(LengthSource):
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
    """Kinds of judges for tests."""
    from __future__ import annotations
    from pydantic import SecretStr
    from qreward_plugins import Verdict
    from qreward_plugins.judges import AskingConfig, Call, Judge
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

    class Short(TwiceJudge):
        def __init__(self, name):
            super().__init__(name, None, None)

    class Nameless(TwiceJudge):
        def __init__(self, name, config, opening):
            super().__init__("x", config, opening)

    class Broken(TwiceJudge):
        async def judge(self, sample, ask):
            raise KeyError("response")

    class Telling(TwiceJudge):
        class Config(AskingConfig):
            word: SecretStr

        async def judge(self, sample, ask):
            raise ValueError(f"cannot log in with {self._config.word.get_secret_value()}")

    class Float(TwiceJudge):
        async def judge(self, sample, ask):
            return 0.5

    class Endless(TwiceJudge):
        async def judge(self, sample, ask):
            return Verdict(float("nan"), judge=self.name)

    class Silent(Judge):
        """Has no verdict."""
'''
JUDGES = "qreward_plugins.judges"
SOURCES = "qreward_plugins.sources"
NODE = {"kind": "length", "factor": 2}


def named(module, *names):
    return {name.lower().removesuffix("source").removesuffix("judge"): f"{module}:{name}" for name in names}


@pytest.fixture
def length(install):
    kinds = named("length_kind", "LengthSource", "Unready", "Unsure", "Nameless", "Silent", "Loose", "Plain", "Gone")
    install("length-kind", "length_kind", LENGTH, {SOURCES: {**kinds, "broken": "no_such_module:X"}})


@pytest.fixture
def twice(install, length):
    kinds = named("twice_kind", "TwiceJudge", "Unready", "Short", "Nameless", "Broken", "Float", "Silent")
    install("twice-kind", "twice_kind", TWICE, {JUDGES: kinds})


def judged(**judge):
    return {"sources": {"a": NODE}, "judges": {"j": {"kind": "twice", **judge}}}


def tree(**node):
    return {"sources": {"a": {**NODE, **node}}, "judges": {"j": {"kind": "function"}}}


def sample(response, **fields):
    return Sample([{"role": "user", "content": "?"}], response, **fields)


def scored(config, *samples):
    async def score():
        async with RewardEngine(config) as engine:
            return await engine.score_all(samples)

    return asyncio.run(score())


@each_of("kind", ["length", "length_kind:LengthSource"])
def test_a_kind_of_another_package_scores(length, kind):
    outcomes = scored(tree(kind=kind, limits={"concurrency": 1}), *(sample("x" * n) for n in (1, 2, 3)))
    assert [outcome.verdict.score for outcome in outcomes if isinstance(outcome, Scored)] == [2.0, 4.0, 6.0]


@each_of("kind", ["twice", "twice_kind:TwiceJudge"])
def test_a_judge_of_another_package_asks(twice, kind):
    (outcome,) = scored(judged(kind=kind, factor=10), sample("abc"))
    assert isinstance(outcome, Scored)
    assert (outcome.verdict.score, outcome.verdict.spent.attempts) == (60.0, 2)


def test_who_returns_a_number_is_told_what_to_return(twice, caplog):
    (outcome,) = scored(tree(kind="length_kind:Float"), sample("abc"))
    assert "its `send` returned a float; it must return a Reply" in outcome.detail
    (outcome,) = scored(judged(kind="float"), sample("abc"))
    assert (outcome.reason, outcome.detail) == ("bug", "it returned a float; it must return a Verdict")
    assert "Traceback" not in caplog.text


def test_a_bug_in_a_foreign_judge_costs_its_own_samples(twice):
    config = judged(kind="broken")
    config["judges"]["k"] = {"kind": "twice"}
    config["routes"] = {"bad": "j", "*": "k"}
    outcomes = scored(config, *(sample("abc", data_source=name) for name in ("bad", "good")))
    assert [type(outcome) for outcome in outcomes] == [Failed, Scored]
    assert "unexpected KeyError: 'response'" in outcomes[0].detail
    (outcome,) = scored(judged(kind="twice_kind:Endless"), sample("abc"))
    assert re.search(r"finite in float32, not nan \(.*twice_kind\.py:[0-9]+\)", outcome.detail)


@each_of("batch", [None, {"max_size": 2}])
def test_the_same_bug_of_a_kind_is_logged_once_with_a_traceback_and_told_without_secrets(twice, caplog, batch):
    token, password = "tok-0123456789abcdef", "pass-0123456789abcdef"
    source = tree(kind="length_kind:Telling", token=token, db_password=password, batch=batch)
    judge = judged(kind="twice_kind:Telling", word=token)
    for config in (source, judge):
        caplog.clear()
        outcomes = scored(config, *(sample("x" * number) for number in range(1, 30)))
        assert {type(outcome) for outcome in outcomes} == {Failed}
        assert all("unexpected ValueError: cannot log in with ***" in outcome.detail for outcome in outcomes)
        assert not any(secret in str(outcomes) for secret in (token, password))
        assert len([record for record in caplog.records if record.exc_info]) == (2 if batch and config is source else 1)


@each_of(
    ("config", "place", "text"),
    [
        (tree(points=1), "sources.a.points", "unknown key. Allowed here: kind, factor, limits, timeouts, "),
        (tree(facter=1), "sources.a.facter", "unknown key. Did you mean `factor`?"),
        (
            {**tree(), "sources": {"a": {"kind": "length"}}},
            "sources.a.factor",
            "is missing. Points for a character.",
        ),
        (tree(limits={"concurency": 1}), "sources.a.limits.concurency", "unknown key. Did you mean `concurrency`?"),
        (tree(even=3), "sources.a.even", "3 is odd; give an even number."),
        (tree(factor=101, unit="words"), "sources.a", "words score at most 100 each."),
        (tree(odd="x"), "sources.a", "its kind cannot read it: a validator raised KeyError."),
        (tree(solid={"of": "ball", "radius": -1}), "sources.a.solid.radius", "must be above 0, not -1."),
        (tree(solid={"side": 1}), "sources.a.solid", "the key 'of' is missing."),
        (judged(facter=1), "judges.j.facter", "unknown key. Did you mean `factor`?"),
    ],
)
def test_mistakes_are_reported_as_ours_are(twice, config, place, text):
    found = mistakes_of(load_config, config)
    assert list(found) == [place]
    assert text in found[place]


@each_of(
    ("config", "text"),
    [
        (tree(kind="silent"), r"kind 'silent' of length-kind 1\.2: the class length_kind:Silent lacks answers, send\."),
        (tree(kind="plain"), r"length_kind:Plain does not inherit qreward_plugins\.sources\.SourceKind\."),
        (tree(kind="loose"), r"Loose has no `Config` that inherits qreward_plugins\.sources\.SourceConfig\."),
        (tree(kind="gone"), r"1\.2: the class length_kind:Gone does not exist: the module has no `Gone`\. Fix"),
        (tree(kind="broken"), r"length-kind 1\.2: .* cannot be imported: ModuleNotFoundError: .* 'no_such_module'"),
        (
            tree(kind="no_such_module:X"),
            r"the class no_such_module:X cannot be imported: ModuleNotFoundError.*PYTHONPATH",
        ),
        (tree(kind="length_kind:Gone"), r"the class length_kind:Gone does not exist: the module has no `Gone`\.$"),
        (tree(kind="os:path"), r"does not inherit"),
        (tree(kind="lenght"), r"`lenght`\. Did you mean `length`\? Allowed here: openai, reward_model, http, "),
        (judged(kind="twcie"), r"`twcie`\. Did you mean `twice`\? Allowed here: llm, reward_model, "),
        (judged(kind="silent"), r"the kind 'silent' of twice-kind 1\.2: the class twice_kind:Silent lacks judge\."),
    ],
)
def test_a_kind_that_cannot_be_used_is_one_mistake(twice, config, text):
    ((place, said),) = mistakes_of(load_config, config).items()
    assert place in ("sources.a.kind", "judges.j.kind")
    assert re.search(text, said), said


@each_of(
    ("config", "place", "text"),
    [
        (tree(kind="unready"), "sources.a", r"length-kind 1.2 cannot open the source: RuntimeError: no such\nroom."),
        (tree(kind="nameless"), "sources.a", "length-kind 1.2 cannot open the source: AttributeError"),
        (tree(kind="unsure"), "sources.a", "1.2 cannot identify its provider: KeyError: 'NO_SUCH_VARIABLE'."),
        (judged(kind="unready"), "judges.j", "twice-kind 1.2 cannot open the judge: RuntimeError: not today."),
        (judged(kind="short"), "judges.j", ". Its constructor takes `name, config, opening`."),
    ],
)
def test_a_kind_that_does_not_open(twice, config, place, text):
    assert text in mistakes_of(RewardEngine, config)[place]


def test_no_secret_of_a_foreign_kind_is_shown(length):
    secret = ["sk-SECRET"]
    for change in ({"token": secret}, {"db_password": secret}, {"odd": secret[0]}, {"tokens": {"a": secret}}):
        assert "SECRET" not in str(mistakes_of(load_config, tree(**change)))
    assert "SECRET" not in repr(load_config(tree(token="sk-SECRET")))


def test_a_broken_package_hurts_nobody_who_does_not_use_it(length, monkeypatch, caplog):
    function = tree()
    function["sources"]["a"] = {"kind": "function", "function": "os.path:basename"}
    load_config(function)
    assert "length_kind" not in sys.modules

    def broken(**_):
        raise KeyError("Name")

    monkeypatch.setattr(registry.metadata, "entry_points", broken)
    registry._registered.cache_clear()
    try:
        load_config(function)
        assert "unknown kind. Allowed here: openai" in mistakes_of(load_config, tree())["sources.a.kind"]
    finally:
        registry._registered.cache_clear()
    assert "entry points of installed packages cannot be read: KeyError: 'Name'" in caplog.text


def test_a_name_that_two_packages_register(length, install):
    install("second", "other_kind", "", {SOURCES: {"length": "other_kind:LengthSource", "openai": "other_kind:X"}})
    assert mistakes_of(load_config, tree())["sources.a.kind"] == (
        "sources.a.kind: several packages register the kind 'length': length-kind 1.2 (length_kind:LengthSource) and "
        "second 1.2 (other_kind:LengthSource). Uninstall all but one, or name the class: `kind: "
        "length_kind:LengthSource`."
    )
    assert "qreward-plugins" in mistakes_of(load_config, tree(kind="openai"))["sources.a.kind"]
    load_config(tree(kind="length_kind:LengthSource"))


def test_what_the_journal_and_shared_limits_know_of_a_foreign_kind(length):
    """Everything of its configuration but secrets, limits and prices; two kinds never share an answer."""

    def question(response="abc", **node):
        source = open_source("a", load_config(tree(**node)).sources["a"])
        return repr(source.question(Request(sample=sample(response))))

    plain, secret = question(), {"token": "sk-SECRET", "tokens": {"a": "sk-SECRET"}}
    assert question(limits={"concurrency": 3}, token="sk-SECRET") == plain
    assert "SECRET" not in question(**secret)
    for other in ({"factor": 3}, {"unit": "words"}, {"version": "2"}, {"options": {"a": 1}}, {"response": "abd"}):
        assert question(**other) != plain
    limited, keyed = (source_keys(load_config(tree(**node))) for node in ({"limits": {"concurrency": 2}}, secret))
    assert source_keys(load_config(tree())) == limited != keyed
    assert "SECRET" not in repr(keyed)


def test_what_a_kind_answers_decides_which_judges_may_ask_it(length):
    told = mistakes_of(
        load_config, {"sources": {"a": NODE}, "judges": {"j": {"kind": "llm"}, "k": {"kind": "llm", "sources": "a"}}}
    )
    missing, unfit = told["judges.j"], told["judges.k.sources"]
    assert missing.startswith(
        "judges.j: there is no source of kind openai or replicas to answer this judge of kind llm."
    )
    assert unfit.startswith(
        "judges.k.sources: `a` is a source of kind length, which cannot answer a judge of kind llm."
    )


def test_a_foreign_judge_that_cannot_be_rehearsed_cannot_be_planned(twice, tmp_path):
    path = tmp_path / "judges.json"
    path.write_text(json.dumps(judged()))
    result = CliRunner().invoke(app, ["plan", str(path), "--samples", "8"])
    assert result.exit_code == 2
    assert "judge 'j' cannot be planned: its kind 'twice' defines no `rehearsed`" in " ".join(result.output.split())


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
    kind = rf"[\"'](?:{'|'.join(OURS)})[\"']"
    suspect = re.compile(rf"\b(?:{'|'.join(classes)})\b|(?:[!=]=| in ).*{kind}|{kind} (?:[!=]=|in)")
    wrong = []
    for path in sorted(CORE.rglob("*.py")):
        text = path.read_text()
        if (
            path.name in homes
            or path.relative_to(CORE).parts[0] in ("testing", "simulation")
            or not suspect.search(text)
        ):
            continue
        for node in ast.walk(ast.parse(text)):
            name = getattr(node, {ast.Name: "id", ast.Attribute: "attr", ast.alias: "name"}.get(type(node), ""), "")
            parts = ast.walk(node) if isinstance(node, ast.Compare) else ()
            compared = {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}
            # "https" is the scheme of a URL.
            if name in classes or ("https" not in compared and OURS.keys() & compared):
                wrong.append(f"{path.relative_to(CORE)}:{node.lineno}")
    assert wrong == []
