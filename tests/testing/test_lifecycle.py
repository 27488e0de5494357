"""Starting, stopping, and what is left behind: nothing."""

from __future__ import annotations

import gc
import os
import socket
import threading
import urllib.error
import urllib.request

import pytest

from qreward_plugins.testing import Faults, JudgeServer, JudgeServerError, JudgeServerProcess, ServerLimits

from ..kit import connections_left
from .conftest import Client


def server_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "qreward-judge-server"]


def test_nothing_is_left_behind() -> None:
    for _ in range(2):
        with JudgeServer(faults=Faults(script=[None, "hang", "reset", "truncated_body"])) as server:
            assert len(server_threads()) == 1
            client = Client(server)
            assert client.send().status == 200
            hanging = client.open()
            server.wait_for(lambda report: report.in_flight == 1)
            client.send()
            client.send()
            idle = client.connect()
            half = client.connect()
            half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
        assert server_threads() == []
        for connection in (hanging, idle, half):
            connection.close()
        with pytest.raises(ConnectionRefusedError):
            client.connect()
        assert connections_left(server.base_url) == []
    gc.collect()  # an unclosed transport, socket or loop would warn now, and warnings are errors


def test_start_and_stop_are_idempotent_and_repeatable() -> None:
    server = JudgeServer()
    server.stop()
    with pytest.raises(JudgeServerError, match="start"):
        _ = server.base_url
    server.start()
    port = server.port
    assert server.base_url == f"http://127.0.0.1:{port}/v1"
    server.start()
    assert (server.running, len(server_threads())) == (True, 1)
    server.hold()
    abandoned = Client(server).open()
    server.wait_for(lambda report: report.in_flight == 1)
    server.stop()
    server.stop()
    assert (server.running, server.report().abandoned) == (False, 1)
    abandoned.close()
    with server:
        assert server.port == port, "clients find it where it was"
        connection = Client(server).open()
        server.wait_for(lambda report: report.in_flight == 1)  # it still holds its answers
        server.release()
        with connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert server.report().requests == 2


def test_an_address_that_cannot_be_is_one_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = JudgeServer(port=port)
        for host, number in (("127.0.0.1", port), ("127.0.0.1", 99_999), ("192.0.2.1", 0)):
            wrong = server if number == port else JudgeServer(host=host, port=number)
            says = rf"listen on {host}:{number}: [^;]+; use another port or address$"
            with pytest.raises(JudgeServerError, match=says):
                wrong.start()
        assert (server.running, server_threads()) == (False, [])
    with server:
        assert server.port == port, "it can be started once the port is free"


def test_a_process_of_its_own() -> None:
    faults = Faults(script=["error_500"])
    process = JudgeServerProcess(limits=ServerLimits(requests_per_minute=2), faults=faults, api_key="s3cret")
    for unready in (process.report, lambda: process.pid, lambda: process.base_url):
        with pytest.raises(JudgeServerError, match="start"):
            unready()
    with process:
        os.kill(process.pid, 0)  # there is such a process
        assert process.pid != os.getpid()
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(process.score_url, data=b"{}"), timeout=20)
        refused.value.close()
        report = process.report()
        assert (report.requests, report.statuses) == (1, {401: 1})
        port = int(process.root_url.rsplit(":", 1)[1])
        # A second one cannot have the port, and says why across the process border.
        with pytest.raises(JudgeServerError, match="cannot listen"):
            JudgeServerProcess(port=port).start()
        os.kill(process.pid, 9)
        with pytest.raises(JudgeServerError, match="has died"):
            process.report()
    process.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=20)


def test_connections_made_while_it_stops_are_closed_too() -> None:
    gc.collect()
    connections = []
    for count in range(1, 15):
        with JudgeServer() as server:
            connections += [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(count % 5)]
    for connection in connections:
        connection.close()
    gc.collect()  # an accepted socket that nobody closed would warn now
