"""Finds a free port for a server that is going to listen on it in a while."""

from __future__ import annotations

import socket


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port of `host`, which the system gives to nobody else for about a minute.

    A server binds its port seconds after it was started. Meanwhile the system may give a port that is merely free to
    any connection of any program. So a connection to this port is made and closed: the port is then in the state
    TIME_WAIT, in which the system does not hand it out, and a server may listen on it (`SO_REUSEADDR`).
    """
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, 0))
        listening.listen(1)
        port: int = listening.getsockname()[1]
        with socket.create_connection((host, port)):
            accepted, _ = listening.accept()
            # The side that closes first is the one in TIME_WAIT.
            accepted.close()
    return port
