"""mmengine's Runner, with the launcher that it has for torchrun."""

import os

import mmengine.dist
import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner
from record import leave, network, options, samples


class Net(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(
        self, inputs: torch.Tensor, labels: torch.Tensor, mode: str = "tensor"
    ) -> dict[str, torch.Tensor] | torch.Tensor:
        outputs: torch.Tensor = self.layers(inputs)
        if mode == "loss":
            return {"loss": torch.nn.functional.cross_entropy(outputs, labels)}
        return outputs


class Recording(Hook):
    """Keeps this rank's loss of each step."""

    def __init__(self) -> None:
        self.losses: list[str] = []

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: object = None,
        outputs: dict[str, torch.Tensor] | None = None,
    ) -> None:
        assert outputs is not None
        self.losses.append(float(outputs["loss"].item()).hex())


def main() -> None:
    out = options().out
    if not torch.cuda.is_available():
        # Its start takes a GPU for granted, also with Gloo.
        torch.cuda.set_device = lambda device: None
    torch.manual_seed(0)
    recording = Recording()
    runner = Runner(
        model=Net(),
        work_dir=str(out),
        launcher="pytorch",
        cfg={"model_wrapper_cfg": {"device_ids": None}},  # it has CPUs
        env_cfg={"dist_cfg": {"backend": "gloo"}},
        randomness={"seed": 0},
        train_dataloader={
            "batch_size": 16,
            "dataset": samples(),
            "sampler": {"type": "DefaultSampler", "shuffle": True},
            "collate_fn": {"type": "default_collate"},
        },
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}},
        train_cfg={"by_epoch": True, "max_epochs": 2},
        custom_hooks=[recording],
    )
    runner.train()
    mmengine.dist.barrier()
    leave(
        out,
        mmengine.dist.get_rank(),
        int(os.environ["LOCAL_RANK"]),
        mmengine.dist.get_world_size(),
        recording.losses,
        checkpoint=(out / "epoch_2.pth").is_file(),
        iterations=runner.iter,
    )


if __name__ == "__main__":
    main()
