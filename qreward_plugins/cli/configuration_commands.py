"""Defines the options of the commands about a configuration: `init`, `check`, `reload` and `kinds`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from .running import ERRORS, OUT, one_message, run, say


class _Framework(str, Enum):
    verl = "verl"
    slime = "slime"
    roll = "roll"
    none = "none"


class _Score(str, Enum):
    judge = "judge"
    reward_model = "reward-model"
    function = "function"
    mixture = "mixture"


def init_command(
    framework: Annotated[
        _Framework | None,
        typer.Option(
            help="Framework that trains; none: files and Python. Default: the installed one, or verl.",
        ),
    ] = None,
    score: Annotated[
        _Score | None,
        typer.Option(
            help="What scores: a language model, a reward model, a Python function, or the sum of a function and a "
            "language model. Default: judge; with --function: function, or mixture if there is a --url.",
        ),
    ] = None,
    rubric: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="What the judge looks at, or @FILE. Default: correctness and helpfulness."),
    ] = None,
    function: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="Reward function; file.py:name works too. It is imported."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Base URL of the endpoint. Default: http://localhost:8000/v1.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model. Default: the only one that the endpoint lists.")] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Environment variable that holds the API key. Default: chosen by the host."),
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Protocol of the reward model's server. Default: the one of the server that answers."
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Folder of the reward model, for servers that render no conversation."),
    ] = None,
    rpm: Annotated[float | None, typer.Option(help="Requests per minute. Default: announced, or learned.")] = None,
    tpm: Annotated[float | None, typer.Option(help="Tokens per minute. Default: announced, or learned.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Requests at once. Default: 64 at a local address, otherwise learned.")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="File to write. Default: judges.yaml, or qreward.yaml for slime."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; take defaults.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Send nothing; validate the file only.")] = False,
) -> None:
    """Write a configuration with comments, check it, and print the line to train with.

    Asks five questions at a terminal: the framework, what scores a response, its endpoint, its limits, and the file. A
    flag answers its question. The endpoint is asked for its models, its dialect and its limits; if it does not answer
    yet, the file is validated without it.

    A key is never written: the file names the environment variable that holds it. The file is written whole or not at
    all, and an existing one is replaced only after a question, or with --overwrite.

    Exit codes: 0 written, and every source gave a valid verdict or was not asked; 1 written, and a source gave none; 2
    an answer is wrong or missing, and nothing was written; 130 stopped with Ctrl-C.
    """
    with one_message(ERRORS):
        from .init import InitOptions, init

        options = InitOptions(
            framework=None if framework is None else framework.value,
            score=None if score is None else score.value,
            url=url,
            model=model,
            api_key_env=api_key_env,
            protocol=protocol,
            chat_template=chat_template,
            rubric=rubric,
            function=function,
            rpm=rpm,
            tpm=tpm,
            concurrency=concurrency,
            out=out,
            yes=yes,
            overwrite=overwrite,
            offline=offline,
        )
        try:
            code = init(options, OUT, ERRORS)
        except KeyboardInterrupt:
            say(ERRORS, "\nstopped; nothing was written")
            raise typer.Exit(130) from None
    raise typer.Exit(code)


def check_command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration (YAML).")],
    rollouts: Annotated[
        Path | None,
        typer.Option(
            "--rollouts",
            "-r",
            metavar="FILE",
            help="Score the first rows of this .jsonl or .parquet file that go to each judge, instead of a built-in "
            "sample (What is 17 plus 25?).",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Most seconds to wait for the answer of a source.", min=0.1)
    ] = 30.0,
    offline: Annotated[
        bool, typer.Option("--offline", help="Validate only: send nothing, and need no server and no key.")
    ] = False,
) -> None:
    """Validate a configuration, then send live requests to every source of every judge.

    Shows the latency, the limits that the source announces, and the verdict. A language model also grades three pairs
    of a right answer and nonsense (six short requests), to test whether it can tell them apart. Nothing is written to a
    journal. If all is well, it ends with the line to train with.

    Exit codes: 0 every source gave a valid verdict and can judge; 1 a source did not; 2 the configuration has mistakes.
    """
    with one_message(ERRORS):
        from .check import check_config

        code = run(check_config(config, rollouts, OUT, ERRORS, timeout_s=timeout, offline=offline))
    raise typer.Exit(code)


def reload_command(
    before: Annotated[Path, typer.Argument(metavar="OLD", help="The configuration that runs; -: standard input.")],
    after: Annotated[Path, typer.Argument(metavar="NEW", help="The configuration that shall run.")],
    check_only: Annotated[
        bool, typer.Option("--check", help="Show what a reload would change, and change nothing.")
    ] = False,
) -> None:
    """Show what a reload would change: at once, after what is under way has ended, or only with a restart.

    As in: git show HEAD:judges.yaml | qreward reload --check - judges.yaml

    An engine reloads by itself when its file changes (`engine.reload: on`), and `qreward serve` on SIGHUP.

    Exit codes: 0 a reload would be applied; 1 it would be refused, because something needs a restart; 2 a
    configuration has mistakes.
    """
    with one_message(ERRORS):
        from ..errors import InputError
        from .reload import show_difference

        if not check_only:
            raise InputError("add --check. An engine reloads by `engine.reload: on`, `qreward serve` on SIGHUP")
        code = show_difference(before, after, OUT)
    raise typer.Exit(code)


def kinds_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """List the kinds that a configuration may name, with the package that each comes from.

    Other packages register their kinds as entry points (qreward_plugins.sources, qreward_plugins.judges).

    Exit codes: 0 all of them can be used; 1 some cannot, and the table says why.
    """
    with one_message(ERRORS):
        from .kinds import list_kinds

        code = list_kinds(OUT, as_json=as_json)
    raise typer.Exit(code)
