"""The small rules of the judge server's protocol."""

from __future__ import annotations

import pytest

from qreward_plugins.engine.trial import PAIRS
from qreward_plugins.testing import JudgeCall, ScoreCall, count_tokens, overlap_score
from qreward_plugins.testing.judge_calls import Completion, as_verdict, duration


@pytest.mark.parametrize(
    ("text", "tokens"), [("", 0), ("a", 1), ("abcd", 1), ("abcde", 2), ("é" * 2, 1), ("\U0001f600x", 2), ("\ud800", 1)]
)
def test_tokens_are_bytes_by_four_rounded_up(text: str, tokens: int) -> None:
    assert count_tokens(text) == tokens


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (-1.0, "0ms"),
        (0.0001, "1ms"),
        (0.02, "20ms"),
        (1.0, "1s"),
        (1.5, "1.5s"),
        (59.9994, "1m0s"),
        (360.0, "6m0s"),
        (61.25, "1m1.25s"),
    ],
)
def test_durations_are_written_as_providers_do(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_prompt_is_the_last_user_message() -> None:
    call = JudgeCall("judge", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert call.prompt == "a"
    assert JudgeCall("judge", [{"role": "system", "content": "s"}]).prompt == ""


@pytest.mark.parametrize("content", ["é" * 5, "\U0001f600" * 3])
def test_a_cut_never_splits_a_character(content: str) -> None:
    for max_tokens in (1, 2):
        cut = Completion(content).cut(max_tokens)
        assert cut.content is not None
        assert content.startswith(cut.content)
        assert cut.tokens <= max_tokens
        assert cut.finish_reason == "length"
    assert Completion(None).cut(1) == Completion(None)


def test_the_built_in_scorer_counts_words_in_the_range_that_is_asked_for() -> None:
    fences = "<<<reference 0123456789ab>>>\nforty two\n<<<end reference 0123456789ab>>>\n"
    fences += "<<<response 0123456789ab>>>\nIt is Two.\n<<<end response 0123456789ab>>>"
    schema = {"properties": {"score": {"type": "number", "minimum": -10, "maximum": 10}}}
    asked = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    message = [{"role": "user", "content": fences}]

    assert overlap_score(JudgeCall("judge", message)) == 0.5
    assert overlap_score(JudgeCall("judge", message, asked)) == 0.0
    assert JudgeCall("judge", message, {"response_format": {"type": "json_object"}}).score_range == (0.0, 1.0)


@pytest.mark.parametrize(
    "template",
    [
        "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>",
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n{}",
        "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n{}<end_of_turn>",
        "<s>[INST] {} [/INST] {}</s>",
        "User: {}\n\nAssistant: {}",
    ],
)
def test_the_built_in_scorer_scores_an_answer_to_the_question_higher_than_nonsense(template: str) -> None:
    for pair in PAIRS:
        good, bad = (
            overlap_score(ScoreCall("rm", [], {}, template.format(pair.question, text)))
            for text in (pair.good, pair.bad)
        )
        assert good > bad


def test_a_text_without_turns_gets_a_score_of_its_own() -> None:
    scores = [overlap_score(ScoreCall("rm", [], {}, f"text {number}")) for number in range(20)]
    assert len(set(scores)) == 20


def asking(*criteria: str) -> JudgeCall:
    number = {"type": "number", "minimum": 0, "maximum": 10}
    properties = {"score": number}
    if criteria:
        properties["components"] = {"type": "object", "properties": dict.fromkeys(criteria, number)}
    schema = {"type": "object", "properties": properties}
    return JudgeCall("judge", [], {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}})


def test_a_number_stands_for_every_component_that_is_asked_for() -> None:
    assert asking("style", "proof").criteria == ("style", "proof")
    verdict = as_verdict(asking("style", "proof"), 4.0)
    assert isinstance(verdict, dict)
    assert (verdict["score"], verdict["components"]) == (4.0, {"style": 4.0, "proof": 4.0})


@pytest.mark.parametrize("parameters", [{}, {"response_format": {"type": "json_object"}}, {"response_format": "?"}])
def test_without_a_schema_nothing_but_a_score_is_asked_for(parameters: dict[str, object]) -> None:
    for call in (JudgeCall("judge", [], parameters), asking()):
        assert call.criteria == ()
        assert "components" not in as_verdict(call, 1.0)


def test_a_mapping_says_itself_what_it_holds() -> None:
    assert as_verdict(asking("style"), {"score": 1.0}) == {"score": 1.0}
    assert as_verdict(asking("style"), {"components": {"style": 2}}) == {"components": {"style": 2}}
