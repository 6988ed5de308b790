"""Four processes write the example's stand-in data at once; run as ``rival_writers.py FOLDER EXAMPLE``.

Forked from one process before torch has started a thread, since each start of Python would import it again.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import sklearn.datasets  # noqa: F401 - imported once, before the fork
import torch


def write(mnist: dict[str, Any], root: Path) -> NoReturn:
    try:
        mnist["write_digits"](root)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(root: Path, example: str) -> None:
    torch.set_num_threads(1)
    mnist = runpy.run_path(example)
    writers = []
    for _ in range(4):
        writer = os.fork()
        if writer == 0:
            write(mnist, root)
        writers.append(writer)
    end = time.monotonic() + 20
    while not mnist["complete"](root):
        assert time.monotonic() < end, "the files never came"
    for _ in range(10):
        assert len(mnist["read"](root, train=True)) == 1437
        assert len(mnist["read"](root, train=False)) == 360
    codes = [os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) for writer in writers]
    assert codes == [0, 0, 0, 0], codes


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
