"""Laws under threads and tasks: every pass gives what it gives alone, whatever other threads do with the model."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import deltune
from tables.families import FAMILIES, Family
from tables.methods import Row, cells, product
from tables.specimens import (
    Outputs,
    batch,
    build,
    config,
    equal,
    forward,
    loss,
    run,
    specimen,
    stir,
)

ROUNDS = 6


@pytest.fixture(autouse=True)
def _threads_take_turns_often() -> Iterator[None]:
    """Python switches between threads every 5 ms by default, which a tiny pass does not last."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def run_at_once(*jobs: Callable[[], Any]) -> list[Any]:
    """Run jobs in threads of their own, begun at once; their results. What one of them raises is raised."""
    ready = threading.Barrier(len(jobs))

    def started(job: Callable[[], Any]) -> Any:
        ready.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(started, job) for job in jobs]]


def until(stop: threading.Event, work: Callable[[], Any]) -> Callable[[], int]:
    """A job that repeats some work until it is told to stop; how often it did."""

    def job() -> int:
        times = 0
        while not stop.is_set():
            work()
            times += 1
        return times

    return job


def stopping(stop: threading.Event, jobs: list[Callable[[], Any]]) -> Callable[[], list[Any]]:
    """Run jobs together, then tell those who wait for it to stop."""

    def job() -> list[Any]:
        try:
            return run_at_once(*jobs)
        finally:
            stop.set()

    return job


def passes(model: PreTrainedModel, inputs: dict[str, Any], expected: Outputs) -> Callable[[], int]:
    """Passes of one input; how many of them gave something else than alone."""
    return lambda: sum(not equal(run(model, inputs), expected) for _ in range(ROUNDS))


def inspected(family: Family) -> None:
    """What looks at models, or attaches to one of its own, and is no business of anybody else's."""
    model = build(family, "base")
    deltune.inspect(model)
    deltune.count(config(family), "layernorm", denominator=1000)
    deltune.attach(model, "layernorm").detach()


@cells()
@pytest.mark.sample(30)
def test_passes_beside_each_other_and_beside_inspecting(family: Family, row: Row) -> None:
    model = specimen(family.name)
    stir(deltune.attach(model, row.text))
    model.eval()
    inputs = [batch(model, seed=seed, length=6 + seed) for seed in range(2)]
    expected = [run(model, one) for one in inputs]
    assert not equal(*expected)
    done = threading.Event()
    workers = [passes(model, one, alone) for one, alone in zip(inputs, expected, strict=True)]
    wrong, _ = run_at_once(stopping(done, workers), until(done, lambda: inspected(FAMILIES["bert"])))
    deltune.tuned(model).detach()
    assert wrong == [0, 0]


TRAINED = ("layernorm", "lora(rank=2)", "parallel_adapter(rank=4)", "mam(length=3, rank=4)", "three_vectors")


@cells(*TRAINED, "prompt(length=3)", families=lambda f: f.name in ("bert", "gpt2", "t5"))
def test_training_beside_training(family: Family, row: Row) -> None:
    """Gradients of two threads that share a model are those of each alone."""
    model = specimen(family.name)
    tuned = stir(deltune.attach(model, row.text))
    trained = list(tuned.trainable_parameters())
    inputs = [batch(model, seed=seed, length=6 + seed) for seed in range(2)]

    def gradients(one: dict[str, Any]) -> list[torch.Tensor | None]:
        return list(torch.autograd.grad(loss(forward(model, one)), trained, allow_unused=True))

    expected = [gradients(one) for one in inputs]

    def compare(number: int) -> int:
        wrong = 0
        for _ in range(ROUNDS):
            pairs = zip(gradients(inputs[number]), expected[number], strict=True)
            wrong += not all(a is b or torch.equal(a, b) for a, b in pairs if a is not None or b is not None)
        return wrong

    wrong = run_at_once(lambda: compare(0), lambda: compare(1))
    tuned.detach()
    assert wrong == [0, 0]


MIXED = (
    "lora(rank=2) + layernorm", "prefix(length=2) + layernorm", "parallel_adapter(rank=2) + ia3", "prompt(length=3)",
)  # fmt: skip


