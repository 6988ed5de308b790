"""What each of Lightning's cluster environments that finds its launcher says of this rank; nothing is trained."""

import argparse
import json
import os
from pathlib import Path

from lightning.fabric.plugins.environments import MPIEnvironment, SLURMEnvironment, TorchElasticEnvironment


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    record = {"rank": int(os.environ["RANK"]), "losses": []}
    for kind in (TorchElasticEnvironment, SLURMEnvironment, MPIEnvironment):
        if kind.detect():
            here = kind()
            record[kind.__name__] = [here.global_rank(), here.local_rank(), here.node_rank(), here.world_size()]
    (out / f"rank{record['rank']}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
