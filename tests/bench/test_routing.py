"""The bench of routing between replicas, with few questions."""

from __future__ import annotations

import json

import pytest
import routing


@pytest.mark.parametrize("load", ["groups", "shuffled", "all_at_once"])
def test_groups_use_the_caches_as_one_replica_would_and_take_no_longer(load):
    least, ours = routing.measure(load, 8, ["least_requests", "prefix_aware"], 0)
    assert ours.hit_share >= 0.95 > least.hit_share
    assert ours.computed < 0.75 * least.computed
    assert ours.makespan_s <= 1.05 * least.makespan_s
    assert ours.bound_s <= ours.makespan_s


@pytest.mark.parametrize("load", ["8_processes", "8_rows", "8_drawn"])
def test_so_do_groups_that_several_processes_send(load):
    least, ours = routing.measure(load, 8, ["least_requests", "prefix_aware"], 0)
    assert ours.hit_share >= 0.95 > least.hit_share
    assert ours.makespan_s <= 1.02 * least.makespan_s


def test_a_prompt_that_all_share_does_not_leave_replicas_idle():
    least, ours = routing.measure("no_question", 8, ["least_requests", "prefix_aware"], 0)
    assert ours.makespan_s <= 1.05 * least.makespan_s


def test_it_measures_and_writes_what_it_shows(tmp_path, capsys, monkeypatch):
    loads = {name: routing.replace(load, questions=48) for name, load in routing.LOADS.items()}
    monkeypatch.setattr(routing, "LOADS", loads)
    path = tmp_path / "out.json"
    assert routing.main(["--replicas", "2", "--load", "gateways", "groups", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [one["policy"] for one in found] == 2 * list(routing.POLICIES)
    assert all(one["makespan_s"] >= one["bound_s"] for one in found)
    assert "tree (sglang)" in capsys.readouterr().out
