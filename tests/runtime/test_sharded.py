"""Deltas on a model that somebody's own loop has sharded (`fully_shard`): everything is as on the whole model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import deltune
from deltune.errors import DeltuneError
from deltune.runtime.causal_loss import language_head
from tables.families import FAMILIES
from tables.specimens import batch, build, distance, forward, loss, run

CASES = (
    ("bert", "lora(rank=2)"),
    ("bert", "layernorm"),
    ("bert", "bitfit"),
    ("bert", "prefix(length=2)"),
    ("bert", "dora(rank=2) + adapter(rank=2)"),
    ("gpt2", "lora(rank=2) + layernorm"),
)


@contextlib.contextmanager
def group(rank: int, ranks: int, store: Any) -> Iterator[None]:
    """The process group of one of several processes."""
    distributed.init_process_group("gloo", rank=rank, world_size=ranks, store=store)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def plain(family: str) -> Any:
    """A classifier, or a decoder whose loss is computed without its logits."""
    return build(FAMILIES[family], "sequence" if family == "bert" else "causal").eval()


def tuned_pair(family: str, method: str) -> deltune.Tuned:
    """A model with deltas "a", in use, and "b", every tensor of which does something."""
    tuned = deltune.attach(plain(family), method, name="a")
    deltune.attach(tuned.model, method, name="b")
    torch.manual_seed(3)
    for name in ("b", "a"):
        for parameter in tuned.use(name).trainable_parameters():
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    tuned.model.eval()
    return tuned


def sharded(tuned: deltune.Tuned) -> deltune.Tuned:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in tuned.anatomy.layers:
        fully_shard(tuned.model.get_submodule(layer.path), mesh=mesh)
    fully_shard(tuned.model, mesh=mesh)
    return tuned


def answers(family: str, tuned: deltune.Tuned, folder: Path) -> Iterator[tuple[str, torch.Tensor | str]]:
    """Yield what each operation makes of the model, and an error's first words where it is refused."""
    inputs, model = batch(plain(family), rows=4, seed=1), tuned.model

    def output() -> torch.Tensor:
        return run(model, inputs)["logits"].clone()

    yield "a", output()
    with tuned.disable():
        yield "disable", output()
    with tuned.rows(["a", "b", None, ["a"]]):
        yield "rows", output()
    tuned.use("b")
    yield "b", output()
    optimizer = torch.optim.SGD(tuned.trainable_parameters(), lr=0.05)
    for _ in range(2):
        with tuned.disable():
            output()  # as the reference model of DPO
        if family == "bert":
            loss(forward(model, inputs)).backward()
        else:
            deltune.causal_loss(model, {**inputs, "labels": inputs["input_ids"]}).backward()
            assert not language_head(model).reasons
        optimizer.step(), optimizer.zero_grad()
    yield "trained", output()
    tuned.save(folder / "b")
    yield "a again", (tuned.use("a"), output())[1]
    loaded = deltune.load(plain(family), folder / "b").model
    yield "loaded", run(loaded, inputs)["logits"]
    for name, work in (
        ("export", lambda: deltune.export(model, folder / "exported", name="b")),
        ("merge", lambda: tuned.merge(["b", "a"], head_of="b")),
    ):
        try:
            work()
            yield name, output() if name == "merge" else "done"
        except DeltuneError as error:
            yield name, str(error)[:60]


def compare(cases: tuple[tuple[str, str], ...], folder: Path) -> None:
    for number, (family, method) in enumerate(cases):
        here = folder / f"sharded{number}"
        whole = answers(family, tuned_pair(family, method), folder / f"whole{number}-{distributed.get_rank()}")
        ours_of = answers(family, sharded(tuned_pair(family, method)), here)
        for (name, expected), (_, ours) in zip(whole, ours_of, strict=True):
            if isinstance(expected, str):
                assert ours == expected, f"{method}: {name}"
            else:
                assert (ours - expected).abs().max() < 1e-10, f"{method}: {name}"
        inputs = batch(plain(family), rows=4)
        detached = sharded(tuned_pair(family, method)).detach()
        assert distance(run(detached, inputs), run(plain(family), inputs)) == 0, method


def in_two(rank: int, folder: Path) -> None:
    """Run in each of two processes."""
    with group(rank, 2, distributed.FileStore(str(folder / "store"), 2)):
        compare(CASES, folder)


@pytest.mark.slow
def test_two_processes_give_what_the_whole_model_gives(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(in_two, (tmp_path,), nprocs=2)


def test_one_process_with_shards_gives_what_the_whole_model_gives(tmp_path: Path) -> None:
    """And what would go wrong later is refused with what to do."""
    with group(0, 1, distributed.HashStore()):
        compare(CASES[-1:], tmp_path)
        tuned = sharded(tuned_pair("gpt2", "layernorm"))
        for refused in (
            lambda: deltune.attach(tuned.model, "lora", name="c"),
            lambda: deltune.load(tuned.model, tmp_path / "sharded0" / "b", name="c"),
            lambda: tuned.combine("a + b", "c"),
            lambda: tuned.model.save_pretrained(tmp_path / "model"),
            lambda: sharded(tuned_pair("bert", "adalora(rank=2)")).advance(0.5),
        ):
            with pytest.raises(DeltuneError, match="is sharded"):
                refused()
