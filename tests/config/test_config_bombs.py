"""Small files that would become large: aliases, merge keys, interpolations, nesting. Each is one mistake, at once."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from qreward_plugins import ConfigurationError, load_config

TREE = "sources: {{f: {{kind: function, function: 'm:f', kwargs: {{{}}}}}}}\njudges: {{j: {{kind: function}}}}\n"


def doubled(values):
    for _ in range(40):
        values = [values, values]
    return values


def chained(write, count=40):
    """A mapping `a0`, `a1` ... in which each entry is written with the name of the one before."""
    return TREE.format(", ".join(f"a{n}: {write(f'a{n - 1}') if n else 'x'}" for n in range(count)))


FILES = {
    "aliases": "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10) if n else 'x'}]\n" for n in range(10)),
    "merge keys": "a0: &a0 {k: 1}\n"
    + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 10)),
    "texts": chained(lambda name: f"'${{.{name}}}${{sources.f.kwargs.{name}}}'", count=25),
    "nodes": chained(lambda name: f"{{b: '${{..{name}}}', c: '${{..{name}}}'}}", count=25),
    "a chain": chained(lambda name: f"'${{.{name}}}'", count=300),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_expands_is_one_mistake(name, tmp_path):
    path = tmp_path / "judges.yaml"
    path.write_text(FILES[name])
    with pytest.raises(
        ConfigurationError, match=r"expand to more than|resolve to more than|more than 32 steps"
    ) as caught:
        load_config(path)
    assert len(caught.value.mistakes) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 20_000, "nested too deeply"),
        ("{a: " * 500 + "1" + "}" * 500, "nested too deeply"),
        ("a: " + "x" * 2**20, "larger than 1 MiB"),
        ("sources: &a {f: *a}\n", "contains itself"),
        ("a: 1" + ":59" * 300_000, "does not fit its tag"),
        ("a: 0x" + "f" * 900_000, "does not fit its tag"),
    ],
)
@pytest.mark.usefixtures("usual_recursion_limit")
def test_files_that_are_too_deep_or_too_large(text, says, tmp_path):
    path = tmp_path / "judges.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=says):
        load_config(path)


def test_mappings_that_share_their_parts_are_bounded_too():
    tree = {"sources": {"f": {"kind": "function", "function": "m:f", "kwargs": {"a": doubled(["x"])}}}}
    with pytest.raises(ConfigurationError, match="more than 100,000 values"):
        load_config({**tree, "judges": {"j": {"kind": "function"}}})


def test_the_node_of_a_trainers_tree_is_counted_from_its_root():
    texts = {f"a{n}": f"${{x.a{n - 1}}}${{x.a{n - 1}}}" if n else "x" for n in range(25)}
    root = OmegaConf.create({"x": texts, "qreward": {"a": "${x.a24}"}})
    with pytest.raises(ConfigurationError, match="resolve to more than"):
        load_config(root.qreward)


def test_aliases_and_interpolations_of_ordinary_size_are_read(tmp_path):
    path = tmp_path / "judges.yaml"
    path.write_text(
        "sources:\n"
        "  a: &a {kind: openai, base_url: http://a, model: m, limits: {concurrency: 4}}\n"
        "  b: {<<: *a, base_url: http://b}\n"
        "  c: {<<: *a, base_url: '${sources.b.base_url}/c'}\n"
        "judges: {j: {kind: llm}}\n"
    )
    config = load_config(path)
    assert config.sources["c"].base_url == ("http://b/c",)
    assert config.sources["b"].limits.concurrency == 4
