"""What a file must hold is known by arithmetic before a delta is made, and it is what the delta then keeps."""

from __future__ import annotations

from pathlib import Path

import deltune
from deltune.interop.tensor_files import tensor_infos
from deltune.runtime.delta_schema import check_tensors, expected_tensors
from tables.families import Family
from tables.methods import Row, cells
from tables.specimens import main_role, specimen


@cells(families=lambda family: family.name in ("bert", "gpt2", "bart", "llama", "albert"))
def test_a_file_is_what_arithmetic_expects(family: Family, row: Row) -> None:
    model = specimen(family.name, main_role(family))
    tuned = deltune.attach(model, row.text)
    delta = tuned.delta()
    needed = expected_tensors(tuned.anatomy, delta.planned, delta.owned_tensor_names, delta.head)
    tensors = tuned.attached.tensors_to_save(delta)
    check_tensors(needed, tensor_infos(tensors), Path("file"))
    dense = {name: tuple(t.shape) for name, t in tensors.items() if name in needed.shapes}
    assert dense == {n: s if s is not None else dense[n] for n, s in needed.shapes.items()}
    drawn = {name for name in tensors if name not in dense}
    assert {name for name in drawn if name.endswith(".index")} <= set(needed.bounds)
    assert sum(tensors[name].numel() for name in drawn if name.endswith(".values")) == sum(
        d.count for d in needed.drawn
    )
    tuned.detach()
