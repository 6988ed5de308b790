"""What the kernel knows of connections that did not come about: the first packet arrived, and the answer got lost."""

from __future__ import annotations

import socket
from collections.abc import Sequence


def half_open(listeners: Sequence[socket.socket]) -> list[str]:
    """The addresses whose connections to these sockets came through, but not the answer."""
    import psutil

    ports = {listener.getsockname()[1] for listener in listeners}
    waiting = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_SYN_RECV]
    return [one.raddr.ip for one in waiting if one.laddr and one.raddr and one.laddr.port in ports]
