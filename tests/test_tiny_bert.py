"""tiny_bert.py: the lab's Trainer learns, asks nobody, and reads AG News as it is distributed."""

from __future__ import annotations

import importlib.util
import json
import re
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest

from srunddp.errors import ConfigError
from tests.conftest import PROGRAMS, ROOT, missing
from tests.examples import loaded
from tests.support.starting import ended, slurm, started, write

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "docs" / "examples" / "tiny_bert.py"
FIGURE = r"val accuracy (\d+\.\d\d) %, loss \d+\.\d{4}"


@pytest.fixture(scope="module", autouse=True)
def transformers() -> None:
    if not importlib.util.find_spec("transformers"):
        missing("transformers -> the extra hf")


@pytest.fixture(scope="module")
def tiny_bert() -> ModuleType:
    return loaded("tiny_bert")


def start(folder: Path, *options: str, ranks: int) -> list[str]:
    """What each rank prints, under srunddp; none of them reaches another node."""
    command = ("--quiet", "--offline", EXAMPLE, *options)
    shared = {
        "ATTEMPTS": str(folder / "attempts"),
        "PYTHONPATH": str(PROGRAMS / "no_network"),
        "OMP_NUM_THREADS": "1",
    }
    shared["HF_HOME"] = str(folder / "cache")
    places = [slurm(rank, ranks) if ranks > 1 else {} for rank in range(ranks)]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(started(*command, folder=folder, **shared, **place))
            for place in places
        ]
        found = [ended(process) for process in processes]
    assert [code for code, *_ in found] == [0] * ranks, found
    return [out for _, out, _ in found]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder that two ranks ran in, with its output in `out`, and what they printed."""
    folder = tmp_path_factory.mktemp("two_ranks")
    return folder, start(
        folder, f"--output-dir={folder / 'out'}", "--subset", "2000", "--epochs", "3", ranks=2
    )


def test_two_ranks_learn_the_topics_and_say_data_is_generated(
    saved: tuple[Path, list[str]],
) -> None:
    last = saved[1][0].splitlines()[-1]
    figure = re.fullmatch(FIGURE + ", on made data", last)
    assert figure, last
    assert float(figure[1]) >= 95
    assert saved[1][1] == "", "rank 0 alone prints"


def test_the_ranks_train_together(saved: tuple[Path, list[str]]) -> None:
    """900 rows for each rank in batches of 8 are 113 steps an epoch; each for itself would make
    225.
    """
    epochs = [
        json.loads(line.replace("'", '"'))
        for line in saved[1][0].splitlines()
        if "'grad_norm'" in line
    ]
    assert len(epochs) == 3 * 113 // 10


def test_the_lab_s_model_is_what_rank_0_saves(saved: tuple[Path, list[str]]) -> None:
    config = json.loads((saved[0] / "out" / "config.json").read_text())
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    assert [config[name] for name in (*sizes, "max_position_embeddings")] == [64, 2, 2, 256, 256]
    assert sorted(config["label2id"].values()) == [0, 1, 2, 3]
    assert {"model.safetensors", "tokenizer.json"} <= {
        file.name for file in (saved[0] / "out").iterdir()
    }


def test_no_server_is_asked_and_nothing_else_is_written(saved: tuple[Path, list[str]]) -> None:
    assert [file.name for file in saved[0].iterdir()] == ["out"]


def test_ag_news_and_a_tokenizer_are_read_from_files(
    saved: tuple[Path, list[str]], tmp_path: Path
) -> None:
    rows = [
        '"3","Oil ""climbs"" again","Shares, bank and merger."',
        '"2","A goal","The coach and the referee."',
    ] * 20
    data = write(tmp_path / "train.csv", "\n".join(rows) + "\n")
    options = [
        f"--data-file={data}",
        f"--test-file={data}",
        f"--tokenizer={saved[0] / 'out'}",
        "--epochs=1",
    ]
    [printed] = start(tmp_path, *options, ranks=1)
    assert re.fullmatch(FIGURE, printed.splitlines()[-1]), printed
    assert [file.name for file in tmp_path.iterdir()] == ["train.csv"]


def test_generated_rows_have_ag_news_format_and_are_the_same(tiny_bert: ModuleType) -> None:
    text = tiny_bert.made_csv(400)
    assert text == tiny_bert.made_csv(400)
    rows = tiny_bert.parse(text.splitlines(), "made data")
    assert {topic for topic, _ in rows} == {0, 1, 2, 3}
    assert all(re.fullmatch(r'"[1-4]","[^"]+","[^"]+"', line) for line in text.splitlines())


@pytest.mark.parametrize(
    "line",
    [
        "Class Index,Title,Description",
        "5,a title,a text",
        "1,a title",
        '"1","a title","a text","more"',
        "",
    ],
)
def test_a_row_that_is_not_ag_news_is_named(tiny_bert: ModuleType, line: str) -> None:
    with pytest.raises(
        ConfigError, match=r"news\.csv, row 2: .*expected class 1 to 4, title, description"
    ):
        tiny_bert.parse(["1,a title,a text", line], "news.csv")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "0 rows to train on, 0 to test with"),
        (b"1,a title,a text\n", "0 rows to train on, 1 to test with"),
        (
            "1,caf\u00e9,a text\n".encode("latin-1"),
            r"news\.csv: 'utf-8' codec.*expected AG News as CSV in UTF-8",
        ),
        (b'1,a title,"' + 140_000 * b"x" + b'"\n', r"news\.csv: field larger than field limit"),
    ],
    ids=["empty", "one row", "latin-1", "an open quote"],
)
def test_a_file_that_cannot_be_used_is_refused(
    tiny_bert: ModuleType, tmp_path: Path, content: bytes, words: str
) -> None:
    (tmp_path / "news.csv").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        tiny_bert.read(tiny_bert.Settings(data_file=tmp_path / "news.csv"))


@pytest.mark.parametrize("name", ["subset", "epochs", "batch_size", "lr"])
def test_a_setting_that_trains_nothing_is_refused(tiny_bert: ModuleType, name: str) -> None:
    tiny_bert.check(tiny_bert.Settings())
    with pytest.raises(ConfigError, match=f"{name}=0; expected more than 0"):
        tiny_bert.check(tiny_bert.Settings(**{name: 0}))


def test_missing_files_and_an_impossible_folder_are_refused(
    tiny_bert: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"train\.csv: No such file"):
        tiny_bert.load(tmp_path / "train.csv", None)
    with pytest.raises(ConfigError, match=r"tokenizer=.*: none there; expected a saved one"):
        tiny_bert.load_tokenizer(None, tmp_path, [])
    file = write(tmp_path / "file", "")
    with pytest.raises(ConfigError, match=r"file: File exists; .* -> correct --output-dir"):
        tiny_bert.make(file)
