"""`qreward plan` and `qreward bench`, which tell before a run how long a step takes and how good its judges are; and
`qreward check --deep`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from qreward_plugins import Cause, Failed, Scored, Verdict
from qreward_plugins.cli import bench
from qreward_plugins.cli import plan as module
from qreward_plugins.cli.bench_figures import GivenReward, Grade, JudgeRun, RowResult, compared, figures_of
from qreward_plugins.errors import InputError
from qreward_plugins.files import LabelledRow, read_labelled
from qreward_plugins.journal.history import PastAttempt
from qreward_plugins.samples.spent import Spent, Usage
from qreward_plugins.sources.base import Request
from qreward_plugins.testing import JudgeServer, Latency

from ..kit import each_of, make_sample, record, wait_until
from .conftest import exited, refusal

# `qreward plan`: what a person reads, the files that are written, and how mistakes are told


LIMITS = {"requests_per_minute": 30, "concurrency": 16}


@pytest.fixture
def config(write_config):
    source = {"limits": LIMITS, "price": {"per_request": 0.01}, "api_key_env": "A_KEY_THAT_IS_NOT_SET"}
    return write_config({"a": "http://planned.invalid/v1"}, source=source, engine={"deadline_s": 60})


def test_a_plan_is_printed(run_cli, config):
    exact = ["--latency", "1", "--tokens", "100", "--seeds", "1"]
    result = run_cli("plan", config, "--samples", 45, *exact)
    assert (result.exit_code, result.stderr) == (0, "")
    text = " ".join(result.stdout.split())
    for part in (
        f"{config}: a step of 45 samples (judged: 45 by quality)",
        "takes 61.",
        "costs $0.45 ($10.00 per 1,000 samples)",
        "waits for requests a minute of a",
        "but 33% of the samples get no reward: engine.deadline_s is 60",
        "a 1.00s 45 100% - 16 of 16",
        "+30 requests/min on a",
        "rollouts: 100 tokens",
        "a: an average request takes 1 s (given)",
        "a: no tokens_per_minute declared, so none is assumed",
    ):
        assert part in text
    lines = result.stdout.splitlines()
    advice = lines[lines.index("what would help most") + 2 : lines.index("assumed") - 1]
    saved = [float(line.rsplit("->")[0].split()[-1]) - float(line.rsplit("->")[1].split()[0]) for line in advice]
    assert saved == sorted(saved, reverse=True)
    assert saved[0] > 20


def test_without_a_terminal_lines_tell_how_far_it_is(run_cli, config, monkeypatch):
    monkeypatch.setattr(module, "_LINE_EVERY_S", 0.0)
    result = run_cli("plan", config, "-n", 8, "--seeds", 2)
    assert result.stderr.splitlines()[:3] == [f"rehearsed {done} of 2 steps" for done in range(3)]


def test_the_plan_and_its_timeline_are_written_for_real_rollouts(run_cli, config, write_rows, row, tmp_path):
    rows, plot = write_rows([row(number) for number in range(5)]), tmp_path / "plan.png"
    options = ("-n", 20, "--seeds", 2, "--tokens", f"file:{rows}", "--plot", plot, "--json")
    result = exited(run_cli("plan", config, *options))
    assert f"the timeline is in {plot}" in result.stderr
    assert plot.read_bytes()[:4] == b"\x89PNG"
    found = json.loads(result.stdout)
    assert (found["samples"], [source["name"] for source in found["sources"]]) == (20, ["a"])
    assert found["step_s"]["p50"] > 0
    assert any(f"the rollouts of {rows}" in note for note in found["notes"])


@each_of(
    ("options", "message"),
    [
        ([], "write either --samples N, or --against JOURNAL"),
        (["--against", "missing.sqlite"], "the journal missing.sqlite cannot be opened"),
        (["--against", "empty.sqlite"], "empty.sqlite has no training steps"),
        (["--against", "empty.sqlite", "--plot", "plan.png"], "--plot draws the plan of one step"),
        (["-n", 4, "--start", 90], "no source of kind replicas is asked, so no servers start; leave out --start"),
        (["-n", 4, "--tokens", "file:missing.jsonl"], "missing.jsonl"),
        (["-n", 4, "--plot", "missing/plan.png"], "there is no directory 'missing'"),
        (["-n", 4, "--data-source", "x=-1"], "a share must be above 0"),
    ],
)
def test_mistakes_are_one_message(run_cli, config, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    record(Path("empty.sqlite"), [])
    told = refusal(run_cli("plan", config, *options))
    assert (told.startswith("error: "), message in told) == (True, True), told


@pytest.fixture
def recorded(tmp_path):
    """A journal of three training steps and a validation, each of 40 samples in 5 s: 8 at a time, for a second each."""
    path, now = tmp_path / "verdicts.sqlite", [0.0]

    def samples():
        for step, split in ((1, "train"), (2, "train"), (3, "train"), (3, "val")):
            for number in range(40):
                latency_s = 1.0 + number // 8
                now[0] = 1e9 + 1000 * step + latency_s
                fields = {"response": "x" * 800, "step": step, "split": split, "data_source": "math"}
                sample = make_sample(id=f"{step} {number}", **fields)
                spent = Spent(latency_s=latency_s, attempts=1, usage=Usage(300, 100), cost_usd=0.01)
                times = (latency_s - 1, None, latency_s)
                past = PastAttempt("a", *times, "valid", False, "", spent.usage, 0.01, Request(sample), None)
                yield sample, Scored(Verdict(0.5, judge="quality", source="a", service_s=1.0, spent=spent)), [past]

    record(path, samples(), clock=lambda: now[0])
    return path


def test_the_steps_of_a_journal_stand_beside_their_plans(run_cli, config, recorded):
    tree = config.read_text().replace("requests_per_minute: 30", "requests_per_minute: 3000")
    config.write_text(tree.replace("concurrency: 16", "concurrency: 8"))
    options = ["--against", recorded, "--last", 2, "--seeds", 1, "--workers", 2]
    result = run_cli("plan", config, *options)
    assert (result.exit_code, result.stderr) == (0, "")
    text = " ".join(result.stdout.split())
    assert f"{recorded}: the latest 2 steps, each beside its plan by {config}" in text
    assert "2 40 5.00s" in text
    assert "40 40 16.0k 17.0k 0.4000 0.4000" in text
    found = json.loads(run_cli("plan", config, *options, "--json").stdout)
    assert [step["measured"]["number"] for step in found["steps"]] == [2, 3]
    assert found["errors"]["seconds"] == pytest.approx(0.0, abs=0.1)
    assert found["errors"]["tokens"] == pytest.approx(0.0, abs=0.1)
    assert "the plan is off by (median): time " in text
    assert "a: an average request takes 1 s (journal)" in text


def test_the_first_step_waits_for_servers(run_cli, config):
    tree = yaml.safe_load(config.read_text())
    tree["sources"] = {"own": {"kind": "replicas", "command": ["serve", "{port}", "{name}"], "model": "m"}}
    config.write_text(yaml.safe_dump(tree))
    found = json.loads(run_cli("plan", config, "-n", 8, "--seeds", 1, "--start", 90, "--json").stdout)
    assert found["first_step_s"] > 90
    result = run_cli("plan", config, "-n", 8, "--seeds", 1)
    assert "until the servers of own have started (--start)" in " ".join(result.stdout.split())


# `qreward bench`: what it makes of judges whose answers are known


def judged_by_number(call):
    """The number that a response ends with is its score; without one it is no verdict."""
    last = call.blocks["response"].split()[-1]
    return float(last) if last.replace(".", "").isdigit() else 0.0 if "BAD" not in last else "I would rather not."


@pytest.fixture
def numbers():
    with JudgeServer(judged_by_number) as server:
        yield server


def pair(name, chosen, rejected, **columns):
    return {"id": name, "prompt": f"Question {name}?", "chosen": chosen, "rejected": rejected, **columns}


def row_result(rewards, *, chosen=1, label=None, name="row"):
    samples = tuple(make_sample(group_id=name) for _ in rewards)
    row = LabelledRow(name, "", samples, chosen, label)
    return RowResult(row, [GivenReward(reward) for reward in rewards])


def test_a_failed_call_is_neither_right_nor_wrong():
    """Nor is a floor for an invalid reply. That of an empty answer is what training gets for it."""
    failures = [Failed(Cause.INFRA, "deadline"), Failed(Cause.VERDICT, "invalid"), Failed(Cause.INFRA, "garbage")]
    floors = [
        Scored(Verdict(0.0, basis="floor", failure=Failed(cause, "x"))) for cause in (Cause.VERDICT, Cause.POLICY)
    ]
    given = [GivenReward.of(outcome) for outcome in (*failures, *floors)]
    assert [each.problem for each in given] == ["failed", "invalid", "invalid", "invalid", ""]
    assert [each.reward for each in given] == [None, None, None, None, 0.0]
    rows = [row_result([1.0, 0.0]), RowResult(row_result([0, 0]).row, [GivenReward(1.0), given[0]])]
    figures = figures_of(rows, Grade("pairs"))
    assert (figures.rows, figures.judged, figures.value, figures.failed) == (2, 1, 1.0, 1)


def test_intervals_are_those_of_groups():
    """Of 40 right and 60 wrong rows: 0.4 with an error of 0.049. The same rows in two groups say much less."""

    def figures(name):
        rows = [row_result([1.0 if n < 40 else 0.0], label=1.0, name=name(n)) for n in range(100)]
        return figures_of(rows, Grade("yes_no"))

    apart, two = figures(str), figures(lambda n: "a" if n < 50 else "b")
    assert (apart.value, two.low, two.high) == (0.4, 0.0, 0.8)
    assert (apart.low, apart.high) == pytest.approx((0.304, 0.496), abs=0.025)


def test_numbers_are_compared_by_rank():
    right = [row_result([n**3 / 1e6], label=float(n), name=f"{n}") for n in range(20)]
    turned = [row_result([-each.first[0].reward], label=each.row.label, name=each.row.id) for each in right]
    grade = Grade("numbers")
    assert figures_of(right, grade).value == pytest.approx(1.0)
    assert figures_of(turned, grade).value == pytest.approx(-1.0)
    assert math.isnan(figures_of([row_result([0.5], label=float(n)) for n in range(5)], grade).value)
    both = compared(JudgeRun("a", grade, right), JudgeRun("b", grade, turned))
    assert (both.agreement, both.difference) == (pytest.approx(-1.0), pytest.approx(2.0))


PAIRS = [
    pair("a", "right 0.9", ["wrong 0.1", "wrong 0.2", "wrong 0.3"], domain="best of 4"),
    pair("b", "right, and longer than the others 0.5", ["wrong 0.5", "wrong 0.2", "wrong 0.3"], domain="best of 4"),
    pair("c", "right 0.2", "wrong, but much longer 0.8", domain="two"),
    pair("d", "right, and so much longer 0.7", "wrong 0.4", domain="two"),
    pair("e", "right 0.7", "BAD", domain="two"),
]


def test_pairs_are_measured_by_domain(numbers, run_cli, write_config, write_rows):
    config = write_config({"a": numbers}, source={"price": {"per_request": 0.01}})
    result = exited(run_cli("bench", config, "--data", write_rows(PAIRS), "--json"))
    report = json.loads(result.stdout)
    judge = report["judges"]["quality"]
    whole, (best_of_4, two) = judge["all"], judge["domains"]
    assert (report["layout"], whole["rows"], whole["judged"]) == ("pairs", 5, 4)
    assert (best_of_4["value"], best_of_4["ties"], best_of_4["longer"]) == (0.75, 1, 0.5)
    assert (two["value"], two["ties"], two["invalid"], two["failed"]) == (0.5, 0, 1, 0)
    assert (two["longer"], two["shorter"]) == (1.0, 0.0)
    assert whole["value"] == pytest.approx(2.5 / 4)
    assert whole["low"] < whole["value"] < whole["high"]
    # Of the shells, ':' ... '.' get 0, and no good answer has so little.
    assert (whole["shells_passed"], whole["shells"]) == (0, 5)
    assert judge["requests"] == numbers.report().requests == 8 + 6 + 5
    assert judge["invalid_replies"] == 1
    assert whole["usd"] == pytest.approx(0.01 * 19)


def test_a_judge_that_a_shell_deceives_is_found_out(run_cli, write_config, write_rows):
    with JudgeServer(lambda call: float(len(call.blocks["response"]) < 40)) as server:
        config, data = write_config({"a": server}), write_rows([pair("a", "42", "It is " + 9 * "most " + "certain")])
        assert " 1/1 " in run_cli("bench", config, "--data", data).stdout


def test_the_second_asking_is_a_call_of_its_own_and_both_are_recorded(run_cli, write_config, write_rows):
    """Two of four rows flip. A second run makes no call, and finds the same flips."""
    asked = {}

    def scorer(call):
        response = call.blocks["response"]
        asked[response] = asked.get(response, 0) + 1
        return 0.0 if asked[response] > 1 and response in ("good 0", "good 1") else float("good" in response)

    rows = [pair(f"{n}", f"good {n}", f"bad {n}") for n in range(4)]
    with JudgeServer(scorer) as server:
        config, data = write_config({"a": server}), write_rows(rows)
        first, again = (json.loads(run_cli("bench", config, "--data", data, "--twice", "--json").stdout) for _ in "ab")
        assert server.report().requests == 8 + 4 + 8
    judges = [one["judges"]["quality"] for one in (first, again)]
    assert [(one["all"]["flips"], one["all"]["asked_twice"], one["all"]["value"]) for one in judges] == [
        (2, 4, 1.0)
    ] * 2
    assert [(one["requests"], one["cached"]) for one in judges] == [(12, 0), (0, 12)]


def test_a_judge_of_siblings_sees_them_together_and_in_another_order_the_second_time(
    run_cli, write_config, write_rows, monkeypatch
):
    """One that likes what it sees first flips, and one that reads does not. A row and its shell are one call."""
    monkeypatch.setattr(bench, "MOST_SHELLS", 10)
    count = [0]

    def first_slot(call):
        count[0] += 1
        return 1 / count[0]

    rows = [pair(f"{n}", f"good {n}", [f"bad {n}", f"worse {n}"]) for n in range(60)]
    flips = {}
    for scorer in (first_slot, lambda call: float("good" in call.blocks["response"])):
        with JudgeServer(scorer) as server:
            llm, rank = {"kind": "llm", "score_range": [0, 1]}, {"kind": "rank", "judge": "quality"}
            # A hedge would be one more request.
            engine = {"scheduling": {"hedge": False}}
            config = write_config({"a": server}, judges={"quality": llm, "ranks": rank}, engine=engine)
            data = write_rows(rows, f"{scorer.__name__}.jsonl")
            report = json.loads(run_cli("bench", config, "--data", data, "--twice", "--json").stdout)
            assert server.report().requests == 60 + 60
        assert list(report["judges"]) == ["ranks"]
        whole = report["judges"]["ranks"]["all"]
        flips[scorer] = whole["flips"], whole["value"]
    (by_place, wrong), (by_text, right) = flips.values()
    # More than the 10 rows with a shell, which change the order, too.
    assert (by_place > 14, wrong < 0.6) == (True, True), flips
    assert (by_text, right) == (0, 1.0)


def test_labels_and_where_an_answer_begins_to_be_good(numbers, run_cli, write_config, write_rows):
    rows = [{"prompt": "?", "response": f"it is {n / 10}", "label": n >= 4, "id": n} for n in range(1, 9)]
    data = write_rows(rows)

    def whole(config):
        result = run_cli("bench", config, "--data", data, "--json")
        return json.loads(result.stdout)["judges"]["quality"]["all"]

    config = write_config({"a": numbers})
    assert whole(config)["value"] == 7 / 8
    assert whole(write_config({"a": numbers}, judge={"correct_at": 0.4}))["value"] == 1.0
    scores = [{key: value for key, value in row.items() if key != "label"} | {"score": row["id"]} for row in rows]
    report = json.loads(run_cli("bench", config, "--data", write_rows(scores, "n.jsonl"), "--json").stdout)
    assert (report["layout"], report["judges"]["quality"]["all"]["value"]) == ("numbers", pytest.approx(1.0))


def test_two_judges_are_compared_and_a_bar_fails_the_command(numbers, server, run_cli, write_config, write_rows):
    judges = {
        name: {"kind": "llm", "sources": source, "score_range": [0, 1]}
        for name, source in {"quality": "a", "other": "b"}.items()
    }
    path = write_config({"a": numbers, "b": server}, judges=judges, routes={"*": "quality"})
    data = write_rows(
        [pair("a", "42, or 0.1", "7, or 0.9", ground_truth="42"), pair("b", "0.9", "0.1", ground_truth="x")]
    )
    result = run_cli("bench", path, "--data", data, "--judge", "quality", "--judge", "other", "--at-least", "0.6")
    assert result.exit_code == 1, result.output
    assert "judge quality: 0.5 is below 0.6" in result.stderr
    assert "judge other" not in result.stderr.partition("is below")[2]
    assert "quality and other, 2 rows that both have judged:" in result.stdout
    assert "only quality is right: b" in result.stdout
    assert "only other is right: a" in result.stdout
    assert run_cli("bench", path, "--data", data, "--judge", "other", "--at-least", "0.6").exit_code == 0


def test_answers_without_a_reward_have_an_exit_code_of_their_own(run_cli, write_config, write_rows):
    config = write_config({"a": "http://127.0.0.1:9/v1"}, engine={"deadline_s": 0.2})
    assert "0/1" in exited(run_cli("bench", config, "--data", write_rows([pair("a", "x", "y")])), 3).stdout


def test_a_judge_that_reads_what_the_rows_lack_says_so(numbers, run_cli, write_config):
    config = write_config({"a": numbers}, judge={"instructions": "{{ extras.style }} {{ response }}"})
    result = run_cli("bench", config)
    assert (result.exit_code, numbers.report().requests) == (3, 0)
    assert "quality: 60 of 60 failed, the first with: judges.quality.instructions: there is no 'style'" in result.stdout
    assert "; if rows lack what it reads, give others with --data FILE" in result.stdout


def test_a_stopped_bench_says_what_is_left_of_it(run_cli, stop_cli, write_config, write_rows):
    data = write_rows([pair("a", "x", "y")])
    for options, said in (((), "nothing was recorded"), (("--data", data), f"so far are in {data}.journal. Run")):
        # A server of its own: requests of the bench that was stopped before may arrive late.
        with JudgeServer(lambda call: 0.5, latency=Latency(median_s=60)) as server:
            asked = lambda server=server: wait_until(lambda: server.report().requests > 0)  # noqa: E731
            result = stop_cli(asked, "bench", write_config({"a": server}), *options)
        assert (result.exit_code, said in result.stderr) == (130, True), result.stderr


def write(tmp_path, rows, name="x.json"):
    path = tmp_path / name
    path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    return path


def test_answers_may_be_conversations_and_no_judge_sees_a_label(tmp_path):
    """A conversation brings its prompt. Files of the suffix json hold a list, or lines."""
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [
        {"chosen": said, "rejected": [[*said[:1], {"role": "assistant", "content": "No"}], said], "subset": "chat"},
        {"id": 7, "prompt": "Hi", "chosen": ["a", "b"], "rejected": said[1:], "data_source": "d", "extra": 1},
    ]
    layout, (first, second) = read_labelled(write(tmp_path, rows))
    assert (layout, first.domain, first.chosen, second.domain, second.chosen) == ("pairs", "chat", 1, "d", 2)
    assert [sample.response for sample in first.samples] == ["Hello", "No", "Hello"]
    assert [sample.response for sample in second.samples] == ["a", "b", "Hello"]
    assert first.samples[0].messages == said[:1]
    assert second.samples[2].messages == [{"role": "user", "content": "Hi"}]
    assert [sample.id for sample in second.samples] == ["7/0", "7/1", "7/2"]
    assert second.samples[0].extras == {"extra": 1}


GOOD = {"prompt": "?", "response": "x", "label": 1}


@each_of(
    ("rows", "message"),
    [
        ([], "x.json: has no rows"),
        ([{"prompt": "?", "response": "x"}], "item 1: needs the columns `chosen` and `rejected`, or `response` and"),
        ('[{"prompt": "?", "response": "x", "label": NaN}]', "not one that is not finite"),
        ([GOOD, pair("b", "x", "y")], "b: some rows have `chosen` and `rejected`, and others a label; make two files"),
        ([pair("a", [{"role": "user", "content": "x"}], "y")], "must end with a message of the assistant"),
    ],
)
def test_a_mistake_in_the_data_is_one_message(tmp_path, rows, message):
    with pytest.raises(InputError) as caught:
        read_labelled(write(tmp_path, rows))
    assert message in str(caught.value)


def test_a_judge_that_is_not_there_is_named_with_those_that_are(run_cli, write_config):
    told = refusal(run_cli("bench", write_config({"a": "http://127.0.0.1:9/v1"}), "--judge", "other"))
    assert "has no judge 'other'; its judges: quality" in told


def test_the_built_in_pairs_favour_no_length():
    layout, rows = read_labelled(Path(bench.PAIRS))
    assert (layout, len(rows), len({row.id for row in rows})) == ("pairs", 20, 20)
    assert sum(len(row.samples[0].response) > len(row.samples[1].response) for row in rows) == 10


def test_a_deep_check_finds_a_judge_that_only_knows_nonsense(run_cli, write_config):
    """The three pairs of the check are a matter of nonsense; the twenty are not."""
    right = {row.samples[0].response for row in read_labelled(Path(bench.PAIRS))[1]}

    def shallow(call):
        words = ("ladders", "bananas", "asdf")
        return float(not any(word in call.blocks["response"] for word in words))

    def deep(call):
        return shallow(call) * (0.9 if call.blocks["response"] in right else 0.5)

    for scorer, code in ((shallow, 1), (deep, 0)):
        with JudgeServer(scorer) as server:
            config = write_config({"a": server})
            assert run_cli("check", config).exit_code == 0
            result = run_cli("check", config, "--deep")
        assert result.exit_code == code, result.output
        assert ("judge quality: fewer than 15 of the 20 built-in pairs" in result.stdout) == bool(code)
    with JudgeServer(shallow) as server:
        own = write_config({"a": server}, judge={"instructions": "Is the response polite?"})
        assert run_cli("check", own, "--deep").exit_code == 0
    assert run_cli("check", config, "--deep", "--offline").exit_code == 2
