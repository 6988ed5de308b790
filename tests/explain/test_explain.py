"""What is explained, for made-up environments, without starting a process."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from srunddp.bootstrap.environment import detect, mpi, slurm
from srunddp.bootstrap.network import ifaces_conf, ifaces_entry
from srunddp.bootstrap.network.interface import NetworkInterface
from srunddp.bootstrap.rendezvous import auth, discovery
from srunddp.explain.explain import ExplainOptions, Explanation, Row, explain
from tests.support.facts import tells
from tests.support.launchers import batch_body, daemon_step, hydra, open_mpi, pty_shell, step
from tests.support.starting import write

CONF = """\
- {nodes: login, interface: eth0}
- nodes: node[01-03]
  interface: [ib0, ib1]
  address: "{node}-data"
  ports: 40000-40009
  env: {NCCL_IB_TC: 106, NCCL_DEBUG: WARN}
- {nodes: node01, interface: eth9}
- {nodes: "*", interface: auto}
"""
PMI2 = {"PMI_FD": "9", "PMI_RANK": "1", "PMI_SIZE": "4"}
EXPLICIT = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
OF_DAEMON = "Slurm: SLURM_PROCID=1"
ASKED = "pmi: --channel slurm was asked for"
LO = NetworkInterface("lo", True, 0, ("127.0.0.1",), ())
ETH0 = NetworkInterface("eth0", True, 1000, ("10.0.0.2",), ())


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No file of interface entries but those a test names, mpi4py, and no look-up of a name."""
    monkeypatch.setattr(ifaces_conf, "default_files", lambda: [tmp_path / "none.conf"])
    monkeypatch.setattr(mpi, "is_installed", lambda: True)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("a name was looked up"))


def names_lead_to_eth0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", ("10.0.0.2", 0))])


def elsewhere(variables: Mapping[str, str], **asked: object) -> Explanation:
    return explain(variables, ExplainOptions(**asked), None)  # type: ignore[arg-type]


def row(found: Explanation, name: str) -> Row:
    (one,) = [row for row in found.rows if row.name == name]
    return one


def said(found: Explanation, name: str) -> tuple[str, str]:
    return row(found, name).value, row(found, name).why


@pytest.fixture
def conf(tmp_path: Path) -> str:
    return str(write(tmp_path / "ifaces.conf", CONF))


NOT_TAKEN = (
    "slurm: comes after pmi",
    "mpi: PMIX_RANK is not set, as without srun --mpi=pmix",
    "env: only by --channel env; RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set",
)
OF_NODE = "the default, as no ifaces.conf has entries; not checked, as only a rank on that node can"
# Who a rank is: variables, --channel, a row, and of it the value, why, and what was not chosen.
WHO = [
    (step(1, **PMI2, RANK="1"), None, "rank", "1", "SLURM_PROCID=1", ("PMI_RANK=1", "RANK=1")),
    (step(1), None, "world_size", "4", "SLURM_STEP_NUM_TASKS=4", ("SLURM_NTASKS=6",)),
    (daemon_step(1) | open_mpi(3, 6, 1, 2), None, "rank", "3", "OMPI_COMM_WORLD_RANK=3", ()),
    (
        daemon_step(1) | open_mpi(3, 6, 1, 2),
        None,
        "launcher",
        "Open MPI",
        "OMPI_COMM_WORLD_RANK=3",
        (OF_DAEMON,),
    ),
    (batch_body(), None, "rank", "0", "no launcher was found", ()),
    (batch_body(), None, "interface", "lo", "loopback, as a single process", ()),
    (step(0) | EXPLICIT, "env", "rank", "1", "RANK=1", ()),
    (step(0) | EXPLICIT, "env", "ports", "29500", "MASTER_PORT", ()),
    (step(1), None, "node", "node02", "SLURMD_NODENAME", ()),
    (open_mpi(1), None, "node", "?", "hostname", ()),
    (hydra(0), None, "ports", "any", "the kernel's choice, published", ()),
    (step(1), None, "interface", "auto", OF_NODE, ()),
    (step(1, **PMI2), None, "channel", "pmi", "PMI_FD=9, then slurm", NOT_TAKEN),
    (step(1, **PMI2), None, "proof", "secret", "carried over pmi", ()),
    (
        step(1, **PMI2),
        "slurm",
        "channel",
        "slurm",
        "--channel, SLURM_STEP_NODELIST=node[02-03]",
        (ASKED,),
    ),
]


