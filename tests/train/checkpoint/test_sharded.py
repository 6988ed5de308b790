"""The model in shards, and their checkpoints."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import nn

from srunddp.errors import ConfigError
from srunddp.train import CheckpointError, FSDPConfig, load_checkpoint
from srunddp.train.checkpoint import dcp
from srunddp.train.checkpoint.directory import CheckpointDirectory
from srunddp.train.checkpoint.file import load_file
from tests.train.conftest import results_of
from tests.train.local_world import LocalWorld
from tests.train.sharded import config, network, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def results(folder: Path) -> Any:
    return results_of("sharded.py", folder, timeout=240)


def equal(one: Any, other: Any) -> bool:
    """To the bit, tensors within included."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def outcome(result: dict[str, Any]) -> dict[str, Any]:
    return {name: result[name] for name in ("losses", "records", "weights", "state")}


def test_two_ranks_train_in_shards_to_the_bits_of_whole_models(results: Any) -> None:
    """With gradients that are accumulated, BatchNorm, dropout and a last step that is not full."""
    for whole, sharded in zip(results["alike"]["ddp"], results["alike"]["fsdp"], strict=True):
        assert equal(outcome(sharded), outcome(whole))


def test_each_rank_has_half_of_parameters_and_optimizer_state(results: Any) -> None:
    for result in results["alike"]["fsdp"]:
        assert abs(result["own"] - result["all"] / 2) < 0.05 * result["all"]


def test_a_meta_device_model_trains_to_the_same_bits(results: Any) -> None:
    for deferred, plain in zip(results["deferred"], results["alike"]["fsdp"], strict=True):
        assert equal(outcome(deferred), outcome(plain))
    assert equal(
        outcome(train(LocalWorld(), config(), None, nn.BatchNorm1d, torch.optim.AdamW, "meta")),
        outcome(train(LocalWorld(), config())),
    )


def test_a_meta_device_model_is_never_whole_in_a_ranks_memory(results: Any) -> None:
    assert max(results["peaks"]) < 384 / 2 + 64 + 50


def test_values_set_after_sharding_are_refused(results: Any) -> None:
    for message in results["reset in shards"]:
        assert message.startswith("reset_parameters() of Resets, on the meta device, sets what is in shards by then")


def test_all_of_rank_0s_buffers_go_to_the_others(results: Any) -> None:
    for part in results["with gaps"]:
        assert not part.any()


@pytest.mark.parametrize("name", ["clipped", "sgd"])
def test_clipping_and_sgd_train_in_shards_as_in_whole_models(results: Any, name: str) -> None:
    """Clipping takes the norm over all shards; torch's fused SGD knows no shards."""
    whole, sharded = (results[name][parallel][0]["losses"] for parallel in ("ddp", "fsdp"))
    assert sharded == pytest.approx(whole, rel=1e-4)
    assert sharded != pytest.approx(results["alike"]["ddp"][0]["losses"], rel=1e-2)


def test_bf16_is_computed_with_and_fp32_is_kept(results: Any) -> None:
    (train, _), *_, (last, _) = results["bf16"][0]["records"]
    assert last["loss"] < train["loss"]
    assert {tensor.dtype for tensor in results["bf16"][0]["weights"].values()} == {torch.float32}


def test_checkpointed_activations_change_nothing(results: Any) -> None:
    for result, plain in zip(results["checkpointed"], results["alike"]["fsdp"], strict=True):
        assert result["losses"] == plain["losses"]


def test_what_shards_cannot_do_is_refused_with_its_hint(results: Any) -> None:
    for messages in results["refused"]:
        fp16, ema, hook, name, norm, ddp, fused, rprop, scalar, tied, sparse, mixed, again = messages
        assert "GradScaler knows nothing of shards" in fp16
        assert ema.startswith("ema_decay is 0.9, with parallel=fsdp; expected null, shards are not averaged")
        assert hook.startswith("ddp.hook with parallel=fsdp; expected parallel=ddp, which alone has it")
        assert name.startswith("fsdp.modules names Blok; expected classes of the modules in the model: ")
        assert norm.startswith("fsdp.param_dtype=bf16, and BatchNorm in the model")
        assert ddp.startswith("fsdp.modules, fsdp.param_dtype with parallel=ddp; expected parallel=fsdp")
        assert fused.startswith("the optimizer SGD with fused=True, and parallel=fsdp")
        assert rprop.startswith("the optimizer Rprop, and parallel=fsdp")
        assert scalar.startswith("the parameter 1.factor without a dimension, and parallel=fsdp")
        assert tied.startswith("last.weight shared between modules that are gathered one after the other")
        assert sparse.startswith("an embedding with sparse=True, and parallel=fsdp")
        assert mixed.startswith("parameters of float32 and float64 in one Sequential, and parallel=fsdp")
        assert again.startswith("a model that is in shards already, and parallel=fsdp")


