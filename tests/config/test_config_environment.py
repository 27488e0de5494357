"""A configuration can be read with other environment variables than this process's, which nobody else notices."""

from __future__ import annotations

import os
import threading

import pytest
from omegaconf import OmegaConf

from qreward_plugins import ConfigurationError
from qreward_plugins.config import load_layers
from qreward_plugins.config.environment import environment, environment_of

MINE = {"sources": {"judge": {"kind": "openai", "base_url": "http://judge.test/v1", "model": "${oc.env:THE_MODEL}"}}}
TREE = {**MINE, "judges": {"quality": {"kind": "llm"}}}


def model_of(tree, **variables: str) -> str | None:
    return load_layers(tree, variables=variables).sources["judge"].model


def test_interpolations_and_the_name_of_the_file_are_of_the_given_variables(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("THE_MODEL", "mine")
    assert model_of(TREE, THE_MODEL="theirs") == "theirs"
    assert load_layers(TREE).sources["judge"].model == "mine"
    file = tmp_path / "judges.yaml"
    file.write_text(OmegaConf.to_yaml(TREE))
    assert model_of(None, THE_MODEL="theirs", QREWARD_CONFIG=str(file)) == "theirs"


def test_a_variable_that_they_do_not_have_is_not_set(monkeypatch) -> None:
    monkeypatch.setenv("THE_MODEL", "mine")
    with pytest.raises(ConfigurationError, match="the environment variable THE_MODEL is not set"):
        model_of(TREE)


def test_defaults_of_an_interpolation_are_as_omegaconf_has_them(monkeypatch) -> None:
    monkeypatch.delenv("THE_NUMBER", raising=False)
    tree = OmegaConf.create({"text": "${oc.env:THE_NUMBER,7}", "none": "${oc.env:THE_NUMBER,null}"})
    before = OmegaConf.to_container(tree, resolve=True)
    assert before == {"text": "7", "none": None}
    with environment_of({}):
        assert OmegaConf.to_container(tree, resolve=True) == before
    assert OmegaConf.to_container(tree, resolve=True) == before
    with environment_of({"THE_NUMBER": ""}):
        assert tree.text == "", "set, if to nothing"


def test_resolvers_that_were_reset_are_no_hindrance(monkeypatch) -> None:
    monkeypatch.setenv("THE_MODEL", "mine")
    assert model_of(TREE, THE_MODEL="theirs") == "theirs"
    OmegaConf.clear_resolver("oc.env")
    assert model_of(TREE, THE_MODEL="theirs") == "theirs"


def test_other_threads_read_the_variables_of_the_process(monkeypatch) -> None:
    monkeypatch.setenv("THE_MODEL", "mine")
    tree = OmegaConf.create(TREE)
    seen = []

    def look() -> None:
        seen.append((tree.sources.judge.model, environment()["THE_MODEL"], os.environ["THE_MODEL"]))

    with environment_of({"THE_MODEL": "theirs"}):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        look()
    look()
    assert seen == [("mine",) * 3, ("theirs", "theirs", "mine"), ("mine",) * 3]
