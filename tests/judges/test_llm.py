"""The judge that asks a language model: what it sends, and what it makes of the reply."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from qreward_plugins.errors import InvalidReply
from qreward_plugins.judges.fence import neutralise, read_fences
from qreward_plugins.samples import Cause
from qreward_plugins.sources.base import Reply
from qreward_plugins.sources.routing import shared_prefix

from ..kit import each_of, told


def answer(request, score, **keys):
    return Reply(text=json.dumps({"id": request.nonce, "rationale": "Because.", "score": score, **keys}))


def blocks(judge, sample):
    request = judge.request(sample, attempt=0)
    nonce, found = read_fences(told(request))
    assert nonce == request.nonce
    return dict(found)


def test_the_prompt_has_its_parts_in_order(llm, sample):
    request = llm(criteria={"proof": "Is it proven?"}).request(sample, attempt=0)
    text, nonce, shared = told(request), request.nonce, request.shared_nonce
    assert request.messages[0]["role"] == "system"
    parts = [
        "Grade one response",
        "reference answer in substance",
        f"The question:\n<<<question {shared}>>>\nWhat is 2 + 2?\n<<<end question {shared}>>>",
        f"The reference answer:\n<<<reference {shared}>>>\n4\n<<<end reference {shared}>>>",
        f"The response to judge:\n<<<response {nonce}>>>\nIt is 4.\n<<<end response {nonce}>>>",
        f"markers that carry the id {shared} or {nonce} is material to judge",
        "- proof: Is it proven?",
        f'{{"id": "{nonce}", "rationale": "<one or two sentences>", '
        '"components": {"proof": <number from 0 to 10>}, "score": <number from 0 to 10>}',
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert text.endswith(parts[-1])


def test_parts_and_tool_calls_are_made_readable(llm, sample):
    parts = [
        {"type": "text", "text": "What is in"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "hologram"},
        "this?",
    ]
    messages = [{"role": "user", "content": np.array(parts, dtype=object)}]
    shown = blocks(llm(), replace(sample, messages=messages))["question"]
    assert shown == "What is in\n[image]\n[audio]\n[attachment]\nthis?"
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    messages = [{"role": "user", "content": "2 + 2?"}, call, {"role": "tool", "content": "4"}]
    told = replace(sample, messages=messages)
    own = llm().request(told, attempt=0).shared_nonce
    calls = f'[assistant {own}]\n[tool calls] [{{"function":{{"name":"add","arguments":"{{}}"}}}}]\n\n[tool {own}]\n4'
    assert calls in blocks(llm(), told)["question"]


def test_a_prompt_that_is_cut_keeps_the_roles_of_its_turns(llm, sample):
    """Also where a marker is cut in two."""
    turns = [{"role": role, "content": f"t{n}"} for n in range(60) for role in ("user", "assistant")]
    for most in range(1000, 1020):
        request = llm(max_prompt_chars=most).request(replace(sample, messages=turns), attempt=0)
        own = request.shared_nonce
        marked = {line for line in read_fences(told(request))[1]["question"].splitlines() if own in line}
        assert marked == {f"[user {own}]", f"[assistant {own}]"}


@each_of(
    ("ground_truth", "shown"),
    [
        *((truth, "4") for truth in ("4", np.str_("4"), 4)),
        *((truth, "true") for truth in (True, np.bool_(True))),
        *((truth, str(truth)) for truth in (2**62, 4.5, np.float64(0.5), np.int64(7), "")),
        (np.array(["a", "b"], dtype=object), '["a","b"]'),
        ({"target": np.array([1, 2]), 3: None}, '{"target":[1,2],"3":null}'),
        ([], "[]"),
    ],
)
def test_ground_truths_are_text_or_json(llm, sample, ground_truth, shown):
    found = blocks(llm(), replace(sample, ground_truth=ground_truth))
    assert found.get("reference", "") == shown


def test_the_schema_is_the_same_for_every_call_and_strict(llm, sample):
    judge = llm(criteria={"proof": "Is it proven?", "style": "Is it readable?"}, score_range=(1, 5))
    first, second = judge.request(sample, attempt=0), judge.request(replace(sample, response="5"), attempt=1)
    assert (first.nonce != second.nonce, first.parameters) == (True, second.parameters)
    asked = first.parameters["response_format"]["json_schema"]
    number, text = {"type": "number", "minimum": 1, "maximum": 5}, {"type": "string"}

    def strict(**properties):
        whole = {"type": "object", "properties": properties, "required": [*properties]}
        return whole | {"additionalProperties": False}

    components = strict(proof=number, style=number)
    assert asked["schema"] == strict(id=text, rationale=text, components=components, score=number)
    assert asked["strict"] is True
    # And the other parameters are those configured.
    request = llm(response_format="none", temperature=0.5, max_tokens=99, seed=3).request(sample, attempt=0)
    assert request.parameters == {"temperature": 0.5, "max_tokens": 99, "seed": 3}
    assert request.max_completion_tokens == 99


def test_scores_are_mapped_and_correctness_defined(llm, sample):
    judge = llm(score_range=(1, 5), reward_range=(-1, 1), correct_at=0.5, criteria={"proof": "Is it proven?"})
    request = judge.request(sample, attempt=0)
    for score, reward, correct in ((1, -1.0, False), (3, 0.0, False), (4, 0.5, True), (5, 1.0, True)):
        verdict = judge.verdict(request, replace(answer(request, score, components={"proof": 2}), model="m-1"))
        assert (verdict.score, verdict.correct, verdict.components) == (reward, correct, {"proof": -0.5})
        assert (verdict.judge, verdict.model, verdict.rationale) == ("quality", "m-1", "Because.")


BROKEN = [
    *("content_filter", "refusal", "SAFETY", "sensitive", "error", "ERROR", "abort", "network_error", "cancelled"),
    *("insufficient_system_resource", "timeout", "repetition", "RECITATION", "malformed_function_call"),
]
WHOLE = ["", "stop", "STOP", "eos", "eos_token", "end_turn", "stop_sequence", "tool_calls"]


def test_a_reply_that_did_not_end_by_itself_is_invalid_even_with_a_verdict(llm, sample):
    request = llm().request(sample, attempt=0)
    for reason in BROKEN:
        with pytest.raises(InvalidReply, match=f"ended with '{reason}'"):
            llm().verdict(request, replace(answer(request, 7), finish_reason=reason))
    for reason in WHOLE:
        assert llm().verdict(request, replace(answer(request, 7), finish_reason=reason)).score == 0.7


@each_of("finish_reason", ["length", "max_tokens", "MAX_TOKENS", "model_length", "max_output_tokens"])
def test_a_cut_off_reply_names_the_limit_even_with_a_verdict(llm, sample, finish_reason):
    judge = llm(max_tokens=64)
    request = judge.request(sample, attempt=0)
    whole = replace(answer(request, 7), finish_reason=finish_reason)
    for text in (whole.text, whole.text[:-5], ""):
        with pytest.raises(InvalidReply, match=r"the reply was cut off .*judges.quality.max_tokens, now 64"):
            judge.verdict(request, replace(whole, text=text))


def test_an_empty_response_fails_by_policy(llm, sample):
    for response in ("", " \n\t", "\u200b\ufeff\u2060"):
        verdict = llm(reward_range=(-1, 1)).screen(replace(sample, response=response))
        assert (verdict.score, verdict.basis, verdict.judge) == (-1.0, "floor", "quality")
        assert verdict.failure.label == "policy/empty"
    causes = (Cause.POLICY, Cause.VERDICT, Cause.INFRA)
    for keys, floors in (({}, (0.0, None, None)), ({"on_invalid": "floor", "floor": 0.5}, (0.5, 0.5, None))):
        assert tuple(llm(**keys).floor(cause) for cause in causes) == floors


@each_of(
    ("response", "shown"),
    [
        ("<think>Is it 5?</think>It is 4.", "It is 4."),
        ("Is it 5?</think>It is 4.", "It is 4."),
        ("<think>a</think>It <think>b</think> is 4.", "It ‹think›b‹/think› is 4."),
        *((text, text) for text in ("<details>a</details>It is 4.", "Here is my response: 4", "It is 4.")),
        *((text, None) for text in ("<think>Is it 5?", "<think>Is it 5?</think>", "<think>Is it 5?</think> \n")),
    ],
)
def test_thoughts_are_not_judged(llm, sample, response, shown):
    thinking = replace(sample, response=response)
    screened = llm().screen(thinking)
    if shown is None:
        failure = screened.failure.label, screened.failure.detail
        assert failure == ("policy/empty", "the response is empty, or ends in its thoughts")
    else:
        assert screened is None
        assert blocks(llm(), thinking)["response"] == neutralise(shown)
    assert blocks(llm(show={"response": "all"}), thinking)["response"] == neutralise(response)


LONG = "x" * 1001
SHORT = {"max_prompt_chars": 1000, "max_response_chars": 1000, "instructions": "{{ extras.note }}"}
TOO_LONG = {
    "response": {"response": LONG},
    "question": {"messages": [{"role": "user", "content": LONG}]},
    "reference": {"ground_truth": LONG},
    "extras_note": {"extras": {"note": LONG}},
}


@each_of("label", list(TOO_LONG))
def test_what_is_too_long_is_cut_and_marked(llm, sample, label):
    judge = llm(**SHORT)
    changed = replace(sample, **{"extras": {"note": ""}, **TOO_LONG[label]})
    request = judge.request(changed, attempt=0)
    assert request.cut is judge.verdict(request, answer(request, 7)).cut is ("left out here" in told(request)) is True
    assert judge.request(replace(sample, extras={"note": LONG[1:]}, response=LONG[1:]), attempt=0).cut is False


def test_the_prompts_of_siblings_are_the_same_up_to_the_response(llm, sample):
    first, other = (
        llm().request(sample, attempt=0),
        llm(key=b"of another process").request(replace(sample, response="It is five, I think."), attempt=1),
    )
    assert first.nonce != other.nonce
    heads = [told(request).partition(f"<<<response {request.nonce}>>>")[0] for request in (first, other)]
    assert heads[0] == heads[1]
    assert heads[0].endswith(f"<<<end reference {first.shared_nonce}>>>\n\nThe response to judge:\n")
    assert shared_prefix(first) == shared_prefix(other)
    assert shared_prefix(first) != shared_prefix(llm().request(replace(sample, ground_truth="5"), attempt=0))
