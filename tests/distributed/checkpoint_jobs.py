"""What the ranks of the checkpoint tests run. Imported by the pool's processes."""

import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from moe_framework.checkpoint import (
    CheckpointStore,
    folder,
    model_tensors,
    optimizer_step,
    optimizer_tensors,
    save,
    set_optimizer_step,
)
from moe_framework.checkpoint.manifest import Manifest

# Seven rows are uneven over 2 and 4 ranks; three rows leave a rank of four empty.
SHAPES = {
    "model.layers.0.dense": (7, 6),
    "model.layers.0.tiny": (3, 2),
    "model.layers.0.one": (1,),
    "model.layers.3.moe.experts.gate_up": (4, 8, 6),
    "optimizer.exp_avg.layers.3.moe.experts.gate_up": (4, 8, 6),
    "optimizer.exp_avg.layers.0.dense": (7, 6),
    "model.buffer": (5,),
}


def full_tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def mesh_of(dp: int, ep: int) -> DeviceMesh:
    mesh = init_device_mesh("cpu", (dp, ep), mesh_dim_names=("dp", "ep"))
    mesh["dp", "ep"]._flatten("dense")
    return mesh


def sharded(full: dict[str, Tensor], mesh: DeviceMesh) -> dict[str, Tensor]:
    """The layout of the framework: dense over all ranks, experts whole over ep and split over dp."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in full.items():
        if "experts" in name:
            tensors[name] = distribute_tensor(tensor, mesh, [Shard(1), Shard(0)])
        elif "buffer" in name:
            tensors[name] = tensor.clone()
        else:
            tensors[name] = distribute_tensor(tensor, mesh["dense"], [Shard(0)])
    return tensors


def full_values(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}


def make_store(directory: Path, *, keep: int = 0, async_save: bool = False) -> CheckpointStore:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return CheckpointStore(directory, keep=keep, async_save=async_save, group=group)


def save_at(directory: Path, dp: int, ep: int, async_save: bool) -> list[str]:
    store = make_store(directory, async_save=async_save)
    tensors = sharded(full_tensors(1), mesh_of(dp, ep))
    store.save(200, tensors, {"layout": {"dp": dp, "ep": ep}}, {"rank": dist.get_rank()})
    for tensor in tensors.values():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local.fill_(-1)
    store.close()
    return sorted(path.name for path in (directory / "step_00000200").iterdir())


def load_at(directory: Path, dp: int, ep: int) -> Manifest:
    store = make_store(directory)
    tensors = sharded({name: torch.zeros(shape) for name, shape in SHAPES.items()}, mesh_of(dp, ep))
    step_dir = store.latest_step()
    assert step_dir is not None
    manifest = store.load(step_dir, tensors)
    for name, tensor in full_values(tensors).items():
        assert torch.equal(tensor, full_tensors(1)[name]), name
    return manifest


def load_wrong_experts(directory: Path, dp: int, ep: int) -> None:
    full = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    full["model.layers.3.moe.experts.gate_up"] = torch.zeros(8, 8, 6)
    store = make_store(directory)
    store.load(directory / "step_00000200", sharded(full, mesh_of(dp, ep)))


def load_untouched_on_error(directory: Path, dp: int, ep: int) -> None:
    """Raise what load raises, after checking that no tensor changed."""
    tensors = sharded({name: torch.full(shape, 7.0) for name, shape in SHAPES.items()}, mesh_of(dp, ep))
    store = make_store(directory)
    try:
        store.load(directory / "step_00000200", tensors)
    finally:
        assert all(torch.all(tensor == 7) for tensor in full_values(tensors).values())


def latest(directory: Path) -> Path | None:
    return make_store(directory).latest_step()


def save_replicated_mesh(directory: Path) -> None:
    """HSDP: two replicas of a tensor sharded over two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    full = torch.arange(12.0).reshape(6, 2)
    store = make_store(directory)
    store.save(1, {"w": distribute_tensor(full, mesh, [Replicate(), Shard(0)])}, {})
    target = distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0), Shard(1)])
    store.load(directory / "step_00000001", {"w": target})
    assert torch.equal(target.full_tensor(), full)


