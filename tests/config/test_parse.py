"""Settings from YAML and the command line."""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from srunddp.config.parse import read_config, save_config
from srunddp.config.schema import NULLS, fields_of, text_of, value_of
from srunddp.errors import ConfigError
from srunddp.train.config import Config
from tests.conftest import ROOT
from tests.support.facts import tells
from tests.support.starting import python

pytestmark = pytest.mark.slow  # srunddp.train imports torch


@dataclass
class Settings:
    """A user's own.

    Attributes:
        lr: of the optimizer,
            as it was given.
        data, cache: folders.
    """

    lr: float = 1e-3
    data: Path = Path("data")
    cache: Path | None = None
    sizes: tuple[int, float] = (1, 2.0)
    names: list[str] = field(default_factory=list)
    limit: int | str = 0
    pace: float | str = 1.0
    level: Literal[1, 2, "no"] = 1
    train: Config = field(default_factory=lambda: Config(epochs=7))
    here: int = field(init=False, default=3)


@dataclass(frozen=True, kw_only=True)
class Required:
    name: str
    train: Config = field(default_factory=Config)


@pytest.fixture
def file(tmp_path: Path) -> typing.Callable[..., str]:
    def write(text: str, name: str = "settings.yaml") -> str:
        (tmp_path / name).write_text(text)
        return f"--config={tmp_path / name}"

    return write


@dataclass(frozen=True, kw_only=True)
class WithRanks(Config):
    ranks: tuple[int, ...] = (0,)


def refused(*arguments: str, kind: type = WithRanks) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(kind, arguments)
    message = str(caught.value)
    assert "; expected " in message
    assert " -> " in message
    assert message.isprintable()
    return message


def test_nothing_given_is_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without arguments the program's own are read."""
    assert read_config(Config, []) == Config()
    assert read_config(Settings, []) == Settings()
    assert read_config(Settings, []).train.epochs == 7
    monkeypatch.setattr("sys.argv", ["train.py", "--epochs=4"])
    assert read_config(Config).epochs == 4


# Every field, both ways.


def strategy(kind: Any, *, cli: bool) -> st.SearchStrategy[Any]:
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        fields = {one.name: hints[one.name] for one in dataclasses.fields(kind) if one.init}
        return st.builds(kind, **{name: strategy(hint, cli=cli) for name, hint in fields.items()})
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return st.sampled_from(arguments)
    if get_origin(kind) in (UnionType, typing.Union):
        members = st.one_of(*(strategy(member, cli=cli) for member in arguments))
        # On the command line nothing tells a text that is null's name from null.
        return members.filter(
            lambda value: not (cli and isinstance(value, str) and value.strip().lower() in NULLS)
        )
    if get_origin(kind) is tuple and arguments[1:] == (...,):
        return st.lists(strategy(arguments[0], cli=cli), max_size=3).map(tuple)
    if get_origin(kind) is tuple:
        return st.tuples(*(strategy(argument, cli=cli) for argument in arguments))
    if get_origin(kind) is list:
        return st.lists(strategy(arguments[0], cli=cli), max_size=3)
    # Nobody types control characters, and YAML's flow style folds some of them.
    letters = st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"])
    texts = st.text(letters, max_size=8) | st.sampled_from(
        ["no", "off", "1e-3", "10:15", "123", "null", "none", "a, b", "[", "~"]
    )
    simple: dict[type, st.SearchStrategy[Any]] = {
        NoneType: st.none(),
        bool: st.booleans(),
        int: st.integers(),
        str: texts,
        float: st.floats(allow_nan=False) | st.just(1e-3),
        Path: texts.filter(lambda t: "\0" not in t).map(Path),
    }
    return simple[kind]


