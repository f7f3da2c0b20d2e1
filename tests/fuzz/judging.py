"""What loading a spoilt folder came to: a refusal or a sound delta, and nothing else, with the model as it was."""

from __future__ import annotations

import contextlib
import resource
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import deltune
from alarm import time_limit
from tables.families import FAMILIES
from tables.specimens import batch, build, differences, equal, facts, run, specimen, stir

HANG = 20
"""Seconds after which a load counts as hanging; a refusal takes some hundredths, on a loaded machine some tenths."""

ROOM = 3 << 30
"""Bytes of address space that a load may ask for beyond what the process has."""


STATISTICS = Path("/proc/self/statm")
"""Where Linux says how much address space a process has."""


class Hanging(BaseException):
    """Raised by the alarm in a load that does not end."""


@contextlib.contextmanager
def bounded(room: int = ROOM, seconds: int = HANG) -> Iterator[None]:
    """Inside, an allocation of more than `room` bytes fails, and so does whatever takes longer than `seconds`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if STATISTICS.exists():  # Linux
        here = int(STATISTICS.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (here + room, hard))
    try:
        with time_limit(seconds, Hanging(f"not done after {seconds} s")):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@dataclass
class Outcome:
    """kind: "refused", "sound", or what went wrong: "raw", "forward", "not finite", "hanging", "harmed"."""

    kind: str
    words: str
    seconds: float

    @property
    def fine(self) -> bool:
        return self.kind in ("refused", "sound")


class Bench:
    """A model, what it was and what it answered, to load spoilt folders into again and again."""

    def __init__(
        self, make: Callable[[], PreTrainedModel], beside: str | None = None, inputs: dict[str, Any] | None = None
    ) -> None:
        """beside: the method of a delta that is already attached; inputs: where the usual ones do not fit."""
        self.make, self.beside, self.usual = make, beside, inputs
        self.begin()

    def begin(self) -> None:
        self.model = self.make()
        if self.beside:
            stir(deltune.attach(self.model, self.beside, name="live"))
        self.inputs = self.usual or batch(self.model)
        self.outputs, self.known = run(self.model, self.inputs), facts(self.model)

    def judge(self, folder: Path) -> Outcome:
        """Load a folder, look at what came of it, and take it off again."""
        outcome = self._load(folder)
        changed = differences(self.known, facts(self.model))
        handle = deltune.tuned(self.model) if self.beside else None
        if handle and (handle.names, handle.active) != (("live",), "live"):
            changed.append("the delta in use")
        if changed or not equal(run(self.model, self.inputs), self.outputs):
            outcome = Outcome("harmed", f"{outcome.kind}: {outcome.words}: {changed[:4]}", outcome.seconds)
            self.begin()
        return outcome

    def _load(self, folder: Path) -> Outcome:
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with bounded():
                    tuned = deltune.load(self.model, folder, name="spoilt")
            except deltune.DeltuneError as error:
                return Outcome("refused", str(error), time.perf_counter() - start)
            except Hanging as error:
                return Outcome("hanging", str(error), time.perf_counter() - start)
            except Exception as error:
                return Outcome("raw", f"{type(error).__name__}: {error}"[:300], time.perf_counter() - start)
            seconds = time.perf_counter() - start
            try:
                return self._use(tuned, seconds)
            finally:
                tuned.detach("spoilt")
                if self.beside:
                    tuned.use("live")

    def _use(self, tuned: deltune.Tuned, seconds: float) -> Outcome:
        """A loaded delta has finite values only and computes, finitely where its values are of any use."""
        values = [p for n, p in self.model.named_parameters() if "deltas.spoilt" in n or p.requires_grad]
        try:
            if any(not torch.isfinite(p).all() for p in values):
                return Outcome("not finite", "a value of the delta", seconds)
            with bounded():
                outputs = run(self.model, self.inputs)
        except (Exception, Hanging) as error:
            return Outcome("forward", f"{type(error).__name__}: {error}"[:300], seconds)
        usual = all(p.abs().max() < 1e6 for p in values if p.numel()) and "e+" not in repr(tuned.method)
        if usual and any(not torch.isfinite(t).all() for t in outputs.values()):
            return Outcome("not finite", "an output", seconds)
        return Outcome("sound", repr(tuned.method)[:80], seconds)


# -- sound folders to spoil -------------------------------------------------------------------------------------------

SAVED = (
    "prefix(length=2) + lora(rank=2) + layernorm",
    "apet(lora(rank=2, at='output') + layernorm, parameters=41)",
    "diff_pruning(sparsity=0.02)",
    "apet(unipelt(length=2, rank=2, bottleneck=4), parameters='4%')",
    "adapter(rank=2) + prompt(length=2)",
    "ia3 + three_vectors",
)
"""Methods that between them keep every kind of tensor: of edits, tied, partly trained, gated, the base's."""

FOREIGN = {
    "gpt2": ("lora(rank=2, scale=3.0, at=('ffn_up', 'ffn_down'))", "layernorm", "prompt(length=3)",
             "prefix(length=3, shift_positions=True)"),
    "bert": ("lora(rank=2, scale=3.0)", "ia3", "layernorm"),
}  # fmt: skip
"""Methods to write for PEFT, by family."""


def saved_deltas(home: Path) -> list[Path]:
    """A sound delta of BERT for every method."""
    folders = []
    for number, method in enumerate(SAVED):
        model = build(FAMILIES["bert"], "sequence", torch.float32)
        folders.append(stir(deltune.attach(model, method)).save(home / f"sound-{number}"))
    return folders


def peft_folders(home: Path) -> dict[str, list[Path]]:
    """Sound folders of PEFT's kind, by family."""
    folders: dict[str, list[Path]] = {}
    for family, methods in FOREIGN.items():
        for number, method in enumerate(methods):
            model = specimen(family, dtype=torch.float32)
            tuned = stir(deltune.attach(model, method))
            folders.setdefault(family, []).append(deltune.export(model, home / f"peft-{family}-{number}"))
            tuned.detach()
    return folders


@contextlib.contextmanager
def copied(folder: Path, home: Path, name: str = "spoilt") -> Iterator[Path]:
    """A copy of a folder to spoil, gone again afterwards, with whatever a link led to."""
    place = home / name
    place.mkdir()
    try:
        yield Path(shutil.copytree(folder, place / "delta"))
    finally:
        shutil.rmtree(place)
