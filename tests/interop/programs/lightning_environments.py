"""What Lightning's cluster environments say of this rank: that of torchrun and those asked for. Nothing is trained."""

import argparse
import json
import os
from pathlib import Path

from lightning.fabric.plugins.environments import MPIEnvironment, SLURMEnvironment, TorchElasticEnvironment

ASKED = {"slurm": SLURMEnvironment, "mpi": MPIEnvironment}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ask", choices=ASKED, required=True)
    options = parser.parse_args()
    record = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"]), "losses": []}
    for name, kind in (("torchrun", TorchElasticEnvironment), (options.ask, ASKED[options.ask])):
        assert kind.detect()
        here = kind()
        record[name] = [here.global_rank(), here.local_rank(), here.node_rank(), here.world_size()]
    (options.out / f"rank{record['rank']}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
