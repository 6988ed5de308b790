"""Join torch's store without a reverse look-up of names.

TCPStore looks up the name of the address it connects to, for a log line. Where reverse DNS does not
answer, that costs up to ten seconds and prints a warning that users take for the cause of other trouble.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

_NAME_SERVERS = 4  # nscount in glibc's struct __res_state: two ints and one long come before it
_ERRORS_ONLY = 2


@contextlib.contextmanager
def without_reverse_dns() -> Iterator[None]:
    """For this thread, answer reverse look-ups from files alone, and keep c10d from warning that it found none."""
    import platform

    if platform.libc_ver()[0] != "glibc" or ctypes.sizeof(ctypes.c_long) != 8 or "TORCH_CPP_LOG_LEVEL" in os.environ:
        yield
        return
    resolver, level = _resolver(), _log_level()
    servers, before = resolver[_NAME_SERVERS], level.value
    resolver[_NAME_SERVERS], level.value = 0, max(before, _ERRORS_ONLY)
    try:
        yield
    finally:
        resolver[_NAME_SERVERS], level.value = servers, before


def _resolver() -> ctypes._Pointer[ctypes.c_int]:
    libc = ctypes.CDLL(None)
    libc.__res_init()
    libc.__res_state.restype = ctypes.POINTER(ctypes.c_int)
    state: ctypes._Pointer[ctypes.c_int] = libc.__res_state()
    return state


def _log_level() -> ctypes.c_int:
    import torch

    library = os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so")
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(library), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return ctypes.c_int(0)  # another build of torch: the warning then stays
