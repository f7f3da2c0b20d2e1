"""PEFT's types of adapters as methods: options as arguments and endings of names as tensors, in both directions.

A row is all that reading and writing know of a type that acts at projections. Types of another kind (prompts, prefixes,
norms, IA3, rows of tokens) have readers and writers of their own. What has no row is refused with its reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from ..errors import DeltuneError, unknown_name
from ..methods import library
from ..methods.forms.base import Form, Widths
from ..methods.other_names import ABSENT_METHODS
from ..methods.positions import ALL
from ..methods.spec import Modification, NamedMethod

NAME_PREFIX = "base_model.model."
GLOBAL_PREFIX = "base_model."
"""Prefixes of the names of tensors: of a module's own, and of tensors that modules share."""

Options = Mapping[str, Any]
Values = dict[str, torch.Tensor]


ANY = "…"
"""In `Row.when`, any value of an option but None and nothing."""


def _no_more(value: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, eq=False)
class Row:
    """A type of PEFT's that changes projections, and the named method that does the same."""

    kind: str  # PEFT's type
    make: Callable[..., NamedMethod]  # the named method
    arguments: Mapping[str, str] = field(default_factory=dict)  # its arguments, with the options of the same meaning
    # the tensors of its form, with what their names end in after the module's; * stands for a number
    leaves: Mapping[str, str] = field(default_factory=dict)
    alpha: str = ""  # the option that is the method's scale times its rank
    ranks: tuple[str, ...] = ()  # options that are added to the rank there
    patterns: tuple[str, ...] = ()  # names of `PATTERNS` that the type has
    when: Options = field(default_factory=dict)  # the options by which it is this method and no other of the type
    # tensors that places share, with their names in a file of PEFT. A file may lack what a seed gives.
    shared: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)  # names of tensors that a file repeats for every module
    lookup: Mapping[str, str] = field(default_factory=dict)  # the leaves where the module is an embedding
    # the tensors with a row for each output, where the parts of a fused projection can stand apart
    outputs: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()  # leaves of tensors of zeros, which stand for what a module lacks
    # options that have a translation with some of their values
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    reads: tuple[str, ...] = ()  # the options that `read` and `to_ours` look at
    read: Callable[[Options], dict[str, Any]] = _no_more  # returns more arguments from the options
    write: Callable[[Any], dict[str, Any]] = _no_more  # returns more options from the form
    # returns the options that a file has no better than its tensors, by our names
    sizes: Callable[[Values], dict[str, Any]] = _no_more
    # returns our tensors from PEFT's, from the options and from the widths of the module
    to_ours: Callable[[Values, Options, Widths], Values] = lambda values, options, widths: values
    to_peft: Callable[[Values, Widths], Values] = lambda values, widths: values  # returns PEFT's tensors from ours
    beside: tuple[Row, ...] = ()  # rows that act beside this one at the same modules, where their options say so
    written: bool = True  # whether such a delta is written as this type
    note: str = ""  # what differs from PEFT, for the documentation

    @property
    def options(self) -> set[str]:
        names = {*self.arguments.values(), *self.when, *self.only, self.alpha, *self.ranks, *self.reads}
        return names.union(self.patterns, *(row.options for row in self.beside)) - {""}

    @property
    def label(self) -> str:
        """The type, and the method where the type is several."""
        return f"{self.kind} ({self.make.__name__})" if self.when else self.kind

    @property
    def rank(self) -> str:
        """The option that is the rank."""
        return self.arguments.get("rank", "r")

    def divisor(self, options: Options) -> float:
        """Return what the scale is alpha divided by."""
        ranks = [_option(options, self.rank), *(options.get(name) or 0 for name in self.ranks)]
        if not all(isinstance(rank, int) for rank in ranks) or sum(ranks) < 1:
            raise DeltuneError(f"option {self.rank}={ranks[0]!r} is no rank")
        return float(sum(ranks) ** 0.5) if options.get("use_rslora") else sum(ranks)

    def method(self, options: Options) -> NamedMethod:
        """Return the method at its default place, by the options of one module."""
        arguments = {name: _option(options, option) for name, option in self.arguments.items()}
        arguments |= self.read(options)
        if self.alpha:
            alpha = _option(options, self.alpha)
            if not isinstance(alpha, int | float) or not math.isfinite(alpha):
                raise DeltuneError(f"option {self.alpha}={alpha!r} is no number")
            arguments["scale"] = alpha / self.divisor(options)
        return self.make(**arguments)

    def leaf(self, name: str, lookup: bool = False) -> str | None:
        """Return what the name of one of our tensors ends in; None for a tensor that a file does not have."""
        leaves = self.lookup if lookup and self.lookup else self.leaves
        stem, _, number = name.rpartition("_")
        if name not in leaves and number.isdigit():
            starred = leaves.get(f"{stem}_*")
            return None if starred is None else starred.replace("*", number)
        return leaves.get(name)

    def is_leaf(self, ending: str) -> bool:
        """Return whether the name of a tensor of this type ends so."""
        return _pattern_of_leaves(self).fullmatch(ending) is not None


