"""What Slurm was told of a lost node, as far as rank 0 can read it; ps and scontrol are made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from srunddp.check.checks.spare_nodes import CHECK, SpareNodeFacts, evaluate
from srunddp.check.cli import check
from srunddp.check.finding import Severity
from srunddp.run.options import OPTIONS
from tests.support.facts import tells
from tests.support.made_up_site import changed, reported, seen, subject, travelled
from tests.support.starting import slurm, srunddp, write

STEP = {
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NODELIST": "node[01-03]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURMD_NODENAME": "node01",
    "SLURM_GTIDS": "0,1",
}
WELL = "srun -N3 --no-kill --kill-on-bad-exit=0 --wait=0 srunddp check train.py"
SCRIPT = "#!/bin/bash\n#SBATCH --nodes=3 --no-kill\nsrun train\n"
ALL = ["srun --no-kill", "srun --kill-on-bad-exit=0", "srun --wait=0"]


def facts(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    srun: str = WELL,
    script: str = SCRIPT,
    host: str = "node01",
    spare_nodes: int = 1,
    min_nodes: int = 0,
    rank: int = 0,
    **variables: str,
) -> SpareNodeFacts:
    """Of a rank of a step that srun has started on a host, by such a command line."""
    texts = {
        "scontrol": (
            f'[ "$1" = write ] && printf %s "{script}" || echo "   SrunHost:Pid={host}:77"\n'
        ),
        "ps": f'[ "$5" = 77 ] && echo "{srun}"\n',
    }
    for name, text in texts.items():
        write(folder / name, f"#!/bin/sh\necho {name} >>{folder}/asked\n{text}").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    context = subject(slurm(rank, 6) | STEP | variables)
    return travelled(CHECK, replace(context, spare_nodes=spare_nodes, min_nodes=min_nodes))


@pytest.mark.parametrize(
    ("srun", "lacking"),
    [
        (WELL, []),
        ("/opt/slurm/bin/srun -k -K0 -W 0 srunddp check", []),
        ("srun -W0 --wait=0 srunddp check", ALL[:2]),
        ("srun --no-kill=off --kill-on-bad-exit=1 --wait=05 srunddp check", ALL),
        ("srun --kill-on-bad-exit -W 90 srunddp --no-killing", ALL),
    ],
)
def test_what_srun_was_not_given_is_seen(
    srun: str, lacking: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert facts(tmp_path, monkeypatch, srun) == SpareNodeFacts(lacking=lacking)


@pytest.mark.parametrize(
    ("script", "lacking"),
    [
        ("#!/bin/sh\n#SBATCH -k\n", []),
        ("#!/bin/sh\nsrun --no-kill train\n# --no-kill\n", ["sbatch --no-kill"]),
        ("#!/bin/sh\n#SBATCH -N3\n#SBATCH -J x --no-kill\n", []),
        ("", []),  # srun or salloc has made the job
    ],
)
def test_the_batch_script_has_the_options_of_the_job(
    script: str, lacking: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert facts(tmp_path, monkeypatch, script=script).lacking == lacking


@pytest.mark.parametrize(
    "other",
    [
        {"srun": "srun", "host": "login"},
        {"srun": ""},
        {"srun": "srunddp check"},
        {"srun": "python srun"},
    ],
)
def test_srun_elsewhere_is_not_seen(
    other: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert facts(tmp_path, monkeypatch, **other).lacking == []  # type: ignore[arg-type]


def test_one_rank_asks_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts(tmp_path, monkeypatch, rank=1) == SpareNodeFacts()
    assert not (tmp_path / "asked").exists()


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--spare-nodes=1", "--min-nodes=1"])
def test_the_check_is_made_with_an_option_alone(option: str, tmp_path: Path) -> None:
    done = srunddp("check", folder=tmp_path)
    assert "spare-nodes" not in done.stdout + (tmp_path / "preflight.local.json").read_text()
    done = srunddp("check", option, folder=tmp_path)
    assert done.returncode == 69
    assert "FAIL  spare-nodes" in done.stdout
    assert tells(done.stdout, "FAIL  spare-nodes", "; expected ", "Slurm", " -> ", "srun")
    for option in ("--no-kill", "--kill-on-bad-exit=0", "--wait=0"):
        assert tells(done.stdout, "srun", option)
    assert tells(done.stdout, "sbatch", "salloc", "--no-kill")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"spare_nodes": 3}, "--spare-nodes=3 of 3 nodes"),
        ({"spare_nodes": 1, "min_nodes": 3}, "--min-nodes=3 of 2 nodes with ranks"),
    ],
    ids=str,
)
def test_what_run_would_refuse_is_a_failure(
    options: dict[str, int], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = facts(tmp_path, monkeypatch, **options)  # type: ignore[arg-type]
    assert reported(evaluate(seen([known, known]))) == [(Severity.FAIL, said, ("node01",), ())] * 2


@pytest.mark.parametrize(
    ("tasks", "decisive"),
    [
        ("2(x3)", []),
        ("1,3,2", ["node02"]),
        ("4,1(x2)", ["node01"]),
        ("2,2,1", []),  # two of five tasks are lost, and three go on
    ],
)
def test_a_node_without_which_no_majority_is_left_is_warned_of(
    tasks: str, decisive: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = "5" if tasks == "2,2,1" else "6"
    step = {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_STEP_NUM_TASKS": count, "SLURM_GTIDS": "0"}
    known = facts(tmp_path, monkeypatch, spare_nodes=0, min_nodes=2, **step)  # type: ignore[arg-type]
    assert known.decisive == decisive
    warned = reported(evaluate(seen([known])))
    assert [(level, nodes) for level, _, nodes, _ in warned] == [
        (Severity.WARN, (node,)) for node in decisive
    ]


def test_what_is_lacking_is_warned_of_where_rank_zero_is() -> None:
    lacking = ["srun --wait=0", "sbatch --no-kill"]
    assert reported(evaluate(changed(SpareNodeFacts(), {0: {"lacking": lacking}}))) == [
        (Severity.WARN, "without srun --wait=0, sbatch --no-kill", ("node01",), ()),
    ]
    assert reported(evaluate(changed(SpareNodeFacts(), {}))) == []


def test_the_options_are_those_of_a_run() -> None:
    own = {option.name: option for option in check.params}
    for name in ("spare_nodes", "min_nodes"):
        of_run = OPTIONS[name]
        assert (own[name].opts, own[name].default) == (of_run.opts, of_run.default)
        assert repr(own[name].type) == repr(of_run.type)
        assert own[name].metavar == of_run.metavar
