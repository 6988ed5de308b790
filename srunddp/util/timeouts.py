"""Ask what may never answer: a file server that is gone, a driver that hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def call_in_daemon_thread(look: Callable[[], T]) -> Future[T]:
    """What it returns or raises, once it has. A thread that hangs in it keeps the process from nothing."""
    answer: Future[T] = Future()

    def answering() -> None:
        try:
            answer.set_result(look())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=answering, daemon=True).start()
    return answer
