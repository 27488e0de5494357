"""`qreward check`: what it shows of good sources, what it says of bad ones, and what it leaves alone."""

from __future__ import annotations

import json
import time

import pytest
import yaml

from qreward_plugins.testing import Faults, JudgeServer, Latency, ServerLimits

KEY = "sk-very-secret-0123456789abcdef"

TRIED = 7
"""Requests to a source that answers a judge: one for the sample, six for the three pairs of the trial."""


def right(call) -> bool:
    """Judge like one that can: whether the response says what the reference does."""
    return call.blocks["reference"] in call.blocks["response"]


@pytest.fixture
def check(run_cli, tmp_path):
    def run(*options):
        return run_cli("check", tmp_path / "config.yaml", *options)

    return run


def table_of(result) -> dict[str, str]:
    """Lines of the table by the source's name."""
    return {line.split()[0]: line for line in result.stdout.splitlines() if "quality" in line and ":" not in line}


def test_a_good_source_shows_latency_limits_and_verdict(check, write_config):
    limits = ServerLimits(requests_per_minute=600, tokens_per_minute=50_000)

    def scorer(call):
        return {"score": 0.5 if right(call) else 0.0, "rationale": "half \x1b[31m right"}

    with JudgeServer(scorer, limits=limits) as server:
        write_config({"fast": server})
        result = check()
        assert result.exit_code == 0, result.output
        assert server.report().requests == TRIED
    assert "config.yaml: valid, with 1 source, 1 judge, 0 routes" in result.stdout
    row = table_of(result)["fast"]
    assert "0.5" in row
    assert "600 requests, 599 left" in row
    assert "50,000 tokens, " in result.stdout
    assert "s  " in row  # the latency's unit
    assert 'fast says: "half \\x1b[31m right"' in result.stdout
    assert result.stderr == ""


def test_every_source_of_every_judge_is_asked_one_request_at_a_time(check, write_config):
    # A second request at the same time would be an answer of 429.
    limits, latency = ServerLimits(concurrency=1), Latency(0.05)
    with JudgeServer(limits=limits, latency=latency) as one, JudgeServer() as two:
        write_config(
            {"one": one, "two": two, "spare": "http://127.0.0.1:9/v1"},
            judges={
                "strict": {"kind": "llm", "sources": ["one"]},
                "kind": {"kind": "llm", "sources": ["two", "one"]},
            },
            routes={"*": "kind"},
        )
        result = check()
        assert result.exit_code == 0, result.output
        assert (one.report().requests, two.report().requests) == (2 * TRIED, TRIED)
    assert "spare: not asked, because neither a judge nor `models` uses it" in result.stdout


def test_sources_that_only_clients_ask_are_asked_too(check, server, tmp_path):
    dead = JudgeServer()
    dead.start()
    dead.stop()
    with JudgeServer(lambda call: "42") as spare:
        source = {"kind": "openai", "model": "judge"}
        tree = {
            "sources": {
                "judged": {**source, "base_url": server.base_url},
                "spare": {**source, "base_url": spare.base_url},
                "dead": {**source, "base_url": dead.base_url},
                "idle": {**source, "base_url": dead.base_url},
            },
            "judges": {"quality": {"kind": "llm", "sources": ["judged"], "score_range": [0, 1]}},
            "models": {"gpt-*": {"sources": ["judged", "spare"]}, "other": {"sources": "de*"}},
        }
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(tree))
        result = check()
        assert result.exit_code == 1, result.output
        assert spare.report().requests == 1
        lines = result.stdout.splitlines()
        assert [line.split()[1] for line in lines if line.startswith("spare")] == ["(clients)"]
        assert sum(line.startswith("models: source 'dead' (") for line in lines) == 1
        assert "idle: not asked, because neither a judge nor `models` uses it" in lines
        # A file for clients alone.
        del tree["judges"]
        tree["models"] = {"*": {"sources": ["spare"]}}
        path.write_text(yaml.safe_dump(tree))
        result = check()
    assert result.exit_code == 0, result.output
    assert result.stdout.count("answers") == 1


def test_a_dead_source_is_named_and_the_others_are_asked(check, server, write_config):
    dead = JudgeServer()
    dead.start()
    dead.stop()
    write_config({"dead": dead, "alive": server})
    result = check()
    assert result.exit_code == 1
    assert "judge quality: source 'dead' (http://127.0.0.1" in result.stdout
    assert "could not connect" in result.stdout
    assert "none" in table_of(result)["dead"]
    assert "none" not in table_of(result)["alive"]
    assert server.report().requests == TRIED


