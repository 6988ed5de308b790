"""Makes up runs: writes the files that sampler and recorder would write, for a run of any size and
with any trouble.

The values follow from the attributes of a :class:`MadeUp`, with a little noise that is the same
each time.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

NODE = (
    "time,cpu_s,cpus,memory_bytes,memory_limit_bytes,read_bytes,written_bytes,iowait_s,interface,"
    "source"
)
TASKS = "time,rank,cpu_s,rss_bytes,processes,delay_s"
LINKS = "time,link,kind,chosen,received_bytes,sent_bytes"
GPUS = (
    "time,uuid,index,name,utilization_percent,memory_bytes,memory_limit_bytes,memory_bandwidth_percent,power_w,"
    "energy_j,temperature_c,sm_clock_mhz,memory_clock_mhz,throttled,pcie_received_bytes_per_s,pcie_sent_bytes_per_s,"
    "nvlink_received_bytes,nvlink_sent_bytes,sm_percent,occupancy_percent,tensor_percent,dram_percent"
)
STEPS = "time,steps,samples,step_s,data_s,own_s,longest_step_s,epoch"
GPU_FAULTS = "time,uuid,index,kind,xid,fault"
MARKS = "time,mark,value"
GIB = 2**30


@dataclass(frozen=True)
class MadeUp:
    """A made-up run. With the default values it has no trouble.

    Attributes:
        nodes, ranks_per_node, gpus_per_node: The size of the run.
        seconds: For how long the run trains.
        interval: Seconds between two readings.
        start: The Unix time at which the run starts.
        step_s: How long a step lasts, in seconds.
        own: The share of a step that is not the backward pass.
        data: The share of a step in which a rank waits for data.
        slow: By rank, how many seconds longer the rank's own part of each step takes.
        slow_data: By rank, how many seconds longer the rank waits for data in each step.
        stall: By rank, how many seconds longer the rank's own part of one step in the middle takes.
        data_stall: Seconds for which all ranks wait for data, once, in the middle.
        epoch_s, evaluation_s, checkpoint_s: How many seconds an epoch, an evaluation and the
            writing of a checkpoint last; 0 for a run without any.
        utilization: How busy each GPU is, in percent.
        idle: The GPUs that do nothing, each as (node, index).
        hot: The GPUs that are throttled, each as (node, index).
        faults: For each fault of a GPU, the number of the node, and the line of the node's file
            without the time. Each fault comes 100 s after the start.
        chosen_link: Bytes per second, in each direction, on the link that the run uses.
        rdma: Bytes per second, in each direction, on an RDMA port; 0 for nodes without one.
        other_link: Bytes per second, in each direction, on a link that the run does not use.
        download: Further bytes per second that this other link receives.
        busy: The share of the CPUs that is used.
        delay: For how many seconds of each second a worker's main thread waits for a CPU.
        memory: Bytes of memory_limit that each node uses.
        code: The exit code of all ranks; None for a run that was killed after ``seconds``.
        codes: By rank, the exit codes that differ from ``code``.
        time_limit: The job's time limit in seconds; None for none.
        ahead: By node, how many seconds the node's clock is ahead.
        trainer: Whether the script uses srunddp.Trainer; otherwise it only calls heartbeat().
        resumed: The step of the checkpoint from which the run went on; None for a new run.
        nan_after: Seconds after which the loss is NaN; None for a run without metrics.jsonl.
        renewed: Whether the counters of tasks and nodes begin at 0 again in the middle.
        workers: The number of loader processes of each rank; None for a run of an old version,
            which did not write the number.
        name: Job and job step, as in ``4711.0``.
        node_name: Returns the name of a node for its number from 0 on.
        model: The name of each GPU.
    """

    nodes: int = 3
    ranks_per_node: int = 2
    gpus_per_node: int = 0
    seconds: float = 600.0
    interval: float = 5.0
    start: float = 1_800_000_000.0
    step_s: float = 0.2
    own: float = 0.4
    data: float = 0.02
    slow: Mapping[int, float] = field(default_factory=dict)
    slow_data: Mapping[int, float] = field(default_factory=dict)
    stall: Mapping[int, float] = field(default_factory=dict)
    data_stall: float = 0.0
    epoch_s: float = 150.0
    evaluation_s: float = 8.0
    checkpoint_s: float = 1.0
    utilization: float = 92.0
    idle: tuple[tuple[int, int], ...] = ()
    hot: tuple[tuple[int, int], ...] = ()
    faults: tuple[tuple[int, str], ...] = ()
    chosen_link: float = 40e6
    rdma: float = 0.0
    other_link: float = 2e3
    download: float = 0.0
    busy: float = 0.8
    delay: float = 0.01
    cpus: int = 8
    memory: int = 6 * GIB
    memory_limit: int = 8 * GIB
    code: int | None = 0
    codes: Mapping[int, int] = field(default_factory=dict)
    time_limit: float | None = 1200.0
    ahead: Mapping[int, float] = field(default_factory=dict)
    trainer: bool = True
    resumed: int | None = None
    nan_after: float | None = None
    renewed: bool = False
    workers: int | None = None
    script: tuple[str, ...] = ("train.py", "--epochs=20")
    name: str = "4711.0"
    node_name: Callable[[int], str] = lambda number: f"node{number + 1:02}"
    model: str = "NVIDIA H100 80GB HBM3"

    @property
    def ranks(self) -> range:
        """All ranks of the run."""
        return range(self.nodes * self.ranks_per_node)

    def node_of(self, rank: int) -> int:
        """Return the number of a rank's node."""
        return rank // self.ranks_per_node

    def write(self, logs: Path, restart: int = 0) -> Path:
        """Write the files of a start of the run below a folder for logs.

        Args:
            logs: The folder for the logs of all runs.
            restart: The number of the restart; 0 for the first start.

        Returns:
            The folder of the files.
        """
        folder = logs / self.name / f"monitor.{restart}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps(self._header(restart), ensure_ascii=False))
        for rank in self.ranks:
            stem = f"{_plain(self.node_name(self.node_of(rank)))}.rank{rank}"
            _write(folder / f"{stem}.steps.csv", STEPS, self._steps(rank))
            _write(folder / f"{stem}.marks.csv", MARKS, self._marks(rank))
        for node in range(self.nodes):
            stem = _plain(self.node_name(node))
            _write(folder / f"{stem}.node.csv", NODE, self._node(node))
            _write(folder / f"{stem}.tasks.csv", TASKS, self._tasks(node))
            _write(folder / f"{stem}.links.csv", LINKS, self._links(node))
            if self.gpus_per_node:
                _write(folder / f"{stem}.gpus.csv", GPUS, self._gpus(node))
                _write(folder / f"{stem}.gpu_faults.csv", GPU_FAULTS, self._gpu_faults(node))
        if self.nan_after is not None:
            (folder / "metrics.jsonl").write_text("".join(self._losses(self.nan_after)))
        return folder

    def _losses(self, nan_after: float) -> Iterator[str]:
        for second in range(10, int(self.seconds), 10):
            time = datetime.fromtimestamp(self.start + second, UTC).isoformat()
            loss = "NaN" if second > nan_after else 1.0 / second
            yield (
                json.dumps({"kind": "step", "step": 5 * second, "time": time, "loss": loss}) + "\n"
            )

    def _header(self, restart: int) -> dict[str, object]:
        names = [self.node_name(node) for node in range(self.nodes)]
        job, _, step = self.name.partition(".")
        return {
            "version": 1,
            "srunddp": "0.1.0",
            "job": job,
            "step": step,
            "restarts": restart,
            "run": self.name,
            "launcher": "Slurm",
            "world_size": len(self.ranks),
            "nodes": names,
            "ranks": {str(rank): names[self.node_of(rank)] for rank in self.ranks},
            "interfaces": dict.fromkeys(names, "ens1f1"),
            "backend": "nccl" if self.gpus_per_node else "gloo",
            "script": list(self.script),
            "seconds": self.interval,
            "started": self.start + 0.5,
            "time_limit_s": self.time_limit,
        }

    # What the training does, and when: times are seconds since the start of the run.

    @property
    def _begin(self) -> float:
        return 5.0 + 0.001 * len(self.ranks)

    @property
    def _end(self) -> float:
        return self._begin + self.seconds

    @property
    def _spans(self) -> list[tuple[float, float]]:
        """The begin and end of each span of time in which steps are made, between evaluations."""
        spans = []
        at = self._begin
        pause = self.evaluation_s + self.checkpoint_s
        while at < self._end:
            stop = min(self._end, at + (self.epoch_s - pause if self.epoch_s else self.seconds))
            spans.append((at, stop))
            at = stop + pause if self.epoch_s else self._end
        return spans

    def _step(self) -> float:
        """Return how long a step lasts: as long as its slowest rank takes."""
        more = [self.slow.get(rank, 0.0) + self.slow_data.get(rank, 0.0) for rank in self.ranks]
        return self.step_s + max(more, default=0.0)

    def _times(self, node: int, since: float = 1.0) -> list[float]:
        """Return the times of the readings since the start. Unless the run was killed, the last
        reading is at its end.
        """
        count = math.floor((self._end - since) / self.interval) + 1
        times = [since + self.interval * number for number in range(count)]
        return [*times, self._end + 0.3] if self.code is not None else times

    def _clock(self, node: int, time: float) -> str:
        return f"{self.start + time + self.ahead.get(node, 0.0):.3f}"

    def _steps(self, rank: int) -> Iterator[str]:
        node = self.node_of(rank)
        noise = random.Random(rank)
        spans = self._spans
        length = self._step()
        own = self.step_s * self.own + self.slow.get(rank, 0.0) + self.slow_data.get(rank, 0.0)
        data = self.step_s * self.data + self.slow_data.get(rank, 0.0)
        own += max(0.0, self.step_s * (self.data - 0.02))
        own_s = data_s = before = 0.0
        for time in self._times(node, 1.5):
            spent = sum(max(0.0, min(time, stop) - begin) for begin, stop in spans)
            count = int(spent / length)
            if time >= self._begin + self.seconds / 2 > time - self.interval:
                own_s += self.stall.get(rank, 0.0) + self.data_stall
                data_s += self.data_stall
            own_s += (count - before) * own * noise.uniform(0.98, 1.02)
            data_s += (count - before) * data * noise.uniform(0.9, 1.1)
            epoch = sum(begin <= time for begin, _ in spans)
            longest = length * noise.uniform(1.0, 1.3) if count > before else 0.0
            head = f"{self._clock(node, time)},{count}"
            if self.trainer:
                samples = count * 64 * len(self.ranks)
                yield (
                    f"{head},{samples},{count * length:.4f},{data_s:.4f},{own_s:.4f},"
                    f"{longest:.4f},{epoch}"
                )
            else:
                yield f"{head},,,,,,"
            before = count

    def _marks(self, rank: int) -> Iterator[str]:
        node = self.node_of(rank)
        late = 0.02 * rank / max(1, len(self.ranks) / 8)
        met = 1.2 + 0.02 * 8
        for mark, time, value in (
            ("process", late, ""),
            ("meeting", late + 0.3, ""),
            ("met", met, ""),
            ("import", met + 0.05, ""),
            ("imported", met + 2.0 + late / 2, ""),
            *(
                [
                    ("init", 3.7, ""),
                    ("initialised", 4.1, ""),
                    ("fit", 4.2, "" if self.workers is None else str(self.workers)),
                ]
                if self.trainer
                else []
            ),
            ("step", self._begin + self._step(), f"{self._step():.4f}"),
            *self._course(rank),
        ):
            yield f"{self._clock(node, time)},{mark},{value}"
        code = self.codes.get(rank, self.code)
        if code is not None:
            yield f"{self._clock(node, self._end + 0.2)},end,{code}"

    def _course(self, rank: int) -> Iterator[tuple[str, float, str]]:
        if not self.trainer or not self.epoch_s:
            return
        if self.resumed is not None:
            yield "resumed", self._begin - 0.1, str(self.resumed)
        for number, (begin, stop) in enumerate(self._spans, 1):
            yield "epoch", begin, str(number)
            if stop + self.evaluation_s + self.checkpoint_s > self._end:
                return
            if self.evaluation_s:
                yield "evaluation", stop, ""
                yield "evaluation_end", stop + self.evaluation_s, ""
            yield "epoch_end", stop + self.evaluation_s, str(number)
            if self.checkpoint_s and rank == 0:
                yield (
                    "checkpoint",
                    stop + self.evaluation_s + self.checkpoint_s,
                    f"{self.checkpoint_s:.3f}",
                )
                yield (
                    "checkpoint_written",
                    stop + self.evaluation_s + self.checkpoint_s,
                    f"{self.checkpoint_s * 3:.3f}",
                )

    # What the sampler of each node would write.

    def _counter(self, rate: float, time: float) -> float:
        """Return the value of a counter that grows at a rate from the first step on. If
        ``renewed``, it begins at 0 again in the middle.
        """
        spent = max(0.0, time - self._begin)
        half = self.seconds / 2
        return rate * (spent - half if self.renewed and spent > half else spent)

    def _node(self, node: int) -> Iterator[str]:
        noise = random.Random(f"node {node}")
        for time in self._times(node):
            cpu = 2.0 * self.ranks_per_node * min(time, 4.0) + self._counter(
                self.busy * self.cpus, time
            )
            memory = int(self.memory * min(1.0, 0.2 + time / 10) * noise.uniform(0.97, 1.0))
            yield (
                f"{self._clock(node, time)},{cpu:.3f},{self.cpus},{memory},{self.memory_limit},"
                f"{int(self._counter(20e6, time))},{int(self._counter(1e6, time))},"
                f"{self._counter(0.05, time):.3f},ens1f1,cgroup"
            )

    def _tasks(self, node: int) -> Iterator[str]:
        first = node * self.ranks_per_node
        for time in self._times(node):
            for rank in range(first, first + self.ranks_per_node):
                cpu = 2.0 * min(time, 4.0) + self._counter(
                    self.busy * self.cpus / self.ranks_per_node, time
                )
                rss = int(self.memory / self.ranks_per_node * min(1.0, 0.2 + time / 10))
                # The task has four processes: the supervisor, the worker and two loader processes.
                delay = self._counter(self.delay * 3, time)
                yield f"{self._clock(node, time)},{rank},{cpu:.3f},{rss},4,{delay:.4f}"

    def _links(self, node: int) -> Iterator[str]:
        for time in self._times(node):
            links = [("ens1f1", "net", 1, self.chosen_link, self.chosen_link)]
            links.append(("eno1", "net", 0, self.other_link + self.download, self.other_link))
            if self.rdma:
                links.append(("mlx5_0/1", "rdma", 0, self.rdma, self.rdma))
            for name, kind, chosen, received, sent in links:
                counts = f"{int(self._counter(received, time))},{int(self._counter(sent, time))}"
                yield f"{self._clock(node, time)},{name},{kind},{chosen},{counts}"

    def _gpu_faults(self, node: int) -> Iterator[str]:
        for where, line in self.faults:
            if where == node:
                yield f"{self._clock(node, 100.0)},{line}"

    def _gpus(self, node: int) -> Iterator[str]:
        noise = random.Random(f"gpus {node}")
        spans = self._spans
        energy = dict.fromkeys(range(self.gpus_per_node), 1e6)
        for time in self._times(node):
            works = any(begin <= time < stop for begin, stop in spans)
            for index in range(self.gpus_per_node):
                if works:
                    used = self.utilization * noise.uniform(0.96, 1.04)
                else:
                    used = noise.uniform(0, 8)
                used = 0.0 if (node, index) in self.idle else min(100.0, used)
                power = 90 + 5.6 * used
                energy[index] += power * self.interval
                hot = (node, index) in self.hot
                heat = 87 if hot else 34 + 0.3 * used * min(1.0, time / 60) + index
                if time > self._begin and used:
                    memory = 42 * GIB
                else:
                    memory = GIB
                yield (
                    f"{self._clock(node, time)},GPU-{node}-{index},{index},{self.model},"
                    f"{used:.0f},{memory},{80 * GIB},{used * 0.55:.0f},{power:.1f},"
                    f"{energy[index]:.1f},{heat:.0f},{1300 if hot else 1980},2619,"
                    f"{'power_cap+thermal' if hot and works else ''},1e8,1e8,,,,,,"
                )


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]|^\.", "_", name, flags=re.ASCII) or "_"


def _write(path: Path, header: str, lines: Iterable[str]) -> None:
    path.write_text("\n".join([header, *lines, ""]))
