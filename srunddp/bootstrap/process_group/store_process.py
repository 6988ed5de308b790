"""Runs the process that serves the agent store; :mod:`srunddp.supervisor.agent_store` starts it."""

import signal
import sys
from datetime import timedelta
from typing import NoReturn

from srunddp.bootstrap.process_group.store import without_reverse_dns
from srunddp.errors import ConfigError
from srunddp.util.console import say_amid_output
from srunddp.util.kernel_file import raise_open_files_limit

_TIMEOUT = timedelta(seconds=300)


def main(descriptor: int, host: str, port: int) -> NoReturn:
    """Serve torch's ``TCPStore`` on a listening socket until this process is killed.

    Args:
        descriptor: The file descriptor of the socket.
        host, port: Where the socket listens.
    """
    raise_open_files_limit()
    try:
        from torch._C._distributed_c10d import TCPStore
    except ImportError as error:
        say_amid_output(f"no store at MASTER_PORT for processes that are no ranks: {error}")
        sys.exit(ConfigError.exit_code)
    with without_reverse_dns():
        store = TCPStore(
            host,
            port,
            is_master=True,
            timeout=_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=descriptor,
            use_libuv=True,
        )
    while store:
        signal.pause()
    raise AssertionError