def spelled(config: Any) -> list[str]:
    """The command line of all its leaves."""
    arguments = []
    for name in fields_of(type(config)):
        value = config
        for part in name.split("."):
            value = getattr(value, part)
        if isinstance(value, tuple):
            arguments.append(
                f"--{name}={yaml.safe_dump(list(value), default_flow_style=True, width=10**6)}"
            )
        else:
            arguments.append(f"--{name}={text_of(value)}")
    return arguments


@given(strategy(Config, cli=True))
def test_the_command_line_gives_what_the_file_gives(
    tmp_path_factory: pytest.TempPathFactory, config: Config
) -> None:
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    save_config(path, config)
    assert (
        read_config(Config, [f"--config={path}"]) == read_config(Config, spelled(config)) == config
    )


@given(strategy(Settings, cli=False))
def test_a_saved_file_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, config: Settings
) -> None:
    path = tmp_path_factory.getbasetemp() / "settings.yaml"
    save_config(path, config)
    again = read_config(Settings, [f"--config={path}"])
    assert again == config
    assert type(again.limit) is type(config.limit)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("resume", "auto", "auto"),
        ("resume", "10:15", "10:15"),
        ("output_dir", "123", "123"),
        ("output_dir", "no", "no"),
        ("output_dir", "1e-3", "1e-3"),
        ("output_dir", "2026-11-21", "2026-11-21"),
        ("output_dir", "null", None),
        ("output_dir", "none", None),
        ("output_dir", "", None),
        ("resume", "", ""),
        ("scale_lr", "no", "no"),
        ("ddp.comm_hook", "none", "none"),
        ("max_grad_norm", "1e-3", 1e-3),
        ("max_grad_norm", ".inf", float("inf")),
        ("max_grad_norm", "1", 1.0),
        ("max_grad_norm", "null", None),
        ("seed", "010", 10),
        ("seed", "-1", -1),
        ("fused", "off", False),
        ("fused", "True", True),
        ("ranks", "0,1", (0, 1)),
        ("ranks", "[0, 1]", (0, 1)),
        ("ranks", "3", (3,)),
        ("ranks", "[]", ()),
        ("preemption.signals", "USR1, off", ("USR1", "off")),
    ],
)
def test_the_type_says_what_a_text_means(
    file: typing.Callable[..., str], key: str, text: str, value: Any
) -> None:
    def leaf(config: Any) -> Any:
        for part in key.split("."):
            config = getattr(config, part)
        return config

    for arguments in ([f"--{key}={text}"], [f"--{key}", text], [file(f"{key}: {text}\n")]):
        found = leaf(read_config(WithRanks, arguments))
        assert found == value
        assert type(found) is type(value)


def test_yamls_marks_are_text_on_the_command_line_as_quoted() -> None:
    assert read_config(Config, ["--resume=a: [b] # 'c"]).resume == "a: [b] # 'c"
    assert read_config(Config, ["--resume", "-x=y"]).resume == "-x=y"
    for text, kind, value in (
        ("'null'", str | None, "null"),
        ("'a,b'", tuple[str, ...], ("a,b",)),
    ):
        node = yaml.compose(text)
        assert node is not None
        assert value_of(node, kind) == value


# Which wins.


def test_the_command_line_wins_over_files_and_later_files(file: typing.Callable[..., str]) -> None:
    """Whoever a file belongs to: it is read by rules that execute nothing."""
    one = file("epochs: 1\nbatch_size: 1\ncompile: true\nddp: {comm_hook: fp16}\n", "one.yaml")
    if os.geteuid() == 0:
        os.chown(one.partition("=")[2], 12345, 12345)
    two = file("batch-size: 2\nddp.comm_hook: bf16\n", "two.yaml")
    config = read_config(Config, ["--epochs=9", one, two])
    assert (config.epochs, config.batch_size, config.ddp.comm_hook, config.compile) == (
        9,
        2,
        "bf16",
        True,
    )


