"""Which sources answer a client that asks for a model, and how one of them is chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...config import Config, ModelRoute, configured_name, sources_for_model
from ...config.routes import is_glob
from ...scheduling import Upstream
from ...scheduling.strategies import Choice, strategy


@dataclass(frozen=True)
class Group:
    """The sources for one request. `choose` is the strategy of the group; None: that of the engine."""

    sources: tuple[str, ...]
    choose: Choice | None = None


class ModelGroups:
    """Finds the group of a model. The strategy of a group has one state for all its requests."""

    def __init__(self, config: Config, upstreams: Mapping[str, Upstream]) -> None:
        self._config = config
        self._upstreams = upstreams
        self._choices = {
            id(group): None if group.strategy is None else strategy(group.strategy, _weights(group))
            for group in config.models.values()
        }

    def find(self, model: str, dialects: Sequence[str]) -> tuple[Group | None, bool]:
        """Return the sources that answer for `model` and speak one of `dialects`; None if there is none. And whether
        any source answers for the model.
        """
        names, route = sources_for_model(self._config, model)
        able = tuple(name for name in names if name in self._upstreams and self._speaks(name, dialects))
        if not able:
            return None, bool(names)
        return Group(able, None if route is None else self._choices[id(route)]), True

    def _speaks(self, name: str, dialects: Sequence[str]) -> bool:
        passes: Sequence[str] = getattr(self._upstreams[name].source, "passes", ())
        return not set(passes).isdisjoint(dialects)

    def models(self) -> tuple[str, ...]:
        """The models that clients may ask for. For a pattern: those models of its sources that match it, or the pattern
        itself if none does.
        """
        answering = {
            name: upstream.source.model
            for name, upstream in self._upstreams.items()
            if getattr(upstream.source, "passes", ())
        }
        if not self._config.models:
            return tuple(dict.fromkeys(answering.values()))
        found: dict[str, None] = {}
        for pattern in self._config.models:
            if not is_glob(pattern):
                found[pattern] = None
                continue
            group = self._config.models[pattern]
            asked = ((model, *sources_for_model(self._config, model)) for model in answering.values())
            known = [model for model, names, route in asked if names and route is group]
            found.update(dict.fromkeys(known or [pattern]))
        return tuple(found)


def _weights(group: ModelRoute) -> Callable[[Upstream], float]:
    return lambda upstream: group.weights.get(configured_name(upstream.name), upstream.weight)
