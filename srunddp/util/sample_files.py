"""The files that ``--monitor`` writes and ``report`` reads: their columns, each once.

docs/reference/files.md says what is in them. A column may be added at the end of a file; a reader
goes by the names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto


class Use(Enum):
    """What a column holds.

    Attributes:
        TIME: Unix time.
        KEY: what a row is about, where a file is about several things.
        COUNTER: a number that grows, and begins anew after a restart.
        GAUGE: a number that goes up and down.
        WORD: a text, or a number of which the last one is enough.
    """

    TIME = auto()
    KEY = auto()
    COUNTER = auto()
    GAUGE = auto()
    WORD = auto()


@dataclass(frozen=True)
class SampleFile:
    """One kind of file: what each of its columns holds, by name, in their order."""

    columns: Mapping[str, Use]

    @property
    def names(self) -> tuple[str, ...]:
        """The columns' names."""
        return tuple(self.columns)

    @property
    def header(self) -> str:
        """The first line."""
        return ",".join(self.columns) + "\n"

    @property
    def key(self) -> str:
        """The column that tells apart what rows are about; empty where all are about one thing."""
        return next(iter(self.having(Use.KEY)), "")

    def having(self, *uses: Use) -> tuple[str, ...]:
        """Return the columns that have one of these uses."""
        return tuple(name for name, use in self.columns.items() if use in uses)


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
THROTTLED = "throttled"  # reasons, as thermal+power_cap; a gauge of whether heat is one of them
# What is asked of each GPU, in the order of the columns.
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
# Those of a node, by the names in those of the files: node01.gpus.csv.
OF_A_NODE = {"node": NODE, "tasks": TASKS, "links": LINKS, "gpus": GPUS}