def several(family: str, role: str, texts: tuple[str, ...] = MIXED) -> deltune.Tuned:
    """A model with a delta of each method, named by its number."""
    model = build(FAMILIES[family], role)
    for number, text in enumerate(texts):
        tuned = stir(deltune.attach(model, text, name=f"d{number}"), seed=number)
    return tuned


def by_rows(
    tuned: deltune.Tuned, names: list[str | None], inputs: dict[str, Any], expected: Outputs
) -> Callable[[], int]:
    def job() -> int:
        wrong = 0
        for _ in range(ROUNDS):
            with tuned.rows(names):
                wrong += not equal(run(tuned.model, inputs), expected)
        return wrong

    return job


@pytest.mark.parametrize(
    ("of", "used"),
    product(
        [("bert", "sequence"), ("gpt2", "causal"), ("llama", "causal"), ("t5", "seq2seq"), ("modernbert", "sequence")],
        ["d0", "d3", None],
    ),
)
@pytest.mark.sample
def test_rows_hold_for_the_thread_that_entered_them(of: tuple[str, str], used: str | None) -> None:
    """Beside them passes with the delta in use, disabled ones, and somebody who counts, saves and attaches others."""
    tuned = several(*of)
    model = tuned.use(used).model
    inputs = batch(model, rows=3)
    plain = run(model, inputs)
    with tuned.disable():
        bare = run(model, inputs)
    mixes: list[list[str | None]] = [["d0", "d1", None], ["d2", "d2", "d3"], [None, "d3", "d0"]]
    expected = []
    for names in mixes:
        with tuned.rows(names):
            expected.append(run(model, inputs))

    def disabled() -> int:
        wrong = 0
        for _ in range(ROUNDS):
            with tuned.disable():
                wrong += not equal(run(model, inputs), bare)
        return wrong

    jobs = [by_rows(tuned, names, inputs, mixed) for names, mixed in zip(mixes, expected, strict=True)]

    def outside() -> int:
        tuned.use(used)  # this thread has nothing to do with the blocks of others
        return passes(model, inputs, plain)()

    wrong = run_at_once(*jobs, disabled, outside)
    assert wrong == [0] * 5
    assert (tuned.active, tuned.mixed) == (used, ()) and equal(run(model, inputs), plain)
    tuned.detach()


def test_changes_beside_passes(tmp_path: Path) -> None:
    """What changes the model waits for passes, and passes for it; rows that are named are not touched by it."""
    tuned = several("bert", "sequence")
    model = tuned.model
    inputs = batch(model, rows=3)
    names: list[str | None] = ["d0", "d2", None]
    with tuned.rows(names):
        expected = run(model, inputs)
    tuned.save(tmp_path / "kept", name="d1")

    def change() -> None:
        stir(deltune.attach(model, "layernorm + adapter(rank=2)", name="new"))
        tuned.use("d0").use("d1").use("new")
        tuned.count()
        tuned.save(tmp_path / "new")
        tuned.detach("new")
        deltune.load(model, tmp_path / "kept", name="again")
        tuned.detach("again")
        tuned.use("d3")

    done = threading.Event()
    jobs: list[Callable[[], Any]] = [by_rows(tuned, names, inputs, expected) for _ in range(2)]
    wrong, _, looked = run_at_once(
        stopping(done, jobs), until(done, change), until(done, lambda: deltune.inspect(model))
    )
    assert wrong == [0, 0] and looked
    assert tuned.names == ("d0", "d1", "d2", "d3")


def test_what_cannot_wait_is_an_error() -> None:
    tuned = several("bert", "sequence")
    model = tuned.use("d3").model
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with tuned.rows(["d0"]):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    for change in (lambda: tuned.detach("d0"), tuned.detach, tuned.merge):
        with pytest.raises(deltune.DeltuneError, match=r"d0 is used inside rows\(\) by another thread"):
            change()
    assert tuned.names == ("d0", "d1", "d2", "d3") and tuned.active == "d3"
    tuned.detach("d1")
    leave.set()
    thread.join()
    tuned.detach("d0")

    def inside(module: Any, args: Any) -> None:
        tuned.use("d2")

    hook = model.bert.encoder.register_forward_pre_hook(inside)
    with pytest.raises(deltune.DeltuneError, match="use cannot be called inside a forward pass"):
        model(**batch(model))
    hook.remove()
    assert tuned.active == "d3"


