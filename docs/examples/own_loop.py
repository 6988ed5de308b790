"""A loop of one's own, without Trainer: a small GPT on made sentences, one process per GPU or CPU.

Upon USR1, USR2 or SIGTERM, or before the job's end, all ranks stop after the same step with a checkpoint, and Slurm
starts the job again. It goes on amid the epoch, and ends in the same bits as without an interruption, with as many
ranks. Start it on a cluster, under MPI, or alone:

    srun --ntasks-per-node=2 srunddp docs/examples/own_loop.py --output-dir=runs/own_loop
    mpirun -n 2 srunddp docs/examples/own_loop.py
    python docs/examples/own_loop.py

What a loop needs of srunddp are DistributedDataLoader, CheckpointManager and Preemption; the rest is torch's. The
sentences are put together from lists of words: what a hunter hunts follows from who it is, some words before.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import srunddp
from srunddp.train import CheckpointManager, DistributedDataLoader, Preemption

ADJECTIVES = ["small", "old", "quick", "hungry", "grey", "young", "patient", "silent"]
HUNTERS = ["fox", "owl", "cat", "heron", "pike", "otter", "lynx", "spider", "stoat", "osprey", "adder", "shrew"]
PREY = ["vole", "mouse", "sparrow", "frog", "roach", "crab", "hare", "fly", "rabbit", "trout", "lizard", "beetle"]
WORDS = ["<pad>", "the", "hunts", "at", "night", "dawn", *ADJECTIVES, *HUNTERS, *PREY]
NUMBERS = {word: number for number, word in enumerate(WORDS)}
PAD, FIRST_PREY, LONGEST = 0, NUMBERS[PREY[0]], 12


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What may be set by ``--key=value``.

    Attributes:
        batch_size: sentences per rank and step.
        lr: AdamW's learning rate.
        save_every_steps: steps from one checkpoint to the next.
        output_dir: where checkpoints are, and where it goes on from.
    """

    epochs: int = 4
    batch_size: int = 16
    lr: float = 1e-3
    seed: int = 0
    save_every_steps: int = 50
    output_dir: Path = Path("runs/own_loop")


def main() -> None:
    settings = srunddp.read_config(Settings)
    with srunddp.init() as world, Preemption(world) as preemption:
        perplexity, right = train(world, preemption, settings)
    if world.rank == 0:
        print(f"perplexity {perplexity:.3f}, prey right {100 * right:.2f} %, on made data", flush=True)


def train(world: srunddp.World, preemption: Preemption, settings: Settings) -> tuple[float, float]:
    """The perplexity, and the share of the prey that is predicted right."""
    torch.manual_seed(settings.seed)
    model = GPT().to(world.device)
    wrapped: nn.Module = DistributedDataParallel(model) if world.world_size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    how: dict[str, Any] = {"batch_size": settings.batch_size, "seed": settings.seed, "num_workers": 0}
    loader = DistributedDataLoader(Sentences(0, 4000), world, collate=padded, weight=count_targets, **how)
    held_out = DistributedDataLoader(Sentences(4000, 400), world, collate=padded, weight=count_targets, **how)
    checkpoints = CheckpointManager(settings.output_dir / "checkpoints", world)
    step = 0

    def save() -> Path:
        parts = {"model": model, "optimizer": optimizer, "loader": loader}
        return checkpoints.save(step, {"step": step, **{name: part.state_dict() for name, part in parts.items()}})

    torch.manual_seed(settings.seed + world.rank)  # each rank drops out other units
    if state := checkpoints.load("auto"):
        # The first backward adds the ranks' gradients in another order than all later ones.
        next_word_loss(wrapped, torch.ones(1, LONGEST, dtype=torch.long, device=world.device)).backward()
        optimizer.zero_grad()
        for name, part in {"model": model, "optimizer": optimizer, "loader": loader}.items():
            part.load_state_dict(state[name])
        step = state["step"]
        checkpoints.restore_rng(state, settings.seed)

    for epoch in range(loader.state_dict()["epoch"], settings.epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            # The mean over the words of all ranks: scale is this rank's part of them, by their number.
            (next_word_loss(wrapped, batch.data) * batch.scale).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            srunddp.heartbeat()
            if preemption.should_stop():
                checkpoints.wait()  # for one that is still being written
                path = save()
                checkpoints.wait()
                preemption.stop(step, path)
            if step % settings.save_every_steps == 0:
                save()
        perplexity, right = evaluate(model, held_out, world)
        if world.rank == 0:
            print(f"epoch {epoch + 1}: perplexity {perplexity:.3f}, prey right {100 * right:.2f} %", flush=True)
    srunddp.heartbeat(last=True)
    checkpoints.wait()
    return evaluate(model, held_out, world)


def next_word_loss(model: nn.Module, words: Tensor) -> Tensor:
    """The mean over all words but each sentence's first."""
    return nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten(), ignore_index=PAD)


def count_targets(words: Tensor) -> int:
    """Over how many words the loss of a batch is the mean."""
    return int((words[:, 1:] != PAD).sum())


@torch.no_grad()
def evaluate(model: nn.Module, loader: DistributedDataLoader, world: srunddp.World) -> tuple[float, float]:
    """Over the sentences of all ranks."""
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=world.device)
    for batch in loader:
        if batch.samples:  # else it is another rank's, which counts it
            targets = batch.data[:, 1:]
            prey = targets >= FIRST_PREY
            right = (model(batch.data[:, :-1]).argmax(2) == targets)[prey].sum()
            loss = next_word_loss(model, batch.data)
            sums += torch.stack([loss * batch.weight, torch.full_like(loss, batch.weight), right, prey.sum()])
    model.train()
    if world.world_size > 1:
        dist.all_reduce(sums)
    loss, words, right, prey = sums.tolist()
    return math.exp(loss / words), right / prey


class Sentences(Dataset[Tensor]):
    """Sentences of 6 to 10 words."""

    def __init__(self, first: int, number: int) -> None:
        self.first, self.number = first, number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Tensor:
        if index >= self.number:
            raise IndexError(index)
        draw = random.Random(self.first + index)
        hunter = draw.randrange(len(HUNTERS))
        words = ["the", *draw.sample(ADJECTIVES, draw.randint(0, 2)), HUNTERS[hunter]]
        words += ["hunts", "the", *draw.sample(ADJECTIVES, draw.randint(0, 1)), PREY[hunter]]
        words += ["at", draw.choice(["night", "dawn"])]
        return torch.tensor([NUMBERS[word] for word in words])


def padded(sentences: list[Tensor]) -> Tensor:
    """One row each, as long as the longest."""
    return pad_sequence(sentences, batch_first=True, padding_value=PAD)


class GPT(nn.Module):
    """Two causal layers of a transformer: for each word of ``[batch, length]`` the logits of the next."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(len(WORDS), width), nn.Embedding(LONGEST, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(WORDS))

    def forward(self, words: Tensor) -> Tensor:
        length = words.shape[1]
        hidden = self.words(words) + self.places(torch.arange(length, device=words.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=words.device)
        return self.head(self.layers(hidden, mask, is_causal=True))


if __name__ == "__main__":
    main()
