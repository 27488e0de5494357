"""Items as rows of a data set for ROLL, in the columns that ROLL has."""

from __future__ import annotations

from typing import Any

from ..judges import label_of, prompt_of


def item_row(item: int, domain: str, tag: str) -> dict[str, Any]:
    """An item before its prompt is encoded."""
    return {
        "id": str(item),
        "prompt": prompt_of(item),
        "messages": [{"role": "user", "content": prompt_of(item)}],
        "ground_truth": label_of(item),
        "domain": domain,
        "tag": tag,
    }
