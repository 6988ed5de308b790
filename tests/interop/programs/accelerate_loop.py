"""A loop of its own with Accelerate: `accelerate launch --cpu --num_processes 2
--mpirun_hostfile FILE accelerate_loop.py --out FOLDER`."""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    inputs = torch.randn(320, 10)
    data = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
    model = torch.nn.Sequential(torch.nn.Linear(10, 50), torch.nn.ReLU(), torch.nn.Linear(50, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
    losses = []
    for batch, labels in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(batch), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item().hex())
    seen = accelerator.gather_for_metrics(torch.tensor([accelerator.process_index])).tolist()
    place = {
        "rank": accelerator.process_index,
        "local_rank": accelerator.local_process_index,
        "world_size": accelerator.num_processes,
    }
    out.mkdir(parents=True, exist_ok=True)
    report = place | {"losses": losses, "seen": seen, "device": str(accelerator.device)}
    (out / f"rank{accelerator.process_index}.json").write_text(json.dumps(report))
    accelerator.end_training()


if __name__ == "__main__":
    main()
