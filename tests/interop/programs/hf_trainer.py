"""A tiny BERT and Hugging Face's Trainer: `accelerate launch --cpu --num_processes 2
--mpirun_hostfile FILE hf_trainer.py --out FOLDER`."""

from typing import Any

import datasets
import torch
from record import leave, options
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

WORDS = 50
LENGTH = 12


class Recording(Trainer):
    """Keeps this rank's loss of each step."""

    losses: list[str]

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        loss = super().training_step(*arguments, **options)
        self.losses = [*getattr(self, "losses", []), float(loss.item()).hex()]
        return loss


def made() -> datasets.Dataset:
    """Texts of two kinds, the second without the lower half of the words."""
    torch.manual_seed(0)
    labels = torch.randint(2, (320,))
    texts = torch.randint(1, WORDS // 2, (320, LENGTH)) + labels.unsqueeze(1) * WORDS // 2
    data = datasets.Dataset.from_dict(
        {"text": [" ".join(map(str, text)) for text in texts.tolist()], "labels": labels}
    )
    return data.map(
        lambda row: {"input_ids": [int(word) for word in row["text"].split()]}
    ).with_format("torch")


def main() -> None:
    out = options().out
    set_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=LENGTH,
        )
    )
    arguments = TrainingArguments(
        output_dir=str(out),
        num_train_epochs=1,
        per_device_train_batch_size=8,
        learning_rate=5e-3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Recording(model=model, args=arguments, train_dataset=made())
    trainer.train()
    place = arguments.process_index, arguments.local_process_index, arguments.world_size
    leave(out, *place, trainer.losses, device=str(arguments.device))


if __name__ == "__main__":
    main()
