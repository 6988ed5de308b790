"""``srunddp triage``: its table, what it reads and passes over, what it says, and what it costs."""

from __future__ import annotations

import json
import os
import re
import time
import tracemalloc
from pathlib import Path

import pytest

from srunddp.triage import collect as collecting
from srunddp.triage import logs
from srunddp.triage.collect import collect
from srunddp.triage.diagnose import diagnose
from srunddp.triage.diagnosis import Diagnosis
from srunddp.triage.logs import find
from srunddp.triage.rank_labels import MOST_RANKS, RankLabels, ranks_of_names, spread
from srunddp.triage.render import lines
from srunddp.triage.signatures import KINDS, Signature, says, table
from srunddp.triage.tracebacks import Tracebacks
from tests.support.facts import tells
from tests.support.starting import one_message, srunddp, write

SIGNS = table().signs
TOP, CAUGHT = (
    f'Traceback (most recent call last):\n  File "/p/a.py", line 1, in {where}\n'
    for where in ("<module>", "fit")
)


def log(folder: Path, text: str, name: str = "slurm-1.out") -> Path:
    return write(folder / name, text)


def diagnosis(path: Path) -> Diagnosis:
    return diagnose(collect(find([str(path)])))


def said(path: Path) -> str:
    evidence = collect(find([str(path)]))
    return "\n".join(lines(diagnose(evidence), evidence))


def name_of(sign: Signature) -> str:
    return f"{sign.id}-{SIGNS.index(sign)}"


def test_every_cause_has_an_entry_with_a_hint() -> None:
    assert list(table().causes) == [*dict.fromkeys(sign.id for sign in SIGNS)]
    assert all(known.cause and known.hint for known in table().causes.values())


@pytest.mark.parametrize("sign", SIGNS, ids=name_of)
def test_a_sign_matches_its_sample_and_no_other_primary_one_does(sign: Signature) -> None:
    assert sign.kind in KINDS
    assert sign.fits(sign.sample)
    assert any(word in sign.sample.lower() for word in table().words), "it would be passed over"
    assert {each.id for each in SIGNS if each.kind == "primary" and each.fits(sign.sample)} <= {
        sign.id
    }
    assert getattr(table().read(sign.sample), "id", None) == sign.id


PIECES = (
    "error ",
    "a",
    "connect 127.0.0.",
    "NCCL WARN x ",
    "rank 1 ",
    "srun: error: ",
    "[",
    "(",
    " ",
    "rank 0 ",
    "connect to ",
    "error: ",
    "Error ",
    "1",
    "srun: error: a",
    "x: ",
)


