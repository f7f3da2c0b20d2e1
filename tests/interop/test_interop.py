"""Folders of PEFT on a model that names its modules otherwise than the model that they were trained with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import deltune
from tables.families import FAMILIES
from tables.specimens import batch, build, stir

TWO_LAYERS = "lora(rank=2, scale=4, layers=(0,)) + lora(rank=2, layers=(1,))"


def exported(folder: Path) -> tuple[Path, torch.Tensor, dict[str, torch.Tensor]]:
    """Write a folder with an alpha for each layer; return it with the states of the model and the inputs."""
    model = build(FAMILIES["llama"], "causal")
    stir(deltune.attach(model, TWO_LAYERS))
    deltune.export(model, folder)
    inputs = batch(model)
    inputs.pop("labels", None)
    with torch.no_grad():
        return folder, model(**inputs, output_hidden_states=True).hidden_states[-1], inputs


def test_patterns_match_the_names_in_the_file(tmp_path: Path) -> None:
    """The model without its head has no prefix `model.` in its names, which the patterns of the file have."""
    folder, states, inputs = exported(tmp_path / "peft")
    headless = build(FAMILIES["llama"], "causal").model
    tuned = deltune.load(headless, folder)
    assert {edit.place.name.split(".")[1]: edit.factor for edit in tuned.delta().all_edits()} == {"0": 4.0, "1": 1.0}
    with torch.no_grad():
        assert torch.equal(headless(**inputs).last_hidden_state, states)


def test_two_tensors_of_one_name_are_an_error(tmp_path: Path) -> None:
    folder, _, _ = exported(tmp_path / "peft")
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if ".layers.1." in name)
    with_other_prefix = name.replace("base_model.model.model.", "base_model.model.")
    save_file({**tensors, with_other_prefix: tensors[name] + 1}, path)
    headless = build(FAMILIES["llama"], "causal").model
    with pytest.raises(deltune.DeltuneError, match=r"are both layers\.1\..* of this model") as raised:
        deltune.load(headless, folder)
    assert name in str(raised.value) and with_other_prefix in str(raised.value)
