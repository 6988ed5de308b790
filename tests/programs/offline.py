"""Print what --offline has exported to this rank."""

import json
import os
import sys

from srunddp.stage.paths import offline

report = {"rank": int(os.environ["RANK"]), "node": os.environ["SLURMD_NODENAME"]}
report |= {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", *offline({}))}
sys.stdout.write(json.dumps(report) + "\n")
