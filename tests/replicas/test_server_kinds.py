from __future__ import annotations

import sys

import pytest

from qreward_plugins.replicas import SERVER_KINDS, PoolSpec, Topology
from qreward_plugins.replicas.server_kinds import Launch, missing_places

ON_GPUS = Topology(1, 4, (0, 1, 2, 3), "cuda")


def launch(weights: str = "", **changes: object) -> Launch:
    spec = PoolSpec(**{"name": "own", "server": "vllm", "model": "Qwen/Qwen3-32B", "topology": ON_GPUS, **changes})
    return Launch(spec, "own-0-ab", "127.0.0.1", 8001, weights)


def command(server: str, **changes: object) -> str:
    words = SERVER_KINDS[server].command(launch(**changes))
    return " ".join(words).replace(sys.executable, "python")


def test_the_command_line_of_vllm():
    arguments = {"max_model_len": 16384, "enforce_eager": True, "enable_prefix_caching": False, "seed": None}
    assert command("vllm", arguments=arguments) == (
        "python -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-32B --host 127.0.0.1 --port 8001 "
        "--served-model-name Qwen/Qwen3-32B own-0-ab --tensor-parallel-size 4 --max-model-len 16384 --enforce-eager "
        "--no-enable-prefix-caching"
    )
    assert command("vllm", task="vllm_classify").endswith("--runner pooling")
    nested = {"structured_outputs_config": {"backend": "xgrammar"}, "allowed_origins": ["a", "b"]}
    assert command("vllm", arguments=nested).endswith(
        '--structured-outputs-config {"backend": "xgrammar"} --allowed-origins a b'
    )


def test_the_command_lines_of_the_others():
    assert command("sglang", task="sglang_classify", arguments={"mem_fraction_static": 0.8, "log_requests": False}) == (
        "python -m sglang.launch_server --model-path Qwen/Qwen3-32B --host 127.0.0.1 --port 8001 --served-model-name "
        "own-0-ab --tp-size 4 --is-embedding --mem-fraction-static 0.8"
    )
    assert command("llama_cpp", model="m.gguf", program=("/opt/llama-server",), arguments={"ctx-size": 4096}) == (
        "/opt/llama-server --model m.gguf --host 127.0.0.1 --port 8001 --alias own-0-ab --ctx-size 4096"
    )
    mine = ("serve", "--at={host}:{port}", "{name}", '{"model": "{model}"}', "{tensor_parallel}")
    assert command("command", command=mine) == 'serve --at=127.0.0.1:8001 own-0-ab {"model": "Qwen/Qwen3-32B"} 4'
    assert missing_places(mine) == []
    assert missing_places(("serve", "{port}")) == ["{name}"]


@pytest.mark.parametrize(
    ("server", "arguments", "refused"),
    [
        ("vllm", {"max_model_len": 1, "pipeline_parallel_size": 1}, []),
        (
            "vllm",
            {"tensor-parallel-size": 2, "--port": 80, "api_key": "x"},
            ["tensor-parallel-size", "--port", "api_key"],
        ),
        ("sglang", {"model_path": "x"}, ["model_path"]),
        ("llama_cpp", {"alias": "x", "api-key": "x"}, ["alias", "api-key"]),
    ],
)
def test_arguments_that_the_pool_sets_are_refused(server, arguments, refused):
    assert [key for key, _ in SERVER_KINDS[server].refused(launch(arguments=arguments).spec)] == refused


def test_which_server_speaks_which_protocol():
    assert {name for name, kind in SERVER_KINDS.items() if kind.serves("chat")} == set(SERVER_KINDS)
    assert {name for name, kind in SERVER_KINDS.items() if kind.serves("vllm_pooling")} == {"vllm", "command"}
    assert {name for name, kind in SERVER_KINDS.items() if kind.serves("sglang_classify")} == {"sglang", "command"}


def test_only_a_server_on_a_processor_gets_the_settings_for_it():
    assert "VLLM_TARGET_DEVICE" not in SERVER_KINDS["vllm"].environment(launch())
    assert SERVER_KINDS["vllm"].environment(launch(topology=Topology()))["VLLM_TARGET_DEVICE"] == "cpu"


def test_servers_that_are_controlled_while_they_run():
    """Only they have the routes of vLLM's development mode, by which everybody at the port can change them."""
    assert "VLLM_SERVER_DEV_MODE" not in SERVER_KINDS["vllm"].environment(launch())
    for changes in ({"in_place": True}, {"sleep_mode": True}):
        started = launch("/step-1", **changes)
        assert SERVER_KINDS["vllm"].environment(started)["VLLM_SERVER_DEV_MODE"] == "1"
        words = SERVER_KINDS["vllm"].command(started)
        model, served = words[words.index("--model") + 1], words[words.index("--served-model-name") + 1]
        assert (model, served) == ("/step-1", "Qwen/Qwen3-32B")
        assert ("--enable-sleep-mode" in words) == started.spec.sleep_mode
        assert ("--enable-memory-saver" in SERVER_KINDS["sglang"].command(started)) == started.spec.sleep_mode
