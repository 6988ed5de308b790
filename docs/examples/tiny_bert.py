"""News sorted into four topics by a tiny BERT and Hugging Face's Trainer, one process per GPU or,
as here, per CPU.

Start it on a cluster, under MPI, or alone:

    srun --ntasks-per-node=2 srunddp --offline docs/examples/tiny_bert.py --subset 2000 --epochs 3
    mpirun -n 2 srunddp docs/examples/tiny_bert.py
    python docs/examples/tiny_bert.py

``--data-file=train.csv --test-file=test.csv`` reads AG News as it is distributed: class (1 to 4),
title, description. Without a test file every tenth row is held out. Without any, sentences put
together from four lists of words stand in, in the same format: what is learned of them says nothing
about AG News.

``--tokenizer=DIR`` reads a tokenizer that was saved before; otherwise one is trained on the texts.
``--output-dir=DIR`` has rank 0 save model and tokenizer there. No server is asked. It needs ``pip
install "srunddp[hf]"``.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import random
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

import srunddp
from srunddp.errors import ConfigError
from srunddp.train import import_torchvision

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
with contextlib.suppress(ImportError):
    # Transformers imports it wherever it is installed, and fails with one built for another torch.
    import_torchvision()

import transformers
from tokenizers import BertWordPieceTokenizer

TOPICS = {
    "World": (
        "minister treaty embassy border election parliament ceasefire envoy refugees summit"
        " coalition protest"
    ),
    "Sports": (
        "striker innings playoff coach goalkeeper marathon referee champion stadium quarterback"
        " medal tournament"
    ),
    "Business": (
        "shares merger profit investors oil bank quarterly dividend retailer economy bond takeover"
    ),
    "Sci/Tech": (
        "software satellite chip browser spacecraft virus genome server telescope encryption laser"
        " wireless"
    ),
}
COMMON = "after the a new on of said for with week two may report plan first over will more as in"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What may be set, as in every example by ``--key=value``.

    Attributes:
        data_file, test_file: CSV of class, title, description.
        subset: read no more than so many rows of each; none for all.
        tokenizer: folder of one that was saved.
        output_dir: where rank 0 saves.
        batch_size: of each rank.
        lr: AdamW's learning rate at its highest.
    """

    data_file: Path | None = None
    test_file: Path | None = None
    subset: int | None = 2000
    tokenizer: Path | None = None
    output_dir: Path | None = None
    epochs: int = 3
    batch_size: int = 8
    lr: float = 3e-3


class Heartbeat(transformers.TrainerCallback):
    """Tells srunddp of each step: it notices a stall, and ``srunddp report`` counts them."""

    def on_step_end(self, *_: Any, **__: Any) -> None:
        srunddp.heartbeat()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        srunddp.heartbeat(last=True)


def main() -> None:
    settings = srunddp.read_config(Settings)
    check(settings)
    train, test = read(settings)
    with srunddp.init() as world:
        if settings.output_dir and world.rank == 0:
            make(settings.output_dir)
        transformers.utils.logging.disable_progress_bar()
        transformers.set_seed(0)  # the same weights on all ranks
        tokenizer = load_tokenizer(world, settings.tokenizer, [text for _, text in train])
        trainer = transformers.Trainer(
            model=tiny_bert(tokenizer),
            args=arguments(settings, world),
            train_dataset=encode(tokenizer, train),
            eval_dataset=encode(tokenizer, test),
            processing_class=tokenizer,  # pads each batch, and is saved with the model
            compute_metrics=accuracy,
            callbacks=[Heartbeat()],
        )
        if world.rank > 0:
            trainer.remove_callback(transformers.PrinterCallback)  # it prints on each node
        trainer.train()
        figures = trainer.evaluate()
        if settings.output_dir:
            trainer.save_model()  # on rank 0 alone
    if world.rank == 0:
        if settings.data_file:
            made = ""
        else:
            made = ", on made data"
        print(
            f"val accuracy {100 * figures['eval_accuracy']:.2f} %, loss"
            f" {figures['eval_loss']:.4f}{made}",
            flush=True,
        )


def arguments(settings: Settings, world: srunddp.World) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        # Made at once; written to by save_model() alone.
        output_dir=str(settings.output_dir or tempfile.gettempdir()),
        # Without a GPU, what makes accelerate take the ranks for a world.
        use_cpu=world.device.type == "cpu",
        ddp_find_unused_parameters=False,
        # For language models; a classifier's loss it multiplies by the ranks.
        average_tokens_across_devices=False,
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        learning_rate=settings.lr,
        warmup_steps=0.1,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=world.device.type != "cpu",
    )


