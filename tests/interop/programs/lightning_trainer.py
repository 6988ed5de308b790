"""A LightningModule and its Trainer. Alone it starts its own ranks: `python lightning_trainer.py
--out FOLDER`.
"""

from pathlib import Path

import lightning
import torch
from lightning.pytorch.plugins.environments import MPIEnvironment, SLURMEnvironment
from record import leave, network, options, samples
from torch.utils.data import DataLoader

ENVIRONMENTS = {"slurm": SLURMEnvironment, "mpi": MPIEnvironment}


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()
        self.losses: list[str] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, labels = batch
        loss = torch.nn.functional.cross_entropy(self.layers(inputs), labels)
        self.losses.append(float(loss.item()).hex())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    layout = {"devices": {"type": int, "default": 2}, "nodes": {"type": int, "default": 1}}
    given = options(**layout, environment={"choices": ENVIRONMENTS})
    lightning.seed_everything(0)
    data = samples()
    model = Net()
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=given.devices,
        num_nodes=given.nodes,
        max_epochs=2,
        plugins=ENVIRONMENTS[given.environment]() if given.environment else None,
        default_root_dir=given.out,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=16, shuffle=True))
    launch = {
        "environment": type(trainer.strategy.cluster_environment).__name__,
        "started": len(trainer.strategy.launcher.procs),
    }
    place = trainer.global_rank, trainer.local_rank, trainer.world_size
    written = Path(trainer.checkpoint_callback.best_model_path).is_file()
    leave(
        given.out,
        *place,
        model.losses,
        node_rank=trainer.node_rank,
        checkpoint=written,
        launch=launch,
    )


if __name__ == "__main__":
    main()
