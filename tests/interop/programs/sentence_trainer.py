"""sentence-transformers: its Trainer on a bag of words, with a loss that takes the sentences of all
ranks as negatives.
"""

from typing import Any

import datasets
import torch
from record import leave, options
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import BoW, Dense
from transformers import set_seed

WORDS = 60
LENGTH = 6
STEPS = 20
BATCH = 8


class Recording(SentenceTransformerTrainer):
    """Keeps this rank's loss of each step."""

    losses: list[str]

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*arguments, **options)
        self.losses = [*getattr(self, "losses", []), float(loss.item()).hex()]
        return loss


def made(ranks: int) -> datasets.Dataset:
    """Pairs of sentences: the second has the first one's words, each in another form."""
    torch.manual_seed(0)
    words = torch.randint(WORDS // 2, (STEPS * BATCH * ranks, LENGTH)).tolist()
    return datasets.Dataset.from_dict(
        {
            "anchor": [" ".join(f"word{word}" for word in row) for row in words],
            "positive": [" ".join(f"form{word}" for word in row) for row in words],
        }
    )


def main() -> None:
    out = options().out
    set_seed(0)
    names = [f"{kind}{number}" for kind in ("word", "form") for number in range(WORDS // 2)]
    bag = BoW(vocab=names)
    model = SentenceTransformer(modules=[bag, Dense(len(names), 16)], device="cpu")
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(out),
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        learning_rate=2e-2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Recording(
        model=model,
        args=arguments,
        train_dataset=made(arguments.world_size),
        loss=MultipleNegativesRankingLoss(model, gather_across_devices=True),
    )
    trainer.train()
    place = arguments.process_index, arguments.local_process_index, arguments.world_size
    leave(out, *place, trainer.losses, device=str(arguments.device))


if __name__ == "__main__":
    main()
