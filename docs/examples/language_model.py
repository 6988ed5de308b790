r"""A causal language model of texts of unequal length: padded batches, and means over tokens rather
than texts.

Start it on a cluster, under MPI, or alone:

    srun --ntasks-per-node=4 \
      srunddp docs/examples/language_model.py --output-dir=runs/language_model
    mpirun -n 2 srunddp docs/examples/language_model.py
    python docs/examples/language_model.py

The texts are the paragraphs of Python's own manual, which its ``help()`` shows; a token is a byte
of UTF-8. Trainer is told what a step is, and by ``weight`` how many tokens of a batch count:
losses, gradients and figures are then means over the tokens of all ranks, wherever the long texts
are.
"""

from dataclasses import dataclass
from math import exp
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import srunddp

# in tokens: of a text to train with, and to validate with
PADDING = 0
CROPPED = 64
WHOLE = 256
Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Settings(srunddp.Config):
    lr: float = 0.005  # Adam's
    epochs: int = 4
    batch_size: int = 16
    max_grad_norm: float | None = 1.0


class LanguageModel(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width, PADDING)
        self.head = nn.Linear(width, 256)
        self.layers = nn.GRU(width, width, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Of shape (texts, length): the scores of each next token, (texts, length, 256)."""
        return self.head(self.layers(self.embedding(tokens))[0])


def padded(texts: list[Tensor]) -> Batch:
    tokens = pad_sequence([text[:WHOLE] for text in texts], batch_first=True, padding_value=PADDING)
    return {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}


def cropped(texts: list[Tensor]) -> Batch:
    """The same of a part of each text, which begins at random."""
    begins = [int(torch.randint(max(1, len(text) - CROPPED), ())) for text in texts]
    return padded(
        [text[begin : begin + CROPPED] for text, begin in zip(texts, begins, strict=True)]
    )


def step(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    scores = model(batch["inputs"])
    return cross_entropy(scores.transpose(1, 2), batch["labels"], ignore_index=PADDING), scores


def tokens(batch: Batch) -> Tensor:
    return (batch["labels"] != PADDING).sum()


# A count: divided by the tokens, as those are the weights.
def right(scores: Tensor, labels: Tensor) -> Tensor:
    return ((scores.argmax(dim=2) == labels) & (labels != PADDING)).sum()


def main() -> None:
    settings = srunddp.read_config(Settings)
    torch.manual_seed(0)
    texts = sorted(
        {" ".join(part.split()) for topic in topics.values() for part in topic.split("\n\n")}
    )
    data = [torch.tensor(list(text.encode())) for text in texts if len(text) > 1]
    train = [text for place, text in enumerate(data) if place % 10]
    val = data[::10]
    with srunddp.init() as world:
        model = LanguageModel()
        optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
        metrics = {"accuracy": right}
        trainer = srunddp.Trainer(
            model,
            optimizer,
            config=settings,
            world=world,
            step=step,
            weight=tokens,
            metrics=metrics,
        )
        figures = trainer.fit(train, val, collate=cropped, val_collate=padded)[-1].val
    if world.rank == 0:
        print(
            f"val perplexity {exp(figures['loss']):.2f}, accuracy"
            f" {100 * figures['accuracy']:.2f} %",
            flush=True,
        )


if __name__ == "__main__":
    main()
