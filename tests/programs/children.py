"""Start processes by one method in all the usual ways, and print what became of them; to be
compared with plain Python.

mpi4py is imported at the top, as scripts of MPI sites do: processes that do not fork import it,
too.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from mpi4py import MPI

try:
    import joblib
except ImportError:
    joblib = None

LIMIT = 100.0  # seconds, which only what is broken reaches
WORLD = MPI.COMM_WORLD


def square(number: int) -> int:
    return number * number


def variable(name: str) -> str | None:
    return os.environ.get(name)


def square_below(method: str) -> int:
    """Of 5, by a process of this process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as executor:
        return executor.submit(square, 5).result(LIMIT)


def wait_for_ever() -> None:
    time.sleep(10 * LIMIT)


def outlive(main: Connection) -> None:
    """Work on, when the script is over."""
    main.poll(LIMIT)
    time.sleep(1)
    print("the last process has ended", flush=True)


def end_at_once(method: str) -> int | None:
    # Each context has a Process, which the type of what they derive from does not say.
    context: Any = multiprocessing.get_context(method)
    process: BaseProcess = context.Process(target=wait_for_ever)
    process.start()
    process.terminate()
    process.join(LIMIT)
    code = process.exitcode
    process.kill()
    return code


def main(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        print("Pool", pool.map(square, range(4)))
        print("variables", pool.map(variable, ["PROBE", "SLURM_PROCID"]))
    with ProcessPoolExecutor(2, context) as executor:
        print("ProcessPoolExecutor", list(executor.map(square, range(4))))
        print("below it", executor.submit(square_below, method).result(LIMIT))
    if joblib:
        print("joblib", joblib.Parallel(n_jobs=2)(joblib.delayed(square)(i) for i in range(4)))
    print("terminated", end_at_once(method))
    reader, writer = context.Pipe(duplex=False)
    context.Process(target=outlive, args=(reader,)).start()
    print("the script is over", flush=True)
    writer.send(None)


if __name__ == "__main__":
    main(sys.argv[1])
