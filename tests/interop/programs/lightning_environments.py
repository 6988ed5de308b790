"""What Lightning's cluster environments say of this rank: that of torchrun and those asked for.
Nothing is trained.
"""

import os

from lightning.fabric.plugins.environments import (
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from record import leave, options

ASKED = {"slurm": SLURMEnvironment, "mpi": MPIEnvironment}


def main() -> None:
    given = options(ask={"choices": ASKED, "required": True})
    said = {}
    for name, kind in (("torchrun", TorchElasticEnvironment), (given.ask, ASKED[given.ask])):
        assert kind.detect()
        here = kind()
        said[name] = [here.global_rank(), here.local_rank(), here.node_rank(), here.world_size()]
    leave(
        given.out,
        *(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")),
        [],
        **said,
    )


if __name__ == "__main__":
    main()