@pytest.mark.parametrize("piece", PIECES[:9])
def test_a_line_of_10_mb_costs_less_than_2_s(tmp_path: Path, piece: str) -> None:
    path = log(tmp_path, piece * (10_000_000 // len(piece)) + "\n")
    before = time.process_time()
    diagnosis(path)
    assert time.process_time() - before < 2


@pytest.mark.parametrize("piece", PIECES)
def test_no_signature_takes_long_for_the_longest_line(piece: str) -> None:
    line = piece * (4000 // len(piece))
    before = time.process_time()
    for sign in SIGNS:
        sign.fits(line)
    for name in table().patterns:
        says(name, line)
    # Twenty times of what it takes; to try all ways takes minutes.
    assert time.process_time() - before < 5


@pytest.mark.slow
def test_a_long_healthy_log_costs_in_proportion_to_its_length(tmp_path: Path) -> None:
    def cost(count: int) -> float:
        steps = (
            f"epoch 1 step {step} loss {step / 7:.4f} val_error 0.{step}\n" for step in range(count)
        )
        path = log(tmp_path, "".join(steps))
        before = time.process_time()
        assert diagnosis(path).first is None
        return time.process_time() - before

    cost(100)  # the table of signs is read once
    assert cost(40_000) < 16 * cost(5_000)


def test_of_a_file_over_the_limit_head_and_tail_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("WHOLE", 40_000), ("HEAD", 10_000), ("TAIL", 10_000)):
        monkeypatch.setattr(logs, name, size)
    path = log(tmp_path, "rank 1/2 up\n" + "step\n" * 20_000 + "MemoryError\n")
    assert diagnosis(path).cause == "host-out-of-memory"
    assert tells(said(path), "middle", "not read")
    assert "2 ranks expected" in said(path)
    assert re.search(r"\(line \d+ of its end\): MemoryError", said(path))


def test_files_that_are_no_logs_are_skipped_without_blocking(tmp_path: Path) -> None:
    log(tmp_path, "step 1\ntraining finished\n")
    os.mkfifo(tmp_path / "pipe.log")
    outside = log(tmp_path.parent, "MemoryError\n", "outside.txt")
    (tmp_path / "link.out").symlink_to(outside)
    (tmp_path / "core.1").write_bytes(b"\x7fELF" + bytes(range(256)) * 20 + b"\nMemoryError\n")
    log(tmp_path, "time,what\n1,MemoryError\n", "monitor.0/node01.node.csv")
    log(tmp_path, '{"note": "MemoryError"}\n', "monitored/run.json")
    log(tmp_path, "raise MemoryError\nMemoryError\n", "train.py")
    assert [each.name for each in find([str(tmp_path)])] == ["slurm-1.out"]
    assert diagnosis(tmp_path).cause is None


def test_colours_progress_bars_and_binary_do_not_hide_an_error(tmp_path: Path) -> None:
    bars = b"\x1b[31m 10%|# | 1/10 [00:01]\r 20%|##\xff| 2/10\r"
    (tmp_path / "a.log").write_bytes(bars + b"\0\0\x1b[1mMemoryError\x1b[0m: \x1b]0;title\x07x\r\n")
    assert said(tmp_path).splitlines()[0].endswith(": MemoryError: x (host-out-of-memory)")
    path = log(tmp_path, CAUGHT + "ValueError: \x9b31m\x85\u202e\n")
    assert all(line.isprintable() for line in said(path).splitlines()), "it commands the terminal"


def test_a_label_tells_the_rank() -> None:
    expected = {
        "[rank3]: boom": ("boom", 3),
        "[rank3]:[E302 10:00:00.1 x.cpp:1] boom": ("[E302 10:00:00.1 x.cpp:1] boom", 3),
        "[1,3]<stderr>: boom": ("boom", 3),
        "[1,3]<stderr>:boom": ("boom", 3),
        "[prterun-node01-77@1,3]<stdout>: boom": ("boom", 3),
        "[default3]:boom": ("boom", 3),
        "[default1]:[rank5]: boom": ("boom", 5),
        "3: boom": ("3: boom", None),
    }
    assert {line: RankLabels().strip(line)[:2] for line in expected} == expected


def test_a_number_beyond_any_job_is_no_rank() -> None:
    """Such as that of a request; the memory that triage takes grows with the ranks."""
    labels = RankLabels()
    assert labels.strip(f"[rank{MOST_RANKS - 1}]: a step") == ("a step", MOST_RANKS - 1, None)
    assert labels.strip(f"[rank{MOST_RANKS}]: a request") == ("a request", None, None)


def test_an_ambiguous_label_counts_where_many_lines_have_it() -> None:
    expected = {
        " 3: boom": (3, None),
        "[3] boom": (3, None),
        "node02:3: boom": (3, "node02"),
        "node02: boom": (None, "node02"),
    }
    found = {line: RankLabels.sniff([line] * 5).strip(line) for line in expected}
    assert found == {line: ("boom", *whose) for line, whose in expected.items()}
    assert not RankLabels.sniff([f"{number}: line" for number in range(1, 40)]).kind
    assert not RankLabels.sniff(["train.py:12: UserWarning", "model.py:30: UserWarning"] * 4).kind


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (["node01.rank0.log", "node02.rank11.log"], [0, 11]),
        (["x/attempt_0/0/stderr.log", "x/attempt_0/1/stderr.log"], [0, 1]),
        (["out.0", "out.1", "out.2"], [0, 1, 2]),
        (["1/rank.0/stdout", "1/rank.1/stdout"], [0, 1]),
        (["node0.log", "node1.log"], [None, None]),
        (["0/stdout", "0/stderr", "1/stdout"], [0, 0, 1]),
        (["a/attempt_0/0/stdout.log", "b/attempt_0/0/stdout.log"], [None, None]),
        (["slurm-4711-0.out", "slurm-4711-1.out"], [0, 1]),
        (["t-node01-0.out", "t-node01-1.out", "t-node02-2.out"], [0, 1, 2]),
        (["worker_0.err", "worker_1.err"], [0, 1]),
        (["slurm-4711.out", "slurm-4712.out"], [None, None]),
        (["slurm-4711.out"], [None]),
        (["slurm-4711_0.out", "slurm-4711_1.out"], [None, None]),
    ],
)
def test_file_names_tell_ranks(names: list[str], ranks: list[int | None]) -> None:
    found = ranks_of_names(names)
    assert [found.get(name) for name in names] == ranks


def test_lists_of_tasks_are_read() -> None:
    expected = {"0-2,5": [0, 1, 2, 5], "[0-1]": [0, 1], "0-99999999,x": []}
    assert {text: spread(text) for text in expected} == expected


