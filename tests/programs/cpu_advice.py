"""Say what srunddp would of the CPUs that this rank was given."""

import json
import os
import sys

from srunddp.bootstrap.environment.cpus import Cpus, advice

report = {"rank": int(os.environ["OMPI_COMM_WORLD_RANK"]), "advice": advice(os.environ, Cpus.here())}
sys.stdout.write(json.dumps(report) + "\n")
