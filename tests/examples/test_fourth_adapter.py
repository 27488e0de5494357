"""The adapter in `examples/README.md` is run, so that it cannot go stale."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from qreward_plugins.engine.process_portals import close_process_portals

TEXT = (Path(__file__).parents[2] / "examples" / "README.md").read_text()

RULES = """
def score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "?":
        raise ValueError("no answer")
    return float(solution_str == ground_truth)
"""


def test_the_adapter_of_the_readme_scores(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, object] = {"__name__": "adapter"}
    exec(program, names)
    (tmp_path / "rules.py").write_text(RULES)
    path = tmp_path / "judges.json"
    source = {"kind": "function", "function": f"{tmp_path / 'rules.py'}:score", "mode": "thread"}
    path.write_text(json.dumps({"sources": {"rules": source}, "judges": {"exact": {"kind": "function"}}}))
    rollouts = [
        {"messages": [{"role": "user", "content": "1 + 1?"}], "response": text, "answer": "2", "prompt_id": prompt}
        for prompt, text in (("a", "2"), ("a", "3"), ("a", "?"), ("b", "2"))
    ]
    try:
        filled, trained = names["rewards"](rollouts, path)  # type: ignore[operator]
    finally:
        close_process_portals()
    assert filled == [1.0, 0.0, 0.5, 1.0]
    assert trained == [True, True, False, True]


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[2].glob("examples/**/README.md")), ids=str)
def test_every_link_of_the_readmes_leads_somewhere_and_every_program_compiles(path):
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target
    for program in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        compile(program, str(path), "exec")
