"""A loop of its own with Accelerate: `accelerate launch --cpu --num_processes 2
--mpirun_hostfile FILE accelerate_loop.py --out FOLDER`."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from record import leave, network, options, samples
from torch.utils.data import DataLoader


def main() -> None:
    out = options().out
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    data = samples()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=8, shuffle=True)
    )
    losses = []
    for batch, labels in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(batch), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.item()).hex())
    seen = accelerator.gather_for_metrics(torch.tensor([accelerator.process_index])).tolist()
    place = accelerator.process_index, accelerator.local_process_index, accelerator.num_processes
    leave(out, *place, losses, seen=seen, device=str(accelerator.device))
    accelerator.end_training()


if __name__ == "__main__":
    main()
