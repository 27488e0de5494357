"""Control tokens of chat templates: what a tokenizer turns into structure (a turn, a role, an end) where it stands.

A server renders its chat template over our message and tokenizes the result, so such a name in a response would become
a turn of its own. The patterns below cover the chat templates and special tokens of the open models of 2023 to 2026:

- `<|name|>`, with ASCII or fullwidth bars: Qwen, Llama 3 and 4, DeepSeek, Kimi, GLM, gpt-oss, Phi, Granite, Cohere,
  OLMo, Hunyuan, Step, Jamba, LFM2, Falcon-H1, MiMo, dots, Apertus, ERNIE, Solar, GigaChat, Inkling, Muse, InternLM
- `<|name>`, `<name|>`: Gemma 4
- `[|name|]`: EXAONE, BlueLM
- `]~b]`, `]~!b[`, `[e~[`, `]!p~[`, `]!d~[`, `]<]name[>[`: MiniMax M2 and M3
- `◁name▷`: Kimi-VL, Kimi k1.5
- `>>NAME<<`: Falcon
- `<s>`, `<bos>`, `<eos>`, `<pad>`, `<unk>`, `<mask>`, `<cls>`, `<sep>`, `<mask:0>`: Llama 2, Mistral, Gemma, Yi,
  Baichuan, ERNIE and everything on SentencePiece
- `<start_of_...>`, `<end_of_...>`, `<beginning_of_...>`: Gemma 2 and 3, MiniMax M1, ERNIE
- `<extra_id_0>`: T5, Nemotron 4; `<reserved_106>`: Baichuan; `<SPECIAL_10>`: Nemotron Nano, Apertus; `<unused12>`:
  Gemma; `[unused16]`: openPangu; `[control_8]`: Mistral; `[UNUSED_TOKEN_145]`: InternLM 2
- `<BOS_TOKEN>`, `<EOS_TOKEN>`: Cohere Command, Aya
- `[INST]`, `<<SYS>>`, `[MODEL_SETTINGS]`, `[THINK]`, `[TOOL_CALLS]`, ...: Llama 2, Mistral, Magistral, Ministral
- `[gMASK]`, `<sop>`, `<eop>`, `<arg_key>`, `<tool_call>`: GLM, Qwen
- `[BOS]`, `[EOS]`, `[EOT]`, `[start_header_id]`: Kimi
- `<seed:...>`: Seed-OSS; `<longcat_...>`: LongCat; `<mm:...>`, `<minimax:...>`: MiniMax; `<atem:...>`: Muse;
  `<_user>`: TeleChat; `<role>`: Ling, Ring; `<用户>`, `<AI>`: MiniCPM; `[BEGIN FINAL RESPONSE]`: Apriel
- `<image>`, `<img>`, `<IMG_CONTEXT>`, `<video>`, `<audio>`: LLaVA, InternVL, Step; one too many fails a request
- `<fim_prefix>`, `<issue_start>`, `<jupyter_code>`, `<commit_msg>`, `<file_sep>`: StarCoder, Granite Code, Seed-Coder
- `<think>` and its kin: reasoning models

Tokens that only mark content, and that ordinary text uses (`<code>`, `<answer>`, `<response>`, `<user>`), are not here.
Where a short name is an ordinary index or type in lower or upper case (`x[mask]`, `Vec<S>`) the case counts.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

from .visibility import INVISIBLE

# What the name in a frame never holds: brackets, and what takes their place here, so that no frame is found around
# one that has been dealt with.
_NEVER = r"<>\[\]◁▷\u2039\u203a\u27e6\u27e7\u25c3\u25b9"

_AFTER_ANGLE = (
    # Frames, with any name.
    rf"\|[^\s{_NEVER}](?:[^\n{_NEVER}]{{0,62}}?[^\s{_NEVER}])??\|>",
    r"\|/?[a-z0-9_]{1,32}>|/?[a-z0-9_]{1,32}\|>",
    r"</?SYS>>",
    # Names.
    r"(?-i:/?s)>",
    r"/?(?:bos|eos|eod|eot|eom|unk|pad|mask|cls|sep|sop|eop|eoa|eoh|role|AI|用户)>|mask:\d{1,4}>",
    r"/?(?:start|end|begin|beginning)_of_[a-z_]{1,32}>",
    r"/?(?:extra|extra_id|reserved|reserved_token|reserved_special_token|special|special_token|unused|unused_token"
    r"|placeholder|control)_?\d{1,6}>",
    r"/?[a-z]{2,16}(?:_[a-z]{2,16}){0,3}_token>",
    r"/?(?:seed|mm|minimax|atem):[a-z_]{1,48}>|/?longcat_[a-z_]{1,32}>|/?_[a-z]{2,16}>",
    r"/?(?:think|thinking|thought|thoughts|reasoning|reflection|think_on|think_off|no_think)>",
    r"/?(?:tool_calls?|tool_response|tool_sep|arg_key|arg_value)>",
    r"/?(?:img|img_context|imgpad|image_pad|image_placeholder|image_soft_token|audio_soft_token)>",
    r"(?:image|video|audio)>",
    r"/?(?:fim|issue|jupyter|commit|tts_text)_[a-z_]{1,24}>|(?:file_sep|repo_name|reponame|gh_stars)>",
)

_AFTER_SQUARE = (
    r"\|/?[a-z_]{2,32}\|\]",
    r"e~\[",
    r"/?(?:INST|THINK|SYSTEM_PROMPT|MODEL_SETTINGS|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|CALL_ID"
    r"|IMG_BREAK|IMG_END|BEGIN_AUDIO|OUTPUT_AUDIO|STREAMING_PAD|STREAMING_WORD|gMASK|sMASK|start_header_id"
    r"|end_header_id)\]",
    r"(?:BEGIN|END) FINAL RESPONSE\]",
    r"(?:unused|control|unused_token|extra_id|reserved)_?\d{1,6}\]",
    r"(?-i:/?(?:ARGS|IMG|AUDIO|TRANSCRIBE|REF|PREFIX|SUFFIX|MIDDLE|MASK|CLS|SEP|PAD|UNK|BOS|EOS|EOT))\]",
)

# Each alternative begins with a character of its own, whose case counts, so the search can skip everything else.
_TOKEN = re.compile(
    rf"<(?i:{'|'.join(_AFTER_ANGLE)})"
    rf"|\[(?i:{'|'.join(_AFTER_SQUARE)})"
    rf"|\](?i:~b\]|~!b\[|![pd]~\[|<\][^\n{_NEVER}]{{1,32}}\[>\[)"
    rf"|◁(?:/?[^\n{_NEVER}]{{1,32}}▷)"
    r"|>(?:>(?:TITLE|ABSTRACT|INTRODUCTION|SUMMARY|COMMENT|ANSWER|QUESTION|DOMAIN|PREFIX|SUFFIX|MIDDLE)<<)"
)


# Every token has one of these, as itself or as what NFKC makes it of.
_BRACKET = re.compile("[<\\[\\]◁\uff1c\uff3b\uff3d\ufe64\ufe47\ufe48]")


class _Folded(dict[int, int]):
    """What a character is under NFKC, where that is one character: fullwidth and styled letters become plain ones."""

    def __missing__(self, code: int) -> int:
        folded = unicodedata.normalize("NFKC", chr(code))
        self[code] = ord(folded) if len(folded) == 1 else code
        return self[code]


_FOLDED = _Folded()

_LOOKALIKE = str.maketrans(
    {
        **dict.fromkeys("<\uff1c\ufe64", "\u2039"),
        **dict.fromkeys(">\uff1e\ufe65", "\u203a"),
        **dict.fromkeys("[\uff3b\ufe47", "\u27e6"),
        **dict.fromkeys("]\uff3d\ufe48", "\u27e7"),
        "◁": "\u25c3",
        "▷": "\u25b9",
    }
)


def neutralise(text: str) -> str:
    """Give the control tokens in `text` other brackets, that look alike and mean nothing: `<s>` becomes `‹s›`.

    The text keeps its length. Tokens count that a server would first have to normalise: with fullwidth or styled
    characters, or with invisible ones between. What comes out holds no token, so a second time changes nothing.
    """
    pieces: list[str] = []
    done = 0
    for start, end in _spans(text):
        pieces += (text[done:start], text[start:end].translate(_LOOKALIKE))
        done = end
    if not pieces:
        return text
    return "".join((*pieces, text[done:]))


def normalised(text: str) -> str:
    """`text` without invisible characters, and with plain ones in the place of fullwidth and styled ones."""
    return INVISIBLE.sub("", text).translate(_FOLDED)


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Where the control tokens in `text` are."""
    if not _BRACKET.search(text):
        return
    gaps = [match.span() for match in INVISIBLE.finditer(text)]
    plain = INVISIBLE.sub("", text) if gaps else text
    # Places in `plain` at which something invisible is left out, and how many characters are, up to there.
    left_out = list(accumulate(end - start for start, end in gaps))
    places = [start - gone for (start, _), gone in zip(gaps, [0, *left_out], strict=False)]
    for match in _TOKEN.finditer(plain if plain.isascii() else plain.translate(_FOLDED)):
        first, last = match.start(), match.end() - 1
        before = bisect_right(places, first)
        inside = bisect_right(places, last)
        start = first + (left_out[before - 1] if before else 0)
        end = last + 1 + (left_out[inside - 1] if inside else 0)
        yield start, end
