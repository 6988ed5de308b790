"""What programs ask of elastic: torch's own functions, and the variables of PyTorch's
test/distributed/launcher/bin/test_script.py. Nothing is trained.
"""

import os

import torch
import torch.distributed as dist
from record import leave, options
from torch.distributed.elastic.multiprocessing.errors import record

# Those that test_script.py reads, but TORCHELASTIC_ERROR_FILE.
NUMBERS = (
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "RANK",
    "WORLD_SIZE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
)
TEXTS = ("ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


@record
def main() -> None:
    out = options().out
    assert dist.is_torchelastic_launched()
    numbers = {name: int(os.environ[name]) for name in NUMBERS}
    texts = {name: os.environ[name] for name in TEXTS}
    dist.init_process_group("gloo", init_method="env://")
    value = torch.ones(1) * dist.get_rank()
    dist.all_reduce(value)
    place = numbers["RANK"], numbers["LOCAL_RANK"], numbers["WORLD_SIZE"]
    leave(out, *place, [], numbers=numbers, sum=value.item(), launch=texts)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