def _option(options: Options, name: str) -> Any:
    if name not in options:
        raise DeltuneError(f"option {name} is missing")
    return options[name]


@cache
def _pattern_of_leaves(row: Row) -> re.Pattern[str]:
    rows = (row, *row.beside)
    leaves = [x for r in rows for x in (*r.leaves.values(), *r.lookup.values(), *r.copies.values(), *r.zeros)]
    leaves += [x for r in rows for x in r.shared.values() if "*" in x]
    return re.compile("|".join(re.escape(leaf).replace(r"\*", r"\w+") for leaf in leaves))


PATTERNS = {
    "rank_pattern": ("r", "effective_rank"), "alpha_pattern": ("lora_alpha", "alpha"),
    "lambda_pattern": ("delora_lambda",), "n_frequency_pattern": ("n_frequency",),
    "block_size_pattern": ("block_size",),
}  # fmt: skip
"""Options that give modules by patterns of their paths other values, with the options of which these are values."""


def options_of_module(options: Options, row: Row, value: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return the options of one module; `value` returns what a pattern gives it, or a default."""
    of_module = dict(options)
    for pattern in row.patterns:
        name = next(name for name in PATTERNS[pattern] if name in row.options)
        if options.get(pattern):
            of_module[name] = value(pattern, options.get(name))
    return of_module


# -- the options that no method has -----------------------------------------------------------------------------------

COMMON_OPTIONS = {"peft_type", "task_type", "base_model_name_or_path", "peft_version", "revision", "inference_mode",
          "auto_mapping", "modules_to_save",
          "trainable_token_indices", "save_projection", "save_indices", "save_precomputed_indices"}  # fmt: skip
"""Options that every type has."""

TARGET_OPTIONS = {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"}
"""Options that say which modules a type changes."""

TRAINING_ONLY_OPTIONS = {
    "init_weights", "init_ia3_weights", "init_scale", "d_initial", "init_theta_d_bound", "init_v_bound",
    "init_vector_bank_bound", "init_logits_std", "module_dropout", "rank_dropout", "rank_dropout_scale", "boft_dropout",
    "deft_dropout", "gralora_dropout", "hira_dropout", "miss_dropout", "psoft_dropout", "pvera_dropout",
    "randlora_dropout", "tinylora_dropout", "unilora_dropout", "vblora_dropout", "vera_dropout",
    "projection_seed", "random_seed", "target_r", "init_r", "tinit", "tfinal", "deltaT", "beta1",
    "beta2", "orth_reg_weight", "total_step", "eva_config", "runtime_config", "ensure_weight_tying", "megatron_core",
    "qalora_group_size", "use_effective_conv2d", "psoft_svd_lowrank_niter", "num_cayley_neumann_terms",
    "prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path", "tokenizer_kwargs", "eps",
    "generator_seed", "encoder_reparameterization_type", "encoder_num_layers", "encoder_dropout", "num_frozen_tokens",
    "lora_dropout", "use_dynamic_rank", "svd_threshold", "use_asa", "asa_target_subspaces", "init_warmup",
    "final_warmup", "mask_interval", "asa_importance_beta", "asa_uncertainty_beta", "asa_schedule_exponent",
    "frod_dropout", "regularization_alpha",
}  # fmt: skip
"""Options that act while a type is initialised, trained or saved, and change nothing of what a folder computes."""

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "num_transformer_submodules": (1,),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}  # fmt: skip
"""Values of further options that change nothing of what a folder computes."""


def bias_mode(options: Options) -> str:
    """Return "all" or "changed" where biases of the base are trained, in all modules or in the changed ones."""
    bias = str(options.get("bias") or "none")
    return "changed" if bias == f"{str(options['peft_type']).lower()}_only" else "" if bias == "none" else bias


def _terms(options: Options) -> dict[str, Any]:
    if not options.get("oft_block_size"):
        raise DeltuneError(
            f"r={options.get('r')} is a number of blocks: give oft_block_size, the width of a module divided by r"
        )
    return {"terms": options["num_cayley_neumann_terms"] if options.get("use_cayley_neumann") else 0}


def _block_of_entries(tensors: Values) -> dict[str, Any]:
    entries = tensors["skew"].shape[-1]
    return {"oft_block_size": int((1 + (1 + 8 * entries) ** 0.5) / 2)}


def _both_scales(options: Options) -> dict[str, Any]:
    both = options.get("psoft_mag_a", True), options.get("psoft_mag_b", True)
    if both[0] != both[1]:
        raise DeltuneError("options psoft_mag_a and psoft_mag_b have a translation where they are equal")
    return {"scales": both[0]}


def _gamma(widths: Widths) -> str:
    return "gamma_in" if widths.in_width <= widths.out_width else "gamma_out"


def _mean_of_pvera(tensors: Values, options: Options, widths: Widths) -> Values:
    rank = _option(options, "r")
    down = tensors["d"][:rank, None] * tensors["A"][:rank, : widths.in_width]
    return {"down": down, "up": tensors["b"][:, None] * tensors["B"][: widths.out_width]}


def _of_clusters(tensors: Values, options: Options, widths: Widths) -> Values:
    clusters = range(sum(name.startswith("down_") for name in tensors))
    downs, ups = ([tensors[f"{side}_{i}"] for i in clusters] for side in ("down", "up"))
    rank, d_in = _option(options, "subspace_rank"), widths.in_width
    values = {
        "down": torch.stack([F.pad(down, (0, 0, 0, rank - len(down))) for down in downs]),
        "up": torch.cat([F.pad(up, (0, rank - up.shape[1])) for up in ups]),
        "clusters": torch.arange(len(ups)).repeat_interleave(torch.tensor([len(up) for up in ups])),
        "basis": tensors["basis"][:, :d_in],
    }
    return values | ({"shift": tensors["basis"][:, d_in]} if widths.bias else {})


def _by_cluster(tensors: Values, widths: Widths) -> Values:
    columns = [tensors["basis"], *([tensors["shift"][:, None]] if widths.bias else [])]
    ups = tensors["up"].split(tensors["clusters"].bincount(minlength=len(tensors["down"])).tolist())
    ranks = [min(up.shape) for up in ups]
    return (
        {"basis": torch.cat(columns, 1)}
        | {f"down_{i}": tensors["down"][i, :rank] for i, rank in enumerate(ranks)}
        | {f"up_{i}": up[:, :rank] for i, (up, rank) in enumerate(zip(ups, ranks, strict=True))}
    )


def frod_category(path: str) -> str:
    """Return what PEFT's FRoD calls all modules that share a basis with the module of a path."""
    *before, owner, name = f"..{path}".split(".")
    if (owner, name) == ("output", "dense") and before[-1] == "attention":
        return "attention_output"
    return f"{owner}_{name}" if owner and not owner.isdigit() else name


def frod_tensors(common: Values, paths: Iterable[str]) -> dict[str, Values]:
    """Take FRoD's shared tensors from those of a file, and return them for each module."""
    kinds = {path: frod_category(path) for path in paths}
    of_kind: dict[str, Values] = {}
    for kind in set(kinds.values()):
        names = [f"{GLOBAL_PREFIX}frod_{name}.{kind}" for name in ("V", "s_size", "s_indices")]
        if missing := [name for name in names if name not in common]:
            raise DeltuneError(f"missing tensor {missing[0]}")
        basis, size, (rows, columns) = (common.pop(name) for name in names)
        if basis.shape != tuple(size) or torch.linalg.inv_ex(basis.double()).info:
            raise DeltuneError(f"{names[0]} is no basis of the widths that {names[1]} has")
        of_kind[kind] = {"basis": basis, "positions": rows * len(basis) + columns}
    return {path: of_kind[kind] for path, kind in kinds.items()}


def _frod_to_peft(tensors: Values, widths: Widths) -> Values:
    positions, d = tensors["positions"], widths.in_width
    indices = torch.stack([f(positions, d) for f in _ROW_AND_COLUMN])
    kept = {name: tensors[name] for name in ("values", "entries", "basis")}
    return kept | {"positions": indices, "size": torch.tensor([d, d])}


def unilora_entries(options: Options, widths: Mapping[str, tuple[int, int]]) -> dict[str, Values]:
    """Return the positions in θ, and their factors, that PEFT draws for modules of these widths, in their order."""
    rank, length, seed = (_option(options, name) for name in ("r", "theta_d_length", "proj_seed"))
    if rank > min(map(min, widths.values()), default=rank) or not isinstance(length, int) or not 0 < length < 1 << 24:
        raise DeltuneError(f"options r={rank} and theta_d_length={length!r} do not fit its modules")
    shapes = [
        (path, *shapes)
        for path, (d_in, d_out) in widths.items()
        for shapes in (("down", rank, d_in), ("up", d_out, rank))
    ]
    number = sum(rows * columns for _, _, rows, columns in shapes)
    generator = np.random.default_rng(seed)
    entries = np.repeat(np.arange(length), number // length)
    entries = np.concatenate((entries, generator.choice(length, size=number % length, replace=False)))
    generator.shuffle(entries)
    flat = torch.from_numpy(entries)
    factors = flat.bincount(minlength=length).float().rsqrt()
    tensors: dict[str, Values] = {path: {} for path in widths}
    for (path, side, *shape), part in zip(shapes, flat.split([r * c for _, _, r, c in shapes]), strict=True):
        tensors[path] |= {f"entries_{side}": part.view(shape), f"scales_{side}": factors[part].view(shape)}
    return tensors


_ROW_AND_COLUMN = (torch.floor_divide, torch.remainder)
_LOW_RANK = {"down": "lora_A.weight", "up": "lora_B.weight"}
_PATTERNS = ("rank_pattern", "alpha_pattern")
_LORA = {"rank": "r"}
_LORA_DROPOUT = _LORA | {"dropout": "lora_dropout"}


def _centred(make: Callable[..., NamedMethod], start: str) -> Row:
    """Return the row of a low rank from other initial values, which is written as one of twice the rank."""
    return Row(
        "LORA", make, _LORA, _LOW_RANK, "lora_alpha", when={"init_lora_weights": start}, patterns=_PATTERNS,
        write=lambda form: {"init_lora_weights": True, "r": 2 * form.rank},
        to_peft=lambda t, w: {
            "down": torch.cat((t["down"], t["down_start"])), "up": torch.cat((t["up"], -t["up_start"]), 1)
        },
        note="the base model stays as it is, which PEFT changes; written as LoRA of twice the rank",
    )  # fmt: skip


_BASE_BIAS = Row("", library.beft, leaves={"vector": "base_layer.bias"}, outputs=("vector",), written=False)
"""The change of a bias of the base, which is trained beside a type."""

_LORA_BIAS = Row(
    "LORA", library.beft, leaves={"vector": "lora_B.bias"}, when={"lora_bias": True}, outputs=("vector",),
    reads=("r", "lora_alpha", "use_rslora"), written=False,
    to_ours=lambda t, o, w: {"vector": t["vector"] * (o["lora_alpha"] / o["r"] ** (0.5 if o.get("use_rslora") else 1))},
)  # fmt: skip

_SUPRA = Row(
    "SUPERTUNING", library.lora, _LORA_DROPOUT,
    {"down": "supertuning_lora_A.weight", "up": "supertuning_lora_B.weight"}, "lora_alpha", written=False,
)  # fmt: skip

_HYBRID = Row(
    "GRALORA", library.lora, {"rank": "hybrid_r"},
    {"down": "gralora_A_general.weight", "up": "gralora_B_general.weight"}, "alpha",
    ranks=("r",), written=False,
)  # fmt: skip

ROWS = (
    Row("LORA", library.dora, _LORA_DROPOUT, _LOW_RANK | {"magnitude": "lora_magnitude_vector"}, "lora_alpha",
        when={"use_dora": True}, patterns=_PATTERNS, outputs=("up", "magnitude"), reads=("use_rslora",)),
    _centred(library.pissa, "pissa"),
    _centred(library.olora, "olora"),
    Row("LORA", library.mica, _LORA, _LOW_RANK, "lora_alpha", when={"init_lora_weights": "mica"}, patterns=_PATTERNS,
        write=lambda form: {"init_lora_weights": "mica" if form.frozen == "up" else True}),
    Row("LORA", library.alora, _LORA_DROPOUT, _LOW_RANK, "lora_alpha", when={"alora_invocation_tokens": ANY},
        patterns=_PATTERNS, outputs=("up",), reads=("use_rslora",),
        read=lambda o: {"invocation": tuple(o["alora_invocation_tokens"])},
        note="language models of one decoder stack"),
    Row("LORA", library.lora, _LORA_DROPOUT, _LOW_RANK, "lora_alpha", patterns=_PATTERNS, outputs=("up",),
        note="with `lora_bias` also `beft`, which is read alone; heads and whole modules in `modules_to_save`",
        reads=("use_rslora",), lookup={"down": "lora_embedding_A", "up": "lora_embedding_B"}, beside=(_LORA_BIAS,)),
    Row("ADALORA", library.lora, _LORA, {"down": "lora_A", "energies": "lora_E", "up": "lora_B"},
        sizes=lambda t: {"r": len(t["down"])},
        to_ours=lambda t, o, w: {"down": t["down"] * t["energies"], "up": t["up"]},
        reads=("lora_alpha", "init_r", "rank_pattern"), written=False,
        read=lambda o: {"scale": o["lora_alpha"] / (o["init_r"] + 1e-5)},
        note="as a folder, with the ranks that were kept"),
    Row("ADAMSS", library.adamss, {"rank": "subspace_rank", "clusters": "num_subspaces", "singular_values": "r",
                                   "seed": "random_seed"},
        {"down_*": "adamss_A.*", "up_*": "adamss_B.*", "basis": "adamss_newB"},
        to_ours=_of_clusters, to_peft=_by_cluster,
        note="needs scikit-learn: the weights are clustered again where a folder is read; `use_asa` is `target=…`"),
    Row("BEFT", library.beft, leaves={"vector": "beft_bias"},
        to_ours=lambda t, o, w: {"vector": t["vector"].flatten()}, to_peft=lambda t, w: {"vector": t["vector"][None]}),
    Row("BOFT", library.boft, {"block_size": "boft_block_size", "factors": "boft_n_butterfly_factor"},
        {"skew": "boft_R", "gain": "boft_s"}, reads=("boft_block_num",),
        sizes=lambda t: {"boft_block_size": t["skew"].shape[-1]}, write=lambda form: {"boft_block_num": 0}),
    Row("C3A", library.c3a, {"block_size": "block_size"}, {"kernel": "c3a_kernel"},
        patterns=("block_size_pattern",),
        note="PEFT's gradient of the input is wrong"),
    Row("DEFT", library.deft, _LORA, {"p": "deft_P", "r": "deft_R"}, only={"decomposition_method": ("relu",)}),
    Row("DELORA", library.delora, {"rank": "r", "bound": "delora_lambda"},
        {"down": "delora_A", "up": "delora_B", "bound": "delora_lambda", "columns": "delora_w_norm"},
        patterns=("rank_pattern", "lambda_pattern")),
    Row("FOURIERFT", library.fourierft, {"frequencies": "n_frequency", "scale": "scaling", "seed": "random_loc_seed"},
        {"spectrum": "fourierft_spectrum"}, patterns=("n_frequency_pattern",)),
    Row("FROD", library.frod, {"density": "sparse_rate", "seed": "projection_prng_key"},
        {"values": "frod_lambda_l", "entries": "frod_lambda_s_values"},
        shared={"basis": "frod_V.*", "positions": "frod_s_indices.*", "size": "frod_s_size.*"},
        only={"save_projection": (True,)}, reads=("progressbar", "runtime_offload_base_weight"), to_peft=_frod_to_peft,
        note="its basis of all weights is in the folder; PEFT computes in float32"),
    Row("GLORA", library.glora, _LORA,
        {f"{x}_{side}": f"glora_{x.upper()}.{leaf}" for x in "abc" for side, leaf in (("up", "Xd"), ("down", "Xu"))}
        | {x: f"glora_{x.upper()}.X" for x in "de"}, zeros=tuple(f"glora_{x}.zeros" for x in "CDE"),
        only={"config_A_B": ("lora",), "config_C": ("lora",)}, reads=("config_D_E",),
        read=lambda o: {"bias": _option(o, "config_D_E")},
        write=lambda form: {"config_D_E": form.bias, "config_A_B": "lora", "config_C": "lora"}),
    Row("GRALORA", library.gralora, {"rank": "r", "blocks": "gralora_k"}, {"down": "gralora_A", "up": "gralora_B"},
        "alpha", ranks=("hybrid_r",), note="with `hybrid_r` also `lora`, which is read alone", beside=(_HYBRID,)),
    Row("HIRA", library.hira, _LORA, {"down": "hira_A", "up": "hira_B"}, patterns=("rank_pattern",)),
    Row("HRA", library.hra, _LORA, {"vectors": "hra_u"}),
    Row("LOHA", library.loha, _LORA, {n: f"hada_{n}" for n in ("w1_a", "w1_b", "w2_a", "w2_b")}, "alpha",
        patterns=_PATTERNS),
    Row("LOKR", library.lokr, {"rank": "r", "factor": "decompose_factor", "decompose_both": "decompose_both"},
        {n: f"lokr_{n}" for n in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b")}, "alpha",
        patterns=_PATTERNS),
    Row("MISS", library.miss, _LORA, {"block": "miss_block"}, only={"init_weights": (True, False, None, "mini")},
        read=lambda o: {"mini_rank": o["mini_r"]} if o.get("init_weights") == "mini" else {}, reads=("mini_r",),
        write=lambda form: {"init_weights": "mini", "mini_r": form.mini_rank} if form.mini_rank else {}),
    Row("OFT", library.oft, {"block_size": "oft_block_size", "shared_block": "block_share"}, {"skew": "oft_R.weight"},
        reads=("r", "use_cayley_neumann", "num_cayley_neumann_terms"), read=_terms,
        sizes=_block_of_entries,
        write=lambda form: {"r": 0, "use_cayley_neumann": form.terms > 0, "num_cayley_neumann_terms": form.terms or 5}),
    Row("OSF", library.osf, {"rank": "effective_rank"}, {n: f"osf_svd_params.{n.upper()}_low" for n in "usv"},
        patterns=("rank_pattern",)),
    Row("PEANUT", library.peanut, {"rank": "r", "depth": "depth", "activation": "act_fn", "scale": "scaling"},
        {"a": "peanut_A.weight", "b": "peanut_B.weight", "encoder_*": "peanut_encoders.*.weight",
         "decoder_*": "peanut_decoders.*.weight"}),
    Row("POLY", library.poly, {"rank": "r", "tasks": "n_tasks", "skills": "n_skills", "splits": "n_splits"},
        {"down": "poly_lora_A", "up": "poly_lora_B", "logits": "poly_router.module_logits"},
        only={"poly_type": ("poly",)}, write=lambda form: {"poly_type": "poly"},
        note="tasks by `tuned.condition(task_ids=…)`"),
    Row("PSOFT", library.psoft, _LORA,
        {"skew": "psoft_R.weight", "alpha": "psoft_R.vector_a", "beta": "psoft_R.vector_b"}, "psoft_alpha",
        only={"psoft_orth": (True,), "ab_svd_init": ("psoft_init",), "psoft_svd": ("full",),
              "use_cayley_neumann": (False,)},
        read=_both_scales, reads=("psoft_mag_a", "psoft_mag_b"),
        write=lambda form: {"psoft_mag_a": form.scales, "psoft_mag_b": form.scales}),
    Row("PVERA", library.lora, _LORA, {"d": "pvera_lambda_d", "b": "pvera_lambda_b"},
        shared={"A": "pvera_A", "B": "pvera_B"}, only={"sample_at_inference": (False,), "save_projection": (True,)},
        reads=("projection_prng_key",), to_ours=_mean_of_pvera, written=False,
        note="as LoRA of the mean, which PEFT computes with outside of training"),
    Row("RANDLORA", library.randlora, {"rank": "r", "seed": "projection_prng_key"},
        {"lambda_": "randlora_lambda", "gamma": "randlora_gamma"}, "randlora_alpha",
        to_ours=lambda t, o, w: {_gamma(w) if n == "gamma" else n: x for n, x in t.items()},
        to_peft=lambda t, w: {"gamma" if n == _gamma(w) else n: x for n, x in t.items()},
        shared={"A": "randlora_A", "B": "randlora_B"}, copies={"A": "randlora_A", "B": "randlora_B"},
        note="modules of one pair of widths",
        write=lambda form: {"save_projection": False}),
    Row("ROAD", library.road, {"group_size": "group_size"}, {"theta": "road_theta", "alpha": "road_alpha"},
        read=lambda o: {"variant": int(str(_option(o, "variant")).removeprefix("road_"))}, reads=("variant",),
        write=lambda form: {"variant": f"road_{form.variant}"}),
    Row("SHIRA", library.shira, _LORA, {"values": "shira_weight", "entries": "shira_indices"},
        only={"mask_type": ("random",)}, reads=("random_seed",), read=lambda o: {"seed": o.get("random_seed") or 0},
        to_ours=lambda t, o, w: t | {"entries": t["entries"][0].long() * w.in_width + t["entries"][1]},
        to_peft=lambda t, w: t | {"entries": torch.stack([f(t["entries"], w.in_width) for f in _ROW_AND_COLUMN]).int()},
        write=lambda form: {"mask_type": "random", "random_seed": form.seed}),
    Row("TINYLORA", library.tinylora, {"rank": "r", "parameters": "u"},
        {"A": "tinylora_A", "B": "tinylora_B", "P": "tinylora_P"}, shared={"v": "tinylora_v.0"},
        only={"weight_tying": (0, 1), "save_projection": (True,)}, read=lambda o: {"tied": o["weight_tying"] == 1},
        write=lambda form: {"weight_tying": float(form.tied), "save_projection": True}),
    Row("UNILORA", library.unilora, {"rank": "r", "length": "theta_d_length"},
        {"entries_down": "unilora_indices_A", "entries_up": "unilora_indices_B", "scales_down": "unilora_scales_A",
         "scales_up": "unilora_scales_B"}, shared={"theta": "unilora_theta_d"}, reads=("proj_seed",),
        write=lambda form: {"save_indices": True}),
    Row("SUPERTUNING", library.supertuning, {"sparsity": "sparsity", "largest": "select_top"},
        {"values": "supertuning_values", "entries": "supertuning_indices"}, beside=(_SUPRA,),
        to_ours=lambda t, o, w: {n: x if n == "values" else x.long() for n, x in t.items()},
        to_peft=lambda t, w: t | {"entries": t["entries"].int()}, note="with `r` also `lora`, which is read alone"),
    Row("VBLORA", library.vblora,
        {"rank": "r", "vectors": "num_vectors", "length": "vector_length", "top_k": "topk"},
        {"logits_down": "vblora_logits_A", "logits_up": "vblora_logits_B"},
        shared={"bank": "vblora_vector_bank"}),
    Row("VERA", library.vera, {"rank": "r", "seed": "projection_prng_key"},
        {"d": "vera_lambda_d", "b": "vera_lambda_b"}, shared={"A": "vera_A", "B": "vera_B"},
        write=lambda form: {"save_projection": False}),
    Row("WAVEFT", library.waveft, {"frequencies": "n_frequency", "scale": "scaling", "seed": "random_loc_seed"},
        {"spectrum": "waveft_spectrum"}, patterns=("n_frequency_pattern",),
        only={"wavelet_family": ("db1", "haar"), "use_idwt": (True,)}),
)  # fmt: skip
"""The types that change projections; of several rows of a type the first counts whose options are there."""


def _eva_of_one_rank(options: Options) -> dict[str, Any]:
    eva = options.get("eva_config") or {"rho": 2.0}
    if eva["rho"] != 1 or eva.get("whiten"):
        raise DeltuneError("option eva_config has a translation with rho=1, which leaves each module its rank, alone")
    return {}


def _kept_by_corda(options: Options) -> dict[str, Any]:
    method = (options.get("corda_config") or {}).get("corda_method", "ipm")
    return {"keep": "knowledge" if method == "kpm" else "task"}


_OF_DATA = (
    "as a configuration; a folder lacks the start, by which PEFT changes the base; written as LoRA of twice the rank"
)
_DEFAULT_GA = {"direction": "ArB2r", "scale": "stable", "stable_gamma": 16}
IN_TRAINING = (
    Row("ADALORA", library.adalora,
        {"rank": "target_r", "initial_rank": "init_r", "alpha": "lora_alpha", "every": "deltaT", "beta1": "beta1",
         "beta2": "beta2", "orthogonality": "orth_reg_weight", "dropout": "lora_dropout"},
        reads=("tinit", "tfinal", "total_step", "r"),
        read=lambda o: {"start": o["tinit"] / o["total_step"], "stop": 1 - o["tfinal"] / o["total_step"]},
        note="as a configuration; PEFT trains its count of ranks and does not save it"),
    Row("LORA", library.eva, _LORA_DROPOUT, alpha="lora_alpha", when={"init_lora_weights": "eva"}, patterns=_PATTERNS,
        reads=("eva_config", "use_rslora"), read=_eva_of_one_rank,
        note="as a configuration, with `rho=1`; its folders are LoRA"),
    Row("LORA", library.corda, _LORA, alpha="lora_alpha", when={"init_lora_weights": "corda"}, patterns=_PATTERNS,
        reads=("corda_config", "use_rslora"), read=_kept_by_corda, note=_OF_DATA),
    Row("LORA", library.lora_ga, _LORA, alpha="lora_alpha", when={"init_lora_weights": "lora_ga"}, patterns=_PATTERNS,
        reads=("use_rslora",), only={"lora_ga_config": (None, _DEFAULT_GA)}, note=_OF_DATA),
)  # fmt: skip
"""The rows of configurations that are trained; their folders hold something else, or what no file says."""


@dataclass(frozen=True)
class Other:
    """A type with a reader of its own, which `peft_read` has."""

    method: str  # what it is here
    leaves: tuple[str, ...] = ()  # the ends of its tensors' names, after the name of the module
    options: frozenset[str] = frozenset()  # the options that are read or change nothing
    # options that have a translation with some of their values
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    written: bool = True  # whether such a delta is written
    note: str = ""  # what differs from PEFT, for the documentation


_CPT = frozenset({
    "cpt_token_ids", "cpt_mask", "cpt_tokens_type_mask", "opt_weighted_loss_type", "opt_loss_decay_factor",
    "opt_projection_epsilon", "opt_projection_format_epsilon",
})  # fmt: skip
_TOKENS = frozenset({"num_virtual_tokens", "token_dim", "num_attention_heads", "num_layers"})
OTHERS: Mapping[str, Other] = {
    "IA3": Other("ia3", ("ia3_l",), frozenset({*TARGET_OPTIONS, "feedforward_modules"}),
                 note="of inputs at the output projection and the FFN's last linear"),
    "LN_TUNING": Other("layernorm", ("ln_tuning_layers.weight", "ln_tuning_layers.bias"), frozenset(TARGET_OPTIONS),
                       note="sets of norms that `layernorm` can choose are read"),
    "PROMPT_TUNING": Other("prompt", options=_TOKENS, note="language models of one decoder stack, as all prompts"),
    "P_TUNING": Other("prompt", options=_TOKENS | {"encoder_hidden_size"}, written=False,
                      note="the prompt that its network made"),
    "MULTITASK_PROMPT_TUNING": Other("prompt", options=_TOKENS | {"num_ranks"}, only={"num_tasks": (1,)}, written=False,
                                     note="the prompt of a task, where there is one"),
    "CPT": Other("prompt", options=_TOKENS | _CPT, written=False, note="its prompt; the loss is not weighted"),
    "ADAPTION_PROMPT": Other("prefix", ("adaption_gate", "adaption_prompt"),
                             frozenset({"target_modules", "adapter_len", "adapter_layers"}), written=False,
                             note="as `gate=False`, with the keys and values that its prompt has; query, key and value "
                             "in linears of their own"),
    "PREFIX_TUNING": Other("prefix", options=_TOKENS | {"encoder_hidden_size", "prefix_projection"},
                           note="with `shift_positions=True`"),
    "CARTRIDGE": Other("prefix", options=_TOKENS, written=False, note="with `shift_positions=True`"),
    "TRAINABLE_TOKENS": Other("trainable_tokens", options=frozenset({"token_indices", "target_modules"})),
}  # fmt: skip
"""The other types that are read."""

REFUSED: Mapping[str, str] = {kind: ABSENT_METHODS[kind.lower()] for kind in ("LILY", "SHADOW")} | {
    "XLORA": "PEFT calls its low ranks 0, 1, …, and drops from its folders what has the number of another one in its "
    'name, such as layers; load the LoRAs, and weigh them by combine("mix(a, b)", mixing="xlora")'
}
"""The types that are not read, each with the reason."""

PROMPTS = ("PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "CPT", "PREFIX_TUNING", "CARTRIDGE")
"""The types that change no modules."""

TYPES_WITH_INTEGER_TENSORS = ("ADALORA", "FROD", "SHIRA", "SUPERTUNING", "UNILORA")
"""The types whose files have tensors of whole numbers, or empty ones."""

_MERGE = "Where PEFT can merge it (merge_and_unload), save the merged model and tune that."

KINDS = tuple(sorted({*(row.kind for row in ROWS), *OTHERS, *REFUSED}))
"""All of PEFT's types."""


def row_of(options: Options, training: bool = False) -> Row | None:
    """Return the row of a folder's options, or of a configuration's in training; None for a type without a row."""
    rows = (*IN_TRAINING, *ROWS) if training else ROWS
    return next((row for row in rows if row.kind == options["peft_type"] and _has(options, row.when)), None)


def _has(options: Options, when: Options) -> bool:
    return all(bool(options.get(name)) if value == ANY else options.get(name) == value for name, value in when.items())


def companion_rows(row: Row, options: Options) -> list[Row]:
    """Return the rows that act beside a row, by the options."""
    rows = [r for r in row.beside if _has(options, r.when) and (r.when or options.get(r.arguments["rank"]))]
    return [*rows, _BASE_BIAS] if bias_mode(options) == "changed" else rows


def _kind(modification: Modification) -> tuple[type[Form], str, bool]:
    return type(modification.form), modification.insertion, modification.positions != ALL


@cache
def _written() -> dict[tuple[type[Form], str, bool], Row]:
    rows: dict[tuple[type[Form], str, bool], Row] = {}
    for row in ROWS:
        part = row.make(**{"invocation": (0,)} if row.make is library.alora else {}).parts[0]
        assert isinstance(part, Modification)
        if row.written:
            rows.setdefault(_kind(part), row)
    return rows


def row_of_form(modification: Modification) -> Row | None:
    """Return the row by which a modification is written, or None where PEFT has none."""
    return _written().get(_kind(modification))


def no_counterpart(name: str, value: Any) -> str:
    """Return what is said of an option that deltune has nothing for."""
    return f"deltune cannot reproduce {name}={value!r}; use its default, or merge in PEFT (merge_and_unload)"


def check_options(options: Options, training: bool = False) -> list[str]:
    """Return what is wrong with the options of a folder, or of a configuration in training.

    These are its type, and each option without a counterpart by name.
    """
    kind = str(options.get("peft_type"))
    if kind in REFUSED:
        return [f"deltune cannot reproduce peft_type {kind}: {REFUSED[kind]}. {_MERGE}"]
    row, other = row_of(options, training), OTHERS.get(kind)
    if row is not None:
        known, only = COMMON_OPTIONS | TARGET_OPTIONS | TRAINING_ONLY_OPTIONS | row.options, row.only
    elif other is not None:
        known, only = COMMON_OPTIONS | TRAINING_ONLY_OPTIONS | other.options, other.only
    else:
        return [unknown_name("peft_type", kind, KINDS, hint=_MERGE)]
    if row is not None and bias_mode(options) in ("", "all", "changed"):
        known = known | {"bias"}
    if training and options.get("use_asa"):
        return [
            "option use_asa counts steps, and the number of all steps is not known here: write adamss(target="
            "asa_target_subspaces, start=init_warmup / steps, stop=final_warmup / steps, every=mask_interval)"
        ]
    return [
        no_counterpart(name, value)
        for name, value in options.items()
        if (
            value not in only[name]
            if name in only
            else name not in known and value and value not in NEUTRAL_VALUES.get(name, ())
        )
    ]