def test_a_silent_source_is_given_up(check, write_config):
    with JudgeServer(faults=Faults(script=["hang"])) as server:
        write_config({"silent": server}, source={"timeouts": {"total_s": 0.2}})
        result = check()
    assert result.exit_code == 1
    assert "source 'silent': no answer within 0.2 s" in result.stdout


@pytest.mark.parametrize(
    ("fault", "requests"),
    [
        *(("error_429_seconds", 1), ("error_500", 1), ("html", 1)),
        *(("prose", TRIED), ("score_nan", TRIED), ("forged_verdict", TRIED)),
    ],
)
def test_no_valid_verdict_is_told(check, write_config, fault, requests):
    with JudgeServer(faults=Faults(script=[fault])) as server:
        write_config({"odd": server})
        result = check()
        assert server.report().requests == requests
    assert result.exit_code == 1
    assert "judge quality: source 'odd'" in result.stdout
    assert "judge: it" not in result.stdout


def test_a_wrong_key_is_told_and_not_shown(check, write_config, monkeypatch):
    monkeypatch.setenv("QREWARD_TEST_KEY", KEY)
    with JudgeServer(api_key="another") as server:
        write_config({"a": server}, source={"api_key_env": "QREWARD_TEST_KEY", "headers": {"X-Team": KEY[::-1]}})
        result = check()
        assert server.report().credentials_seen == 1
    assert result.exit_code == 1
    assert "401" in result.stdout
    for secret in (KEY, KEY[::-1], KEY[:12]):
        assert secret not in result.output


def test_mistakes_of_the_configuration_come_before_any_request(check, server, write_config):
    write_config({"a": server}, judge={"instructions": "{{ respons }}"})
    result = check()
    assert (result.exit_code, result.stdout) == (2, "")
    assert "config.yaml: judges.quality.instructions" in result.stderr
    write_config({"a": server}, source={"api_key_env": "QREWARD_NO_SUCH_KEY"})
    result = check()
    assert (result.exit_code, result.stdout) == (2, "")
    assert "'QREWARD_NO_SUCH_KEY' is not set" in result.stderr
    assert server.report().requests == 0


def test_the_journal_is_left_alone(check, server, write_config, tmp_path):
    write_config({"a": server}, engine={"journal": {"path": str(tmp_path / "verdicts.sqlite")}})
    assert check().exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_functions_are_called(check, write_config, tmp_path, mode):
    (tmp_path / "functions.py").write_text(
        "def right(solution_str, ground_truth, **_):\n    return float(ground_truth in solution_str)\n"
        "def broken(**_):\n    raise ValueError('not my data')\n"
    )
    functions = {"kind": "function", "mode": mode, "workers": 1}
    write_config(
        sources={
            "right": {**functions, "function": f"{tmp_path}/functions.py:right"},
            "broken": {**functions, "function": f"{tmp_path}/functions.py:broken"},
        },
        judges={"quality": {"kind": "function"}},
    )
    result = check()
    assert result.exit_code == 1
    assert " 1 " in table_of(result)["right"]
    assert "ValueError: not my data" in result.stdout


def test_a_scoring_service_is_asked_like_any_source(check, write_config):
    limits = ServerLimits(requests_per_minute=600)
    right = lambda call: {"score": float(call.label in call.response)}  # noqa: E731
    with JudgeServer(right, limits=limits) as good, JudgeServer(faults=Faults(script=["score_nan"])) as odd:
        write_config(
            sources={
                "good": {"kind": "http", "url": good.score_url},
                "odd": {"kind": "http", "url": odd.score_url, "model": "rm-7b"},
            },
            judges={"quality": {"kind": "function", "reward_range": [0, 1]}},
        )
        result = check()
        assert (good.report().requests, odd.report().requests) == (1, 1)
        place = good.score_url.removeprefix("http://")
    assert result.exit_code == 1
    assert " 1 " in table_of(result)["good"]
    assert "600 requests, 599 left" in table_of(result)["good"]
    assert place in result.stdout
    assert "rm-7b" in result.stdout
    assert "judge quality: source 'odd' gave no valid value: its reply holds NaN, which is not JSON" in result.stdout


