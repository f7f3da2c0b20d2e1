"""What leaves a block of `use`, `rows` or `disable`: copies, pickles, hashes, threads; and what other threads break."""

from __future__ import annotations

import contextvars
import copy
import io
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dill
import pytest
import torch
from datasets.fingerprint import Hasher
from transformers import PreTrainedModel

import deltune
from tables.families import FAMILIES
from tables.specimens import Outputs, batch, build, equal, forward, loss, run, stir

from .test_races import Part, beside
from .test_threads import run_at_once

TEXTS = ("lora(rank=2)", "layernorm", "prefix(length=2) + bitfit", "apet(layernorm + lora(rank=2), parameters=40)")


def tuned_model(text: str) -> deltune.Tuned:
    """A model with the deltas a and b of one method, of which a is in use."""
    model = build(FAMILIES["bert"], "sequence")
    for seed, name in enumerate("ab"):
        tuned = stir(deltune.attach(model, text, name=name), seed=seed)
    return tuned.use("a")


def through_torch(model: PreTrainedModel) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "dill": lambda model: dill.loads(dill.dumps(model, recurse=True)),
    "torch.save": through_torch,
    "pickle of the handle": lambda model: pickle.loads(pickle.dumps(deltune.tuned(model))).model,
    "twice": lambda model: copy.deepcopy(pickle.loads(pickle.dumps(copy.deepcopy(model)))),
}


def states(tuned: deltune.Tuned) -> Iterator[str]:
    """Put the model into one state after another; those of one name give the same."""
    for name in ("a", "b", None, "a"):
        tuned.use(name)
        yield str(name)
    with tuned.disable():
        yield "None"
        with tuned.rows(["b", "a"]):
            yield "b, a"
        yield "None"
    for rows in (["a", None], ["b", "a"], ["b", "b"]):
        with tuned.rows(rows):
            yield ", ".join(map(str, rows))
    yield "a"


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.sample(1)
def test_what_a_block_uses_is_in_use_in_what_leaves_it(text: str) -> None:
    """It stays in use there until `use`; the model itself is what it was."""
    tuned = tuned_model(text)
    model, inputs = tuned.model, batch(tuned.model, rows=2)
    named = list(tuned.named_trainable_parameters())
    plain = run(model, inputs)
    for state in states(tuned):
        here = run(model, inputs)
        trained = [name for name, _ in tuned.named_trainable_parameters()]
        for way, leave in WAYS.items():
            twin = leave(model)
            handle = deltune.tuned(twin)
            assert (handle.active, handle.mixed) == (tuned.active, tuned.mixed), (state, way)
            assert equal(run(twin, inputs), here), (state, way)
            if way != "copy":  # it shares its parameters with the model
                assert [name for name, _ in handle.named_trainable_parameters()] == trained, (state, way)
                assert equal(run(handle.use("a").model, inputs), plain), (state, way)
                assert handle.active == "a" and handle.mixed == ()
    after = list(tuned.named_trainable_parameters())
    assert [name for name, _ in after] == [name for name, _ in named]
    assert all(one is other for (_, one), (_, other) in zip(after, named, strict=True))


def test_rows_in_use_in_a_copy() -> None:
    tuned = tuned_model("lora(rank=2)")
    inputs = batch(tuned.model, rows=2)
    bare = {name: run(tuned.use(name).model, inputs) for name in ("a", "b", None)}
    with tuned.rows(["a", "b"]):
        twin, other = copy.deepcopy(tuned.model), pickle.loads(pickle.dumps(tuned.model))
    handle = deltune.tuned(twin)
    loss(forward(twin, inputs)).backward()
    assert all(p.grad is not None for name in "ab" for p in handle.delta(name).parameters() if p.requires_grad)
    with pytest.raises(deltune.DeltuneError, match="2 names, but the batch has 3 rows"):
        run(twin, batch(twin, rows=3))
    with handle.disable():
        assert equal(run(twin, inputs), bare[None])
    handle.detach("b")
    assert (handle.active, handle.mixed, handle.names) == (None, (), ("a",)) and equal(run(twin, inputs), bare[None])
    assert equal(run(handle.use("a").model, inputs), bare["a"])
    assert equal(run(deltune.tuned(other).use("b").model, inputs), bare["b"])


def test_a_part_of_a_model_is_not_pickled_alone() -> None:
    tuned = tuned_model("layernorm")
    model, inputs = tuned.model, batch(tuned.model)
    for part in (model.bert, model.bert.encoder.layer[0], model.bert.encoder):
        with pytest.raises(deltune.DeltuneError, match="pickle the whole model"):
            pickle.dumps(part)
    with tuned.disable():
        both = copy.deepcopy([model.bert, model])
        here = run(model, inputs)
    assert both[1].bert is both[0] and equal(run(both[1], inputs), here)


