"""What a failure says of its cause: an error of one's own, an echo of another's, or a signal."""

from __future__ import annotations

import errno
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest

from srunddp.errors import ConfigError
from srunddp.supervisor.failure import (
    FailureCategory,
    FailureKind,
    ScriptError,
    of_exception,
    of_exit,
    shortened,
)
from srunddp.supervisor.messages import HasFailed
from srunddp.supervisor.recorder import FailureRecorder
from srunddp.supervisor.root_cause import RootCause, report_as_deputy
from srunddp.supervisor.stacks import StackDump


class DistError(RuntimeError):
    """Named as torch's, whose own needs torch."""


class DistBackendError(DistError):
    """One of those below it."""


ECHOES = [
    # As Gloo and NCCL have said it under torch 2; test_torch_errors.py has real ones.
    RuntimeError(
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
        " [127.0.0.1]:3517"
    ),
    RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/buffer.cc:72] Timed out waiting 1800000ms"
        " for recv"
    ),
    RuntimeError(
        "NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited or there was a network"
        " error"
    ),
    RuntimeError(
        "Gloo connectFullMesh failed with"
        " [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] no error"
    ),
    RuntimeError("[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 2000 ms"),
    RuntimeError(
        "Rank 1 successfully reached monitoredBarrier, but received errors while waiting for"
        " send/recv from rank 0. Please check rank 0 logs for faulty rank."
    ),
    DistError("no words that are known"),
    DistBackendError("no words that are known"),
]
CAUSES = [
    ValueError("boom"),
    ValueError("the connection was closed by peer"),  # only a RuntimeError is torch's
    # Words that a lost peer's errors have, too.
    RuntimeError("cannot open /scratch/nccl/data.bin: connection reset by storage"),
    RuntimeError("DataLoader timed out after 3 seconds"),
    RuntimeError("Broken pipe"),
    RuntimeError("could not read [/data/gloo/part.cc:3]: Connection closed by peer"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
    FileNotFoundError(2, "No such file or directory", "data"),
    KeyboardInterrupt(),
    MemoryError(),
]


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


KINDS = [(error, FailureKind.SECONDARY) for error in ECHOES] + [
    (error, FailureKind.PRIMARY) for error in CAUSES
]
# Python's own errors of a connection wait for a cause.
KINDS += [
    (kind(1, "Connection reset"), FailureKind.NETWORK)
    for kind in (ConnectionResetError, BrokenPipeError)
]


@pytest.mark.parametrize(("error", "kind"), KINDS, ids=repr)
def test_an_error_of_a_collective_or_of_the_store_is_an_echo(
    error: BaseException, kind: FailureKind
) -> None:
    assert of_exception(error, None).weight is kind


def test_an_error_is_judged_by_its_causes_even_in_a_circle() -> None:
    outer = ValueError("step 3")
    other = ValueError("step 4")
    outer.__cause__ = ECHOES[0]
    other.__context__ = ECHOES[0]
    assert [of_exception(each, None).weight for each in (outer, other)] == [
        FailureKind.SECONDARY,
        FailureKind.SECONDARY,
    ]
    first = ValueError("a")
    second = ValueError("b")
    first.__context__ = second
    second.__context__ = first
    assert of_exception(first, None).weight is FailureKind.PRIMARY


def test_what_python_raises_with_the_words_of_gloo_is_its_own() -> None:
    """As a client of another service does: torch's own comes from C++, in a call."""
    error = raised(RuntimeError(*ECHOES[0].args))
    assert of_exception(error, error.__traceback__).weight is FailureKind.PRIMARY


def exit_in_handler(error: BaseException, code: int | str) -> SystemExit:
    try:
        try:
            raise error
        except BaseException:
            sys.exit(code)
    except SystemExit as end:
        return end


def test_an_exit_in_the_handler_of_an_error_has_that_error_as_its_cause() -> None:
    """Hydra, Fire and click end so: without it nobody would know what was wrong."""
    assert of_exit(SystemExit(1), 1) == ScriptError("sys.exit(1)", "", FailureKind.PRIMARY)
    assert of_exit(SystemExit("no data"), 1).cause == "sys.exit(1): no data"
    said = of_exit(exit_in_handler(ValueError("no such file"), 1), 1)
    assert said.cause == "ValueError: no such file; then sys.exit(1)"
    assert said.weight is FailureKind.PRIMARY
    assert said.traceback.endswith("ValueError: no such file\n")
    assert of_exit(exit_in_handler(DistError("a peer is gone"), 1), 1).weight is (
        FailureKind.SECONDARY
    )
    wrong_option = of_exit(exit_in_handler(ValueError("no option --lrr"), 2), 2)
    assert wrong_option == ScriptError(
        "ValueError: no option --lrr; then sys.exit(2)", "", FailureKind.PRIMARY
    )


def ended_by(script: str) -> ScriptError:
    """How a script's ``sys.exit`` is described."""
    with pytest.raises(SystemExit) as caught:
        exec(script, {"DistError": DistError, "click": click})
    end = caught.value
    assert isinstance(end.code, int)
    return of_exit(end, end.code)


def test_an_exit_from_none_says_nothing_of_the_error_that_was_handled() -> None:
    """But of a lost peer's error it stays an echo."""
    script = "try: raise {}('x')\nexcept Exception: raise SystemExit(3) from None"
    assert ended_by(script.format("KeyError")) == ScriptError(
        "sys.exit(3)", "", FailureKind.PRIMARY
    )
    assert ended_by(script.format("DistError")).weight is FailureKind.SECONDARY


def test_an_exit_from_an_error_has_that_error_as_its_cause() -> None:
    said = ended_by("try: raise DistError('x')\nexcept Exception as e: raise SystemExit(3) from e")
    assert said.cause.endswith("DistError: x; then sys.exit(3)")
    assert said.weight is FailureKind.SECONDARY


CLICK = """
@click.command()
@click.pass_context
def main(context):
    {}
main([])
"""


def test_click_s_own_way_to_exit_is_no_cause() -> None:
    assert ended_by(CLICK.format("context.exit(3)")) == ScriptError(
        "sys.exit(3)", "", FailureKind.PRIMARY
    )
    leaves = click.exceptions.Exit(3)
    leaves.__context__ = ValueError("no data")
    said = of_exit(exit_in_handler(leaves, 3), 3)
    assert said.cause == "ValueError: no data; then sys.exit(3)"


class PluginMissingError(ImportError):
    """A script's own."""


class ImportErrorOfNodeError(Exception):
    """Of another class, though its name begins alike."""


class FinalError(ConfigError):
    """Of srunddp's, such as that another run has the folder of checkpoints."""

    final = True


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "category"),
    [
        (SyntaxError("invalid"), FailureCategory.WRONG_SCRIPT),
        (IndentationError("unexpected"), FailureCategory.WRONG_SCRIPT),
        (ModuleNotFoundError("no x"), FailureCategory.IMPORT_FAILED),
        (PluginMissingError("no x"), FailureCategory.IMPORT_FAILED),
        (FinalError("taken"), FailureCategory.FINAL),
        (ConfigError("damaged"), FailureCategory.OTHER),
        (caused_by(ValueError("boom"), FinalError("taken")), FailureCategory.FINAL),
        (caused_by(ValueError("boom"), ImportError("no x")), FailureCategory.OTHER),
        (ImportErrorOfNodeError("n1"), FailureCategory.OTHER),
        (ValueError("boom"), FailureCategory.OTHER),
    ],
)
def test_its_class_says_whether_the_script_would_fail_again(
    error: Exception, category: FailureCategory
) -> None:
    assert of_exception(error, None).category is category


