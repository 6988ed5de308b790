"""The columns of the files that ``--monitor`` writes and ``srunddp report`` reads.

docs/reference/files.md describes the columns. Add a new column after all others of its file;
readers find columns by name.
"""

from collections.abc import Mapping
from enum import Enum, auto

from srunddp.util.quick_dataclass import dataclass


class Use(Enum):
    """What kind of value a column holds.

    Attributes:
        TIME: Unix time in seconds.
        KEY: Which rank, link or GPU the row is about, in a file with rows about several of them.
        COUNTER: A number that grows, and starts again after a restart.
        GAUGE: A number that goes up and down.
        WORD: A text, or a number of which the latest value is enough.
    """

    TIME = auto()
    KEY = auto()
    COUNTER = auto()
    GAUGE = auto()
    WORD = auto()


@dataclass(frozen=True)
class SampleFile:
    """A kind of file that ``--monitor`` writes.

    Attributes:
        columns: The use of each column, by the column's name, in the order of the file.
    """

    columns: Mapping[str, Use]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns, in file order."""
        return tuple(self.columns)

    @property
    def header(self) -> str:
        """The file's first line, with its line end."""
        return ",".join(self.columns) + "\n"

    @property
    def key(self) -> str:
        """The name of the column that tells which rank, link or GPU a row is about; empty if the
        file has no such column.
        """
        return next(iter(self.having(Use.KEY)), "")

    def having(self, *uses: Use) -> tuple[str, ...]:
        """Return the names of the columns with one of these uses, in file order."""
        return tuple(name for name, use in self.columns.items() if use in uses)


SETTINGS = "config.yaml"
"""The name of the file with the settings of a ``Trainer``, as in its ``output_dir``."""

STEPS = SampleFile(
    {
        "time": Use.TIME,
        "steps": Use.COUNTER,
        "samples": Use.COUNTER,
        "step_s": Use.COUNTER,
        "data_s": Use.COUNTER,
        "own_s": Use.COUNTER,
        "longest_step_s": Use.GAUGE,
        "epoch": Use.WORD,
    }
)
MARKS = SampleFile({"time": Use.TIME, "mark": Use.WORD, "value": Use.WORD})
NODE = SampleFile(
    {
        "time": Use.TIME,
        "cpu_s": Use.COUNTER,
        "cpus": Use.GAUGE,
        "memory_bytes": Use.GAUGE,
        "memory_limit_bytes": Use.GAUGE,
        "read_bytes": Use.COUNTER,
        "written_bytes": Use.COUNTER,
        "iowait_s": Use.COUNTER,
        "interface": Use.WORD,
        "source": Use.WORD,
    }
)
TASKS = SampleFile(
    {
        "time": Use.TIME,
        "rank": Use.KEY,
        "cpu_s": Use.COUNTER,
        "rss_bytes": Use.GAUGE,
        "processes": Use.GAUGE,
        "delay_s": Use.COUNTER,
    }
)
LINKS = SampleFile(
    {
        "time": Use.TIME,
        "link": Use.KEY,
        "kind": Use.WORD,
        "chosen": Use.WORD,
        "received_bytes": Use.COUNTER,
        "sent_bytes": Use.COUNTER,
    }
)
# The name of the column with the reasons for a lower clock, joined as in thermal+power_cap. Where
# the column is used as a gauge, its number says whether heat is one of the reasons.
THROTTLED = "throttled"
# The values sampled for each GPU, in the order of the columns.
GPU_FIELDS = {
    "utilization_percent": Use.GAUGE,
    "memory_bytes": Use.GAUGE,
    "memory_limit_bytes": Use.GAUGE,
    "memory_bandwidth_percent": Use.GAUGE,
    "power_w": Use.GAUGE,
    "energy_j": Use.COUNTER,
    "temperature_c": Use.GAUGE,
    "sm_clock_mhz": Use.GAUGE,
    "memory_clock_mhz": Use.WORD,
    THROTTLED: Use.GAUGE,
    "pcie_received_bytes_per_s": Use.WORD,
    "pcie_sent_bytes_per_s": Use.WORD,
    "nvlink_received_bytes": Use.WORD,
    "nvlink_sent_bytes": Use.WORD,
    "sm_percent": Use.GAUGE,
    "occupancy_percent": Use.WORD,
    "tensor_percent": Use.GAUGE,
    "dram_percent": Use.WORD,
}
GPUS = SampleFile(
    {"time": Use.TIME, "uuid": Use.KEY, "index": Use.WORD, "name": Use.WORD} | GPU_FIELDS
)
# The faults of GPUs, with one row for each. The text of the last column never has a comma.
GPU_FAULTS = SampleFile(
    {
        "time": Use.TIME,
        "uuid": Use.KEY,
        "index": Use.WORD,
        "kind": Use.WORD,
        "xid": Use.WORD,
        "fault": Use.WORD,
    }
)
# The files that are written for each node. The key is a part of the file's name: the file of "gpus"
# is, for example, node01.gpus.csv.
OF_A_NODE = {"node": NODE, "tasks": TASKS, "links": LINKS, "gpus": GPUS}
