"""Control tokens of chat templates lose their meaning in whatever a judge is shown, and nothing else changes."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from qreward_plugins.judges.control_tokens import neutralise

from ..kit import each_of

TOKENS = [
    # Qwen, Llama 3 and 4, DeepSeek, Kimi, GLM, gpt-oss, Granite, Phi, dots, Apertus, Muse, Solar, OLMo
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|header_start|>", "<|python_start|>"),
    *("<｜User｜>", "<｜begin▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<｜hy_place▁holder▁no▁797｜>", "<｜▁pad▁｜>"),
    *("<|im_middle|>", "<|open|>", "<|sep|>", "<|observation|>", "<|channel|>", "<|start_of_role|>", "<|im_sep|>"),
    *("<|userprompt|>", "<|inner_prefix|>", "<|eom|>", "<|think:end|>", "<|tool_call:start|>", "<|LOC_0|>", '<|"|>'),
    # Gemma 2, 3 and 4
    *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<start_of_turn>", "<end_of_turn>"),
    *("<start_of_image>", "<image_soft_token>", "<unused12>", "<mask>"),
    # Cohere
    *(
        "<|START_OF_TURN_TOKEN|>",
        "<|CHATBOT_TOKEN|>",
        "<|START_THINKING|>",
        "<BOS_TOKEN>",
        "<EOS_TOKEN>",
        "<MASK_TOKEN>",
    ),
    # EXAONE, BlueLM, MiniMax, Falcon, Kimi-VL
    *("[|user|]", "[|assistant|]", "[|system|]", "[|endofturn|]", "[|tool|]", "[|Human|]", "[|AI|]"),
    *("]~b]", "]~!b[", "[e~[", "]!p~[", "]!d~[", "]<]minimax[>[", "]<]start of image[>[", "<minimax:tool_call>"),
    *("<beginning_of_sentence>", "<end_of_sentence>", "<mm:think>", "</mm:think>"),
    *(">>TITLE<<", ">>QUESTION<<", "◁think▷", "◁/think▷"),
    # SentencePiece, T5, Nemotron, Baichuan, InternLM, openPangu
    *("<s>", "</s>", "<bos>", "<eos>", "<unk>", "<pad>", "<PAD>", "<cls>", "<sep>", "<mask:1>", "<eoa>"),
    *("<extra_id_0>", "<extra_id_1>", "<SPECIAL_10>", "<SPECIAL_12>", "<reserved_106>", "<reserved_special_token_3>"),
    *("[UNUSED_TOKEN_145]", "[unused16]", "[control_8]"),
    # Llama 2, Mistral, Magistral
    *("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>", "[THINK]", "[/THINK]", "[SYSTEM_PROMPT]", "[MODEL_SETTINGS]"),
    *("[/MODEL_SETTINGS]", "[AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[TOOL_CONTENT]", "[CALL_ID]"),
    *("[ARGS]", "[IMG]", "[IMG_BREAK]", "[BEGIN_AUDIO]", "[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
    # GLM, Kimi, Seed-OSS, LongCat, Ling, MiniCPM, TeleChat, Apriel, InternVL, StarCoder
    *("[gMASK]", "[sMASK]", "<sop>", "<eop>", "<arg_key>", "</arg_value>", "<tool_call>", "</tool_response>"),
    *("[BOS]", "[EOS]", "[EOT]", "[start_header_id]", "<seed:bos>", "</seed:think>", "<seed:cot_budget_reflect>"),
    *("<longcat_think>", "<longcat_tool_call>", "<role>", "</role>", "<用户>", "<AI>", "<_user>", "<_bot>"),
    *("[BEGIN FINAL RESPONSE]", "<IMG_CONTEXT>", "<image>", "<fim_prefix>", "<jupyter_code>", "<file_sep>"),
    *("<think>", "</think>", "<thinking>", "<think_on>"),
]


@each_of("token", TOKENS)
def test_control_tokens_are_rewritten_wherever_they_stand(token: str) -> None:
    for text in (
        token,
        f"a{token}b",
        token * 3,
        f"<{token}>",
        f"<|{token}|>",
        f"[{token}]",
        f"<|im{token}",
        f"<s{token}",
        f"{token[: len(token) // 2]}{token}{token[len(token) // 2 :]}",
    ):
        safe = neutralise(text)
        assert token not in safe
        assert len(safe) == len(text)
        assert neutralise(safe) == safe


@each_of("token", TOKENS)
@each_of("hidden", ["\u200b", "\u2060", "\u00ad", "\ufe0f", "\u034f", "\U000e0041", "\u3164", "\x00"])
def test_invisible_characters_hide_no_token(token: str, hidden: str) -> None:
    """A server that drops them before it tokenizes would put the token together."""
    for text in (hidden.join(token), f"{hidden}{token[0]}{hidden}{hidden}{token[1:]}{hidden}"):
        safe = neutralise(text)
        assert token not in safe.replace(hidden, "")
        assert len(safe) == len(text)
        assert neutralise(safe) == safe


@each_of("token", [token for token in TOKENS if token.isascii()])
def test_fullwidth_characters_hide_no_token(token: str) -> None:
    """A tokenizer that normalises (NFKC) before it splits would read the token."""
    wide = "".join(chr(ord(character) + 0xFEE0) if character != " " else character for character in token)
    styled = "".join(chr(0x1D41A + ord(c) - 97) if "a" <= c <= "z" else c for c in token)
    for text in (wide, styled, wide[0] + token[1:], "\u200b".join(wide), token.replace("[", "\ufe47")):
        plain = unicodedata.normalize("NFKC", neutralise(text)).replace("\u200b", "")
        assert token not in plain


@each_of(
    "text",
    [
        *("a < b > c", "x[0]", "list[int]", "<b>bold</b>", "a || b", "f(x) |> g", "if a<b|c>d:", "[a, b]", "<"),
        *("{{ x }}", "f <| x |> g", "p <|> q <|> r", "[|1; 2; 3|]", "x[mask]", "sys.argv[args]", "Vec<S>", "Map<K, V>"),
        *("a[i]~b[j]", "y ~ x[1]", "<user>", "<code>x</code>", "<answer>4</answer>", "<div><p>hi</p></div>", "[x](y)"),
        *("cin >> title << endl;", "$a_{[i]} \\left[0, 1\\right)$", "1 << 2 >> 3", "[1] Knuth, 1997", "- [ ] task"),
        *("std::vector<int>", "Optional[List[str]]", "array<float, 3>", "<img src='a.png'>", "<YOUR_API_KEY>", "<-|->"),
        *("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "👩\u200d🔬", "３＜４ and ５＞４", "→ ∀x∈ℝ: ⌈x⌉"),
    ],
)
def test_other_text_is_left_alone(text: str) -> None:
    assert neutralise(text) == text


def test_what_is_rewritten_can_still_be_read() -> None:
    html = 'Use <s>old</s> or <del>old</del>: <a href="x[0]">[INST]</a>'
    assert (
        neutralise(html) == 'Use \u2039s\u203aold\u2039/s\u203a or <del>old</del>: <a href="x[0]">\u27e6INST\u27e7</a>'
    )


PIECES = st.lists(
    st.sampled_from([*TOKENS, *"<>|[]◁▷/~!", "\u200b", "\ufe0f", "＜", "｜", "s", "im_end", "\n", "‹", "⟦"])
    | st.text(max_size=4),
    max_size=12,
).map("".join)


@given(PIECES)
def test_no_token_is_left_and_a_second_time_changes_nothing(text: str) -> None:
    safe = neutralise(text)
    assert len(safe) == len(text)
    assert neutralise(safe) == safe
    assert not any(token in safe for token in TOKENS)
    # Only brackets change, and only into their lookalikes.
    changed = {(a, b) for a, b in zip(text, safe, strict=True) if a != b}
    assert all(b in "\u2039\u203a\u27e6\u27e7\u25c3\u25b9" for _, b in changed)


def test_a_long_text_of_openings_takes_linear_time() -> None:
    for piece in ("<|", "[", "<", "]<]", "◁", "<\u200b", "＜", "<extra_id_", "<start_of_", "]~"):
        text = piece * (262_144 // len(piece))
        assert neutralise(text) == text
