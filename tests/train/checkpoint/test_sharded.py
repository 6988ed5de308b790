"""The model in shards, and their checkpoints."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

from srunddp.errors import ConfigError
from srunddp.train import (
    Callback,
    CheckpointConfig,
    CheckpointError,
    Config,
    DDPConfig,
    FSDPConfig,
    Trainer,
    load_checkpoint,
)
from srunddp.train.checkpoint import dcp, resharding, sharded
from srunddp.train.checkpoint.directory import CheckpointDirectory
from srunddp.train.checkpoint.file import load_file
from tests.train.interrupted import until
from tests.train.local_world import LocalWorld, run_ranks, start_ranks
from tests.train.problems import Scale, classes, message

pytestmark = pytest.mark.usefixtures("one_thread")

BF16 = FSDPConfig(modules=("Block",), param_dtype="bf16")


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), norm(16)

    def forward(self, inputs: Any) -> Any:
        return inputs + torch.relu(self.norm(self.linear(inputs)))


def network(seed: int = 0, norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Module:
    """With a number of outputs that no number of ranks divides."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), Block(norm), Block(norm), nn.Dropout(0.1), nn.Linear(16, 5))


class StopsAfterSave(Callback):
    def __init__(self, step: int | None) -> None:
        self.losses: list[float | None] = []
        self._step = step

    def on_step(self, trainer: Trainer, step: int, loss: float | None) -> None:
        self.losses.append(loss)
        if step == self._step:
            assert until(Path(trainer.config.output_dir or "", "checkpoints", f"step-{step - 1:08}.pt").exists)
            raise KeyboardInterrupt


def config(parallel: str = "fsdp", folder: Path | None = None, **changes: Any) -> Config:
    fsdp = FSDPConfig(modules=("Block",)) if parallel == "fsdp" else FSDPConfig()
    kept = (
        {"output_dir": str(folder), "resume": "auto", "checkpoint": CheckpointConfig(every_steps=2)} if folder else {}
    )
    return Config(
        **({"epochs": 2, "batch_size": 4, "accumulation": 2, "tensorboard": False, "parallel": parallel, "fsdp": fsdp})
        | kept
        | changes
    )


def train(
    world: LocalWorld,
    settings: Config,
    stop: int | None = None,
    norm: type[nn.Module] = nn.BatchNorm1d,
    optimizing: Any = torch.optim.AdamW,
    built_on: str = "cpu",
) -> dict[str, Any]:
    with torch.device(built_on):
        model, journal = network(world.rank, norm), StopsAfterSave(stop)  # all are to begin with rank 0's
    if built_on == "meta":
        torch.manual_seed(world.rank)
    optimizer = optimizing(model.parameters(), lr=0.01)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), settings, world=world, callbacks=[journal])
    torch.manual_seed(world.rank)  # of the dropout
    try:
        records = trainer.fit(classes(120), classes(30))
    except KeyboardInterrupt:
        return {}
    return {
        "losses": journal.losses[1:],
        "records": [(record.train, record.test) for record in records],
        "weights": {name: whole(tensor) for name, tensor in trainer.model.state_dict().items()},
        "state": [{name: whole(each) for name, each in values.items()} for values in optimizer.state.values()],
        "own": sum(local(parameter).numel() for parameter in trainer.model.parameters()),
        "all": sum(parameter.numel() for parameter in trainer.model.parameters()),
    }


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def run(ranks: int, folder: Path, *args: Any) -> Any:
    return run_ranks(ranks, folder / "world", train, *args) if ranks > 1 else [train(LocalWorld(), *args)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def whole_models(folder: Path) -> Any:
    return run(2, folder, config("ddp", folder / "ddp"))


@pytest.fixture(scope="module")
def in_shards(folder: Path) -> Any:
    return run(2, folder, config("fsdp"))


@pytest.fixture(scope="module")
def resumed(folder: Path) -> Any:
    """A run that was stopped after its fifth step, and went on."""
    run(2, folder, config("fsdp", folder / "stopped"), 5)
    return run(2, folder, config("fsdp", folder / "stopped"))


def equal(one: Any, other: Any) -> bool:
    """To the bit, tensors within included."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def outcome(result: dict[str, Any]) -> dict[str, Any]:
    return {name: result[name] for name in ("losses", "records", "weights", "state")}


def test_two_ranks_train_in_shards_to_the_bits_of_whole_models(whole_models: Any, in_shards: Any) -> None:
    """With gradients that are accumulated, BatchNorm, dropout and a last step that is not full.

    Each rank has half of the parameters and of the optimizer's state.
    """
    for whole, result in zip(whole_models, in_shards, strict=True):
        assert equal(outcome(result), outcome(whole))
        assert abs(result["own"] - result["all"] / 2) < 0.05 * result["all"]


def test_a_meta_device_model_trains_to_the_same_bits(in_shards: Any, tmp_path: Path) -> None:
    options = (None, nn.BatchNorm1d, torch.optim.AdamW, "meta")
    for deferred, plain in zip(run(2, tmp_path, config("fsdp"), *options), in_shards, strict=True):
        assert equal(outcome(deferred), outcome(plain))
    assert equal(outcome(train(LocalWorld(), config(), *options)), outcome(train(LocalWorld(), config())))


def peak(world: LocalWorld) -> float:
    """MiB of memory that a rank needed at most to have its shards of 384 MiB."""
    with torch.device("meta"):
        model = nn.Sequential(*(Wide() for _ in range(6)))
    Path("/proc/self/clear_refs").write_text("5")  # the highest is what there is now
    before = memory("VmRSS")
    optimizer = torch.optim.SGD(model.parameters())
    settings = config("fsdp", fsdp=FSDPConfig(modules=("Wide",)))
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), settings, world=world)
    assert local(next(trainer.model.parameters())).shape == (2048, 4096)
    return memory("VmHWM") - before


class Wide(nn.Module):
    """64 MiB, of which glibc gives what is freed back to the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4096, 4096, bias=False)

    def forward(self, inputs: Any) -> Any:
        return self.linear(inputs)


