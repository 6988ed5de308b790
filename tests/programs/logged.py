"""A supervisor and its worker as far as their output goes: the script is the worker's, the report
is the supervisor's.

The one argument is JSON: destination, script, limit, report (a path), and the limits that differ
from the usual ones.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from srunddp.supervisor.limits import Limits
from srunddp.supervisor.output.redirect import OutputRedirect, OutputTarget


def main(order: dict[str, Any]) -> int:
    file = order["file"] and Path(order["file"])
    before = os.listdir("/proc/self/fd")
    target = OutputTarget(file, order["terminal"], order["prefix"])
    output = OutputRedirect.open(target, Limits(**order["limits"]))
    worker = os.fork()
    if worker == 0:
        output.in_worker()
        exec(order["script"], {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    output.start()
    report: dict[str, float] = {
        "threads": threading.active_count(),
        "opened": len(os.listdir("/proc/self/fd")) - len(before),
    }
    report["code"] = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    begin = time.monotonic()
    output.finish(order["limit"])
    report["took"] = time.monotonic() - begin
    report["left"] = len(os.listdir("/proc/self/fd")) - len(before)
    Path(order["report"]).write_text(json.dumps(report))
    return 0


sys.exit(main(json.loads(sys.argv[1])))
