"""In PYTHONPATH: Python reaches nothing but this node, and what it tries beyond is a line in the
file ATTEMPTS.
"""

import os
import socket
import sys

NEAR = ("127.", "::1", "localhost", "0.0.0.0", socket.gethostname())


def refuse(event: str, arguments: tuple[object, ...]) -> None:
    if event not in ("socket.connect", "socket.getaddrinfo"):
        return
    where = arguments[0] if event == "socket.getaddrinfo" else arguments[1]
    if isinstance(where, bytes | None) or str(where).startswith("/"):
        return  # any address of this node's, or a socket in the file system
    host = where[0] if isinstance(where, tuple) else where
    if not str(host).startswith(NEAR):
        with open(os.environ["ATTEMPTS"], "a") as attempts:
            attempts.write(f"{event} {host}\n")
        raise OSError(f"no network in this test: {host}")


sys.addaudithook(refuse)