@pytest.mark.parametrize("suppressed", [False, True])
@pytest.mark.parametrize(
    ("error", "category"),
    [
        (ModuleNotFoundError("no x", name="x"), FailureCategory.IMPORT_FAILED),
        (FinalError("taken"), FailureCategory.FINAL),
    ],
)
def test_an_exit_from_its_handler_says_the_same(
    error: Exception, category: FailureCategory, suppressed: bool
) -> None:
    end = SystemExit(1)
    end.__context__ = error
    end.__suppress_context__ = suppressed
    assert of_exit(end, 1).category is category


def test_import_errors_of_one_module_are_the_same_whatever_paths_they_name() -> None:
    said = [
        of_exception(error, None).failed_import
        for error in (
            ImportError("cannot import name 'f' from 'm' (/scratch/n1/m.py)", name="m"),
            ImportError("cannot import name 'f' from 'm' (/scratch/n2/m.py)", name="m"),
            ImportError("cannot import name 'f' from 'k' (/scratch/n2/k.py)", name="k"),
            ModuleNotFoundError("No module named 'm'", name="m"),
            ValueError("boom"),
        )
    ]
    assert said[0] == said[1]
    assert len({*said}) == 4
    assert said[-1] == ""


def test_the_cause_is_one_line_a_long_trace_keeps_both_ends() -> None:
    error = raised(ValueError("first\nlast"))
    said = of_exception(error, error.__traceback__)
    assert said.cause == "ValueError: first"
    assert said.traceback.startswith("Traceback (most recent call last):\n")
    assert said.traceback.endswith("ValueError: first\nlast\n")
    text = "begins" + "x" * 10**6 + "ends"
    assert len(shortened(text)) < 20000
    assert shortened(text).startswith("begins")
    assert shortened(text).endswith("ends")


