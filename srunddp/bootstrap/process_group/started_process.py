"""Prepares the processes that a rank starts by ``multiprocessing`` for the agent store.

Every such process imports this module before the script, so the module itself imports little.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from srunddp.bootstrap.environment import child_processes
from srunddp.util.import_hook import surround_import

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.distributed_c10d import Store

RENDEZVOUS = "torch.distributed.rendezvous"
"""torch's module with the handlers of ``env://`` and ``tcp://``."""


def call_in_others(host: str, port: str, run: str) -> None:
    """Make every process that this process starts by ``multiprocessing`` call :func:`enter` before
    it imports the script.

    Args:
        host, port, run: as in
            :class:`srunddp.bootstrap.process_group.master_address.MasterAddress`.
    """
    child_processes.call_in_processes(__name__, enter.__name__, host, port, run)


def enter(host: str, port: str, run: str) -> None:
    """Let torch connect to the agent store only if the script joins at the agent store's address,
    in this process and in the processes that it starts by ``multiprocessing``.

    Args:
        host, port, run: as for :func:`call_in_others`.
    """
    call_in_others(host, port, run)
    surround_import("multiprocessing.util", preparing_others)
    surround_import(RENDEZVOUS, partial(_replacing_handlers, (host, port, run)))


@contextlib.contextmanager
def preparing_others(util: ModuleType) -> Iterator[None]:
    """Surround the import of ``multiprocessing.util``: after it, call
    :func:`srunddp.bootstrap.environment.child_processes.prepare_processes`.
    """
    yield
    child_processes.prepare_processes(util)


@contextlib.contextmanager
def _replacing_handlers(master: tuple[str, str, str], rendezvous: ModuleType) -> Iterator[None]:
    yield
    handlers = rendezvous._rendezvous_handlers  # private to torch; a test pins it
    for scheme in ("env", "tcp"):
        handlers[scheme] = partial(_handle, master, handlers[scheme])


def _handle(
    master: tuple[str, str, str],
    stock: Callable[..., Iterator[Any]],
    url: str,
    **options: Any,
) -> Iterator[tuple[Store, int, int]]:
    # Imported here, because most processes join no group.
    from srunddp.bootstrap.process_group.master_address import MasterAddress, asked_for, join

    asked = asked_for(url, os.environ)
    yield from join(MasterAddress(*master), asked, stock(url, **options))
