"""A client that speaks bytes, because most faults are below what an HTTP library would show."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from typing import Any

from qreward_plugins.judges.fence import fence
from qreward_plugins.testing import JudgeServer

NONCE = "0123456789ab"
SAFETY_S = 20.0


@dataclass(frozen=True)
class Exchange:
    """All bytes of one connection, and whether it ended in a reset."""

    raw: bytes
    was_reset: bool

    @property
    def status(self) -> int:
        return int(self.raw.split(b" ", 2)[1])

    @property
    def headers(self) -> dict[str, str]:
        lines = self.raw.split(b"\r\n\r\n", 1)[0].decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}

    @property
    def body(self) -> bytes:
        return self.raw.split(b"\r\n\r\n", 1)[1]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def content(self) -> str:
        return self.json["choices"][0]["message"]["content"]

    @property
    def verdict(self) -> dict:
        return json.loads(self.content)


def judge_prompt(response: str = "42", reference: str | None = None) -> str:
    blocks = [fence("response", response, NONCE)]
    if reference is not None:
        blocks.append(fence("reference", reference, NONCE))
    return "Judge the response.\n" + "\n".join(blocks)


def request_bytes(
    body: bytes, *, method: str = "POST", path: str = "/v1/chat/completions", headers: dict[str, str] | None = None
) -> bytes:
    fields = {"Host": "judge", "Connection": "close", "Content-Length": str(len(body)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def chat_body(prompt: str | None = None, **parameters: object) -> bytes:
    messages = [
        {"role": "system", "content": "You are a judge."},
        {"role": "user", "content": prompt or judge_prompt()},
    ]
    return json.dumps({"model": "judge", "messages": messages, **parameters}).encode()


def read_all(connection: socket.socket) -> Exchange:
    raw = bytearray()
    try:
        while data := connection.recv(1 << 20):
            raw += data
    except ConnectionResetError:
        return Exchange(bytes(raw), True)
    return Exchange(bytes(raw), False)


@dataclass(frozen=True)
class Client:
    """Bytes to and from one judge server."""

    server: JudgeServer

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=SAFETY_S)

    def open(self, body: bytes | None = None, **options: object) -> socket.socket:
        """Send a request and leave its connection open."""
        connection = self.connect()
        connection.sendall(request_bytes(chat_body() if body is None else body, **options))
        return connection

    def send(self, body: bytes | None = None, **options: object) -> Exchange:
        with self.open(body, **options) as connection:
            return read_all(connection)

    def post(self, path: str, **body: object) -> Exchange:
        return self.send(json.dumps(body).encode(), path=path)

    def score(self, response: object = "42", prompt: object = "6 * 7?", **more: object) -> Exchange:
        return self.post("/score", prompt=prompt, response=response, **more)

    def chat(self, prompt: str | None = None, **parameters: object) -> Exchange:
        return self.send(chat_body(prompt, **parameters))
