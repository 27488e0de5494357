"""What the model answers in a scripted training: the same in verl and in its stand-in. It imports neither."""

from __future__ import annotations

QUESTIONS = 8
HELD_OUT = 4

TRAINING = ("fails 0", "number 0.25", "mapping 0.5", "number 1")
"""A group with a failed sample, first of all, and the ways in which a function can return."""
SOUND = ("number 0", "number 0.25", "mapping 0.5", "number 1")
VALIDATION = ("number 1", "fails 0")
SCRIPTS = {"failing": TRAINING, "lost": TRAINING, "uniform": TRAINING, "sound": SOUND, "turns": SOUND}
"""In validation one of two samples fails."""
OTHERS = {
    ("uniform", 1): ("fails 0", "number 1", "number 1", "number 1"),
    ("uniform", 5): ("fails 0", "number 1", "number 1", "number 1"),
    ("lost", 5): ("fails 0",),
    ("lost", 6): ("fails 0", "fails 0", "number 0.5", "fails 0"),
}
"""What is answered to a question in a script, where it differs."""


def rows(split, count, source="sums"):
    """The data set, as in verl's parquet files."""
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"What is {number} plus {number}?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
            # A row of training that is called `test` is one of training: only the trainer knows what is validation.
            "extra_info": {"index": number, "split": split if number % 2 else "test", "held_out": split == "val"},
        }
        for number in range(count)
    ]


def outputs(script, info, number, *, several):
    """What the model writes for a question: outputs of parts, of which every second is a tool's. `several`: question 2
    has two outputs, and question 3 three turns, as it always has in the script `turns`.
    """
    index = info["index"]
    words = VALIDATION if info["held_out"] else OTHERS.get((script, index), SCRIPTS[script])
    text = f"{words[number % len(words)]} q{index} n{number}"
    if several and index == 2:
        return [[f"let us see n{number}"], [text]]
    if (several or script == "turns") and index == 3:
        return [[text, " a tool says so", " and so it is"]]
    return [[text]]


def score(data_source, solution_str, ground_truth, extra_info, **_):
    """The reward function. What it returns depends on the first two words of the response."""
    kind, value = solution_str.split()[:2]
    if kind == "fails":
        raise ValueError("no such answer")
    if kind == "and":  # a second turn alone
        return 0.125
    if kind == "mapping":
        return {"score": float(value), "acc": float(value) > 0.6, "style": len(solution_str) / 2, "why": ground_truth}
    return float(value)
