"""What the programs share: their command line, their data, and what each rank leaves."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset


def options(**more: dict[str, Any]) -> argparse.Namespace:
    """``--out FOLDER`` and these."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    for name, how in more.items():
        parser.add_argument(f"--{name}", **how)
    return parser.parse_args()


def samples() -> TensorDataset:
    inputs = torch.randn(320, 10)
    return TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())


def network() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(10, 50), torch.nn.ReLU(), torch.nn.Linear(50, 2))


def leave(
    out: Path, rank: int, local_rank: int, world_size: int, losses: list[str], **more: object
) -> None:
    """Write what a rank has to say into the folder."""
    out.mkdir(parents=True, exist_ok=True)
    place = {"rank": rank, "local_rank": local_rank, "world_size": world_size}
    (out / f"rank{rank}.json").write_text(json.dumps(place | {"losses": losses} | more))
