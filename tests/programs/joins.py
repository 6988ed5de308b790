"""Join a process group in one of the ways in which a process that is no rank of srunddp does it,
and print the sum over the group.

The first word says how: ``client`` (of the launcher's store, before the group), ``subprocess``
(each rank starts a program), ``exec`` (each rank becomes a program), ``some`` (all ranks but the
first), ``plain``.
"""

import datetime
import json
import os
import subprocess
import sys

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
size = int(os.environ["WORLD_SIZE"])
program = [sys.executable, __file__, "plain"]
members = size

match sys.argv[1]:
    case "client":
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=100),
        )
        store.set(str(rank), "here")
        store.wait([str(each) for each in range(size)])
    case "subprocess":
        sys.exit(subprocess.run(program, check=False).returncode)
    case "exec":
        os.execv(sys.executable, program)
    case "some":
        rank -= 1
        members -= 1
        if rank < 0:
            sys.exit()

dist.init_process_group("gloo", rank=rank, world_size=members)
total = torch.tensor([rank + 1])
dist.all_reduce(total)
sys.stdout.write(json.dumps({"rank": rank, "sum": int(total)}) + "\n")
dist.destroy_process_group()
