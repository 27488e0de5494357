"""Selecting the manager: verl's registries, its entry points, and the ways in which it says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import verl_adapter

from ..kit import each_of, imported, later

later("verl")


@pytest.fixture(scope="module")
def plugin():
    return imported("verl_adapter.plugin")


def test_every_registry_of_this_verl_has_it(plugin):
    """That importing verl registers it, a training shows (tests/recipes/test_verl_training.py)."""
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
    from verl.workers.reward_manager import get_reward_manager_cls as get_batch_cls

    assert plugin.register() == ["verl.experimental.reward_loop.reward_manager", "verl.workers.reward_manager"]
    assert get_reward_manager_cls("qreward") is verl_adapter.QRewardManager
    assert get_batch_cls("qreward") is verl_adapter.QRewardBatchManager


IMPORTED = [
    "reward.reward_manager.source=importlib",
    "reward.reward_manager.name=QRewardManager",
    "reward.reward_manager.module.path=pkg://verl_adapter",
]


@each_of("selection", [["reward.reward_manager.name=qreward"], ["+reward_manager=qreward"], IMPORTED])
def test_every_way_to_select_it_resolves_to_the_class(compose, selection):
    from verl.trainer.ppo.reward import resolve_reward_manager_cls

    from verl_adapter import QRewardManager

    assert resolve_reward_manager_cls(compose(*selection)) is QRewardManager


def test_what_goes_wrong_while_registering_is_said_aloud(plugin, monkeypatch, caplog):
    def broken():
        raise ImportError("no torch")

    monkeypatch.setattr(plugin, "register", broken)
    with pytest.raises(ImportError):
        plugin._load()
    assert "could not register" in caplog.text


def test_the_search_path_plugin_needs_no_searchpath(compose, monkeypatch):
    for name, value in {"BASE_URL": "http://judge/v1", "MODEL": "m", "API_KEY": "k"}.items():
        monkeypatch.setenv(f"QREWARD_{name}", value)
    config = compose("+reward_manager=qreward", "+qreward=openai")
    assert config.reward.reward_manager.name == "qreward"
    assert config.qreward.sources.judge.base_url == "http://judge/v1"
    assert "QREWARD_API_KEY" in str(config.qreward)


def test_the_ready_made_tree_says_which_variables_it_needs(monkeypatch):
    from omegaconf import OmegaConf

    from qreward_plugins import ConfigurationError
    from verl_adapter.settings import load_settings

    for name in ("QREWARD_BASE_URL", "QREWARD_MODEL", "QREWARD_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    tree = OmegaConf.load(Path(verl_adapter.__file__).parent / "conf" / "qreward" / "openai.yaml")
    with pytest.raises(ConfigurationError, match="QREWARD_BASE_URL"):
        load_settings(None, tree)