def tiny_bert(tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.PreTrainedModel:
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        id2label=dict(enumerate(TOPICS)),
        label2id={topic: number for number, topic in enumerate(TOPICS)},
    )
    return transformers.BertForSequenceClassification(config)


def load_tokenizer(
    world: srunddp.World, folder: Path | None, texts: list[str]
) -> transformers.PreTrainedTokenizerFast:
    """The one that is in the folder, or WordPiece as BERT has it, trained by rank 0 for all."""
    if folder:
        if not folder.is_dir():
            raise ConfigError(
                f"tokenizer={folder}: no folder",
                expected="a saved tokenizer",
                hint="correct the path",
            )
        try:
            return transformers.AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"tokenizer={folder}: none there", expected="a saved one", hint="correct it"
            ) from error
    trained = [wordpiece(texts) if world.rank == 0 else {}]
    dist.broadcast_object_list(trained)
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
    pieces = BertWordPieceTokenizer(trained[0])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=pieces._tokenizer, **names)


def wordpiece(texts: list[str]) -> dict[str, int]:
    """A vocabulary trained on the texts."""
    pieces = BertWordPieceTokenizer()
    letters = sorted(
        {letter for text in texts for letter in pieces.normalize(text) if not letter.isspace()}
    )
    # The trainer numbers other letters' pieces in any order, which decides where two are equally
    # frequent.
    fixed = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"##{letter}" for letter in letters)]
    pieces.train_from_iterator(texts, vocab_size=8000, special_tokens=fixed, show_progress=False)
    return pieces.get_vocab()


def encode(
    tokenizer: transformers.PreTrainedTokenizerFast, rows: list[tuple[int, str]]
) -> list[dict[str, Any]]:
    tokens = tokenizer([text for _, text in rows], truncation=True, max_length=256)
    return [
        {"input_ids": ids, "attention_mask": mask, "label": topic}
        for ids, mask, (topic, _) in zip(
            tokens["input_ids"], tokens["attention_mask"], rows, strict=True
        )
    ]


def accuracy(prediction: transformers.EvalPrediction) -> dict[str, float]:
    return {
        "accuracy": float((prediction.predictions.argmax(axis=-1) == prediction.label_ids).mean())
    }


def check(settings: Settings) -> None:
    for name in ("subset", "epochs", "batch_size", "lr"):
        value = getattr(settings, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{name}={value}", expected="more than 0", hint="correct it")


def make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder}: {error.strerror}", expected="a folder", hint="correct --output-dir"
        ) from None


def read(settings: Settings) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Topics (0 to 3) with texts, to train on and to test with."""
    if settings.data_file is None:
        rows = parse(io.StringIO(made_csv(settings.subset or 2000)), "made data")
    else:
        rows = load(settings.data_file, settings.subset)
    if settings.test_file:
        train = rows
        test = load(settings.test_file, settings.subset)
    else:
        train = [row for place, row in enumerate(rows) if place % 10]
        test = rows[::10]
    if not train or not test:
        found = f"{len(train)} rows to train on, {len(test)} to test with"
        raise ConfigError(
            found, expected="some of both", hint="name a file with more rows, or leave out --subset"
        )
    return train, test


def load(path: Path, subset: int | None) -> list[tuple[int, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            return parse(lines, str(path))[:subset]
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}", expected="AG News as CSV", hint="correct the path"
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"{path}: {error}", expected="AG News as CSV in UTF-8", hint="convert or correct it"
        ) from None


def parse(lines: Iterable[str], name: str) -> list[tuple[int, str]]:
    rows = []
    for number, row in enumerate(csv.reader(lines), start=1):
        if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
            found = f"{name}, row {number}: {','.join(row)[:60]}"
            raise ConfigError(
                found, expected="class 1 to 4, title, description", hint="remove or correct it"
            )
        rows.append((int(row[0]) - 1, f"{row[1]} {row[2]}"))
    return rows


def made_csv(rows: int) -> str:
    """Titles and descriptions in which one topic's words are more frequent than the others'; the
    same on all ranks.
    """
    chance = random.Random(0)
    file = io.StringIO()
    vocabulary = [words.split() for words in TOPICS.values()]
    common = COMMON.split()
    writer = csv.writer(file, quoting=csv.QUOTE_ALL)
    for _ in range(rows):
        topic = chance.randrange(len(vocabulary))
        words = [
            chance.choice(common if chance.random() < 0.5 else vocabulary[topic]) for _ in range(20)
        ]
        words[chance.randrange(20)] = chance.choice(chance.choice(vocabulary))
        writer.writerow(
            [topic + 1, " ".join(words[:5]).capitalize(), " ".join(words[5:]).capitalize() + "."]
        )
    return file.getvalue()


if __name__ == "__main__":
    main()
