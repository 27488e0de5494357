"""slime's own client of reward servers (`--rm-type remote_rm`) asks `qreward serve`."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from qreward_plugins.testing import JudgeServer

CLIENT = """
import asyncio, sys
from types import SimpleNamespace

sys.path.insert(0, sys.argv[1])
from slime.rollout import rm_hub


async def ask(label):
    sample = SimpleNamespace(prompt="2 + 2?", response="It is 4.", label=label)
    try:
        return await rm_hub.remote_rm(SimpleNamespace(rm_url=sys.argv[2]), sample, max_retries=1)
    except Exception as error:
        return getattr(error, "status", error)


async def main():
    print([await ask("4"), await ask("BAD")])
    await rm_hub._get_shared_session().close()


asyncio.run(main())
"""


def test_it_gets_a_number_or_a_status(slime_source, tmp_path):
    def grade(call):
        return "no verdict" if call.blocks["reference"] == "BAD" else 1.0

    config = tmp_path / "judges.yaml"
    with JudgeServer(grade) as judge:
        config.write_text(
            textwrap.dedent(f"""\
                sources: {{near: {{kind: openai, base_url: "{judge.base_url}", model: judge}}}}
                judges: {{quality: {{kind: llm, score_range: [0, 1], invalid_retries: 0}}}}
            """)
        )
        command = [sys.executable, "-m", "qreward_plugins.cli", "serve", str(config), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                url = server.stdout.readline().split()[3].rstrip(";")
                asked = [sys.executable, "-c", CLIENT, str(slime_source), f"{url}/slime"]
                said = subprocess.run(asked, capture_output=True, text=True, timeout=120)
            finally:
                server.terminate()
    assert said.stdout == "[1.0, 502]\n", said.stderr
