"""A stand-in for an inference server: starts late, hangs, dies, lies or refuses to stop, as its arguments say.

Usage: python -S stand_in.py PORT NAME MODEL [KEY=VALUE ...]. It answers /v1/models, and questions with a verdict.
It imports only the standard library, so that it starts at once. It and its children write their ids into `pids`.

As a stand-in for vLLM it is started by `stand_in.py vllm [KEY=VALUE ...] FLAGS`, has the control routes of vLLM's
development mode, and takes the text of `weights.bin` in the folder of the model for its weights. A reply names the
weights at its begin, at its end, and those of the cached prefix; more than one means a mixed reply.

delay=S         seconds that a reply takes
hold=FILE       replies wait while there is this file
fault=FILE      a word in this file is done at the next load, and the file is removed: `fail`, `die`, `hang`,
                `stuck` (the cache is not reset); or at the next pause: `no-pause`; or at the next sleep: `no-sleep`
                (it hangs)
notes=FILE      what it was told, one line each
questions       notes also its start and each question

ready_after=S   seconds until it listens        exit=CODE   ends at once with this code, after a line of log
never           it does not listen, ever        wrong       lists another model
stubborn        ignores SIGTERM                 children=N  children that ignore SIGTERM and leave the session
child_mb=N      memory of each child: the more, the longer it dies
pids=FILE       file of its process ids         only=N      what is said here goes for the replica -N- alone
host=H          listens there, not on 127.0.0.1
key=K           answers below /v1 only with this key, as vLLM does
private         states its own name as the model that answered, as SGLang and llama.cpp do
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def main() -> None:
    if sys.argv[1] == "vllm":
        words = sys.argv[2:]
        at = next(n for n, word in enumerate(words) if word.startswith("--"))
        named = words.index("--served-model-name")
        flags = dict(zip(words[at:-1], words[at + 1 :], strict=True))
        port, name, model = int(flags["--port"]), words[named + 2], words[named + 1]
        options = dict(word.partition("=")[::2] for word in words[:at])
        options |= {"weights": flags["--model"], "host": flags["--host"]}
    else:
        port, name, model = int(sys.argv[1]), sys.argv[2], sys.argv[3]
        options = dict(word.partition("=")[::2] for word in sys.argv[4:])
    note(options, os.getpid())
    if "only" in options and f"-{options['only']}-" not in name:
        everywhere = {"pids", "host", "weights", "delay", "hold", "notes", "questions"}
        options = {key: options[key] for key in everywhere & options.keys()}
    print(f"stand-in {name} on {port}", flush=True)
    if "stubborn" in options:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(int(options.get("children", 0))):
        child = os.fork()
        if child == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            grandchild = os.fork()
            if grandchild:
                note(options, grandchild)
                os._exit(0)  # the grandchild is an orphan in a session of its own
            _held = b"x" * (int(options.get("child_mb", 0)) << 20)
            time.sleep(600)
        os.waitpid(child, 0)
    if "exit" in options:
        print(f"RuntimeError: no memory for the weights, token {os.environ.get('HF_TOKEN', 'none')}", flush=True)
        sys.exit(int(options["exit"]))
    time.sleep(float(options.get("ready_after", 0)))
    while "never" in options:
        time.sleep(600)
    models = ["someone-else"] if "wrong" in options else [model, name]
    serve(port, models, options)


def note(options: dict[str, str], pid: int) -> None:
    if options.get("pids"):
        with open(options["pids"], "a") as file:
            file.write(f"{pid}\n")


class Weights:
    """The weights of a stand-in for vLLM, which are loaded, cached and put to sleep as vLLM does it."""

    ORDERS = (
        *("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/weight_checker"),
        *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
        *("/sleep", "/wake_up"),
    )

    def __init__(self, options: dict[str, str], name: str) -> None:
        self.options, self.name = options, name
        self.has = self.of(options["weights"]) if "weights" in options else ""
        self.cached: dict[str, str] = {}
        self.free = threading.Event()
        self.free.set()

    @staticmethod
    def of(path: str) -> str:
        with open(os.path.join(path, "weights.bin")) as file:
            return file.read()

    def read(self, prompt: str) -> str:
        """Answer with the names of all weights that took part."""
        if "questions" in self.options:
            self.note("/ask")
        self.free.wait()
        begun = self.has
        cached = self.cached.setdefault(prompt[:200], begun)
        while os.path.exists(self.options.get("hold", "")):
            time.sleep(0.01)
        time.sleep(float(self.options.get("delay", 0)))
        self.free.wait()
        return "+".join(sorted({begun, cached, self.has}))

    def fault(self, *faults: str) -> str:
        path = self.options.get("fault", "")
        try:
            with open(path) as file:
                word = file.read().strip()
            if word in faults:
                os.rename(path, f"{path}-{os.getpid()}")  # of several stand-ins, only one succeeds
                return word
        except OSError:
            pass
        return ""

    def load(self, new: str) -> tuple[int, object]:
        fault = self.fault("fail", "die", "hang")
        if fault == "die":
            os._exit(0)
        if fault == "hang":
            time.sleep(600)
        if fault == "fail":
            self.has = "half"
            return 500, {"error": "cannot load"}
        self.has = new
        return 200, {"results": [None]}

    def note(self, what: str) -> None:
        if "notes" in self.options:
            with open(self.options["notes"], "a") as file:
                file.write(f"{self.name} {what}\n")

    def told(self, order: str, query: str, body: dict) -> tuple[int, object]:
        self.note(f"{order}{query and '?' + query}")
        if order == "/pause":
            if self.fault("no-pause"):
                return 500, {"error": "cannot pause"}
            self.free.clear()
            self.cached.clear()
        elif order in ("/resume", "/wake_up"):
            self.free.set()
        elif order == "/collective_rpc":
            return self.load(self.of(body["kwargs"]["weights_path"]))
        elif order == "/update_weights":
            return self.load(body["update_info"]["weights"])
        elif order == "/reset_prefix_cache":
            if self.fault("stuck"):
                return 500, {"error": "stuck"}
            self.cached.clear()
            return 200, {"success": True}
        elif order == "/weight_checker":
            return 200, {"checksums": {"all": self.has}}
        elif order == "/sleep":
            if self.fault("no-sleep"):
                time.sleep(600)
            self.free.clear()
        return 200, {}


def serve(port: int, models: list[str], options: dict[str, str]) -> None:
    server = Weights(options, models[-1])
    if "questions" in options:
        server.note("/start")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self._knows_key():
                self._say({"data": [{"id": model} for model in models]})

        def _knows_key(self) -> bool:
            given = self.headers.get("Authorization")
            if "key" not in options or not self.path.startswith("/v1") or given == f"Bearer {options['key']}":
                return True
            self._say({"error": "Unauthorized"}, 401)
            return False

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
            order, _, query = self.path.partition("?")
            if order in Weights.ORDERS:
                status, told = server.told(order, query, body)
                self._say(told, status)
                return
            if not self._knows_key():
                return
            if "input" in body or "messages" not in body or self.path.endswith("/classify"):
                number = float(len(str(body)) % 17)
                self._say({"data": [{"index": 0, "label": "LABEL_0", "probs": [number], "num_classes": 1}]})
                return
            found = re.findall(r'"id"\s*:\s*"([0-9a-z]+)"', json.dumps(body).replace('\\"', '"'))
            said = server.read(json.dumps(body)) if "weights" in options else str(os.getpid())
            verdict = json.dumps({"id": found[-1] if found else "", "rationale": said, "score": 7})
            message = {"role": "assistant", "content": verdict}
            stated = models[-1] if "private" in options else body["model"]
            self._say({"model": stated, "choices": [{"message": message, "finish_reason": "stop"}]})

        def _say(self, value: object, status: int = 200) -> None:
            text = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer.allow_reuse_address = True
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer((options.get("host", "127.0.0.1"), port), Handler).serve_forever()


if __name__ == "__main__":
    main()