def fsdp_model(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(dist.get_rank())  # what is not loaded differs
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.AdamW, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def resume_fsdp_model(directory: Path) -> None:
    """Save after an evaluation, which leaves FSDP's root gathered; train on; load into a fresh model; compare."""
    mesh, store = init_device_mesh("cpu", (2,)), make_store(directory, async_save=True)
    model, optimizer = fsdp_model(mesh)
    train(model, optimizer, 2)
    with torch.no_grad():
        model(torch.ones(4, 6))
    tensors = {**model_tensors(model), **optimizer_tensors(model, optimizer)}
    assert all(isinstance(tensor, DTensor) for tensor in tensors.values())
    store.save(2, tensors, {"optimizer_step": optimizer_step(optimizer)})
    train(model, optimizer, 3)

    resumed, fresh = fsdp_model(mesh)
    targets = {**model_tensors(resumed), **optimizer_tensors(resumed, fresh)}
    manifest = store.load(directory / "step_00000002", targets)
    set_optimizer_step(fresh, manifest.state["optimizer_step"])
    train(resumed, fresh, 3)
    expected = full_values(model_tensors(model))
    for name, tensor in full_values(model_tensors(resumed)).items():
        assert torch.equal(tensor, expected[name]), name
    store.close()


def save_shards_as_plain_tensors(directory: Path) -> None:
    make_store(directory).save(1, {"experts": torch.full((2, 3), float(dist.get_rank()))}, {})


def save_different_names(directory: Path) -> None:
    make_store(directory).save(1, {f"w{dist.get_rank()}": torch.ones(2)}, {})


def save_unserialisable_on_one_rank(directory: Path, rank: int, async_save: bool) -> None:
    store = make_store(directory, async_save=async_save)
    store.save(1, {"w": torch.ones(2)}, {}, {"rng": object() if dist.get_rank() == rank else 1})
    store.close()


def background_failure(directory: Path, failing_rank: int, surface: str) -> tuple[str, int, Path | None]:
    """Let one rank's write fail in the background; the error's text, polls until it surfaced, and the newest step."""
    store = make_store(directory, keep=1, async_save=True)
    tensors = sharded(full_tensors(1), mesh_of(dist.get_world_size(), 1))
    store.save(200, tensors, {})
    store.wait()
    genuine = save._Writer.write_data

    def fail(writer: Any, *args: Any) -> Any:
        if dist.get_rank() == failing_rank:
            raise OSError(28, "No space left on device")
        return genuine(writer, *args)

    polls = 0
    save._Writer.write_data = fail  # pyright: ignore[reportAttributeAccessIssue]
    try:
        store.save(300, tensors, {})
        while surface == "poll" and not store.poll():
            polls += 1
        store.wait() if surface == "wait" else store.save(400, tensors, {})
    except Exception as error:
        text = str(error)
    else:
        text = "no error"
    finally:
        save._Writer.write_data = genuine
    newest = store.latest_step()
    store.close()
    return text, polls, newest


def train_while_saving(directory: Path) -> bool:
    """Collectives of training while the background thread is held: they must not meet the store's."""
    store = make_store(directory, async_save=True)
    release = threading.Event()
    genuine = save._Writer.write_data

    def held(writer: Any, *args: Any) -> Any:
        release.wait(60)
        return genuine(writer, *args)

    save._Writer.write_data = held  # pyright: ignore[reportAttributeAccessIssue]
    try:
        store.save(200, sharded(full_tensors(1), mesh_of(2, 1)), {})
        for _ in range(20):
            total = torch.ones(3)
            dist.all_reduce(total)
            assert torch.all(total == dist.get_world_size())
            assert store.poll() is False
        release.set()
        store.wait()
    finally:
        save._Writer.write_data = genuine
    return store.poll()


def poll_while_one_rank_is_late(directory: Path) -> tuple[list[bool], bool]:
    """Hold one rank after its save: (what polls said meanwhile, whether a poll reported the end afterwards)."""
    store = make_store(directory, async_save=True)
    release, write = threading.Event(), store._write

    def write_late(job: save.SaveJob) -> None:
        write(job)
        if dist.get_rank() == 1:
            release.wait(60)

    store._write = write_late
    store.save(200, sharded(full_tensors(1), mesh_of(2, 1)), {})
    while dist.get_rank() == 0 and store._in_flight is not None and not store._in_flight.done():
        time.sleep(0.01)
    dist.barrier()  # rank 0's save is done, rank 1's is not
    polls = [store.poll() for _ in range(5)]
    release.set()
    deadline = time.monotonic() + 60
    while not (ended := store.poll()) and time.monotonic() < deadline:
        time.sleep(0.01)
    store.close()
    return polls, ended


def die_before_latest(directory: Path) -> None:
    """Publish a manifest and stop there, as a killed process would."""
    genuine = folder.publish_latest

    def stop(step_dir: Path) -> None:
        raise RuntimeError("stopped")

    store = make_store(directory)
    folder.publish_latest = stop
    try:
        store.save(200, sharded(full_tensors(1), mesh_of(dist.get_world_size(), 1)), {})
    finally:
        folder.publish_latest = genuine


def save_without_group_argument(directory: Path) -> None:
    store = CheckpointStore(directory, keep=0, async_save=False, group=None)
    store.save(200, sharded(full_tensors(1), mesh_of(dist.get_world_size(), 1)), {})