def test_dashes_are_underscores_and_dots_reach_nested_keys(file: typing.Callable[..., str]) -> None:
    assert read_config(Config, ["--batch-size=5", "--ddp.bucket-cap-mb=9"]).ddp.bucket_cap_mb == 9
    assert read_config(Config, [file("ddp:\n  bucket-cap-mb: 7\n")]).ddp.bucket_cap_mb == 7
    found = read_config(
        Settings,
        [file("lr: 1e-4\ntrain:\n  ddp: {comm_hook: fp16}\n"), "--train.dataloader.num_workers=2"],
    )
    assert (found.lr, found.train.ddp.comm_hook, found.train.dataloader.num_workers) == (
        1e-4,
        "fp16",
        2,
    )
    assert found.train.epochs == 7  # the user's default, not Config's


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "ddp:\n"])
def test_an_empty_file_sets_nothing(file: typing.Callable[..., str], text: str) -> None:
    assert read_config(Config, [file(text)]) == Config()


# What is refused.


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("--epoch=3", ["--epoch is an unknown key", "did you mean epochs?"]),
        ("--comm_hok=fp16", ["did you mean ddp.comm_hook?"]),
        ("--ddp.num_worker=2", ["did you mean dataloader.num_workers?"]),
        ("--conf=x", ["did you mean config?"]),
        ("--epochs=three", ["--epochs is 'three'; expected an integer -> "]),
        ("--epochs=10:15", ["'10:15'; expected an integer"]),
        ("--epochs=3.0", ["expected an integer"]),
        ("--max_grad_norm=big", ["expected a number or null"]),
        ("--fused=1", ["expected true or false"]),
        ("--fused=ture", ["did you mean true?"]),
        ("--precision=fp61", ["expected fp32, bf16 or fp16 -> did you mean fp16?"]),
        ("--ranks=[0, x]", ["--ranks is 'x'; expected a list, each an integer"]),
        ("--ranks=[0", ["'[0'; expected a list"]),
        ("--ddp=3", ["--ddp stands for several keys; expected one of them, such as ddp."]),
        ("--epochs", ["--epochs without a value"]),
        ("epochs=3", ["the argument 'epochs=3'; expected --key=value"]),
        ("-e", ["the argument '-e'"]),
        ("--", ["the argument '--'"]),
        ("--=3", ["is an unknown key"]),
        (
            "--config=/nowhere/x.yaml",
            ["/nowhere/x.yaml: No such file or directory", "correct --config"],
        ),
        ("--config=/", ["/: Is a directory"]),
    ],
)
def test_a_wrong_argument_says_what_was_expected(argument: str, parts: list[str]) -> None:
    message = refused(argument)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        (
            "epochs: 3\nddp:\n  hok: fp16\n",
            3,
            "ddp.hok is an unknown key; expected a key that --help lists -> ",
        ),
        ("epochs: 3\nconfig: x\n", 2, "config is an unknown key"),
        ("\nepochs: x\n", 2, "epochs is 'x'; expected an integer"),
        ("epochs: '3'\n", 1, "expected an integer"),
        ("epochs: [3]\n", 1, "epochs is a list; expected an integer"),
        ("resume: {a: b}\n", 1, "resume is keys with values; expected a text"),
        ("resume: !!python/name:os.system x\n", 1, "expected a text"),
        ("ranks:\n  - 0\n  - x\n", 3, "ranks is 'x'"),
        ("ddp: 3\n", 1, "ddp is '3'; expected keys with values"),
        ("- epochs\n", 1, "the file is a list; expected keys with values"),
        ("epochs: 3\nseed: 1\nepochs: 4\n", 3, "epochs twice in one file"),
        ("ddp: {comm_hook: fp16}\nddp.comm_hook: bf16\n", 2, "ddp.comm_hook twice in one file"),
        ("ddp: {comm_hook: fp16}\nddp: {static_graph: true}\n", 2, "ddp twice in one file"),
        ("batch-size: 3\nbatch_size: 4\n", 2, "batch_size twice in one file"),
        ("[a]: 3\n", 1, "a list is an unknown key"),
        ("epochs: 3\nddp: [\n", 3, "this is not YAML"),
        ("epochs: 3\n---\nepochs: 4\n", 2, "this is not YAML"),
        ("a: \x01\n", 1, "this is not YAML"),
        ("ddp: &a\n  ddp: *a\n", 2, "ddp.ddp is an unknown key"),
        ("epochs: 3\nparallel: ddp\n", 2, "parallel is no longer a setting"),
        ("fsdp:\n  modules: [Block]\n", 1, "fsdp is no longer a setting"),
    ],
)
def test_a_wrong_file_is_named_with_its_place(
    file: typing.Callable[..., str], text: str, line: int, part: str
) -> None:
    argument = file(text)
    message = refused(argument)
    name = argument.removeprefix("--config=")
    assert re.match(rf"{re.escape(name)}:{line}:[1-9][0-9]*: ", message)
    assert part in message


