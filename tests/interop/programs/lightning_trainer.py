"""A LightningModule and its Trainer. Alone it starts its own ranks: `python lightning_trainer.py --out FOLDER`."""

import argparse
import json
from pathlib import Path

import lightning
import torch
from lightning.pytorch.plugins.environments import MPIEnvironment, SLURMEnvironment
from torch.utils.data import DataLoader, TensorDataset

ENVIRONMENTS = {"slurm": SLURMEnvironment, "mpi": MPIEnvironment}


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(10, 50), torch.nn.ReLU(), torch.nn.Linear(50, 2))
        self.losses: list[str] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, labels = batch
        loss = torch.nn.functional.cross_entropy(self.layers(inputs), labels)
        self.losses.append(loss.item().hex())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--environment", choices=ENVIRONMENTS)
    options = parser.parse_args()
    lightning.seed_everything(0)
    inputs = torch.randn(320, 10)
    data = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
    model = Net()
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=options.devices,
        num_nodes=options.nodes,
        max_epochs=2,
        plugins=ENVIRONMENTS[options.environment]() if options.environment else None,
        default_root_dir=options.out,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=16, shuffle=True))
    record = {
        "rank": trainer.global_rank,
        "local_rank": trainer.local_rank,
        "node_rank": trainer.node_rank,
        "world_size": trainer.world_size,
        "losses": model.losses,
        "checkpoint": Path(trainer.checkpoint_callback.best_model_path).is_file(),
        "launch": {
            "environment": type(trainer.strategy.cluster_environment).__name__,
            "started": len(trainer.strategy.launcher.procs),
        },
    }
    (options.out / f"rank{trainer.global_rank}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