def memory(name: str) -> float:
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(name))
    return int(line.split()[1]) / 1024


def test_a_meta_device_model_is_never_whole_in_a_ranks_memory(tmp_path: Path) -> None:
    assert max(run_ranks(2, tmp_path, peak)) < 384 / 2 + 64 + 50


class Resets(nn.Sequential):
    """Sets what is in it."""

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.ones_(parameter)


def reset_sharded_model(world: LocalWorld) -> str:
    with torch.device("meta"):
        model = Resets(Block(nn.LayerNorm), nn.Linear(16, 5))
    return message(lambda: sharded_model(world, model))


def test_values_set_after_sharding_are_refused(tmp_path: Path) -> None:
    for said in run_ranks(2, tmp_path, reset_sharded_model):
        assert said.startswith("reset_parameters() of Resets, on the meta device, sets what is in shards by then")


def with_gaps(world: LocalWorld) -> Any:
    """Rank 0's buffer that is a part of a wider one."""
    model = network(0, nn.LayerNorm)
    model.register_buffer("part", torch.full((3, 4), float(world.rank))[:, :2])
    return sharded_model(world, model).part


def test_all_of_rank_0s_buffers_go_to_the_others(tmp_path: Path) -> None:
    for part in run_ranks(2, tmp_path, with_gaps):
        assert not part.any()


@pytest.mark.parametrize(
    ("changes", "optimizing"), [({"clip_norm": 0.5}, torch.optim.AdamW), ({}, torch.optim.SGD)], ids=["clipped", "sgd"]
)
def test_clipping_and_sgd_train_in_shards_as_in_whole_models(
    changes: Any, optimizing: Any, whole_models: Any, tmp_path: Path
) -> None:
    """Clipping takes the norm over all shards; torch's fused SGD knows no shards."""
    whole, sharded = (
        run(2, tmp_path, config(parallel, **changes), None, nn.BatchNorm1d, optimizing)[0]["losses"]
        for parallel in ("ddp", "fsdp")
    )
    assert sharded == pytest.approx(whole, rel=1e-4)
    assert sharded != pytest.approx(whole_models[0]["losses"], rel=1e-2)


def test_bf16_is_computed_with_and_fp32_is_kept(tmp_path: Path) -> None:
    result, _ = run(2, tmp_path, config("fsdp", fsdp=BF16), None, nn.LayerNorm)
    (train, _), *_, (last, _) = result["records"]
    assert last["loss"] < train["loss"]
    assert {tensor.dtype for tensor in result["weights"].values()} == {torch.float32}