@pytest.mark.parametrize("name", ["parallel", "fsdp.modules"])
def test_a_setting_that_has_gone_says_what_to_do_instead(name: str) -> None:
    for kind, prefix in ((Config, "--"), (Settings, "--train.")):
        message = refused(f"{prefix}{name}=fsdp", kind=kind)
        assert re.match(rf"{prefix}{name} .*; .* -> .* docs/examples/fsdp_loop\.py$", message)
    own = dataclasses.make_dataclass(
        "Own", [("parallel", str, "")], bases=(Config,), frozen=True, kw_only=True
    )
    assert read_config(own, ["--parallel=model"]) == own(parallel="model"), (
        "a script's own of that name"
    )


def test_what_must_be_given_and_is_not_is_named() -> None:
    found = refused("--train.epochs=3", kind=Required)
    assert tells(found, "name", "; expected ", "a text", " -> ", "--name=VALUE")
    assert read_config(Required, ["--name=x"]) == Required(name="x")


def test_a_class_that_no_text_can_fill_is_refused() -> None:
    bad = dataclasses.make_dataclass(
        "Bad", [("table", dict[str, int], field(default_factory=dict))]
    )
    assert "Bad.table is of type dict[str, int]; expected bool" in refused(kind=bad)
    taken = dataclasses.make_dataclass("Taken", [("config", str, "")])
    assert tells(refused(kind=taken), "Taken.config", "--config")

    @dataclass
    class Local:
        inner: Nowhere = None  # type: ignore[name-defined]  # noqa: F821

    assert tells(refused(kind=Local), "Local", "'Nowhere'")


# The help.


def test_help_lists_every_key_and_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        read_config(Settings, ["--lr=2", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name, key in fields_of(Settings).items():
        assert f"\n  --{name}={text_of(key.default)}  (" in text
    flat = " ".join(text.split())
    assert "--lr=0.001 (a number) of the optimizer, as it was given." in flat
    assert "--cache=null (a path or null) folders." in flat
    assert "--train.epochs=7 (an integer) passes over the training data." in flat
    assert [name for name, key in fields_of(Config).items() if not key.sentence] == []


def test_other_ranks_print_no_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        read_config(Config, ["-h"])
    assert capsys.readouterr().out == ""


# The file.


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.yaml"
    save_config(path, Config())
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_config(path, Config(epochs=9))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


# The __init__ of srunddp.train imports the loop, and so torch.
WITHOUT_TORCH = f"""
import sys, types
sys.modules["torch"] = None
sys.modules["srunddp.train"] = package = types.ModuleType("srunddp.train")
package.__path__ = [{str(ROOT / "srunddp" / "train")!r}]
from srunddp.train.config import Config
from srunddp.config.parse import read_config
print(read_config(Config, ["--epochs=4"]).epochs)
"""


def test_settings_are_read_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    assert python("-c", WITHOUT_TORCH, folder=tmp_path, PYTHONPATH=str(ROOT)).stdout == "4\n"
