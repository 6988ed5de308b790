"""Configures Slurm's accounting: slurmdbd, and the MariaDB in which slurmdbd keeps jobs and job
steps.
"""

import shlex
from pathlib import Path

from .nodes import LOGIN

_PORT = 6819
_SAMPLE_SECONDS = 1  # how often Slurm reads a task's CPU time and memory


def config_lines(munge_socket: Path) -> list[str]:
    """Return the lines of slurm.conf for accounting. They leave AccountingStorageEnforce off, so
    that nobody needs an account to submit jobs.
    """
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={LOGIN.name}",
        f"AccountingStoragePort={_PORT}",
        # Slurm proves itself to slurmdbd by the socket named here, and not by the one in AuthInfo.
        f"AccountingStoragePass={munge_socket}",
        "AccountingStorageTRES=gres/gpu",
    ]


def gathering_lines(tracking: str) -> list[str]:
    """Return the lines of slurm.conf that make Slurm read the CPU time and memory of running tasks.
    This needs no slurmdbd.
    """
    return [
        f"JobAcctGatherType=jobacct_gather/{'cgroup' if tracking == 'cgroup' else 'linux'}",
        f"JobAcctGatherFrequency=task={_SAMPLE_SECONDS}",
    ]


def write_config(folder: Path, munge_socket: Path) -> None:
    etc = folder / "etc"
    (etc / "my.cnf").write_text("\n".join(_database_lines(folder)) + "\n")
    slurmdbd = etc / "slurmdbd.conf"
    slurmdbd.write_text("\n".join(_slurmdbd_lines(folder, munge_socket)) + "\n")
    slurmdbd.chmod(0o600)  # slurmdbd refuses a file with any other mode


def make_database(folder: Path) -> str:
    """Return a shell command that creates the database's files. Run it before `database`."""
    return shlex.join(
        ("mariadb-install-db", _defaults(folder), "--auth-root-authentication-method=socket")
    )


def database(folder: Path) -> tuple[str, ...]:
    """Return the command line of MariaDB."""
    return ("mariadbd", _defaults(folder))


def wait_database(folder: Path) -> str:
    """Return a shell command that waits for the database. Run it before slurmdbd, which would wait
    5 s if the database did not answer at once.
    """
    socket = shlex.quote(str(_socket(folder)))
    return f"export MYSQL_UNIX_PORT={socket}; until [ -S {socket} ]; do sleep 0.05; done"


def wait_slurmdbd() -> str:
    """Return a shell command that waits for slurmdbd. Run it before slurmctld, whose first start
    fails without slurmdbd.
    """
    return f"until ss -Hltn sport = :{_PORT} | grep -q .; do sleep 0.05; done"


def _socket(folder: Path) -> Path:
    return folder / "run" / "mariadb.socket"


def _defaults(folder: Path) -> str:
    return f"--defaults-file={folder}/etc/my.cnf"


def _database_lines(folder: Path) -> list[str]:
    """Return the configuration of MariaDB: small and fast. It does not protect the data, because
    the database is removed with the cluster.
    """
    return [
        "[mariadbd]",
        "user=root",
        f"datadir={folder}/database",
        f"socket={_socket(folder)}",
        f"pid-file={folder}/run/mariadb.pid",
        # If several databases that are created at the same time share a tmpdir, some of them crash:
        # 10 of 80 did.
        f"tmpdir={folder}/run",
        "skip-networking",
        "skip-name-resolve",
        "innodb-buffer-pool-size=16M",
        "innodb-log-file-size=4M",
        "innodb-flush-log-at-trx-commit=0",
        "innodb-flush-method=nosync",
        "innodb-doublewrite=0",
    ]


def _slurmdbd_lines(folder: Path, munge_socket: Path) -> list[str]:
    return [
        "AuthType=auth/munge",
        f"AuthInfo=socket={munge_socket}",
        f"DbdHost={LOGIN.name}",
        f"DbdAddr={LOGIN.management}",
        f"DbdPort={_PORT}",
        "SlurmUser=root",
        f"PidFile={folder}/run/slurmdbd.pid",
        f"LogFile={folder}/log/slurmdbd.log",
        "StorageType=accounting_storage/mysql",
        "StorageHost=localhost",
        "StorageUser=root",
    ]
