from __future__ import annotations

import functools
import os
import pickle
import sys
from pathlib import Path

import pytest

from qreward_plugins.errors import ConfigurationError
from qreward_plugins.system.functions import PathLoader, load

SCORING = Path(__file__).parent / "scoring"
FUNCTIONS = SCORING / "functions.py"


def test_a_function_of_a_module_and_of_a_file() -> None:
    assert load(PathLoader("os.path:join"), key="k")("a", "b") == "a/b"
    assert load(PathLoader("os:path.join"), key="k")("a", "b") == "a/b"
    function = load(PathLoader(f"{FUNCTIONS}:awaited_object.method"), key="k")
    assert function.__name__ == "method"


def test_a_file_is_loaded_once_and_what_it_defines_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    strange = load(PathLoader(f"{FUNCTIONS}:Awaited"), key="k")
    assert pickle.loads(pickle.dumps(strange)) is strange
    monkeypatch.chdir(SCORING)
    assert load(PathLoader("functions.py:Awaited"), key="k") is strange


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("no_such_package.inner:score", "there is no module 'no_such_package'"),
        ("json.nothing:score", "there is no module 'json.nothing'"),
        ("nowhere/rewards.py:score", "there is no file"),
        ("json:JSONEncoderr", "json has no 'JSONEncoderr'; did you mean 'JSONEncoder'"),
        ("json:qqqqqq", "json has no 'qqqqqq'."),
        (f"{FUNCTIONS}:value", "value of .* is of type float, not a function"),
        (
            f"{SCORING / 'broken.py'}:score",
            "ModuleNotFoundError: No module named 'no_such_module_at_all' .*broken.py:1",
        ),
    ],
)
def test_what_is_wrong_with_a_path(path: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        load(PathLoader(path), key="sources.f.function")
    assert [mistake.path for mistake in caught.value.mistakes] == ["sources.f.function"]


def test_a_file_that_failed_to_load_is_tried_afresh(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("raise SystemExit(3)")
    with pytest.raises(ConfigurationError, match="SystemExit: 3"):
        load(PathLoader(f"{path}:score"), key="k")
    path.write_text("def score(**given): return 12345.0")
    assert load(PathLoader(f"{path}:score"), key="k")() == 12345.0


def test_a_file_that_was_changed_within_a_second_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "rewards.py"
    for score in (1.0, 2.0):
        path.write_text(f"def score(**given): return {score}")
        os.utime(path, (10**9, 10**9))
        function = load(PathLoader(f"{path}:score"), key="k")
        assert function() == score
        del sys.modules[function.__module__]
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_names_the_users_line_or_none(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("def score(\n")
    with pytest.raises(ConfigurationError) as caught:
        load(PathLoader(f"{path}:score"), key="k")
    assert "rewards.py, line 1" in str(caught.value)
    assert "importlib" not in str(caught.value)


def test_a_loader_that_returns_no_function() -> None:
    with pytest.raises(ConfigurationError, match="of type int"):
        load(functools.partial(int, 3), key="k")  # type: ignore[arg-type]
