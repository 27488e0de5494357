"""Samples and what becomes of them: what is scored, its verdict, its outcome, and what it cost.

- `sample`: `Sample`, `Verdict`, `Scored`, `Failed`; `Spent`: attempts, tokens and dollars of an outcome.
- `check`: reads foreign values, rejects what cannot be scored.
- `messages`: prompts and responses of several turns, in every form that frameworks give them.
- `json_values`: JSON, written and read exactly.
- `images`: images of prompts and responses.
"""

from __future__ import annotations

from .sample import FLOAT32_LIMIT as FLOAT32_LIMIT
from .sample import SCREENED as SCREENED
from .sample import Cause as Cause
from .sample import Failed as Failed
from .sample import Message as Message
from .sample import Outcome as Outcome
from .sample import RawScore as RawScore
from .sample import ResponseTurn as ResponseTurn
from .sample import Sample as Sample
from .sample import Scored as Scored
from .sample import Split as Split
from .sample import Verdict as Verdict
from .sample import fits_float32 as fits_float32