def test_a_judge_that_needs_columns_gets_them_from_rollouts(check, server, write_config, write_rows, row):
    write_config({"a": server}, judge={"instructions": "By this rubric: {{ extras.rubric }}"})
    result = check()
    assert result.exit_code == 1
    assert "source 'a': " in result.stdout
    assert "use one of yours with --rollouts" in result.stdout
    assert server.report().requests == 0

    path = write_rows([row(0, rubric="Be kind."), row(1), "not JSON, and not read"])
    assert check("--rollouts", path).exit_code == 0
    assert server.report().requests == TRIED

    result = check("--rollouts", path.with_name("missing.jsonl"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "missing.jsonl: cannot be read" in result.stderr


def test_every_judge_gets_the_first_row_that_is_routed_to_it(check, write_config, write_rows, row):
    seen = []

    def scorer(call):
        seen.append((json.loads(call.prompt.splitlines()[0])["judge"], call.blocks["response"]))
        return 1.0

    with JudgeServer(scorer) as server:
        judges = {
            name: {"kind": "llm", "instructions": f'{{"judge": "{name}"}}\n', "score_range": [0, 1]}
            for name in ("math", "code", "rest")
        }
        write_config({"a": server}, judges=judges, routes={"m/*": "math", "c/*": "code", "r/*": "rest"})
        rows = [("m/1", " "), ("x", "nobody's"), ("c/1", "print"), ("m/2", "two"), ("m/3", "three")]
        path = write_rows([row(0, data_source=source, response=response) for source, response in rows])
        assert check("-r", path).exit_code == 0
    assert seen[::TRIED] == [("math", "two"), ("code", "print"), ("rest", "17 plus 25 is 42")]


def test_the_default_server_gives_every_criterion(check, write_config):
    with JudgeServer() as server:
        write_config({"a": server}, judge={"criteria": {"proof": "Is it proven?", "style": "Is it elegant?"}})
        result = check()
    assert result.exit_code == 0, result.output


def test_every_part_of_a_sum_is_asked(check, write_config, write_rows, row):
    judges = {
        "style": {"kind": "llm", "instructions": "By this rubric: {{ extras.rubric }}"},
        "rules": {"kind": "function"},
        "total": {"kind": "sum", "weights": {"style": 0.75, "rules": -1}},
    }
    with JudgeServer() as words, JudgeServer() as rules:
        sources = {
            "a": {"kind": "openai", "base_url": words.base_url, "model": "judge"},
            "rm": {"kind": "http", "url": rules.score_url},
        }
        write_config(sources=sources, judges=judges)
        result = check("--rollouts", write_rows([row(1, rubric="Be brief.")]))
        assert result.exit_code == 0, result.output
        assert (words.report().requests, rules.report().requests) == (TRIED, 1)
        assert "valid, with 2 sources, 3 judges, 0 routes" in result.stdout
        assert "total: the sum of 0.75 x style and -1 x rules" in result.stdout
        rules.stop()
        assert check("--rollouts", write_rows([row(1, rubric="Be brief.")])).exit_code == 1


def random_scores(call):
    """What a model of 270 million parameters does: 0 or 10, whatever it is shown."""
    low, high = call.score_range
    return high if int(call.nonce, 16) % 2 else low


@pytest.mark.parametrize(
    ("scorer", "said"),
    [
        (lambda call: 1.0, "gives right answers and nonsense the same reward, 1"),
        (lambda call: 0.0, "gives right answers and nonsense the same reward, 0"),
        (lambda call: 0.0 if right(call) else 1.0, "the right one scored higher in 0 of 3 pairs"),
        (lambda call: len(call.blocks["response"]) / 100, "cannot tell a right answer from nonsense"),
        (random_scores, "judge quality: source 'tiny' cannot judge: it "),
        (lambda call: {"score": 1.0, "rationale": "<one or two sentences>"}, "copied from the form"),
        (
            lambda call: {"score": 1.0, "rationale": "Right." if right(call) else "One or two sentences."},
            "3 of 6 test answers got no valid verdict; the last: the rationale is copied from the form",
        ),
        (lambda call: "It is fine." if "asdf" in call.prompt or "Moon" in call.prompt else right(call) * 1.0, "2 of 6"),
    ],
)
def test_a_judge_that_cannot_judge_is_told(check, write_config, scorer, said):
    with JudgeServer(scorer) as server:
        write_config({"tiny": server}, engine={"seed": 3})
        result = check()
    assert result.exit_code == 1
    assert said in result.stdout.replace("\n", " ")
    assert "use a more capable model" in result.stdout


def test_a_judge_with_instructions_of_its_own_may_ask_for_something_else(check, write_config):
    with JudgeServer(lambda call: len(call.blocks["response"]) / 100) as server:
        write_config({"long": server}, judge={"instructions": "The longer, the better."})
        result = check()
    assert result.exit_code == 0, result.output
    assert (
        "judge quality: source 'long' may be unable to judge: it cannot tell a right answer from nonsense"
        in result.stdout
    )


def test_a_judge_that_stops_answering_is_not_called_unable(check, write_config):
    limits = ServerLimits(requests_per_minute=3)
    with JudgeServer(limits=limits) as server:
        write_config({"slow": server})
        result = check()
    assert result.exit_code == 0, result.output
    assert "cannot judge" not in result.stdout


def test_one_flaw_among_many_verdicts_is_forgiven(check, write_config):
    with JudgeServer(faults=Faults(script=[None, None, "prose"])) as server:
        write_config({"a": server})
        assert check().exit_code == 0


def test_a_source_that_hangs_is_waited_for_once_and_not_for_long(check, write_config):
    judges = {name: {"kind": "llm"} for name in ("one", "two", "three")}
    with JudgeServer(latency=Latency(600.0)) as server:
        write_config({"slow": server}, judges=judges, routes={"a": "one", "b": "two", "*": "three"})
        started_at = time.monotonic()
        result = check("--timeout", "0.5")
        took_s = time.monotonic() - started_at
    assert result.exit_code == 1
    assert took_s < 100
    assert "source 'slow': no answer within 0.5 s" in result.stdout
    assert "source 'slow': not asked, because it did not answer the judge 'one'" in result.stdout


def test_a_file_of_rollouts_without_rows_is_an_error(check, write_config, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with JudgeServer() as server:
        write_config({"a": server})
        result = check("--rollouts", tmp_path / "empty.jsonl")
        assert server.report().requests == 0
    assert result.exit_code == 2
    assert "has no rows" in result.stderr


def test_a_judge_that_no_row_goes_to_is_told_of(check, write_config, write_rows, row, tmp_path):
    write_rows([row(1, data_source="other")])
    with JudgeServer() as server:
        write_config({"a": server}, judges={"quality": {"kind": "llm"}}, routes={"math": "quality"})
        result = check("--rollouts", tmp_path / "in.jsonl")
    assert "quality: no row of" in result.stdout


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("absent/verdicts.sqlite", "there is no directory"),
        (".", "cannot be opened (Is a directory); choose another path"),
        ("notes.txt", "is not a journal; name another file"),
    ],
)
def test_a_journal_that_no_run_could_open_is_a_mistake(check, server, write_config, tmp_path, path, said):
    (tmp_path / "notes.txt").write_text("not a database")
    write_config({"a": server}, engine={"journal": {"path": str(tmp_path / path)}})
    result = check()
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert (tmp_path / "notes.txt").read_text() == "not a database"
    assert server.report().requests == 0


def test_a_check_leaves_the_journal_alone(check, server, write_config, tmp_path):
    write_config({"a": server}, engine={"journal": {"path": str(tmp_path / "verdicts.sqlite")}})
    assert check().exit_code == 0
    assert not (tmp_path / "verdicts.sqlite").exists()


def test_routes_that_miss_data_sources_are_told(check, server, write_config):
    said = 'routes: samples of other data sources get no reward; a last route "*" would judge them'
    write_config({"a": server}, routes={"math/*": "quality"})
    assert said in check().stdout.replace("\n", " ")
    write_config({"a": server}, routes={"math/*": "quality", "*": "quality"})
    assert "routes: samples" not in check().stdout


def test_one_fault_is_told_once(check, write_config):
    with JudgeServer(faults=Faults(rates={"prose": 1.0})) as server:
        write_config({"odd": server})
        lines = [line for line in check().stdout.splitlines() if line.startswith("judge quality: ")]
    assert len(lines) == 1
    assert lines[0].endswith("; 6 of 6 test answers got no valid verdict, either; use a more capable model")


def test_a_configuration_for_ray_can_be_checked_without_ray(check, server, write_config):
    write_config({"a": server}, engine={"shared": "ray"})
    result = check()
    assert result.exit_code == 0, result.output


def test_each_key_of_a_source_is_shown_and_no_key(check, write_config, monkeypatch):
    keys = [f"{KEY}-one", f"{KEY}-two"]
    for name, key in zip(("QREWARD_KEY_1", "QREWARD_KEY_2"), keys, strict=True):
        monkeypatch.setenv(name, key)
    with JudgeServer(api_key=keys[:1]) as server:
        write_config({"a": server}, source={"api_key_env": ["QREWARD_KEY_1", "QREWARD_KEY_2"]})
        result = check()
    assert result.exit_code == 1
    assert "1 source," in result.stdout
    assert "a#1" in result.stdout
    assert "source 'a#2'" in result.stdout
    assert "401" in result.stdout
    assert not any(key in result.output for key in (KEY, *keys))


def test_a_check_ends_with_the_line_to_train_with(check, server, write_config, monkeypatch):
    from qreward_plugins.cli import training_lines

    path = write_config({"a": server})
    monkeypatch.setattr(training_lines, "installed", lambda: ["verl"])
    verl = "python -m verl.trainer.main_ppo ... reward.reward_manager.name=qreward"
    assert check().stdout.splitlines()[-2:] == ["Train with verl:", f"  {verl} +qreward.config={path}"]
    monkeypatch.setattr(training_lines, "installed", list)
    told = check().stdout
    for part in (verl, f"export QREWARD_CONFIG={path}", "--custom-rm-path slime_adapter.reward", f"config: {path}"):
        assert part in told


def test_an_offline_check_asks_nothing_and_needs_no_key_and_no_trainer(check, write_config):
    write_config(
        {"a": "http://127.0.0.1:9/v1", "b": "framework://judge/v1"},
        source={"api_key_env": "QREWARD_NO_SUCH_KEY", "dialect": "auto"},
    )
    result = check("--offline")
    assert result.exit_code == 0, result.output
    assert "valid, with 2 sources, 1 judge, 0 routes; nothing was asked" in result.stdout
    assert "a: QREWARD_NO_SUCH_KEY is not set" in result.stdout
    assert "b: its address comes from the training framework" in result.stdout
    write_config({"a": "http://127.0.0.1:9/v1"}, judge={"instructions": "{{ respons }}"})
    assert check("--offline").exit_code == 2


@pytest.mark.parametrize("folder", ["plain", "with blanks, and = signs", "it's", 'quo"ted', "ünï"])
def test_the_lines_to_train_with_name_the_file_whatever_its_path(tmp_path, folder):
    import shlex

    import yaml
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from qreward_plugins.cli.training_lines import training_line

    path = tmp_path / folder / "judges.yaml"
    override = shlex.split(training_line("verl", path))[-1]
    assert OverridesParser.create().parse_override(override).value() == str(path)
    settings = yaml.safe_load(training_line("roll", path))["rewards"]["my_domain"]["reward_manager_config"]
    assert settings == [{"config": str(path)}]
    assert str(path) in shlex.split(training_line("slime", path, wrapped=True))


def test_a_reward_server_that_is_waited_for_is_named_at_once(check, tmp_path):
    tree = {"engine": {"server": {"url": "http://127.0.0.1:9", "start_s": 0.01}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    result = check()
    assert result.exit_code == 2
    assert result.stderr.startswith("asking the reward server at http://127.0.0.1:9, for 0.01 s at most")


@pytest.mark.parametrize(
    "protocol", ["vllm_classify", "vllm_score", "sglang_classify", "sglang_embeddings", "tei_predict", "openrlhf"]
)
def test_the_trial_server_serves_a_reward_model_that_can_judge(check, tmp_path, protocol):
    """The first check of a newcomer, with `qreward fake-judge`, ends well whatever is asked."""
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    (tmp_path / "chat.jinja").write_text(template)
    with JudgeServer(models=["rm"]) as server:
        source = {"kind": "reward_model", "base_url": server.root_url, "model": "rm", "protocol": protocol}
        if not protocol.startswith("vllm"):
            source["chat_template"] = str(tmp_path / "chat.jinja")
        tree = {"sources": {"rm": source}, "judges": {"quality": {"kind": "reward_model"}}}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
        result = check()
        assert server.report().requests == TRIED
    assert result.exit_code == 0, result.output


def test_a_file_for_clients_does_not_end_with_a_line_to_train_with(check, tmp_path):
    source = {"kind": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "m"}
    tree = {"sources": {"a": source}, "models": {"gpt-*": {"sources": "a"}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    result = check("--offline")
    assert (result.exit_code, "Train with" in result.stdout) == (0, False), result.output
