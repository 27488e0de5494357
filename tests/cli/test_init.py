"""`qreward init`: what it asks, what it writes, what it refuses, and what it never writes."""

from __future__ import annotations

import os
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from qreward_plugins import load_config
from qreward_plugins.cli import discovery
from qreward_plugins.cli import init as init_module
from qreward_plugins.testing import JudgeServer, ServerLimits

KEY = "sk-very-secret-0123456789abcdef"
NOWHERE = "http://127.0.0.1:9/v1"


def right(call) -> float:
    """Judge like one that can; `init` first asks for a word, without a response."""
    return float(call.blocks.get("reference", "") in call.blocks.get("response", ""))


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("JUDGE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "")  # so that what a test sets is taken back
        monkeypatch.delenv(name)


@pytest.fixture
def init(run_cli):
    return lambda *flags: run_cli("init", *flags)


@pytest.fixture
def answer(monkeypatch):
    """Answer the questions at a terminal, one line each; the input ends after them."""
    from typer.testing import CliRunner

    from qreward_plugins.cli.app import app

    monkeypatch.setattr(init_module, "has_terminal", lambda: True)

    def run(*lines, flags=()):
        typed = "".join(f"{line}\n" for line in lines)
        return CliRunner().invoke(app, ["init", *flags], input=typed, prog_name="qreward")

    return run


@pytest.fixture(scope="module")
def judge():
    with JudgeServer(right, models=["grader"], limits=ServerLimits(requests_per_minute=900)) as server:
        yield server


def written(name="judges.yaml"):
    return Path(name).read_text()


def files():
    return sorted(os.listdir())


def test_the_five_questions(answer, judge):
    result = answer("", "", "", judge.base_url, "", "", "", "", "", "my.yaml")
    assert result.exit_code == 0, result.output
    config = load_config("my.yaml")
    source = config.sources["judge"]
    assert source.urls == (judge.base_url,)
    assert source.model == "grader"  # the only one that the endpoint lists
    assert source.limits.requests_per_minute == 900  # as its headers announce
    assert source.limits.concurrency == 64
    assert "it announces 900 requests" in result.stdout
    assert "my.yaml: valid, with 1 source, 1 judge, 0 routes" in result.stdout
    last = result.stdout.splitlines()[-1]
    assert last == (
        "  python -m verl.trainer.main_ppo ... reward.reward_manager.name=qreward "
        f"+qreward.config={Path('my.yaml').absolute()}"
    )
    assert files() == ["my.yaml"]


@pytest.mark.parametrize("lists", [False, True])
def test_a_server_that_hangs_is_waited_for_with_a_word_and_for_a_short_time(init, monkeypatch, lists):
    assert discovery.LIST_S <= 5.0
    monkeypatch.setattr(discovery, "LIST_S", 0.2)
    monkeypatch.setattr(discovery, "SURVEY_S", 0.2)
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if not lists:
                over.wait(30)
            body = b'{"object": "list", "data": [{"id": "m"}]}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            over.wait(30)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    # The check has its own time limit.
    monkeypatch.setattr(init_module, "check_config", lambda *_, **options: _ok())
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        result = init("--framework", "none", "--url", url, "--model", "m")
    finally:
        over.set()
        server.shutdown()
        thread.join()
        server.server_close()
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"asking {url} for its models ..."
    if lists:
        assert lines[1:3] == ["it answers, with 1 model (m)", "asking m for a word ..."]
    else:
        assert lines[1].startswith("it does not answer yet (no answer (TimeoutError)")


async def _ok():
    return 0


def test_the_flags_of_slime_and_a_file_below_its_key(init, judge):
    result = init("--framework", "slime", "--url", judge.base_url, "--model", "grader", "--rpm", "600")
    assert result.exit_code == 0, result.output
    tree = yaml.safe_load(written("qreward.yaml"))
    assert list(tree) == ["qreward"]
    assert tree["qreward"]["sources"]["judge"]["limits"] == {"requests_per_minute": 600, "concurrency": 64}
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert f"--custom-config-path {Path('qreward.yaml').absolute()}" in lines, "each flag on a line of its own"
    assert "--data-source-path slime_adapter.DataSource" in lines
    assert "#min_scored: 6" in written("qreward.yaml")


def test_a_model_that_the_endpoint_does_not_list_is_told(init, judge):
    result = init("--framework", "slime", "--url", judge.base_url, "--model", "typo")
    assert "it does not list the model typo; it lists grader" in result.stdout


def test_a_missing_version_in_the_url_is_found(init, judge):
    url = judge.base_url.removesuffix("/v1")
    result = init("--url", url.removeprefix("http://"), "--yes")
    assert result.exit_code == 0, result.output
    assert load_config("judges.yaml").sources["judge"].urls == (judge.base_url,)


def test_an_endpoint_that_does_not_answer_yet(init):
    result = init("--framework", "roll", "--url", NOWHERE, "--model", "m")
    assert result.exit_code == 0, result.output
    assert "it does not answer yet" in result.stdout
    assert "judges.yaml: valid, with 1 source, 1 judge, 0 routes; nothing was asked" in result.stdout
    assert f"config: {Path('judges.yaml').absolute()}" in result.stdout


@pytest.mark.parametrize(("framework", "correct_at"), [("roll", 0.6), ("verl", None)])
def test_roll_gets_the_threshold_that_its_validation_counts_by(init, framework, correct_at):
    """`val_correct` counts scores of exactly 1, so it would read 0."""
    Path("mine.py").write_text(
        "def whole(solution_str, ground_truth, **_):\n    return float(solution_str == ground_truth)\n"
    )
    given = ("--framework", framework, "--url", NOWHERE, "--model", "m", "--offline")
    assert init(*given).exit_code == 0
    assert load_config("judges.yaml").judges["quality"].correct_at == correct_at
    mixed = init(*given, "--score", "mixture", "--function", "mine.py:whole", "--out", "mixed.yaml")
    assert mixed.exit_code == 0, mixed.output
    assert load_config("mixed.yaml").judges["total"].correct_at == correct_at


def test_a_comma_that_was_copied_with_the_url_is_dropped(init, judge):
    result = init("--url", f"{judge.base_url},", "--yes")
    assert result.exit_code == 0, result.output
    assert load_config("judges.yaml").sources["judge"].urls == (judge.base_url,)


def test_every_line_is_documented_by_the_models_and_a_removed_mark_sets_a_key(init):
    from qreward_plugins.sources.openai import OpenAISource

    init("--framework", "verl", "--url", NOWHERE, "--model", "1e3", "--rubric", "cost: ${5} # {{ question }}")
    text = written()
    spoken = " ".join(" ".join(line.strip().lstrip("# ") for line in text.splitlines()).split())
    for key in ("base_url", "model", "api_key_env"):
        assert OpenAISource.Config.model_fields[key].description.split("\n\n")[0].replace("\n", " ") in spoken
    config = load_config(yaml.safe_load(text))
    assert config.sources["judge"].model == "1e3"
    assert config.judges["quality"].instructions == "cost: ${5} # {{ question }}"
    unset = "\n".join(
        line.replace("#", "", 1) if line.strip().startswith("#") and line.strip()[1] != " " else line
        for line in text.splitlines()
    )
    config = load_config(yaml.safe_load(unset))
    assert config.sources["judge"].limits.tokens_per_minute == 400_000
    assert config.engine.journal.path == "verdicts.sqlite"
    assert config.judges["quality"].max_tokens == 8192


def test_a_function_and_a_mixture(init, judge):
    Path("mine.py").write_text(
        "async def score(solution_str, **_):\n    return 1.0\nasync def whole(sample):\n    return 0.5\n"
    )
    result = init("--function", "mine.py:score", "--yes")
    assert result.exit_code == 0, result.output
    assert load_config("judges.yaml").sources["rules"].function == f"{Path('mine.py').absolute()}:score"
    flags = ("--function", "mine.py:whole", "--url", judge.base_url, "--yes", "--out", "both.yaml")
    result = init(*flags)
    assert result.exit_code == 0, result.output
    config = load_config("both.yaml")
    assert config.sources["rules"].arguments == "sample"
    assert config.judges["total"].weights == {"correct": 0.5, "quality": 0.5}


def test_a_reward_model(init):
    Path("model").mkdir()
    Path("model/chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    given = ("--score", "reward-model", "--url", "localhost:9/v1", "--model", "rm", "--framework", "verl")
    result = init(*given, "--protocol", "sglang_classify", "--chat-template", "model")
    assert result.exit_code == 0, result.output
    source = load_config("judges.yaml").sources["rm"]
    assert (source.urls, source.protocol) == (("http://localhost:9",), "sglang_classify")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "there is no terminal to ask questions at; add --framework, --url, --model, or --yes for the defaults"),
        (("--score", "function", "--framework", "verl"), "add --function, or --yes"),
        (("--yes", "--url", NOWHERE), "--model is missing, and cannot be taken from the endpoint: no answer"),
        (("--yes", "--url", "ftp://x.y/v1", "--model", "m"), "--url: a URL must start with http:// or https://"),
        (("--yes", "--url", "http://me:pw@x.y", "--model", "m"), "--url: a URL must not have credentials"),
        (("--yes", "--url", NOWHERE, "--model", KEY), "--model: that holds something that looks like an API key"),
        (("--yes", "--url", KEY, "--model", "m"), "--url: that holds something that looks like an API key"),
        (("--yes", "--url", NOWHERE, "--model", "m", "--rpm", "-3"), "--rpm: write a number above 0"),
        (("--yes", "--url", NOWHERE, "--model", "m", "--rubric", "{{ respons }}"), "--rubric: "),
        (("--yes", "--url", NOWHERE, "--model", "m", "--rubric", "@gone.txt"), "--rubric: the file cannot be read"),
        (("--yes", "--url", NOWHERE, "--model", "m", "--rubric", NOWHERE), "--rubric: that is a URL"),
        (("--yes", "--url", NOWHERE, "--model", "m", "--out", "no/such/x.yaml"), "--out: the folder '"),
        (("--yes", "--url", NOWHERE, "--model", "m", "--out", "x.txt"), "--out: write the name of a file that ends in"),
        (
            ("--yes", "--url", NOWHERE, "--model", "m", "--out", "a\nb.yaml"),
            "--out: the name has characters that cannot",
        ),
        (
            ("--yes", "--url", NOWHERE, "--model", "m", "--out", "a" * 300 + ".yaml"),
            "--out: the file cannot be written",
        ),
        (("--yes", "--url", "http://x.y:99999/v1", "--model", "m"), "--url: a URL must have brackets around an IPv6"),
        (("--yes", "--function", "nowhere_at_all:f"), "--function: the function cannot be loaded: there is no module"),
        (("--yes", "--function", "math:pi"), "--function: the function cannot be loaded: pi of math is of type float"),
        (("--yes", "--function", "math:isclose"), "--function: it takes ("),
        (("--yes", "--function", "score"), "--function: write package.module:function, or path/to/file.py:function"),
        (
            ("--yes", "--score", "reward-model", "--url", NOWHERE, "--model", "m", "--protocol", "x"),
            "--protocol: write one of: vllm_classify, ",
        ),
        (("--yes", "--url", NOWHERE, "--model", ""), "--model: write the name of a model, as its server lists it"),
        (("--yes", "--url", NOWHERE, "--model", "  "), "--model: write the name of a model, as its server lists it"),
        (("--yes", "--url", "http://", "--model", "m"), "--url: a URL must start with http:// or https:// and have a"),
        (("--yes", "--url", NOWHERE, "--model", "m", "--rubric", " "), "--rubric: the rubric is empty"),
        (
            ("--yes", "--url", NOWHERE, "--protocol", "tei_predict"),
            "--protocol has no effect with --score judge; leave",
        ),
        (
            ("--yes", "--score", "function", "--function", "math:isclose", "--rpm", "3"),
            "--rpm has no effect with --score function; leave it out, or use --score judge or --score reward-model or",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_one_message_and_nothing_is_written(init, flags, message):
    result = init(*flags)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "pw@" not in result.output
    assert KEY not in result.output
    assert files() == []


@pytest.mark.parametrize("flags", [("--rpm", "0"), ("--tpm", "nan"), ("--concurrency", "-4"), ("--model", " ")])
def test_a_flag_that_cannot_be_used_is_refused_before_anything_is_sent(init, judge, flags):
    asked = judge.report().requests
    result = init("--yes", "--url", judge.base_url, *flags)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {flags[0]}: write ")
    assert judge.report().requests == asked


def test_a_rubric_of_a_file_with_a_byte_order_mark(init):
    Path("rubric.txt").write_bytes(b"\xef\xbb\xbfIs it polite?\r\n")
    result = init("--yes", "--offline", "--model", "m", "--rubric", "@rubric.txt")
    assert result.exit_code == 0, result.output
    assert load_config("judges.yaml").judges["quality"].instructions == "Is it polite?"


GIVEN = ("--framework", "verl", "--url", NOWHERE, "--model", "m", "--rpm", "5")


def test_a_file_is_replaced_only_with_a_flag(init):
    Path("judges.yaml").write_text("mine")
    result = init(*GIVEN)
    assert result.exit_code == 2
    assert "judges.yaml exists; add --overwrite" in result.stderr
    assert written() == "mine"
    assert init(*GIVEN, "--overwrite").exit_code == 0
    assert load_config("judges.yaml").sources["judge"].limits.requests_per_minute == 5


def test_a_file_is_replaced_only_after_a_yes(answer):
    Path("judges.yaml").write_text("mine")
    result = answer("1", "", "none", "", "", "judges.yaml", "n", "other.yaml", flags=GIVEN)
    assert (result.exit_code, written()) == (0, "mine"), result.output
    result = answer("1", "", "none", "", "", "", "y", flags=GIVEN)
    assert result.exit_code == 0, result.output
    assert load_config("judges.yaml").sources["judge"].limits.requests_per_minute == 5
    assert files() == ["judges.yaml", "other.yaml"]


@pytest.mark.parametrize("typed", [KEY, "gsk_abcdefghijklmnop", "AKIAIOSFODNN7EXAMPLE", "0123456789abcdef" * 2])
def test_a_key_is_never_written(answer, typed):
    with JudgeServer(right, api_key=typed) as server:
        given = ("--framework", "verl", "--url", server.base_url, "--rpm", "100")
        result = answer("1", "", typed, "", "", "", "", flags=given)
    assert result.exit_code == 0, result.output  # the key is used for the check
    assert "api_key_env: JUDGE_API_KEY" in written()
    assert typed not in written()
    assert "the file names JUDGE_API_KEY" in result.stdout
    assert typed not in result.output.replace(f": {typed}\n", "")  # but for the echo of a terminal


@pytest.mark.parametrize("words", ["1 2", "Bearer sk-0123456789abcdef", "MY_KEY OTHER_KEY"])
def test_several_words_are_neither_a_variable_nor_a_key(init, words):
    result = init("--yes", "--url", NOWHERE, "--model", "m", "--api-key-env", words)
    assert result.exit_code == 2, result.output
    assert "--api-key-env: write the name of one variable" in result.stderr
    assert words not in result.output
    assert files() == []


def test_a_model_of_gemini_may_have_the_prefix_of_its_list(init):
    with JudgeServer(right, models=["gemini-x", "gemini-y"], protocols=("gemini",)) as server:
        url = f"{server.root_url}/v1beta"
        result = init("--yes", "--framework", "none", "--url", url, "--model", "models/gemini-x", "--overwrite")
    assert result.exit_code == 0, result.output
    assert "it does not list" not in result.stdout
    source = load_config("judges.yaml").sources["judge"]
    assert (source.dialect, source.model) == ("gemini", "gemini-x")


def test_a_prefix_is_a_part_of_the_name_elsewhere(init):
    with JudgeServer(right, models=["models/folder"]) as server:
        result = init("--yes", "--framework", "none", "--url", server.base_url)
    assert result.exit_code == 0, result.output
    assert load_config("judges.yaml").sources["judge"].model == "models/folder"


def test_a_variable_that_is_not_set_is_named(init):
    result = init("--yes", "--url", "https://api.openai.com/v1", "--model", "m")
    assert result.exit_code == 0, result.output
    assert "api_key_env: OPENAI_API_KEY" in written()
    assert "judge: OPENAI_API_KEY is not set" in result.stdout


@pytest.mark.parametrize("key", ["abc\ndef", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_one_message(init, monkeypatch, key):
    monkeypatch.setenv("JUDGE_API_KEY", key)
    result = init(*GIVEN, "--api-key-env", "JUDGE_API_KEY")
    assert result.exit_code == 2, result.output
    assert "--api-key-env: the key holds characters that a header cannot carry" in result.stderr
    assert key not in result.output
    assert files() == []


def test_the_url_of_a_web_page_is_said_to_be_none_of_an_api(init):
    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"<hi>")

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as site:
        threading.Thread(target=site.serve_forever).start()
        result = init("--yes", "--url", f"http://127.0.0.1:{site.server_port}/v1")
        site.shutdown()
    assert result.exit_code == 2
    assert "--model is missing" in result.stderr
    assert "/v1/models answered 200, but with no list of models; is this the URL of the API?" in result.stderr


def test_an_answer_is_asked_again_until_it_can_be_used(answer):
    result = answer(
        "caffe", "s", "judge", "{{ x }}", "default", "%", NOWHERE, "none", "", "m", "x", "9", "", "", "a", "b.yml"
    )
    assert result.exit_code == 0, result.output
    for remark in ("answer with one of: verl, slime, roll, none", "an answer is needed", "write a number above 0"):
        assert remark in result.stdout
    assert load_config("b.yml").sources["judge"].limits.requests_per_minute == 9


@pytest.mark.parametrize("lines", [0, 1, 4, 8])
def test_the_end_of_the_input_ends_it_and_nothing_is_written(answer, lines):
    typed = ["verl", "judge", "default", NOWHERE, "none", "m", "600", "", "64", "judges.yaml"]
    result = answer(*typed[:lines])
    assert result.exit_code == 2
    assert "the input ended before the last question; nothing was written" in result.stderr
    assert files() == []


def test_ctrl_c_ends_it_and_nothing_is_written(answer, monkeypatch):
    def interrupted(prompt: str) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(5)
        raise AssertionError("the signal was lost")

    monkeypatch.setattr("builtins.input", interrupted)

    result = answer()
    assert result.exit_code == 130
    assert "stopped; nothing was written" in result.stderr
    assert files() == []


def test_a_judge_that_cannot_judge_fails_the_check_after_the_file_is_written(init):
    with JudgeServer(lambda call: 0.5) as server:
        result = init("--yes", "--url", server.base_url)
    assert result.exit_code == 1
    assert "cannot judge" in result.stdout
    assert "Train" not in result.stdout
    assert files() == ["judges.yaml"]