@pytest.mark.parametrize(
    ("of", "options"),
    product(
        [("gpt2", "causal"), ("llama", "causal"), ("bart", "seq2seq"), ("t5", "seq2seq")],
        [{}, {"num_beams": 3}, {"use_cache": False}, {"do_sample": True, "top_k": 1}],
    ),
)
@pytest.mark.sample
def test_generation_beside_generation(of: tuple[str, str], options: dict[str, Any]) -> None:
    tuned = several(*of)
    model = tuned.use("d1").model
    inputs = {k: v for k, v in batch(model, rows=3, pad=0).items() if k != "decoder_input_ids"}
    ways = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, **options}
    mixes: list[list[str | None]] = [["d0", "d1", None], ["d2", "d2", "d3"]]

    def answer(names: list[str | None] | None) -> torch.Tensor:
        if names is None:
            return model.generate(**inputs, **ways)
        with tuned.rows(names):
            return model.generate(**inputs, **ways)

    expected = [answer(names) for names in (*mixes, None)]

    def compare(number: int) -> int:
        names = [*mixes, None][number]
        return sum(not torch.equal(answer(names), expected[number]) for _ in range(3))

    # in copies of this context, which is in no block: a thread of its own would not know
    contexts = [contextvars.copy_context() for _ in range(3)]
    assert run_at_once(*(lambda n=n: contexts[n].run(compare, n) for n in range(3))) == [0, 0, 0]
    tuned.detach()


def test_prompts_and_beams_are_told_apart() -> None:
    tuned = several("gpt2", "causal")
    inputs = batch(tuned.model, rows=4, pad=0)
    with tuned.rows(["d0", None]):
        for options in ({}, {"num_beams": 2}):
            with pytest.raises(deltune.DeltuneError, match=r"was given 2 names, but generate got 4 prompts"):
                tuned.model.generate(**inputs, max_new_tokens=2, **options)
        with pytest.raises(deltune.DeltuneError, match="the batch has 4 rows"):
            tuned.model(**inputs, use_cache=True)
    with pytest.raises(deltune.DeltuneError, match="in a thread of its own"), tuned.disable():
        tuned.model.generate_batch([[1, 2]])


def test_tasks_have_their_own_rows() -> None:
    """asyncio tasks of one thread, with passes in it and in an executor, and waits in between."""
    tuned = several("bert", "sequence")
    model = tuned.use("d2").model
    inputs = batch(model, rows=2)
    mixes: list[list[str | None] | None] = [["d0", "d1"], [None, "d3"], None]

    def answer() -> Outputs:
        return run(model, inputs)

    expected = []
    for names in mixes:
        if names is None:
            expected.append(answer())
        else:
            with tuned.rows(names):
                expected.append(answer())

    async def task(number: int) -> int:
        wrong = 0
        for round_ in range(ROUNDS):
            await asyncio.sleep(0)
            if (names := mixes[number]) is None:
                wrong += not equal(answer(), expected[number])
                continue
            with tuned.rows(names):
                await asyncio.sleep(0)
                output = await asyncio.to_thread(answer) if round_ % 2 else answer()
                await asyncio.sleep(0)
                wrong += not equal(output, expected[number]) or not equal(answer(), expected[number])
        return wrong

    async def main() -> list[int]:
        return await asyncio.gather(*(task(number % 3) for number in range(9)))

    assert asyncio.run(main()) == [0] * 9
    assert tuned.active == "d2"


def test_a_generator_that_is_left_leaves_its_rows() -> None:
    """Blocks that end in another order than they began, and one that is thrown away."""
    tuned = several("bert", "sequence")
    inputs = batch(tuned.model, rows=2)
    plain = run(tuned.model, inputs)

    def inside(names: list[str | None]) -> Iterator[Outputs]:
        with tuned.rows(names):
            while True:
                yield run(tuned.model, inputs)

    first, second = inside(["d0", "d1"]), inside(["d2", "d3"])
    next(first)
    answer = next(second)
    first.close()
    assert equal(run(tuned.model, inputs), answer) and tuned.mixed == ("d2", "d3")
    del second
    assert tuned.mixed == () and equal(run(tuned.model, inputs), plain)
