"""Draws reloads for the trials of some seeds: other configurations, at random times, while samples are scored.

Its generator is apart from that of the trial, so the servers, judges and calls of a seed stay as they were. What
changes is the kind of the sources, which the engine opens itself in these trials, and the declared limits. They are at
most those of the server, so that a server is never asked for more than it has.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from .endpoint import KIND
from .servers import Server

SHARE_OF_TRIALS = 0.25
LEAST_TOKENS = 6000
"""The most that one request of a trial takes, so that it fits every declared limit."""
_MOST_RELOADS = 6
_RANGES = ([0.0, 1.0], [-1.0, 1.0], [0.0, 10.0], [0.0, 100.0])
_PARTS_OF_LIMIT = (1.0, 1.0, 0.5, 0.2)


@dataclass(frozen=True)
class Reload:
    """Another configuration, `at_s` seconds after the trial began. `refused`: it needs a restart."""

    at_s: float
    config: dict[str, Any]
    refused: bool = False


def random_reloads(
    seed: int, servers: tuple[Server, ...], config: dict[str, Any], *, patient: bool
) -> tuple[dict[str, Any], tuple[Reload, ...]]:
    """The configuration of a trial and its reloads; without reloads for most seeds. `patient`: no change may fail a
    sample.
    """
    rng = random.Random(f"reloads {seed}")
    if rng.random() >= SHARE_OF_TRIALS:
        return config, ()
    drawer = _Drawer(rng, servers, patient=patient)
    first = present = drawer.opened(config)
    reloads: list[Reload] = []
    at_s = 0.0
    for _ in range(rng.randint(1, _MOST_RELOADS)):
        at_s += rng.choice((rng.uniform(0, 2), rng.expovariate(1 / 10), rng.expovariate(1 / 40)))
        after = drawer.changed(present)
        refused = rng.random() < 0.1
        if refused:
            after["engine"]["seed"] += 1
        else:
            present = after
        reloads.append(Reload(at_s, after, refused))
    return first, tuple(reloads)


class _Drawer:
    """Draws changes of a configuration."""

    def __init__(self, rng: random.Random, servers: tuple[Server, ...], *, patient: bool) -> None:
        self._rng = rng
        self._servers = {server.name: server for server in servers}
        self._patient = patient
        self._names = 0
        self._removed: dict[str, dict[str, Any]] = {}
        """The sources that were removed last, by their servers."""

    def opened(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration with sources that the engine opens itself, and declared limits from the drawn ones."""
        made = deepcopy(dict(config))
        for name, node in made["sources"].items():
            node.update(kind=KIND, server=name, base_url=f"http://{name}.invalid/v1")
            node["limits"] = self._limits(self._servers[name])
        return made

    def changed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration after one to four changes."""
        rng, made = self._rng, deepcopy(dict(config))
        changes = [
            self._change_limits,
            self._change_limits,
            self._change_sources,
            # Not both: for a provider, another key under another name is another account, whose limits begin anew.
            rng.choice((self._rename, self._open_anew)),
            self._retune,
            self._change_judge,
            self._change_judge,
            self._change_routes,
            self._change_engine,
        ]
        for change in rng.sample(changes, rng.randint(1, 4)):
            change(made)
        return made

    # Sources

    def _limits(self, server: Server) -> dict[str, Any]:
        rng, node = self._rng, server.limits()
        shortest_s = 60.0 / server.window_s
        for name, least in (("requests_per_minute", shortest_s), ("tokens_per_minute", LEAST_TOKENS * shortest_s)):
            if name in node:
                node[name] = min(node[name], max(least, node[name] * rng.choice(_PARTS_OF_LIMIT)))
        if "concurrency" in node:
            node["concurrency"] = max(1, round(node["concurrency"] * rng.choice(_PARTS_OF_LIMIT)))
        return node

    def _change_limits(self, config: dict[str, Any]) -> None:
        for node in config["sources"].values():
            if self._rng.random() < 0.7:
                node["limits"] = self._limits(self._servers[node["server"]])

    def _change_sources(self, config: dict[str, Any]) -> None:
        """Remove a source, or add one that was removed, under its own name or another."""
        rng, sources = self._rng, config["sources"]
        used = {node["server"] for node in sources.values()}
        gone = [name for name in self._servers if name not in used]
        if gone and (len(sources) == 1 or rng.random() < 0.6):
            server = rng.choice(gone)
            name = server if rng.random() < 0.7 else self._new_name(server)
            sources[name] = {**self._removed[server], "limits": self._limits(self._servers[server])}
            for judge in config["judges"].values():
                if rng.random() < 0.7:
                    judge["sources"].append(name)
        elif len(sources) > 1:
            self._leave(config, rng.choice(list(sources)))

    def _leave(self, config: dict[str, Any], name: str) -> None:
        node = config["sources"].pop(name)
        self._removed[node["server"]] = deepcopy(node)
        for judge in config["judges"].values():
            left = [source for source in judge["sources"] if source != name]
            judge["sources"] = left or [self._rng.choice(list(config["sources"]))]

    def _rename(self, config: dict[str, Any]) -> None:
        old = self._rng.choice(list(config["sources"]))
        new = self._new_name(config["sources"][old]["server"])
        config["sources"] = {new if name == old else name: node for name, node in config["sources"].items()}
        for judge in config["judges"].values():
            judge["sources"] = [new if name == old else name for name in judge["sources"]]

    def _new_name(self, server: str) -> str:
        self._names += 1
        return f"{server}-{self._names}"

    def _open_anew(self, config: dict[str, Any]) -> None:
        """Change what needs new connections: a key, or a parameter."""
        node = self._rng.choice(list(config["sources"].values()))
        if self._rng.random() < 0.5:
            node["api_key"] = f"key-{self._rng.randrange(3)}"
        else:
            node["parameters"] = {"number": self._rng.randrange(3)}

    def _retune(self, config: dict[str, Any]) -> None:
        rng = self._rng
        for node in config["sources"].values():
            node["price"] = {"per_request": rng.choice((0.0, 0.001, 0.01))}
            node["weight"] = rng.choice((1.0, 0.2, 5.0))
            if not self._patient:
                node["timeouts"] = {"total_s": rng.choice((120.0, 20.0, rng.uniform(1, 60)))}

    # Judges

    def _change_judge(self, config: dict[str, Any]) -> None:
        rng, judges = self._rng, config["judges"]
        name = rng.choice(list(judges))
        shape = rng.random()
        if shape < 0.5:
            range_ = rng.choice(_RANGES)
            judges[name].update(reward_range=range_, correct_at=rng.choice((range_[0], 0.3, 0.7)))
        elif shape < 0.6:
            judges[name]["instructions"] = rng.choice(("Grade it.", "Grade it well.", "Grade it with care, please."))
        elif shape < 0.8:
            judges[name].update(invalid_retries=rng.choice((0, 1, 3)), on_invalid=rng.choice(("missing", "floor")))
        else:
            names = list(config["sources"])
            judges[name]["sources"] = rng.sample(names, rng.randint(1, len(names)))

    def _change_routes(self, config: dict[str, Any]) -> None:
        """Lead data sources to other judges, and sometimes remove a judge or add one."""
        rng, judges = self._rng, config["judges"]
        if not config["routes"]:
            return
        if rng.random() < 0.3 and not self._patient and len(judges) > 1:
            del judges[rng.choice(list(judges))]
        elif rng.random() < 0.2:
            self._names += 1
            judges[f"j-{self._names}"] = deepcopy(rng.choice(list(judges.values())))
        names = list(judges)
        for pattern, route in config["routes"].items():
            judge = route["judge"] if isinstance(route, dict) else route
            if judge not in judges or rng.random() < 0.3:
                judge = rng.choice(names)
                config["routes"][pattern] = {**route, "judge": judge} if isinstance(route, dict) else judge

    def _change_engine(self, config: dict[str, Any]) -> None:
        rng, engine = self._rng, config["engine"]
        if "priority" in engine:
            engine["priority"] = {split: rng.choice(("high", "normal", "low")) for split in engine["priority"]}
        engine["max_attempts"] = rng.choice((6, 1, 2, rng.randint(1, 12)))
        engine["scheduling"].update(
            strategy=rng.choice(("earliest_finish", "earliest_finish", "round_robin", "least_requests")),
            prefer=rng.choice(("speed", "speed", "cost")),
            hedge=rng.random() < 0.7,
            hedge_budget=rng.choice((0.25, 0.02, 1.0)),
        )
        if not self._patient:
            engine["deadline_s"] = rng.choice((300.0, 60.0, rng.uniform(0.5, 30)))