def test_checkpointed_activations_change_nothing(in_shards: Any, tmp_path: Path) -> None:
    checkpointed = run(2, tmp_path, config("fsdp", ddp=DDPConfig(activation_checkpointing=("Block",))))
    assert [result["losses"] for result in checkpointed] == [result["losses"] for result in in_shards]


class Tied(nn.Module):
    """A parameter that two modules share, of which one is gathered by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Block(nn.LayerNorm), nn.Linear(16, 16)
        self.last.weight = self.block.linear.weight


def sharded_model(world: LocalWorld, model: nn.Module, optimizing: Any = torch.optim.SGD) -> Any:
    return Trainer(model, optimizing(model.parameters()), nn.CrossEntropyLoss(), config("fsdp"), world=world).model


def refusals(world: LocalWorld) -> list[str]:
    sgd, fused = torch.optim.SGD, partial(torch.optim.SGD, fused=True)
    parts = [
        (network(), fused),
        (network(), torch.optim.Rprop),
        (nn.Sequential(network(), Scale()), sgd),
        (Tied(), sgd),
        (nn.Sequential(network(), nn.Embedding(2, 2, sparse=True)), sgd),
        (nn.Sequential(network(), nn.Linear(5, 5).double()), sgd),
        (sharded_model(world, network(), sgd), sgd),
    ]
    messages = [message(lambda part=part: sharded_model(world, *part)) for part in parts]
    return [*messages, message(lambda: train(world, config("fsdp", fsdp=BF16)))]


def test_what_shards_cannot_do_is_refused_with_its_hint(tmp_path: Path) -> None:
    starts = [
        "the optimizer SGD with fused=True, and parallel=fsdp",
        "the optimizer Rprop, and parallel=fsdp",
        "the parameter 1.factor without a dimension, and parallel=fsdp",
        "last.weight shared between modules that are gathered one after the other",
        "an embedding with sparse=True, and parallel=fsdp",
        "parameters of float32 and float64 in one Sequential, and parallel=fsdp",
        "a model that is in shards already, and parallel=fsdp",
        "fsdp.param_dtype=bf16, and BatchNorm in the model",
    ]
    for messages in run_ranks(2, tmp_path, refusals):
        assert [said[: len(start)] for said, start in zip(messages, starts, strict=True)] == starts


def train_with_earlier_state(world: LocalWorld) -> Any:
    """The state of an optimizer that has made a step, before and after its parameters become shards."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    before = [values["momentum_buffer"] for values in optimizer.state.values()]
    Trainer(model, optimizer, nn.CrossEntropyLoss(), config("fsdp"), world=world)
    after = [optimizer.state[each]["momentum_buffer"] for each in model.parameters()]
    return before, list(map(whole, after)), [local(each).numel() for each in after]


def test_a_state_that_the_optimizer_has_becomes_shards(tmp_path: Path) -> None:
    numbers = 0
    for before, after, own in run_ranks(2, tmp_path, train_with_earlier_state):
        assert equal(after, before)
        numbers += sum(own)
    assert numbers == sum(tensor.numel() for tensor in before)


def train_in_relative_folder(world: LocalWorld, folder: Path) -> Any:
    """A run in a relative folder, and one that goes on from a checkpoint amid it; the folder then."""
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    settings = config("fsdp", Path("run"), checkpoint=CheckpointConfig(every_steps=4, keep_last=9))
    first = train(world, settings, None, nn.BatchNorm1d, torch.optim.Adagrad)
    keeping = CheckpointConfig(every_steps=4, keep_last=1, keep_best=0)
    asked = replace(settings, resume="run/checkpoints/step-00000004.pt", checkpoint=keeping)
    with contextlib.redirect_stderr(io.StringIO()):
        second = train(world, asked, None, nn.BatchNorm1d, torch.optim.Adagrad)
    return first, second, sorted(path.name for path in Path("run/checkpoints").glob("step-*"))


def test_a_relative_folder_and_a_named_checkpoint_are_the_same(tmp_path: Path) -> None:
    """With Adagrad, which has a state before its first step. An archived checkpoint keeps its shards."""
    results = run_ranks(2, tmp_path, train_in_relative_folder, tmp_path)
    for first, second, _ in results:
        assert len(second["losses"]) < len(first["losses"])
        assert all(equal(first[name], second[name]) for name in ("records", "weights", "state"))
    _, _, left = results[0]
    folders = [name.partition(".")[0] for name in left if name.endswith(".shards")]
    files = [name.partition(".")[0] for name in left if not name.endswith(".shards")]
    assert len([name for name in left if name.endswith(".aside")]) > 2
    assert len(files) > len(set(files)), "no step was made again"
    assert folders == files


