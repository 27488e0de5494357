"""`qreward serve-judge`: starts the servers of sources of kind `replicas`, or of a model, and keeps them running."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import Config, load_config
from ..errors import InputError
from ..sources import kind_of, open_source
from .console import ERRORS, OK, OUT, number_of, run, say
from .engines import ended_by_a_signal, join_ray

_ENDINGS = (".yaml", ".yml", ".json")


def command(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG_OR_MODEL", help="The configuration (.yaml), or a model to serve.")
    ],
    source: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Source to start; repeatable. Default: every one of kind replicas."),
    ] = None,
    server: Annotated[
        str | None, typer.Option(metavar="PROGRAM", help="For a MODEL: vllm, sglang or llama_cpp. Default: vllm.")
    ] = None,
    devices: Annotated[
        str | None, typer.Option(metavar="LIST", help="For a MODEL: its devices, e.g. 0,1,2,3. Default: the first.")
    ] = None,
    dp: Annotated[
        int | None, typer.Option("--dp", min=1, metavar="N", help="For a MODEL: replicas (data parallel). Default: 1.")
    ] = None,
    tp: Annotated[
        int | None, typer.Option("--tp", min=1, metavar="N", help="For a MODEL: devices a replica (tensor parallel).")
    ] = None,
) -> int:
    """Start the servers of the sources of kind replicas, or of a model, print their addresses, and supervise them.

    Trainings on this machine with the same source use these servers, and leave them running when they end. Ctrl-C or
    SIGTERM stops the servers. A file (but a .gguf), and a name that ends with .yaml, .yml or .json, is a configuration;
    any other name is a model.

    Exit codes: 0 stopped; 2 the configuration has mistakes, or a server did not start.
    """
    topology = {
        "server": server,
        "devices": devices and [device.strip() for device in devices.split(",")],
        "data_parallel": dp,
        "tensor_parallel": tp,
    }
    given = {key: value for key, value in topology.items() if value is not None}
    is_model = not config.lower().endswith(_ENDINGS) and (config.endswith(".gguf") or not Path(config).is_file())
    if is_model:
        node = {"kind": "replicas", "server": "vllm", "model": config, **given}
        tree = {"sources": {"judge": node}, "judges": {"judge": {"kind": "llm"}}}
        return run(_serve(load_config(tree, origin=config), config, tuple(source or ())))
    if given:
        raise InputError(f"{config} is a configuration, so write {next(iter(given))} into its source of kind replicas")
    return run(_serve(load_config(config), config, tuple(source or ())))


async def _serve(config: Config, path: str, names: Sequence[str]) -> int:
    """Start the servers of the sources `names` (default: all of kind `replicas`), and serve until cancelled.

    Raises `ConfigurationError`, `InputError` for a name that is not such a source, and `ReplicasNotStarted`.
    """
    sources = _opened(config, path, names)
    try:
        await asyncio.gather(*map(start_servers, sources))
        say(OUT, "the servers run; stop them with Ctrl-C")
        with suppress(asyncio.CancelledError):
            await asyncio.get_running_loop().create_future()
        say(OUT, "stopping the servers ...")
    finally:
        await asyncio.gather(*(source.aclose() for source in sources))
    return OK


def _opened(config: Config, path: str, names: Sequence[str]) -> list[Any]:
    """Open the sources `names` of a configuration, or all that start servers of their own. Nothing is started.

    Raises `ConfigurationError`, and `InputError` for a name that is not such a source, and if one is to be placed on
    Ray and no cluster runs.
    """
    known = [name for name, source in config.sources.items() if kind_of(source).has_servers]
    unknown = [name for name in names if name not in known]
    if unknown or not known:
        missing = f"--source {unknown[0]}: it is no source" if unknown else f"{path}: there is no source"
        raise InputError(f"{missing} of kind replicas" + (f"; such sources: {', '.join(known)}" if known else ""))
    with ended_by_a_signal():
        join_ray(config, Path(path), names or known)
    return [open_source(name, config.sources[name]) for name in dict.fromkeys(names or known)]


async def start_servers(source: Any) -> None:
    """Start the servers of a source of kind `replicas`, and print their topology. Raises `ReplicasNotStarted`."""
    say(ERRORS, f"starting the servers of {source.name} ...")
    await source.start()
    spec = source.spec
    replicas = number_of(spec.topology.data_parallel, "replica")
    say(OUT, f"{source.name}: {replicas} of {spec.model} on {spec.server} ({spec.topology.platform})")
    for state in source.replicas:
        say(OUT, f"  replica {state.number} on {state.devices or 'no device'}: {state.url or state.state}")