@pytest.mark.parametrize(("variables", "channel", "name", "value", "why", "passed_over"), WHO)
def test_each_value_has_its_source_and_what_was_passed_over(
    variables: dict[str, str],
    channel: str | None,
    name: str,
    value: str,
    why: str,
    passed_over: tuple[str, ...],
) -> None:
    found = elsewhere(variables, channel=channel)
    assert said(found, name) == (value, why)
    assert set(passed_over) <= set(row(found, name).not_chosen)


@pytest.mark.parametrize(
    ("variables", "channel"), [({"RANK": "3"}, None), (step(1, RANK="1"), "env"), (step(1), "pmi")]
)
def test_what_a_run_would_refuse_ends_with_78(
    variables: dict[str, str], channel: str | None
) -> None:
    assert elsewhere(variables, channel=channel).exit_code == 78
    assert elsewhere(step(1)).exit_code == 0


def test_every_launcher_decides_by_its_own_variables() -> None:
    for launcher in mpi.LAUNCHERS:
        variables = {launcher.rank: "1", launcher.local_rank: "0", launcher.world_size: "2"}
        found = elsewhere(variables)
        assert said(found, "launcher")[0] == launcher.name
        assert said(found, "rank") == ("1", f"{launcher.rank}=1")
        assert said(found, "local_world_size") == ("?", "known after the rendezvous")


def test_elsewhere_a_pty_shell_is_taken_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        slurm,
        "is_interactive_shell",
        lambda task: pytest.fail("looked at a process of this machine"),
    )
    found = elsewhere(pty_shell(1))
    assert said(found, "rank") == ("1", "SLURM_PROCID=1")
    (note,) = found.notes
    assert tells(note, "SLURM_PTY_PORT=40001", "srun --pty")


# Interface and what is exported.


def test_an_entry_of_another_node_is_chosen_and_not_checked(conf: str) -> None:
    found = elsewhere(step(1), ifaces=conf)
    assert said(found, "ifaces.conf") == (conf, "--ifaces")
    name, why = said(found, "interface")
    assert name == "ib1"
    assert tells(why, f"{conf}:2:3", "not checked")
    address, why = said(found, "address")
    assert address == "?"
    assert tells(why, "not checked")
    mine, later = row(found, "interface").not_chosen
    assert tells(mine, f"{conf}:2:3", "interface ib0 ib1", "local rank")
    assert tells(later, f"{conf}:8:3", "first")
    assert found.exit_code == 0


def test_what_the_user_exported_wins_over_the_entry(conf: str) -> None:
    found = elsewhere(step(1, GLOO_SOCKET_IFNAME="eth7", NCCL_IB_TC="41"), ifaces=conf)
    assert said(found, "interface")[0] == "eth7"
    others = row(found, "interface").not_chosen
    assert [each for each in others if tells(each, f"{conf}:2:3", "interface ib0 ib1", "exported")]
    assert said(found, "GLOO_SOCKET_IFNAME") == ("eth7", "exported")
    assert said(found, "NCCL_SOCKET_IFNAME") == ("=eth7", "GLOO_SOCKET_IFNAME=eth7")
    assert said(found, "TP_SOCKET_IFNAME") == ("eth7", "GLOO_SOCKET_IFNAME=eth7")
    assert said(found, "NCCL_IB_TC") == ("41", "exported")
    assert said(found, "NCCL_DEBUG") == ("WARN", f"{conf}:2:3")


def test_an_interface_exported_for_rpc_alone_is_told(conf: str) -> None:
    found = elsewhere(step(1, TP_SOCKET_IFNAME="eth7"), ifaces=conf)
    assert said(found, "interface")[0] == "ib1"
    assert said(found, "TP_SOCKET_IFNAME") == ("eth7", "exported")


