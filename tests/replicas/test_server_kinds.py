"""How servers of each kind are started and controlled, and which devices they get."""

from __future__ import annotations

import sys

import pytest
from aiohttp import test_utils, web

from qreward_plugins.replicas import SERVER_KINDS, PoolSpec, Topology
from qreward_plugins.replicas.control import ServerFailed, SGLangControl
from qreward_plugins.replicas.server_kinds import Launch, found_devices, found_platform, problem_of_command

ON_GPUS = Topology(1, 4, (0, 1, 2, 3), "cuda")


def launch(weights="", **changes):
    spec = PoolSpec(**{"name": "own", "server": "vllm", "model": "Qwen/Qwen3-32B", "topology": ON_GPUS, **changes})
    return Launch(spec, "own-0-ab", "127.0.0.1", 8001, weights)


def command(server, **changes):
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
    assert problem_of_command(mine) == ""
    assert problem_of_command(("serve", "{port}")).startswith("no word holds {name}; ")
    assert problem_of_command((*mine, "{gpu}", "{{x}}")).startswith("there is no place {gpu}; places are {host}, ")


@pytest.mark.parametrize(
    ("server", "refused"),
    [
        ("vllm", ["tensor-parallel-size", "--port", "api_key"]),
        ("sglang", ["model_path"]),
        ("llama_cpp", ["alias", "api-key"]),
    ],
)
def test_arguments_that_the_pool_sets_are_refused(server, refused):
    arguments = {"max_model_len": 1, "pipeline_parallel_size": 1, **dict.fromkeys(refused, "x")}
    assert [key for key, _ in SERVER_KINDS[server].refused(launch(arguments=arguments).spec)] == refused


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


@pytest.mark.anyio
async def test_the_control_routes_of_sglang():
    """Those of 0.5.23, as its source has them: JSON to an update, a text to a flush, and nothing to memory."""
    told, flushed = [], [200, 400]

    async def update(request):
        model = (await request.json())["model_path"]
        told.append((model, request.headers["Authorization"]))
        if model == "/none":
            return web.json_response({"success": False, "message": "no such model"}, status=400)
        return web.json_response({"success": True, "message": "Succeeded", "num_paused_requests": 0})

    async def flush(request):
        assert float(request.query["timeout"]) > 0
        status = flushed.pop(0)
        return web.Response(text="Cache flushed.\n" if status == 200 else "Flush cache failed.\n", status=status)

    async def memory(request):
        await request.json()
        return web.json_response(None)

    app = web.Application()
    app.router.add_post("/update_weights_from_disk", update)
    app.router.add_route("*", "/flush_cache", flush)
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        app.router.add_post(path, memory)
    async with test_utils.TestServer(app) as server:
        control = SGLangControl(str(server.make_url("")).rstrip("/"), {"Authorization": "Bearer sk-own"}, 5.0)
        await control.load("/new")
        assert told == [("/new", "Bearer sk-own")]
        for path, why in [("/none", "no such model"), ("/new", "Flush cache failed")]:
            with pytest.raises(ServerFailed, match=why):
                await control.load(path)
        await control.sleep()
        await control.wake()


# Which devices they get


@pytest.mark.parametrize(
    ("topology", "groups", "variables"),
    [
        (Topology(), ((),), {}),
        (Topology(2, 4, tuple(range(8)), "cuda"), ((0, 1, 2, 3), (4, 5, 6, 7)), {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}),
        (Topology(2, 2, (7, 1, 3, 5), "cuda"), ((7, 1), (3, 5)), {"CUDA_VISIBLE_DEVICES": "3,5"}),
        (Topology(2, 1, ("GPU-a", "MIG-b"), "cuda"), (("GPU-a",), ("MIG-b",)), {"CUDA_VISIBLE_DEVICES": "MIG-b"}),
        (
            Topology(2, 2, (0, 1, 2, 3), "rocm"),
            ((0, 1), (2, 3)),
            {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "0,1"},
        ),
        (Topology(2, 2, platform="cuda", assigned=True), ((), ()), {}),
    ],
)
def test_each_replica_gets_its_own_devices(topology, groups, variables):
    assert topology.groups == groups
    assert topology.environment(topology.data_parallel - 1) == variables


@pytest.mark.parametrize(
    ("files", "environment", "platform", "devices"),
    [
        ((), {}, "cpu", ()),
        (("dev/nvidia0", "dev/nvidia1", "dev/nvidiactl"), {}, "cuda", (0, 1)),
        (("dev/nvidia0", "dev/nvidia1"), {"CUDA_VISIBLE_DEVICES": "1"}, "cuda", (1,)),
        (("dev/nvidia0",), {"CUDA_VISIBLE_DEVICES": "-1"}, "cuda", ()),
        (("dev/nvidia0",), {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}, "cuda", ("GPU-a", "GPU-b")),
        (("dev/kfd",), {}, "rocm", ()),
        (("dev/kfd",), {"HIP_VISIBLE_DEVICES": "2,3"}, "rocm", (2, 3)),
    ],
)
def test_the_devices_of_this_machine(tmp_path, files, environment, platform, devices):
    (tmp_path / "dev").mkdir()
    for name in files:
        (tmp_path / name).touch()
    assert found_platform(tmp_path) == platform
    assert found_devices(platform, environment, tmp_path) == devices
