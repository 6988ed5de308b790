"""--stall-timeout: what torch.compile and a first step take stays below it."""

from __future__ import annotations

from pathlib import Path

import pytest

from srunddp.supervisor.limits import STALL_TIMEOUT
from tests.gpu.ranks import ran
from tests.gpu.requirements import need_tool

# 6e8 parameters
LAYERS = 12
WIDTH = 2048
LENGTH = 512
LIMIT = 580.0

COMPILED = """
from torch import nn
from torch.utils.data import TensorDataset
from srunddp.train import Callback, Config, DDPConfig, DataLoaderConfig, Trainer

class Longest(Callback):
    before, longest = time.monotonic(), 0.0

    def on_step(self, trainer, step, loss):
        now = time.monotonic()
        self.longest, self.before = max(self.longest, now - self.before), now

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, LAYERS), nn.Linear(WIDTH, 16)

    def forward(self, inputs):
        return self.head(self.layers(inputs).mean(1))

torch._inductor.config.max_autotune = MAX_AUTOTUNE
world = srunddp.init()
model = Model()
data = [TensorDataset(torch.randn(n, LENGTH, WIDTH), torch.arange(n) % 16) for n in (16, 11)]
config = Config(
    epochs=2, batch_size=4, precision="bf16", tensorboard=False, compile=True,
    dataloader=DataLoaderConfig(num_workers=0),
)
waits = Longest()
trainer = Trainer(
    model,
    torch.optim.SGD(model.parameters(), lr=0.01),
    nn.CrossEntropyLoss(),
    config,
    world=world,
    callbacks=[waits],
)
trainer.fit(*data)
say("longest", waits.longest)
world.close()
"""


@pytest.mark.parametrize("autotune", [False, True])
def test_the_first_steps_of_a_compiled_model_are_no_stall(autotune: bool, tmp_path: Path) -> None:
    """Batches of another size in evaluation compile it anew."""
    need_tool("cc")  # of Triton
    sizes = f"LAYERS, WIDTH, LENGTH, MAX_AUTOTUNE = {LAYERS}, {WIDTH}, {LENGTH}, {autotune}\n"
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    ran(tmp_path, sizes + COMPILED, backend="gloo", variables=variables, limit=LIMIT)
    longest = max(float((tmp_path / f"longest.{rank}").read_text()) for rank in range(2))
    print(f"longest time between two steps: {longest:.0f} s")
    assert longest < STALL_TIMEOUT