@pytest.mark.parametrize("rule", ["network: 10.1.0.0/16", "interface: auto"])
def test_an_interface_that_is_excluded_is_not_taken_for_the_chosen_one(
    rule: str, tmp_path: Path
) -> None:
    conf = str(write(tmp_path / "rule.conf", f"- nodes: '*'\n  {rule}\n"))
    found = elsewhere(step(1, NCCL_SOCKET_IFNAME="^eth7"), ifaces=conf)
    assert said(found, "interface")[0] == rule.replace(":", "").removeprefix("interface ")
    assert not found.errors


@pytest.mark.parametrize("rule", ["network: 10.1.0.0/16", "interface: eth*"])
def test_a_rule_is_shown_and_on_the_node_what_it_takes(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names_lead_to_eth0(monkeypatch)
    conf = str(write(tmp_path / "rule.conf", f"- nodes: '*'\n  {rule}\n"))
    shown = rule.replace(":", "")
    name, why = said(elsewhere(step(1), ifaces=conf), "interface")
    assert name == shown.removeprefix("interface ")
    assert tells(why, f"{conf}:1:3", "not checked")
    assert (
        said(elsewhere(step(1) | {"GLOO_SOCKET_IFNAME": "ib0"}, ifaces=conf), "interface")[0]
        == "ib0"
    )
    links = (
        LO,
        NetworkInterface("eth1", True, 0, ("10.1.0.2",), ()),
        NetworkInterface("eth9", False, 0, (), ()),
    )
    found = explain(step(0), ExplainOptions(ifaces=conf), links)
    assert said(found, "interface") == ("eth1", f"{conf}:1:3, {shown}")
    assert ("eth9: down" in row(found, "interface").not_chosen) == (rule == "interface: eth*")


def test_all_errors_of_a_file_are_explained(tmp_path: Path) -> None:
    conf = write(tmp_path / "wrong.conf", "- nodes: a, b\n  interface: =ib0\n")
    found = elsewhere(step(1), ifaces=str(conf))
    assert [str(error).partition(": ")[0] for error in found.errors] == [
        f"{conf}:1:10",
        f"{conf}:2:14",
    ]
    assert found.text.count("[rank 1] error: ") == 2


def test_where_the_node_is_not_known_no_entry_is_taken_for_it(conf: str) -> None:
    write(Path(conf), CONF.partition("\n")[2])
    found = elsewhere(hydra(0), ifaces=conf)
    name, why = said(found, "interface")
    assert name == "?"
    assert tells(why, "name", conf)
    assert not [row for row in found.rows if row.name == "NCCL_IB_TC"]


def test_each_file_is_taken_or_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "missing.conf"
    empty = write(tmp_path / "empty.conf", "# nothing\n")
    taken = write(tmp_path / "taken.conf", CONF)
    later = write(tmp_path / "later.conf", CONF)
    monkeypatch.setattr(ifaces_conf, "default_files", lambda: [missing, empty, taken, later])
    found = elsewhere(step(1))
    file, why = said(found, "ifaces.conf")
    assert file == str(taken)
    assert tells(why, "first")
    assert row(found, "ifaces.conf").not_chosen == (
        f"{missing}: not there",
        f"{empty}: has no entries",
        f"{later}: {taken} comes first",
    )


def test_on_the_node_itself_other_interfaces_are_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names_lead_to_eth0(monkeypatch)
    found = explain(step(0), ExplainOptions(), (LO, ETH0))
    name, why = said(found, "interface")
    assert name == "eth0"
    assert tells(why, "auto", "default", "ifaces.conf")
    (other,) = row(found, "interface").not_chosen
    assert tells(other, "lo:", "loopback")
    assert said(found, "address") == ("10.0.0.2", "of eth0")


# Where rank 0 is.


def test_rank_zeros_line_follows_from_its_nodes_entry(conf: str) -> None:
    found = elsewhere(step(1), ifaces=conf)
    value, why = said(found, "rank 0")
    who = detect.detect(step(1))
    first = discovery.rendezvous_ports(
        who, ifaces_entry.IfacesEntry("*", ("ib0",), ports=range(40000, 40010)), None
    )[0]
    assert value.startswith(f"node02-data:{first}, ")
    assert why.startswith(f"SLURM_STEP_NODELIST=node[02-03], address: of {conf}:2:3")


def test_the_rule_of_the_ports_is_named(conf: str) -> None:
    reserved = step(1, SLURM_STEP_RESV_PORTS="12000-12001")
    value, why = said(elsewhere(reserved), "ports")
    assert value.startswith("12000, 12001, ")
    assert tells(why, "SLURM_STEP_RESV_PORTS", "job, step and restart count")
    assert said(elsewhere(step(1)), "ports")[1] == why
    of_entry = elsewhere(reserved, ifaces=conf)
    assert said(of_entry, "ports")[1].startswith(f"ports: 40000-40009 of {conf}:2:3; ")
    asked = elsewhere(reserved, ifaces=conf, ports=range(30000, 30011))
    assert said(asked, "ports")[1].startswith("--port 30000-30010; ")


def test_master_addr_below_slurm_is_passed_over() -> None:
    found = elsewhere(step(1, MASTER_ADDR="n1", MASTER_PORT="29500"))
    assert tuple(row(found, "rank 0").not_chosen) == (
        "MASTER_ADDR=n1: ignored under Slurm",
        "MASTER_PORT=29500: ignored under Slurm",
    )
    assert tells(found.notes[0], "MASTER_ADDR=n1", "MASTER_PORT=29500", "ignored", "Slurm")


# The rest.


@pytest.mark.parametrize(
    ("visible", "value", "why"),
    [
        ("0,1", "cuda:1", "2 visible, "),
        ("3", "cuda:0", "1 visible, "),
        ("3,-1,1", "cuda:0", "1 visible, "),
        ("NoDevFiles", "cpu", "CUDA_VISIBLE_DEVICES=NoDevFiles: no GPU"),
    ],
)
def test_the_device_follows_from_the_devices_that_are_visible(
    visible: str, value: str, why: str
) -> None:
    found = elsewhere(step(1, CUDA_VISIBLE_DEVICES=visible, SLURM_STEP_GPUS="6,7"))
    assert said(found, "device")[0] == value
    assert said(found, "device")[1].startswith(why)


@pytest.mark.parametrize(
    "told",
    [
        {"SLURM_GPUS_PER_TASK": "2"},  # Slurm 22.05 and 23.02, in a job of sbatch
        {"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=2", "SLURMD_TRES_BIND": "gres/gpu:per_task:2"},
        {"SLURMD_TRES_BIND": "gpu:per_task:2"},  # Slurm 22.05, by srun alone
    ],
)
def test_of_two_gpus_of_its_own_each_of_three_ranks_takes_the_first(told: dict[str, str]) -> None:
    """--ntasks=3 --gpus-per-task=2 on one node, at rank 1."""
    own = {"CUDA_VISIBLE_DEVICES": "2,3", "SLURM_STEP_GPUS": "2,3"}
    of_three = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3", "SLURM_GTIDS": "0,1,2"}
    of_three |= {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "3"}
    assert said(elsewhere(step(1, **of_three, **own, **told)), "device")[0] == "cuda:0"


def test_limits_token_proof_and_threads_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names_lead_to_eth0(monkeypatch)
    monkeypatch.setattr(auth, "choose_authenticator", lambda: SimpleNamespace(kind="munge"))
    asked = ExplainOptions(limits={"timeout": (7.0, "--timeout")})
    found = explain(step(0, OMP_NUM_THREADS="4"), asked, (LO, ETH0))
    assert said(found, "timeout") == ("7 s", "--timeout")
    assert said(found, "token")[0] == "1207.0.0"
    proof, why = said(found, "proof")
    assert proof == "munge"
    assert tells(why, "munge", "none")
    assert said(found, "threads") == ("4", "OMP_NUM_THREADS=4")
    assert said(found, "backend") == ("auto", "the default")
    assert said(elsewhere(step(0), backend="gloo"), "backend") == ("gloo", "--backend")


def test_the_binding_is_that_of_a_run(fake_nvml: object) -> None:
    assert said(explain({}, ExplainOptions(), (LO,)), "bind") == ("none", "the default")
    binding, why = said(elsewhere(step(0), bind="auto"), "bind")
    assert binding == "auto"
    assert tells(why, "--bind", "not checked")
    value, why = said(explain({}, ExplainOptions(bind="auto"), (LO,)), "bind")
    # Here is no GPU, or the tests are bound.
    assert (value, why[:13]) == ("unchanged", "--bind=auto: ")


# Where something is wrong.


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        (step(1, RANK="3"), "RANK=3, but SLURM_PROCID=1; expected "),
        (step(1) | hydra(0) | open_mpi(1), "two launchers disagree: "),
    ],
)
def test_what_follows_from_a_wrong_launcher_is_left_out(
    variables: dict[str, str], error: str
) -> None:
    found = elsewhere(variables)
    assert found.exit_code == 78
    assert found.text.splitlines()[-1].startswith(f"[rank 1] error: {error}")
    assert {"ifaces.conf", "backend", "threads"} <= {row.name for row in found.rows}
    assert "rank" not in {row.name for row in found.rows}


