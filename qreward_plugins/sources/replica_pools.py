"""Makes the parts of a source of kind `replicas`: the spec of its pool, its use of the pool, and the inner source.

The parts come from the configuration alone. Nothing is started here.
"""

from __future__ import annotations

import json
import os
from typing import Any

from ..config.registry import sources
from ..config.source_models import EndpointConfig
from ..errors import ConfigurationError, Mistake
from ..replicas.pool_use import PoolUse
from ..replicas.server_kinds import (
    CHAT,
    SERVER_KINDS,
    VARIABLES,
    Platform,
    PoolSpec,
    Topology,
    TopologyError,
    found_devices,
    found_platform,
)
from ..secrets import without_secrets
from ..system.ray_actors import missing_ray, ray_is_up
from .endpoint import Endpoint
from .replica_set_config import ReplicaSetConfig

_COMMAND = "command"
_REPLACED = frozenset({"kind", "version", "api_key_env", "timeouts"})


def pool_spec(name: str, config: ReplicaSetConfig) -> PoolSpec:
    """Return what the servers of a source are started with. Raises ConfigurationError."""
    where = f"sources.{name}"
    if config.server is None and config.command is None:
        raise ConfigurationError([Mistake(f"{where}.server", "no server is named.", "Set server or command.")])
    mistakes: list[Mistake] = []
    server = config.server or _COMMAND
    kind = SERVER_KINDS[server]
    for key, wanted in (("weight_updates", config.weight_updates == "in_place"), ("sleep_mode", config.sleep_mode)):
        if wanted and kind.control is None:
            problem = f"{server} has no routes for it; its servers are stopped and started again instead."
            mistakes.append(Mistake(f"{where}.{key}", problem, "Leave it out."))
    if config.colocated and config.placement == "ray":
        problem = "Ray gives the trainer's GPUs to nobody else, so it cannot place servers there."
        mistakes.append(Mistake(f"{where}.colocated", problem, "Use `placement: local`, and name the `devices`."))
    if config.command is not None and config.program is not None:
        mistakes.append(Mistake(f"{where}.program", "it is the beginning of command.", "Leave it out."))
    if (
        config.placement == "ray"
        and config.command is not None
        and not any("{host}" in word for word in config.command)
    ):
        problem = "with `placement: ray` a word must hold {host}, because the servers are asked from other nodes."
        mistakes.append(Mistake(f"{where}.command", problem))
    if not kind.serves(config.task):
        problem = f"{server} does not speak {config.task}."
        mistakes.append(Mistake(f"{where}.task", problem, "Use another server or another protocol."))
    topology = Topology()
    try:
        topology = _topology(config)
        for variable in VARIABLES[topology.platform]:
            if variable in config.environment:
                problem = "each replica sees its own devices by this variable."
                remedy = "Ray chooses them; leave it out." if topology.assigned else "Set devices."
                mistakes.append(Mistake(f"{where}.environment.{variable}", problem, remedy))
    except TopologyError as error:
        mistakes.append(Mistake(f"{where}.{error.key}", error.problem, error.remedy))
    spec = PoolSpec(
        name=name,
        server=server,
        model=config.model,
        topology=topology,
        task=config.task,
        arguments=without_secrets(config.arguments),
        command=tuple(without_secrets(list(config.command or ()))),
        program=tuple(without_secrets(list(config.program or ()))),
        environment={key: value.get_secret_value() for key, value in config.environment.items()},
        start_within_s=config.start_within_s,
        restarts=config.restarts,
        in_place=config.weight_updates == "in_place",
        sleep_mode=config.sleep_mode,
        api_key=_key(config),
        log_folder=None if config.log_folder is None else os.path.abspath(config.log_folder),
    )
    mistakes += [Mistake(f"{where}.arguments.{key}", why, "Leave it out.") for key, why in kind.refused(spec)]
    if mistakes:
        raise ConfigurationError(mistakes)
    return spec


def _key(config: ReplicaSetConfig) -> str:
    """Return the key of the servers, or "". The inner source checks it."""
    if config.api_key is not None:
        return config.api_key.get_secret_value().strip()
    return os.environ.get(config.api_key_env, "").strip() if isinstance(config.api_key_env, str) else ""


def _topology(config: ReplicaSetConfig) -> Topology:
    platform: Platform
    if config.platform != "auto":
        platform = config.platform
    elif config.placement == "ray":
        from ..replicas.ray_server import cluster_platform

        platform = cluster_platform()
    else:
        platform = "cuda" if config.devices and found_platform() == "cpu" else found_platform()
    devices = config.devices or ()
    if config.devices is None and config.placement == "local":
        devices = found_devices(platform)
    return Topology(
        config.data_parallel,
        config.tensor_parallel,
        devices,
        platform,
        assigned=config.placement == "ray",
    )


def pool_use(name: str, config: ReplicaSetConfig, spec: PoolSpec) -> PoolUse:
    """Return the use of the pool. Raises ConfigurationError."""
    if config.placement == "ray" and not ray_is_up():
        raise ConfigurationError(
            [Mistake(f"sources.{name}.placement", missing_ray(), "Call ray.init() before you create the engine.")]
        )
    return PoolUse(spec)


def inner_source(name: str, config: ReplicaSetConfig) -> Endpoint:
    """Make the source that sends the requests to the servers: an `openai` or a `reward_model`. It has no URL yet.

    Raises ConfigurationError for a key that this kind does not have.
    """
    shared = {key: getattr(config, key) for key in EndpointConfig.model_fields if key not in _REPLACED}
    # What the servers answer depends on the model and its settings, not on where they run.
    known = {"server": config.server or config.command, "model": config.model, "arguments": config.arguments}
    version = config.version or json.dumps(known, sort_keys=True)
    shared.update(base_url=(), version=version, api_key_env=config.api_key_env)
    if config.task == CHAT:
        for key in ("chat_template", "batch"):
            if getattr(config, key) is not None:
                raise ConfigurationError(
                    [Mistake(f"sources.{name}.{key}", "only a reward model has it.", "Set task, or leave it out.")]
                )
        shared.update(stream=config.stream, vision=config.vision, timeouts=config.timeouts)
        return _opened("openai", name, config, shared)
    for key in ("stream", "vision"):
        if getattr(config, key):
            raise ConfigurationError([Mistake(f"sources.{name}.{key}", "only a chat model has it.", "Leave it out.")])
    shared.update(timeouts=config.timeouts, chat_template=config.chat_template, batch=config.batch)
    return _opened("reward_model", name, config, {**shared, "protocol": config.task})


def _opened(kind: str, name: str, config: ReplicaSetConfig, settings: dict[str, Any]) -> Endpoint:
    """Make a source of `kind` that has no URL yet."""
    opened: Any = sources.load(kind)
    usual = opened.Config(kind=kind, base_url=("http://replicas",), model=config.model)
    source: Endpoint = opened(name, usual.model_copy(update=settings))
    return source