def test_a_state_that_the_optimizer_has_becomes_shards(results: Any) -> None:
    numbers = 0
    for before, after, own in results["adopted"]:
        assert equal(after, before)
        numbers += sum(own)
    assert numbers == sum(tensor.numel() for tensor in before)


def test_a_relative_folder_and_a_named_checkpoint_are_the_same(results: Any) -> None:
    """With Adagrad, which has a state before its first step."""
    for first, second, _ in results["elsewhere"]:
        assert len(second["losses"]) < len(first["losses"])
        assert all(equal(first[name], second[name]) for name in ("records", "weights", "state"))


def test_an_archived_checkpoint_keeps_its_shards(results: Any) -> None:
    _, _, left = results["elsewhere"][0]
    folders = [name.partition(".")[0] for name in left if name.endswith(".shards")]
    files = [name.partition(".")[0] for name in left if not name.endswith(".shards")]
    assert len([name for name in left if name.endswith(".aside")]) > 2
    assert len(files) > len(set(files)), "no step was made again"
    assert folders == files


def test_a_stopped_sharded_run_resumes_to_the_same_bits(results: Any) -> None:
    for again, plain in zip(results["resumed"]["went on"], results["alike"]["fsdp"], strict=True):
        assert 10 <= len(again["losses"]) < len(plain["losses"])
        assert again["losses"] == plain["losses"][-len(again["losses"]) :]
        assert all(equal(again[name], plain[name]) for name in ("records", "weights", "state"))


@pytest.mark.parametrize("ranks", ["3 ranks", "whole, 2 ranks", "whole, alone"])
def test_shards_of_two_ranks_are_taken_up_by_others_to_the_bit(results: Any, ranks: str) -> None:
    saved = results["resumed"]["went on"][0]
    for loaded in results["resumed"][ranks]:
        assert loaded["losses"] == []
        assert all(equal(loaded[name], saved[name]) for name in ("records", "weights", "state"))


def test_a_checkpoint_of_whole_models_is_taken_up_in_shards(results: Any) -> None:
    saved = results["alike"]["ddp"][0]
    for loaded in results["resumed"]["in shards, of one file"]:
        assert all(equal(loaded[name], saved[name]) for name in ("records", "weights", "state"))
        assert loaded["own"] < 0.4 * loaded["all"]


def test_more_ranks_go_on_amid_an_epoch(results: Any) -> None:
    first, _, third = results["resumed"]["on more ranks"]
    assert len(first["records"]) == 2
    assert equal(first["weights"], third["weights"])


def test_killed_saves_leave_a_checkpoint_and_nothing_else(results: Any) -> None:
    amid, again, left = results["killed"]
    assert amid > 0, "no save was met"
    for rank, plain in zip(again, results["alike"]["fsdp"], strict=True):
        assert all(equal(rank[name], plain[name]) for name in ("records", "weights", "state"))
    assert left == sorted(2 * list(set(left))), "each has its file and its folder"


def test_one_ranks_failing_disk_is_named_and_the_next_save_whole(results: Any, folder: Path) -> None:
    (result, printed), (_, other) = results["failing disk"]
    assert "the checkpoint of step 2 could not be written: [Errno 28] rank 1: No space left on device" in printed
    assert "the checkpoint of step 4 could not be written: [Errno 5] rank 1: Input/output error" in printed
    assert other == ""
    assert len(result["records"]) == 2
    state = load_checkpoint(folder / "failing" / "checkpoints" / "step-00000016.pt")
    assert equal(dict(state["model"]), results["alike"]["fsdp"][0]["weights"])


def test_a_folder_that_nodes_do_not_share_is_refused(results: Any) -> None:
    for message in results["unshared"]:
        assert message.startswith("what rank 0 writes to /")
        assert "is not seen by rank 1; expected with parallel=fsdp an output_dir that all nodes share" in message
        assert message.endswith("-> put output_dir on a shared file system")


@pytest.fixture
def checkpoint(results: Any, folder: Path, tmp_path: Path) -> Path:
    """A copy of the last one in shards."""
    shutil.copytree(folder / "stopped" / "checkpoints", tmp_path / "checkpoints", symlinks=True)
    return max((tmp_path / "checkpoints").glob("step-*.pt"))


def shards_of(path: Path) -> Path:
    (found,) = path.parent.glob(f"{path.stem}.*.shards")
    return found


def test_a_misspelt_class_is_refused_also_of_one_rank() -> None:
    with pytest.raises(ConfigError, match=r"fsdp\.modules names Blok"):
        train(LocalWorld(), config("fsdp", fsdp=FSDPConfig(modules=("Blok",))))


def test_one_call_loads_a_checkpoint_as_a_whole(results: Any, checkpoint: Path) -> None:
    state = load_checkpoint(checkpoint)
    assert equal(dict(state["model"]), results["resumed"]["went on"][0]["weights"])
    assert len(state["optimizer"]["state"]) == 12
    network().load_state_dict(state["model"])


def test_torchs_own_reader_takes_the_shards(results: Any, checkpoint: Path) -> None:
    weights = results["resumed"]["went on"][0]["weights"]
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