def test_a_stopped_sharded_run_resumes_to_the_same_bits(resumed: Any, in_shards: Any) -> None:
    for again, plain in zip(resumed, in_shards, strict=True):
        assert 10 <= len(again["losses"]) < len(plain["losses"])
        assert again["losses"] == plain["losses"][-len(again["losses"]) :]
        assert all(equal(again[name], plain[name]) for name in ("records", "weights", "state"))


@pytest.mark.parametrize(("ranks", "parallel"), [(3, "fsdp"), (2, "ddp"), (1, "fsdp")])
def test_shards_of_two_ranks_are_taken_up_by_others_to_the_bit(
    ranks: int, parallel: str, resumed: Any, folder: Path
) -> None:
    """All epochs are done: these load what is there, and nothing else."""
    for loaded in run(ranks, folder, config(parallel, folder / "stopped")):
        assert loaded["losses"] == []
        assert all(equal(loaded[name], resumed[0][name]) for name in ("records", "weights", "state"))


def test_a_checkpoint_of_whole_models_is_taken_up_in_shards(whole_models: Any, folder: Path) -> None:
    for loaded in run(3, folder, config("fsdp", folder / "ddp")):
        assert all(equal(loaded[name], whole_models[0][name]) for name in ("records", "weights", "state"))
        assert loaded["own"] < 0.4 * loaded["all"]


def test_more_ranks_go_on_amid_an_epoch(tmp_path: Path) -> None:
    run(2, tmp_path, config("fsdp", tmp_path), 5)
    first, _, third = run(3, tmp_path, config("fsdp", tmp_path))
    assert len(first["records"]) == 2
    assert equal(first["weights"], third["weights"])


def killed(folder: Path, kills: int) -> Any:
    """All ranks killed amid a save, again and again; what is left then, and the run that ends."""
    place, amid = folder / "killed", 0
    settings = config("fsdp", place, checkpoint=CheckpointConfig(every_steps=1))
    for _ in range(kills):
        known = set(place.glob("checkpoints/*.shards"))
        ranks = start_ranks(2, folder / "world", train, settings)
        until(lambda known=known: set(place.glob("checkpoints/*.shards")) - known)
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join()
        files = {path.stem for path in place.glob("checkpoints/step-*.pt")}
        amid += any(path.name.partition(".")[0] not in files for path in place.glob("checkpoints/*.shards"))
    result = run(2, folder, settings)
    return amid, result, sorted(path.name.partition(".")[0] for path in place.glob("checkpoints/step-*"))


def test_killed_saves_leave_a_checkpoint_and_nothing_else(in_shards: Any, tmp_path: Path) -> None:
    amid, again, left = killed(tmp_path, 3)
    assert amid > 0, "no save was met"
    for rank, plain in zip(again, in_shards, strict=True):
        assert all(equal(rank[name], plain[name]) for name in ("records", "weights", "state"))
    assert left == sorted(2 * list(set(left))), "each has its file and its folder"


def failing_disk(world: LocalWorld, folder: Path) -> Any:
    """Rank 1's disk is full when the first checkpoint is written, and broken when the second is read back.

    At first rank 0's does not list its files either.
    """
    if world.rank == 0:
        CheckpointDirectory.remove_leftovers = failing_once(CheckpointDirectory.remove_leftovers, errno.EIO)
    if world.rank == 1:
        FileSystemWriter.write_data = failing_once(FileSystemWriter.write_data, errno.ENOSPC)
        sharded.file_digest = failing_once(sharded.file_digest, errno.EIO)
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        result = train(world, config("fsdp", folder))
    return result, printed.getvalue()