# -- hashes, by which `datasets.map` finds what it has computed before


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.sample(1)
def test_a_hash_differs_exactly_where_outputs_do(text: str) -> None:
    tuned = tuned_model(text)
    model, inputs = tuned.model, batch(tuned.model, rows=2)

    def embed(row: Any) -> Any:
        return model(**inputs).logits

    hashes: dict[str, str] = {}
    for state in states(tuned):
        for _ in range(2):
            number = Hasher.hash(embed)
            assert hashes.setdefault(state, number) == number, f"{state}: what was done before changes the hash"
            run(model, inputs)
    assert len(set(hashes.values())) == len(hashes) == 6
    with torch.no_grad():
        next(tuned.trainable_parameters()).add_(1)
    assert Hasher.hash(embed) not in hashes.values()


HASHED = """
import sys, torch
from datasets.fingerprint import Hasher
from tests.runtime.test_blocks import tuned_model
tuned = tuned_model(sys.argv[1])
hashes = [Hasher.hash(tuned.model)]
with tuned.disable():
    hashes.append(Hasher.hash(tuned.model))
with tuned.rows(["a", "b"]):
    hashes.append(Hasher.hash(tuned.model))
print(*hashes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("text", [TEXTS[0], TEXTS[2]])
def test_a_hash_is_the_same_in_another_process(text: str) -> None:
    root = Path(__file__).parents[2]
    printed = []
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([*sys.path, str(root)])}
        done = subprocess.run(
            [sys.executable, "-c", HASHED, text], env=environment, cwd=root, check=True, capture_output=True, text=True
        )
        printed.append(done.stdout.split()[-3:])
    assert printed[0] == printed[1] and len(set(printed[0])) == 3


# -- threads


@pytest.mark.parametrize("block", [lambda tuned: tuned.disable(), lambda tuned: tuned.rows(["b", None])])
@pytest.mark.parametrize("warm", [False, True])
def test_a_thread_that_may_belong_to_a_block_is_refused(block: Callable[[Any], Any], warm: bool) -> None:
    """Also one of a pool that was there before, and whatever it does: run, generate, copy, read."""
    tuned = tuned_model("lora(rank=2)")
    model, inputs = tuned.model, batch(tuned.model, rows=2)
    plain = run(model, inputs)
    work: list[Callable[[], Any]] = [
        lambda: run(model, inputs), lambda: run(model.bert, inputs), model.state_dict, lambda: copy.deepcopy(model),
        lambda: pickle.dumps(model),
    ]  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        if warm:
            assert equal(pool.submit(run, model, inputs).result(), plain)
        with block(tuned):
            here = run(model, inputs)
            for one in work:
                with pytest.raises(deltune.DeltuneError, match="another thread is inside rows"):
                    pool.submit(one).result()
            carried = contextvars.copy_context()
            assert equal(pool.submit(carried.run, run, model, inputs).result(), here)

            def inside() -> Outputs:
                with block(tuned):
                    return run(model, inputs)

            assert equal(pool.submit(inside).result(), here)
            with pytest.raises(deltune.DeltuneError, match="another thread is inside rows"):
                pool.submit(run, model, inputs).result()
        assert equal(pool.submit(run, model, inputs).result(), plain)


def test_a_thread_that_chose_what_is_in_use() -> None:
    """It has nothing to do with the blocks of others, and neither have the contexts that are copied from it."""
    tuned = tuned_model("layernorm")
    model, inputs = tuned.model, batch(tuned.model)
    plain = run(model, inputs)

    def chosen() -> Outputs:
        tuned.use("a")
        return run(model, inputs)

    outside = contextvars.copy_context()
    with tuned.disable(), ThreadPoolExecutor(1) as pool:
        assert equal(pool.submit(outside.run, run, model, inputs).result(), plain)
        assert equal(pool.submit(chosen).result(), plain)
        assert not equal(run(model, inputs), plain)
    assert equal(run(model, inputs), plain)


def test_heads_of_other_labels_in_threads(tmp_path: Path) -> None:
    """Losses, logits and gradients of each are those alone, with `rows`, with `disable`, and with what is in use."""
    model = build(FAMILIES["bert"], "sequence", num_labels=2)
    for number in (3, 5):
        other = build(FAMILIES["bert"], "sequence", num_labels=number)
        other.bert.load_state_dict(model.bert.state_dict())
        stir(deltune.attach(other, "layernorm + lora(rank=2)"), seed=number).save(tmp_path / str(number))
    tuned = stir(deltune.attach(model, "layernorm", name="two"))
    for number in (3, 5):
        deltune.load(model, tmp_path / str(number), name=f"of{number}", use=False)
    inputs = batch(model, rows=2)
    jobs: dict[str, tuple[Callable[[], Any], torch.Tensor]] = {
        "of3": (lambda: tuned.rows(["of3"] * 2), torch.tensor([2, 0])),
        "of5": (lambda: tuned.rows(["of5"] * 2), torch.tensor([4, 1])),
        "both": (lambda: tuned.rows(["of3", "of5"]), torch.tensor([2, 4])),
        "base": (tuned.disable, torch.tensor([1, 0])),
    }

    def answer(labels: torch.Tensor) -> Outputs:
        output = model(**inputs, labels=labels)
        return {"loss": output.loss.detach(), "logits": output.logits.detach()}

    def job(name: str) -> Outputs:
        block, labels = jobs[name]
        with block():
            return answer(labels)

    expected = {name: job(name) for name in jobs}
    plain = answer(torch.tensor([1, 0]))

    def repeated(name: str) -> int:
        return sum(not equal(job(name), expected[name]) for _ in range(6))

    def outside() -> int:
        tuned.use("two")
        return sum(not equal(answer(torch.tensor([1, 0])), plain) for _ in range(6))

    wrong = run_at_once(*(lambda name=name: repeated(name) for name in jobs), outside)
    assert wrong == [0] * 5 and model.config.num_labels == 2 and tuned.active == "two"


# -- other models in other threads


@pytest.mark.parametrize("leave", [copy.deepcopy, pickle.dumps, lambda model: pickle.loads(pickle.dumps(model))])
def test_another_model_that_is_being_copied(leave: Callable[[Any], Any], tmp_path: Path) -> None:
    """Its copy has modules that are not whole yet, and this model has nothing to do with them."""
    other, tuned = tuned_model("layernorm"), tuned_model("lora(rank=2)")
    model, inputs = tuned.model, batch(tuned.model)
    expected = run(model, inputs)
    tuned.save(tmp_path / "saved")
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go_on.wait(60)

    other.model.bert.pooler.part = Part(wait)
    with beside(lambda: leave(other.model)):
        begun.wait(60)
        fresh = build(FAMILIES["bert"], "sequence")
        deltune.attach(fresh, "layernorm")
        deltune.load(model, tmp_path / "saved", name="again")
        deltune.attach(model, "bitfit", name="more")
        assert equal(run(tuned.use("a").model, inputs), expected)
        tuned.detach("again")
        deltune.tuned(fresh).detach()
        go_on.set()
    assert equal(run(model, inputs), expected)


def test_models_that_are_copied_and_freed_beside_attaching(tmp_path: Path) -> None:
    other, tuned = tuned_model("layernorm"), tuned_model("lora(rank=2)")
    tuned.save(tmp_path / "saved")
    stop = threading.Event()

    def copies() -> None:
        pickled = pickle.dumps(other.model)
        while not stop.is_set():
            copy.deepcopy(other.model)
            pickle.loads(pickled)

    with beside(copies):
        try:
            for _ in range(10):
                deltune.load(tuned.model, tmp_path / "saved", name="again").detach("again")
                deltune.attach(build(FAMILIES["bert"], "sequence"), "layernorm")
        finally:
            stop.set()


@pytest.mark.parametrize("leave", [lambda model: model, *(WAYS[way] for way in ("deepcopy", "pickle"))])
def test_a_module_of_another_model_or_of_its_copy(leave: Callable[[Any], Any]) -> None:
    """Its tensors would be taken for the base's, also where no edit acts at it."""
    of = leave(tuned_model("lora(rank=2)").model)
    for share in ("bert", "bert.embeddings.word_embeddings"):
        model = build(FAMILIES["bert"], "sequence")
        parent, _, leaf = share.rpartition(".")
        setattr(model.get_submodule(parent), leaf, of.get_submodule(share))
        with pytest.raises(deltune.DeltuneError, match=f"'{share}.*also belongs to"):
            deltune.attach(model, "layernorm")
    deltune.tuned(of).detach()
    deltune.attach(model, "layernorm").detach()


# -- what `use` in another thread promises about gradients


def test_use_in_another_thread_during_a_backward_pass() -> None:
    """torch drops the gradient of a parameter that is frozen just before it is added, which must not go unnoticed."""
    tuned = tuned_model("prefix(length=4) + layernorm")
    model, inputs = tuned.model, batch(tuned.model)
    tuned.use("b").use("a")
    frozen, parameters = model.bert.encoder.layer[1].output.LayerNorm.bias, list(tuned.trainable_parameters())

    def use(name: str) -> None:
        thread = threading.Thread(target=lambda: tuned.use(name))
        thread.start()
        thread.join()

    hook = frozen.register_hook(lambda gradient: use("b"))
    first: list[torch.Tensor] = []
    entry = model.bert.encoder.layer[1].register_forward_pre_hook(lambda module, args: first.append(args[0]))
    output = forward(model, inputs)
    first[0].register_hook(lambda gradient: use("a"))
    with pytest.raises(deltune.DeltuneError, match="not in use any more"):
        loss(output).backward()
    hook.remove()
    entry.remove()
    tuned.use("a")
    model.zero_grad()
    loss(forward(model, inputs)).backward()
    assert all(parameter.grad is not None for parameter in parameters)