def test_of_chained_exceptions_the_first_is_the_cause() -> None:
    stream = Tracebacks()
    text = """Traceback (most recent call last):
  File "/project/a.py", line 3, in read
    open(path)
  File "/usr/lib/python3.11/x.py", line 9, in open
FileNotFoundError: [Errno 2] gone

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/project/a.py", line 8, in main
RuntimeError: no data
Exception ignored in: <function f>
Traceback (most recent call last):
  File "/project/b.py", line 8, in __del__
AttributeError: x"""
    for number, line in enumerate(text.splitlines(), 1):
        stream.feed(number, line)
    one, other = stream.done
    assert one.chain == [(5, "FileNotFoundError: [Errno 2] gone"), (11, "RuntimeError: no data")]
    assert (one.began, one.frame) == (1, "a.py:3 in read")
    assert (one.aside, other.aside) == (False, True)


def test_tracebacks_of_two_ranks_in_one_another_are_both_seen(tmp_path: Path) -> None:
    header = "Traceback (most recent call last):\n"
    frame = '  File "/project/a.py", line 3, in f\n    g()\n'
    path = log(tmp_path, header * 2 + frame * 2 + "ValueError: one\nIndexError: other\n")
    assert [event.text for event in collect(find([str(path)])).events] == [
        "ValueError: one",
        "IndexError: other",
    ]


@pytest.mark.parametrize(
    "after",
    [
        "retrying\nstep 3\nTraining finished\n",
        "".join(f"step {step}\n" for step in range(3, 9)),
        "exit code 0\n",
    ],
)
@pytest.mark.parametrize(
    "sign", [sign for sign in SIGNS if sign.kind in ("primary", "symptom")], ids=name_of
)
def test_whatever_a_run_survived_is_no_failure(tmp_path: Path, sign: Signature, after: str) -> None:
    if not re.match(r"srunddp: |FAIL|slurmstepd|srun: ", sign.sample):
        assert diagnosis(log(tmp_path, f"step 1\nstep 2\n{sign.sample}\n{after}")).first is None


def test_world_and_silent_ranks_are_told(tmp_path: Path) -> None:
    text = "".join(f"{rank}: rank {rank}/4 up\n{rank}: step\n" for rank in (0, 1, 3))
    path = log(tmp_path, text + "srun: error: node02: task 2: Exited with exit code 1\n")
    assert tells(said(path), "4 ranks expected", "3 with output", "without output: 2")
    assert diagnosis(path).rank == 2
    assert "cause unknown" in said(path)
    assert tells(said(path), "rank 3", "step")


def test_the_command_says_it_in_few_lines_and_for_machines(tmp_path: Path) -> None:
    path = log(
        tmp_path, TOP + "torch.OutOfMemoryError: CUDA out of memory.\n", "4711.0/node02.rank1.log"
    )
    done = srunddp("triage", tmp_path, folder=tmp_path)
    assert done.returncode == 0
    first = done.stdout.splitlines()[0]
    where = ("rank 1", "node02", "4711.0/node02.rank1.log:3")
    cause = ("torch.OutOfMemoryError: CUDA out of memory.", "a.py:1", "cuda-out-of-memory")
    assert tells(first, "first failure", *where, *cause)
    assert re.search(r"^cause: .*\nhint: ", done.stdout, re.MULTILINE)
    record = json.loads(srunddp("triage", "--json", path, folder=tmp_path).stdout)
    found = [record[name] for name in ("cause", "certainty", "rank", "node")]
    assert found == ["cuda-out-of-memory", "certain", 1, "node02"]
    assert (
        srunddp("triage", log(tmp_path, "training done\n", "fine.out"), folder=tmp_path).stdout
        == "nothing failed\n"
    )


def test_where_there_is_nothing_to_read_it_says_so(tmp_path: Path) -> None:
    for words in ([], ["no-such-file"], ["/dev/null"], ["."]):
        assert one_message(srunddp("triage", *words, folder=tmp_path))


def test_of_two_nodes_the_earlier_clock_counts(tmp_path: Path) -> None:
    for node, second in (("node01", 9), ("node02", 3)):
        log(
            tmp_path,
            f"2026-03-01 10:00:0{second} rank failed\nMemoryError: {node}\n",
            f"{node}.log",
        )
    assert "MemoryError: node02" in said(tmp_path).splitlines()[0]


@pytest.mark.parametrize("line", ["[rank{0}]: step {0} x", "[rank{0}]: MemoryError: {0}"])
def test_memory_is_bounded_by_what_is_read(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever number stands behind "rank", for example that of a request."""
    monkeypatch.setattr(collecting, "_MOST_EVENTS", 100)
    monkeypatch.setattr(collecting, "_MOST_STREAMS", 100)
    count = 4000
    path = log(tmp_path, "".join(f"{line.format(number)}\n" for number in range(count)))
    table()
    tracemalloc.start()
    try:
        diagnosis(path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1000 * count  # a stream of its own for each would take 2,000 bytes and more