def test_a_wrong_file_leaves_the_ranks_numbers(tmp_path: Path) -> None:
    conf = str(write(tmp_path / "wrong.conf", "- nodes: '*'\n  interfaces: ib0\n"))
    found = elsewhere(step(1), ifaces=conf)
    assert said(found, "rank") == ("1", "SLURM_PROCID=1")
    assert found.text.splitlines()[-1].startswith(
        f"[rank 1] error: {conf}:2:3: unknown key 'interfaces'; "
    )


def test_rank_zeros_name_leads_to_another_interface(
    monkeypatch: pytest.MonkeyPatch, conf: str
) -> None:
    names_lead_to_eth0(monkeypatch)
    found = explain(
        step(0),
        ExplainOptions(ifaces=conf),
        (ETH0, NetworkInterface("ib0", True, 0, ("10.1.0.2",), ())),
    )
    assert said(found, "interface") == ("ib0", f"{conf}:2:3")
    assert tells(str(found.errors[0]), "rank 0", "node02-data", "10.0.0.2", "eth0")


def test_an_interface_that_is_down_leaves_what_was_chosen(
    conf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names_lead_to_eth0(monkeypatch)
    down = NetworkInterface("ib0", False, 0, (), ())
    found = explain(step(0), ExplainOptions(ifaces=conf, channel="slurm"), (LO, ETH0, down))
    assert said(found, "interface") == ("ib0", f"{conf}:2:3; see the error")
    assert said(found, "GLOO_SOCKET_IFNAME") == ("ib0", f"{conf}:2:3")
    (error,) = found.errors
    assert tells(str(error), "ib0", "down", "node02")
    assert found.exit_code == 78


def test_every_error_of_a_run_is_explained() -> None:
    """Each variable of a step in turn holds what no launcher writes, and is not there."""
    for name in step(1):
        for wrong in ("x[", "-3", "9999999999", ""):
            variables = step(1) | PMI2 | EXPLICIT | {name: wrong}
            if not wrong:
                del variables[name]
            for channel in (None, "slurm", "env", "mpi"):
                assert elsewhere(variables, channel=channel).rows


def test_a_line_of_an_explanation_stays_one_and_is_printable() -> None:
    """What variables hold is explained, and no terminal obeys it."""
    command = "a\x1b]0;owned\x07b\rc\nd"
    shown = r"a\x1b]0;owned\x07b\rc\nd"
    rows = [Row("master", command, f"MASTER_ADDR={command}", (f"OTHER={command}: {command}",))]
    text = Explanation({}, ExplainOptions(), None, rows=rows, notes=[command]).text
    lines = text.splitlines()
    assert (len(lines), text.count(shown)) == (3, 5)
    assert all(line.isprintable() and line.startswith("[rank 0] ") for line in lines)
