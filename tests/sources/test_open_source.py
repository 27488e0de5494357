from __future__ import annotations

import subprocess
import sys

import pytest

import qreward_plugins.sources as sources
from qreward_plugins.sources import FunctionSource, HTTPSource, OpenAISource, open_source


def test_the_kind_decides_and_every_name_loads() -> None:
    fast = open_source("fast", OpenAISource.Config(kind="openai", base_url="http://h/v1", model="m"))
    rule = open_source("rule", FunctionSource.Config(kind="function", function="os.path:join"))
    service = open_source("rm", HTTPSource.Config(kind="http", url="http://h:1/score"))
    assert isinstance(fast, OpenAISource)
    assert isinstance(service, HTTPSource)
    assert isinstance(rule, FunctionSource)
    assert (fast.name, fast.model) == ("fast", "m")
    assert (service.name, service.model, service.slots) == ("rm", "h:1/score", None)
    assert (rule.name, rule.model) == ("rule", "os.path:join")
    assert all(hasattr(sources, name) for name in sources.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        sources.nothing  # noqa: B018


def test_a_worker_needs_neither_the_http_client_nor_the_configuration() -> None:
    program = (
        "import sys, qreward_plugins.sources.worker_program, qreward_plugins.system.functions\n"
        "print(sorted({'aiohttp', 'pydantic', 'asyncio'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