@pytest.mark.parametrize("number", sorted({*signal.Signals} - {signal.SIGABRT}))
def test_a_process_that_a_signal_ended_is_a_cause_and_says_which(number: signal.Signals) -> None:
    dump = StackDump()
    os.write(dump.descriptor, b"a stack")
    failure = FailureRecorder(1, "node02", dump, None).of_status(-number, 1.0, dumped_core=True)
    assert (failure.traceback, failure.weight, failure.exit_code) == (
        "a stack",
        FailureKind.PRIMARY,
        128 + number,
    )
    assert failure.cause == f"killed by {number.name}, core dumped"


def test_of_signals_an_abort_may_be_secondary_names_are_told() -> None:
    recorder = FailureRecorder(1, "node02", StackDump(), None)
    assert recorder.of_status(-signal.SIGABRT, 1.0).weight is FailureKind.ABORTED
    assert recorder.of_status(-40, 1.0).cause == "killed by signal 40"


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM])
def test_without_a_process_to_write_them_files_are_left_out_and_the_run_goes_on(
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A limit on processes, or on memory, may hold for a while only."""

    def no_fork() -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fork", no_fork)
    monkeypatch.setattr(StackDump, "request", lambda *_: "")
    log = tmp_path / "node02.rank1.log"
    recorder = FailureRecorder(1, "node02", StackDump(), log)
    for _ in range(2):  # it may be asked again
        recorder.print_stack(os.getpid())
    failure = replace(recorder.of_status(7, 1.0), traceback="ValueError: boom")
    recorder.write(failure)
    report_as_deputy(RootCause.of(failure), tmp_path)
    said = capfd.readouterr().err
    assert said.count("rank 1 on node02 gives no stack") == 2
    assert "rank 1 on node02 failed" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("signal_grace", "counts_for"), [(5.0, 120.0), (600.0, 600.0)])
def test_what_ends_a_rank_that_may_save_is_the_launchers_signal(
    signal_grace: float, counts_for: float
) -> None:
    recorder = FailureRecorder(1, "node02", StackDump(), None, signal_grace=signal_grace)
    recorder.note_ending_signal(signal.SIGTERM, 100.0)
    late = recorder.of("ValueError: boom", 1, 99.0 + counts_for)
    assert late.cause.startswith("the launcher ended the run with SIGTERM")
    assert recorder.of("ValueError: boom", 1, 101.0 + counts_for).cause == "ValueError: boom"


def test_no_failure_ends_a_run_with_0() -> None:
    """As of a worker that has ended before its script has begun."""
    failure = FailureRecorder(1, "node02", StackDump(), None).of_status(0, 1.0)
    assert failure.exit_code == 1
    assert HasFailed.about(failure).exit_code == 1
