"""A stand-in for an inference server: starts late, hangs, dies, lies or refuses to stop, as its arguments say.

Usage: python -S stand_in.py PORT NAME MODEL [KEY=VALUE ...]. It answers /v1/models, and questions with a verdict.
It imports only the standard library, so that it starts at once. It and its children write their ids into `pids`.

ready_after=S   seconds until it listens        exit=CODE   ends at once with this code, after a line of log
never           it does not listen, ever        wrong       lists another model
stubborn        ignores SIGTERM                 children=N  children that ignore SIGTERM and leave the session
pids=FILE       file of its process ids         only=N      what is said here goes for the replica -N- alone
host=H          listens there, not on 127.0.0.1
die_after=N     dies after N chat requests, with exit code 0
pieces          sends the list of its models in two pieces
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def main() -> None:
    port, name, model = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    options = dict(word.partition("=")[::2] for word in sys.argv[4:])
    note(options, os.getpid())
    if "only" in options and f"-{options['only']}-" not in name:
        options = {key: options[key] for key in ("pids", "host", "pieces") if key in options}
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


def serve(port: int, models: list[str], options: dict[str, str]) -> None:
    asked = [0]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._say({"data": [{"id": model} for model in models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked[0] += 1
            if asked[0] > int(options.get("die_after", 1_000_000)):
                os._exit(0)
            if "input" in body or "messages" not in body or self.path.endswith("/classify"):
                number = float(len(str(body)) % 17)
                self._say({"data": [{"index": 0, "label": "LABEL_0", "probs": [number], "num_classes": 1}]})
                return
            found = re.findall(r'"id"\s*:\s*"([0-9a-z]+)"', json.dumps(body).replace('\\"', '"'))
            verdict = json.dumps({"id": found[-1] if found else "", "rationale": str(os.getpid()), "score": 7})
            message = {"role": "assistant", "content": verdict}
            self._say({"model": body["model"], "choices": [{"message": message, "finish_reason": "stop"}]})

        def _say(self, value: object) -> None:
            text = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            if "pieces" in options:
                self.wfile.write(text[:10])
                self.wfile.flush()
                time.sleep(0.02)
                text = text[10:]
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer.allow_reuse_address = True
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer((options.get("host", "127.0.0.1"), port), Handler).serve_forever()


if __name__ == "__main__":
    main()
