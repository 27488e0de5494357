"""Control tokens of chat templates lose their meaning in whatever a judge is shown, and nothing else changes; what is
empty; and the ids of fences.
"""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from qreward_plugins.judges.fence import NONCE_LENGTH, cap, draw_nonces, is_blank, neutralise

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
    *("<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|START_THINKING|>"),
    *("<BOS_TOKEN>", "<EOS_TOKEN>", "<MASK_TOKEN>"),
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


def rewritten(text):
    safe = neutralise(text)
    assert len(safe) == len(text)
    assert neutralise(safe) == safe
    return safe


@each_of("token", TOKENS)
def test_control_tokens_are_rewritten_wherever_they_stand(token):
    half = len(token) // 2
    texts = [token, f"a{token}b", token * 3, f"<{token}>", f"<|{token}|>", f"[{token}]", f"<|im{token}", f"<s{token}"]
    for text in (*texts, f"{token[:half]}{token}{token[half:]}"):
        assert token not in rewritten(text)


@each_of("token", TOKENS)
@each_of("hidden", ["\u200b", "\u2060", "\u00ad", "\ufe0f", "\u034f", "\U000e0041", "\u3164", "\x00"])
def test_invisible_characters_hide_no_token(token, hidden):
    """A server that drops them before it tokenizes would put the token together."""
    for text in (hidden.join(token), f"{hidden}{token[0]}{hidden}{hidden}{token[1:]}{hidden}"):
        assert token not in rewritten(text).replace(hidden, "")


@each_of("token", [token for token in TOKENS if token.isascii()])
def test_fullwidth_characters_hide_no_token(token):
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
def test_other_text_is_left_alone(text):
    assert neutralise(text) == text
    html = 'Use <s>old</s> or <del>old</del>: <a href="x[0]">[INST]</a>'
    plain = 'Use \u2039s\u203aold\u2039/s\u203a or <del>old</del>: <a href="x[0]">\u27e6INST\u27e7</a>'
    assert neutralise(html) == plain, "what is rewritten can still be read"


PIECES = st.lists(
    st.sampled_from([*TOKENS, *"<>|[]◁▷/~!", "\u200b", "\ufe0f", "＜", "｜", "s", "im_end", "\n", "‹", "⟦"])
    | st.text(max_size=4),
    max_size=12,
).map("".join)


@given(PIECES)
def test_no_token_is_left_and_a_second_time_changes_nothing(text):
    safe = rewritten(text)
    assert not any(token in safe for token in TOKENS)
    # Only brackets change, and only into their lookalikes.
    changed = {(a, b) for a, b in zip(text, safe, strict=True) if a != b}
    assert all(b in "\u2039\u203a\u27e6\u27e7\u25c3\u25b9" for _, b in changed)


def test_a_long_text_of_openings_takes_linear_time():
    for piece in ("<|", "[", "<", "]<]", "◁", "<\u200b", "＜", "<extra_id_", "<start_of_", "]~"):
        text = piece * (32_768 // len(piece))
        assert neutralise(text) == text


INVISIBLE = [
    *("", " \n\t\r\x0b\x0c", "\u00a0\u2003\u3000", "\u2028\u2029", "\u200b\ufeff\u2060", "\x00\x07\x1b\x7f\x85"),
    *("\u00ad", "\u034f", "\u061c", "\u115f\u1160\u3164\uffa0", "\u180e", "\ufe0f", "\U000e0100", "\U000e0041"),
    *("\u2800\u2800", "\u2066", "\u206f", "\ufff9", "\u202e\u200f", "\U0001d173"),
]
VISIBLE = [
    *("\ue000", "\uf8ff", "\U000f0000", "\U0010fffd"),  # private use: a font may show it
    *("\u0378", "\U0001faff", "\U0003fffd", "\u20c1", "\U0001cccc"),  # unassigned here, or was until lately
    *("<s>", "</s>", "[INST]", "<|im_end|>", "<|endoftext|>", "<think></think>", "<turn|>", "]~b]"),
    *("\ufffd", "\ud800", "\u0301", "\u0600", "\u06dd", "0", ".", "∅", "😀", "\u4e00", "\u200b.\u200b"),
]


def test_only_white_space_and_invisible_characters_are_empty():
    assert [text for text in INVISIBLE if not is_blank(text)] == [text for text in VISIBLE if is_blank(text)] == []


# The fence: ids that cannot be guessed or repeated.

KEY = b"a key that no policy can see"


def nonce_of(*texts, key=KEY, attempt=0):
    return draw_nonces(key, texts, attempt=attempt)[0]


def test_a_nonce_depends_on_key_texts_and_attempt():
    nonces = [nonce_of("a", "b", key=b"other"), nonce_of("a", "b", attempt=1)]
    nonces += [nonce_of(*texts) for texts in (("a", "b"), ("ab", ""), ("b", "a"))]
    assert [len(nonce) for nonce in set(nonces)] == [NONCE_LENGTH] * 5


def test_a_nonce_that_a_text_contains_is_drawn_again(monkeypatch):
    monkeypatch.setattr("qreward_plugins.judges.fence.NONCE_LENGTH", 2)
    for free in ({"00", "7f"}, {"80", "ff"}):
        texts = [f"{byte:02x}" for byte in range(256) if f"{byte:02x}" not in free]
        assert {*draw_nonces(KEY, texts, attempt=0)} == free


def test_a_capped_text_keeps_both_ends_and_says_so():
    assert cap("abcdefg", 7) == "abcdefg"
    kept = cap("a" * 1000 + "the middle" + "z" * 1000, 11)
    assert kept.startswith("aaaaa\n[... 1999 characters left out")
    assert kept.endswith("\nzzzzzz")