def failing_once(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    errors = [OSError(number, os.strerror(number))]

    def failing(*args: Any, **named: Any) -> Any:
        if errors:
            raise errors.pop()
        return function(*args, **named)

    return failing


def test_one_ranks_failing_disk_is_named_and_the_next_save_whole(in_shards: Any, tmp_path: Path) -> None:
    (result, printed), (_, other) = run_ranks(2, tmp_path, failing_disk, tmp_path)
    assert "the checkpoint of step 2 could not be written: [Errno 28] rank 1: No space left on device" in printed
    assert "the checkpoint of step 4 could not be written: [Errno 5] rank 1: Input/output error" in printed
    assert other == ""
    assert len(result["records"]) == 2
    state = load_checkpoint(tmp_path / "checkpoints" / "step-00000016.pt")
    assert equal(dict(state["model"]), in_shards[0]["weights"])


def unshared(world: LocalWorld, folder: Path) -> str:
    """Each rank sees another folder there, as on nodes of their own; through a link, as the path is the same."""
    folder.mkdir(exist_ok=True)
    exists, resharding._VISIBLE_WITHIN = Path.exists, 0.1
    if world.rank == 1:
        Path.exists = lambda path: path.suffix != ".tmp" and exists(path)
    return message(lambda: train(world, config("fsdp", folder)))


def test_a_folder_that_nodes_do_not_share_is_refused(tmp_path: Path) -> None:
    for said in run_ranks(2, tmp_path, unshared, tmp_path / "run"):
        assert said.startswith("what rank 0 writes to /")
        assert "is not seen by rank 1; expected with parallel=fsdp an output_dir that all nodes share" in said
        assert said.endswith("-> put output_dir on a shared file system")


@pytest.fixture
def checkpoint(resumed: Any, folder: Path, tmp_path: Path) -> Path:
    """A copy of the last one in shards."""
    shutil.copytree(folder / "stopped" / "checkpoints", tmp_path / "checkpoints", symlinks=True)
    return max((tmp_path / "checkpoints").glob("step-*.pt"))


def shards_of(path: Path) -> Path:
    (found,) = path.parent.glob(f"{path.stem}.*.shards")
    return found


def test_a_misspelt_class_is_refused_also_of_one_rank() -> None:
    with pytest.raises(ConfigError, match=r"fsdp\.modules names Blok"):
        train(LocalWorld(), config("fsdp", fsdp=FSDPConfig(modules=("Blok",))))


def test_one_call_loads_a_checkpoint_as_a_whole(resumed: Any, checkpoint: Path) -> None:
    state = load_checkpoint(checkpoint)
    assert equal(dict(state["model"]), resumed[0]["weights"])
    assert len(state["optimizer"]["state"]) == 12
    network().load_state_dict(state["model"])


def test_torchs_own_reader_takes_the_shards(resumed: Any, checkpoint: Path) -> None:
    weights = resumed[0]["weights"]
    read = {f"model/{name}": torch.empty_like(tensor) for name, tensor in weights.items()}
    torch.distributed.checkpoint.load(read, checkpoint_id=shards_of(checkpoint), no_dist=True)
    assert equal(read, {f"model/{name}": tensor for name, tensor in weights.items()})


def test_a_damaged_shard_falls_back_to_the_checkpoint_before(checkpoint: Path) -> None:
    said: list[str] = []
    shard = max(shards_of(checkpoint).glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    found = CheckpointDirectory(checkpoint.parent, 2, 1).newest(said.append)
    assert found is not None
    assert found[0] < checkpoint
    assert said == [f"passed over {shard}: its SHA-256 is not that of its content"]
    shard.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        load_checkpoint(checkpoint)


def test_old_checkpoints_and_leftovers_go_with_their_shards(checkpoint: Path) -> None:
    folder = checkpoint.parent
    kept = {path.stem.partition(".")[0] for path in folder.glob("step-*.pt")}
    assert {path.name.partition(".")[0] for path in folder.glob("*.shards")} == kept
    for name in ("step-00000099.0a1b2c3d.shards", "mine.shards", "step-00000098.abcd.shards"):
        (folder / name).mkdir()
    (folder / "step-00000098.pt.aside").touch()
    CheckpointDirectory(folder, 1, 0).add(50, {"step": 50})
    left = sorted(path.name for path in folder.iterdir() if path.suffix != ".aside" and path.name != "best.pt")
    assert left == ["mine.shards", "step-00000050.pt", "step-00000098.abcd.shards"]


def test_a_pickle_in_the_shards_metadata_is_not_executed(checkpoint: Path, tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "executed",)

    (shards_of(checkpoint) / ".metadata").write_bytes(pickle.dumps(Harmful()))
    state = load_file(checkpoint)
    with pytest.raises(CheckpointError, match=r"pathlib\.Path\.touch, which is refused|pathlib\.\w+, which is refused"):
        dcp.read(state, shards_of(checkpoint), dcp.empty)
    assert not (tmp_path / "executed").exists()
