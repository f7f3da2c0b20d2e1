"""Reads PEFT folders: adapter_config.json and the tensors beside it.

PEFT names a tensor base_model.model.MODULE.lora_A.weight, where a module is a whole linear, fused or not. PEFT computes
y + (α/r) B A x for LoRA; l ⊙ y for IA3, or W (l ⊙ x) in `feedforward_modules`; a tuned copy in place of a norm; prompt
vectors before the embeddings; and a prefix as the content of the cache, so that positions shift.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from ..anatomy.types import Anatomy
from ..errors import DeltuneError, error_from_problems, first_names, word_list
from ..methods.forms.base import Place
from ..methods.forms.hidden import Rescale
from ..methods.forms.low_rank import LowRank
from ..methods.library import ia3, layernorm, prefix, prompt
from ..methods.resolve import resolve
from ..methods.sites import Location, resolve_locations
from ..methods.spec import OTHER_PROJECTIONS, PROJECTIONS, Method, Modification, Selection, is_pattern
from .base import (
    ForeignFolder,
    Patterns,
    PlacedTensors,
    Translation,
    UnusedTensors,
    locations_or_none,
    method_from_pieces,
    method_selecting,
    rows_of_columns,
    tensors_by_file_name,
)
from .peft_table import OTHERS, PATTERNS, Row, beside, check_options, options_of_module, row_of, unilora_entries

_IA3_LEAF = "ia3_l"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
NAME_PREFIX = "base_model.model."
GLOBAL_PREFIX = "base_model."
PROMPT_TENSOR = "prompt_embeddings"
PROMPTS = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CARTRIDGE")
"""The types that change no modules."""

# -- reading ----------------------------------------------------------------------------------------------------------


def read_peft(
    anatomy: Anatomy,
    folder: ForeignFolder,
    place_of: Callable[[Location], Place | None],
    base_value: Callable[[str], torch.Tensor],
    modules: Iterable[str],
    windowed: bool = False,
) -> Translation:
    """Translate a PEFT folder for a model.

    `place_of` returns the model's own projection at a place, and `base_value` a weight of the model by its name. PEFT
    saves the base's own embeddings where they are adapted; they are no part of the adapter, and have to be this
    model's. `modules` are the paths of the model's modules, and `windowed` says that some of its attentions have a
    sliding window.
    """
    options, kind = folder.options, str(folder.options.get("peft_type"))
    problems = check_options(options)
    if kind in PROMPTS:
        problems += _decoder_problems(anatomy, kind, windowed)
    if problems:
        raise error_from_problems(str(folder.where), problems)
    common = {n: t for n, t in folder.tensors.items() if n.startswith(GLOBAL_PREFIX) and not n.startswith(NAME_PREFIX)}
    unused = UnusedTensors(anatomy, {n: t for n, t in folder.tensors.items() if n not in common}, NAME_PREFIX)
    row = row_of(options)
    is_leaf = row.is_leaf if row else OTHERS[kind].leaves.__contains__
    numbers = [n for n, t in folder.tensors.items() if not t.is_floating_point() and not _endings_match(n, is_leaf)]
    if numbers:
        raise error_from_problems(
            str(folder.where), [f"tensor {name} is not of floating-point numbers" for name in numbers]
        )
    incomplete = _head_problems(anatomy, options, unused)
    paths: list[str] = []
    if kind not in PROMPTS:
        paths, problems = _changed_modules(anatomy, options, unused, modules, is_leaf)
        incomplete += problems
    head = unused.take_all([t.name for t in anatomy.tensors if t.area == "head"])
    problems = _other_embeddings(anatomy, unused, base_value)
    if problems:
        raise error_from_problems(str(folder.where), problems, fault="model")
    try:
        if row is not None:
            method, tensors = _Projections(anatomy, options, row, unused, place_of, common).read(paths)
        else:
            method, tensors = _READERS[kind](anatomy, options, unused)
        saved, values = _read_saved_modules(anatomy, unused, bool(options.get("ensure_weight_tying")))
    except DeltuneError as error:
        unused.check(folder.where, [*incomplete, str(error)])
        raise
    incomplete += [f"extra tensor {name}" for name in common]
    unused.check(folder.where, incomplete)
    return Translation(sum(saved, method), tensors | values, head)


def _endings_match(name: str, is_leaf: Callable[[str], bool]) -> bool:
    return any(is_leaf(ending) for ending in _endings(name))


MethodAndTensors = tuple[Method, dict[str, torch.Tensor]]


def _changed_modules(
    anatomy: Anatomy,
    options: Mapping[str, Any],
    unused: UnusedTensors,
    modules: Iterable[str],
    is_leaf: Callable[[str], bool],
) -> tuple[list[str], list[str]]:
    """Return the modules that the file changes, in the model's order, and where its options say otherwise."""
    if options.get("target_modules") is None:
        return [], ["option target_modules is missing, so nothing says which modules the folder should have tensors of"]
    owners = {name.rpartition(".")[0] for t in anatomy.tensors for name in (t.name, *t.aliases)}
    paths = [path for path in modules if path in owners and unused.name_in_file(path) is not None]
    targeted = _targets(anatomy, options, unused, paths)
    named = {name[: -len(ending) - 1] for name in unused.tensors for ending in _endings(name) if is_leaf(ending)}
    if options.get("save_indices") is False and not named:  # all that UNILORA has is one vector
        return [path for path in paths if path in targeted], []
    missing = [path for path in paths if path in targeted - named]
    others = [path for path in paths if path in named - targeted]
    problems = [f"missing tensors of {_listed(missing)}, which its options target"] if missing else []
    if others:
        problems.append(f"extra tensors of {_listed(others)}, which its options do not target")
    return [path for path in paths if path in named], problems


_GATED = ("gate_proj", "up_proj")
_OUTSIDE_FFN = tuple(site for site in OTHER_PROJECTIONS if site not in _GATED)


def _targets(anatomy: Anatomy, options: Mapping[str, Any], unused: UnusedTensors, paths: list[str]) -> set[str]:
    """Return which of the modules the options target, by PEFT's rules and the names in the model of the file."""
    target, layers = options["target_modules"], options.get("layers_to_transform")
    excluded, saved = _named(options, "exclude_modules"), options.get("modules_to_save") or ()
    saved_whole = Patterns("modules_to_save", saved, r"(?:^|.*\.){}(?:$|\..*)")
    of_layers = options.get("layers_pattern") or r"[^.]*"
    stems = [of_layers] if isinstance(of_layers, str) else of_layers
    layer_of = Patterns("layers_pattern", stems, r"(?:^|.*?\.){}\.(\d+)\.")
    if all_linear := isinstance(target, str) and target.lower() == "all-linear":
        head = "" if options.get("task_type") != "SEQ_CLS" else next(iter(anatomy.head), "")
        left = {head, anatomy.vocabulary.path if anatomy.vocabulary else ""}
        named: Callable[[str], bool] = {
            linear.path for linear in anatomy.linears if linear.path not in left
        }.__contains__
    else:
        named = _named(options, "target_modules")
    chosen = set()
    for path in paths:
        name = unused.name_in_file(path) or path
        if not named(path if all_linear else name) or excluded(name) or saved_whole.first(name):
            continue
        if isinstance(target, list) and name not in target and layers not in (None, []):
            layer = layer_of.first(name)
            if layer is None or int(layer[1][1]) not in (layers if isinstance(layers, list) else [layers]):
                continue
        chosen.add(path)
    return chosen


def _listed(names: list[str]) -> str:
    return first_names(names, 5) if len(names) > 5 else word_list(names)


def _named(options: Mapping[str, Any], option: str) -> Callable[[str], bool]:
    """Return whether an option names a module: by a pattern of its path, or in a list by the end of its path."""
    value = options.get(option) or []
    if isinstance(value, str):
        pattern = Patterns(option, [value], r"(?:{})\Z")
        return lambda name: pattern.first(name) is not None
    endings = set(value)
    return lambda name: any(ending in endings for ending in _endings(name))


def _endings(name: str) -> Iterator[str]:
    """Yield a path, and what remains of it after each dot."""
    while name:
        yield name
        name = name.partition(".")[2]


def _head_problems(anatomy: Anatomy, options: Mapping[str, Any], unused: UnusedTensors) -> list[str]:
    """Return which tensors are missing of the modules that were saved as a whole."""
    ends = tuple(options.get("modules_to_save") or ())
    names = {name: unused.name_in_file(name) for t in anatomy.tensors for name in (t.name, *t.aliases)}
    missing = [
        name
        for name, in_file in names.items()
        if in_file is not None
        and any(in_file[:end].endswith(ends) for end, letter in enumerate(in_file) if letter == ".")
        and name not in unused.tensors
    ]
    return [f"missing tensors {_listed(missing)}, whose modules modules_to_save names"] if missing else []


def _other_embeddings(anatomy: Anatomy, unused: UnusedTensors, base_value: Callable[[str], torch.Tensor]) -> list[str]:
    """Take the base model's own tensors out of a file, and return what is wrong with them."""
    problems = []
    for tensor, name in ((t, name) for t in anatomy.tensors for name in (t.name, *t.aliases)):
        module, _, leaf = name.rpartition(".")
        saved = unused.take(f"{module}.base_layer.{leaf}")
        if saved is None:
            continue
        base, shapes = base_value(tensor.name), (tuple(saved.shape), tuple(tensor.shape))
        if shapes[0] != shapes[1]:
            problems.append(f"{name} has shape {shapes[0]} in the file and {shapes[1]} here; resize the embeddings")
        elif not base.is_meta and not torch.equal(saved.to(base.device, base.dtype), base):
            problems.append(f"{name} is not the one that the adapter was trained with, which the file has")
    return problems


def _decoder_problems(anatomy: Anatomy, kind: str, windowed: bool) -> list[str]:
    problems = []
    if len(anatomy.stacks) != 1 or not anatomy.stacks[0].causal or anatomy.output_kind != "words":
        problems.append(f"{kind} has a translation for language models of one decoder stack; this is {anatomy.model}")
    if kind in ("PREFIX_TUNING", "CARTRIDGE") and windowed:
        problems.append("with PEFT a prefix slides out of a sliding window, with deltune it stays visible")
    return problems


class _Projections:
    """Reads a type that changes projections: the modification of each module, and its tensors."""

    def __init__(
        self,
        anatomy: Anatomy,
        options: Mapping[str, Any],
        row: Row,
        unused: UnusedTensors,
        place_of: Callable[[Location], Place | None],
        common: dict[str, torch.Tensor],
    ) -> None:
        """Take what is common to all modules."""
        self.anatomy, self.options, self.row, self.unused, self.place_of = anatomy, options, row, unused, place_of
        self.common = common
        self.patterns = {
            name: Patterns(name, options[name]) for name in PATTERNS if isinstance(options.get(name), dict)
        }
        self.locations: dict[Modification, dict[str, list[Location]]] = {}
        self.pieces: list[PlacedTensors] = []
        self.problems: list[str] = []

    def read(self, paths: list[str]) -> MethodAndTensors:
        """Return the method of these modules, and its tensors by their names in our files."""
        of_modules = self._of_modules(paths)
        shared = {name: self.common.pop(f"{GLOBAL_PREFIX}{leaf}", None) for name, leaf in self.row.shared.items()}
        known = {name: value for name, value in shared.items() if value is not None}
        sites = _sites_by_path(self.anatomy, paths)
        for path in paths:
            options = self.options_of(path)
            for row in (self.row, *beside(self.row, options)):
                self._read_module(path, row, options, sites.get(path, []), known | of_modules.get(path, {}))
        if self.problems or not self.pieces:
            raise error_from_problems(
                self.row.kind, self.problems or ["no tensor of a module that this model has and can change"]
            )
        method = self._method()
        tensors = tensors_by_file_name(self.anatomy, method, self.pieces)
        return method, tensors | self._shared_tensors(method, known)

    def options_of(self, path: str) -> dict[str, Any]:
        """Return the options of one module."""
        path_in_file = self.unused.name_in_file(path) or path

        def value(pattern: str, default: Any) -> Any:
            first = self.patterns[pattern].first(path_in_file) if pattern in self.patterns else None
            return default if first is None else list(self.options[pattern].values())[first[0]]

        return options_of_module(self.options, self.row, value)

    def _read_module(
        self, path: str, row: Row, options: dict[str, Any], sites: list[str], known: dict[str, torch.Tensor]
    ) -> None:
        linear = next((x for x in self.anatomy.linears if x.path == path), None)
        lookup = linear is None or sites == ["embedding"]
        names = {**row.leaves, **(row.lookup if lookup else {})}
        starred = [n for n in self.unused.tensors if n.startswith(f"{path}.")]
        values = {}
        for name in names:
            for ours in self._names(name, path, starred, row):
                value = self.unused.take(f"{path}.{row.leaf(ours, lookup)}")
                if value is not None:
                    values[ours] = value
        self._take_repeated(path, row, known)
        if not values and not known:
            return
        try:
            pieces = self._modification_and_tensors(path, row, options, sites, values, known, lookup)
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise DeltuneError(f"{path} has options or tensors that do not fit each other: {error}") from error
        if pieces is None or self.problems:
            return
        modification, places, values = pieces
        for site, place in places:
            parts = {
                name: rows_of_columns(value, place.linear.columns if place.linear else None)
                if name in row.outputs
                else value
                for name, value in values.items()
            }
            parts = self._with_buffers(modification, place, parts)
            self.pieces.append(PlacedTensors(replace(modification, site=site), place, parts))

    def _modification_and_tensors(
        self,
        path: str,
        row: Row,
        options: dict[str, Any],
        sites: list[str],
        values: dict[str, torch.Tensor],
        known: dict[str, torch.Tensor],
        lookup: bool,
    ) -> tuple[Modification, list[tuple[str, Location]], dict[str, torch.Tensor]] | None:
        """Return the modification of a module, its places, and its tensors by our names; None where there is none."""
        options |= row.sizes(values) if values else {}
        if row.kind == "ADALORA" and not options["r"]:
            return None  # all of its ranks were pruned
        modification = row.modification(options)
        form = modification.form
        if lookup and isinstance(form, LowRank):
            modification = replace(modification, form=replace(form, dropout=0.0))  # PEFT's has none
        places = self._places(path, sites, modification, bool(row.outputs))
        if not places:
            self.problems.append(f"{path} is no projection that this model shows")
            return None
        widths = places[0][1].widths
        out_width = sum(place.widths.out_width for _, place in places)
        whole = replace(widths, out_width=out_width) if modification.insertion == "parallel" else widths
        expected = {n: spec for n, spec in form.tensors(whole).items() if spec.saved and not spec.shared}
        values = row.to_ours(values | known, options, whole)
        values = {n: t for n, t in values.items() if n in expected or n not in row.shared}
        for name, spec in expected.items():
            where = f"{path}.{row.leaf(name, lookup) or name}"
            if name not in values:
                if spec.trained:
                    self.problems.append(f"missing tensor {where}")
            elif tuple(values[name].shape) != spec.shape:
                shape = tuple(values[name].shape)
                self.problems.append(f"{where} has shape {shape}, by the options and this model it is {spec.shape}")
            elif values[name].is_floating_point() != (spec.below is None):
                self.problems.append(f"{where} is of type {values[name].dtype}")
        extra = values.keys() - expected.keys()
        self.problems += [f"extra tensor {path}.{row.leaf(name, lookup) or name}" for name in extra]
        return modification, places, values

    def _names(self, name: str, path: str, in_file: list[str], row: Row) -> list[str]:
        """Return our names of a leaf, of which a starred one has several."""
        if not name.endswith("*"):
            return [name]
        numbers = range(len(in_file))
        return [n for i in numbers if f"{path}.{row.leaf(n := name.replace('*', str(i)))}" in in_file]

    def _take_repeated(self, path: str, row: Row, known: dict[str, torch.Tensor]) -> None:
        """Take what a file has once more for a module, or as zeros for what the module lacks."""
        for name, leaf in row.copies.items():
            copy = self.unused.take(f"{path}.{leaf}")
            if copy is not None and name in known and not torch.equal(copy, known[name]):
                self.problems.append(f"{path}.{leaf} is not the one of all modules")
        for leaf in row.zeros:
            zeros = self.unused.take(f"{path}.{leaf}")
            if zeros is not None and bool(zeros.any()):
                self.problems.append(f"{path}.{leaf} is not 0")

    def _places(
        self, path: str, sites: list[str], modification: Modification, splits: bool
    ) -> list[tuple[str, Location]]:
        """Return the sites that a module is, each with its place; its path where it is none or has to stay whole."""
        places = [(site, place) for site in sites for place in self._locations(site, modification, path)]
        fused = any(place.linear is not None and place.linear.columns is not None for _, place in places)
        if places and (splits or not fused):
            return places
        layer = next((x.path for x in self.anatomy.layers if path.startswith(f"{x.path}.")), None)
        site = path if layer is None else f"*.{path.removeprefix(f'{layer}.')}"
        return [(site, place) for place in self._locations(site, modification, path)] if is_pattern(site) else []

    def _locations(self, site: str, modification: Modification, path: str) -> list[Location]:
        at_site = replace(modification, site=site)
        if at_site not in self.locations:
            by_path: dict[str, list[Location]] = {}
            for place in resolve_locations(self.anatomy, at_site):
                if place.linear is not None:
                    by_path.setdefault(place.linear.path, []).append(place)
            self.locations[at_site] = by_path
        return self.locations[at_site].get(path, [])

    def _with_buffers(
        self, modification: Modification, place: Location, values: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Add what a file lacks because it follows from the weight or from a seed."""
        form = modification.form
        specs = {n: spec for n, spec in form.tensors(place.widths).items() if spec.saved and not spec.shared}
        if specs.keys() == values.keys():
            return values
        at = self.place_of(place)
        assert at is not None
        if at.weight.is_meta:
            raise DeltuneError("the weights of the model are needed, and they are on the meta device")
        empty = {
            name: at.weight.new_empty(spec.shape, dtype=torch.int64 if spec.below is not None else None)
            for name, spec in specs.items()
        }
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            form.initialize(empty, at)
        return {n: t.cpu() for n, t in empty.items()} | values

    def _of_modules(self, paths: list[str]) -> dict[str, dict[str, torch.Tensor]]:
        """Return what the file has in common tensors for each module, by the order of the modules."""
        if self.row.kind == "TINYLORA" and not self.options.get("weight_tying"):
            of_modules = {}
            for number, path in enumerate(paths):
                value = self.common.pop(f"{GLOBAL_PREFIX}tinylora_v.{number}", None)
                of_modules[path] = {} if value is None else {"v": value}
            return of_modules
        if self.row.kind == "UNILORA" and not self.options.get("save_indices"):
            linears = {x.path: x for x in self.anatomy.linears}
            widths = {path: (linears[path].in_width, linears[path].out_width) for path in paths if path in linears}
            return unilora_entries(self.options, widths)
        return {}

    def _method(self) -> Method:
        """Return the shortest method of the pieces."""
        sites = tuple(dict.fromkeys(piece.modification.site for piece in self.pieces))
        at = ("query", "value") if set(sites) == {"query", "value"} else sites
        first = self.row.method(self.options_of(self.pieces[0].place.linear.path))  # type: ignore[union-attr]
        arguments = dict(first.arguments) | {"at": at}
        indices = {name.split(".")[1] for name in (piece.place.name for piece in self.pieces)}
        layers = tuple(sorted(int(index) for index in indices if index.isdigit()))
        candidates = [
            lambda: self.row.make(**arguments),
            lambda: self.row.make(**arguments | {"layers": layers}),
        ]
        return method_from_pieces(self.anatomy, self.pieces, candidates)

    def _shared_tensors(self, method: Method, known: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors that places share, and check those that a seed gives."""
        tensors: dict[str, torch.Tensor] = {}
        owners: dict[str, str] = {}
        for owner, specs in resolve(self.anatomy, method, lambda: 0).shared_tensors(folded=True).items():
            drawn = {name: spec for name, spec in specs.items() if spec.seed is not None}
            if drawn and known:
                form = self.pieces[0].modification.form
                generator = torch.Generator().manual_seed(next(iter(drawn.values())).seed or 0)
                for name, value in form.draw({n: spec.shape for n, spec in drawn.items()}, generator).items():
                    if name in known and not torch.equal(known[name].to(value.dtype), value):
                        raise DeltuneError(
                            f"{self.row.shared[name]} is not what the seed {drawn[name].seed} gives for these modules"
                        )
            for name, spec in specs.items():
                if spec.seed is None:
                    if name in owners:
                        raise DeltuneError(
                            f"its modules have {self.row.shared[name]} in common, and no one method acts at all of them"
                        )
                    if name not in known:
                        raise DeltuneError(f"missing tensor {GLOBAL_PREFIX}{self.row.shared[name]}")
                    owners[name] = owner
                    tensors[f"common.{owner}.{name}"] = known[name]
        return tensors


def _sites_by_path(anatomy: Anatomy, paths: Iterable[str]) -> dict[str, list[str]]:
    """Return the sites of the modules that are projections; a fused one has several.

    Where the file changes one of the two linears before a gated FFN's activation and not the other, the two are sites
    of their own instead of `ffn_up`.
    """
    changed = set(paths)
    linears = [(site, place) for site in PROJECTIONS for place in _linears_at(anatomy, site)]
    in_file: dict[str, set[bool]] = {}
    for site, place in linears:
        if site == "ffn_up":
            in_file.setdefault(place.linear.path.rpartition(".")[0], set()).add(place.linear.path in changed)
    if any(len(both) > 1 for both in in_file.values()):
        linears = [(site, place) for site, place in linears if site != "ffn_up"]
        linears += [(site, place) for site in _GATED for place in _linears_at(anatomy, site)]
    linears += [(site, place) for site in _OUTSIDE_FFN for place in _linears_at(anatomy, site)]
    by_path: dict[str, list[str]] = {}
    for site, place in linears:
        of_path = by_path.setdefault(place.linear.path, [])
        of_path += [site] if site not in of_path else []
    return by_path


def _linears_at(anatomy: Anatomy, site: str) -> list[Any]:
    """Return the places of a site; without the weights of experts, which PEFT stores otherwise."""
    places = locations_or_none(anatomy, Modification(site, LowRank(1)))
    return [place for place in places if place.linear is not None]


def _read_ia3(anatomy: Anatomy, options: Mapping[str, Any], unused: UnusedTensors) -> MethodAndTensors:
    pieces: list[PlacedTensors] = []
    inputs = {
        place.target.path: (site, place)
        for site in ("heads", "ffn_inner")
        for place in locations_or_none(anatomy, Modification(site, Rescale(), "sequential"))
    }
    feedforward = options.get("feedforward_modules")
    of_input = _named(options, "feedforward_modules")
    input_gains: dict[str, torch.Tensor] = {}
    vectors = [name for name in unused.tensors if name.endswith(f".{_IA3_LEAF}")]
    sites = _sites_by_path(anatomy, [name.rpartition(".")[0] for name in vectors])
    for path in sites:
        linears = [
            (site, place)
            for site in sites[path]
            for place in locations_or_none(anatomy, Modification(site, Rescale(), "sequential"))
            if place.linear is not None and place.linear.path == path
        ]
        gain = unused.take(f"{path}.{_IA3_LEAF}", axes=2)
        by_input = of_input(unused.name_in_file(path) or path)
        if gain is not None and feedforward is not None and by_input != (len(gain) == 1):
            raise DeltuneError(
                f"{path}.{_IA3_LEAF} has shape {tuple(gain.shape)}, which does not fit option feedforward_modules: "
                "vectors of these modules have one row, others one column"
            )
        if gain is not None and gain.shape[0] != 1:
            if tuple(gain.shape) != (sum(place.widths.out_width for _, place in linears), 1):
                raise DeltuneError(f"{path}.ia3_l has shape {tuple(gain.shape)}, which does not fit {path}")
            rescale = [(Modification(site, Rescale(), "sequential"), place) for site, place in linears]
            pieces += [
                PlacedTensors(modification, p, {"gain": rows_of_columns(gain, p.target.columns)[:, 0].contiguous()})
                for modification, p in rescale
            ]
        elif gain is not None:
            input_gains[path] = gain[0]
    for path, gain in input_gains.items():
        if path not in inputs:
            raise DeltuneError(
                f"IA3 on the input of {path}: rescaled inputs have a translation for W_o and the FFN's last linear only"
            )
        site, place = inputs[path]
        pieces.append(PlacedTensors(Modification(site, Rescale(), "sequential"), place, {"gain": gain}))
    if not pieces:
        raise DeltuneError("no tensor ia3_l of a module that this model has")
    method = method_from_pieces(anatomy, pieces, [ia3])
    return method, tensors_by_file_name(anatomy, method, pieces)


def _read_norms(anatomy: Anatomy, options: Mapping[str, Any], unused: UnusedTensors) -> MethodAndTensors:
    values: dict[str, torch.Tensor] = {}
    for tensor in anatomy.tensors:
        owner, _, leaf = tensor.name.rpartition(".")
        value = unused.take(f"{owner}.ln_tuning_layers.{leaf}") if tensor.role.startswith("norm.") else None
        if value is not None:
            values[tensor.name] = value
    owners = {name.rpartition(".")[0] for name in values}
    norms = [t.name for t in anatomy.tensors if t.role.startswith("norm.") and t.name.rpartition(".")[0] in owners]
    if missing := [f"missing tensor {name}" for name in norms if name not in values]:
        raise error_from_problems("norms", missing)
    norm_layers = [anatomy.layers[t.layer] for t in anatomy.tensors if t.name in values and t.layer is not None]
    layers = tuple(sorted({layer.index for layer in norm_layers}))
    choices = product(("both", "attention", "ffn"), ("all", layers), (None, False, True), (None, False, True))

    def candidate(of: Any, layer_choice: Any, embedding: bool | None, final: bool | None) -> Callable[[], Method]:
        return lambda: layernorm("both", of, layer_choice, embedding=embedding, final=final)

    method = method_selecting(anatomy, set(values), [candidate(*choice) for choice in choices])
    return method, {f"base.{name}": value for name, value in values.items()}


def _read_prompt(anatomy: Anatomy, options: Mapping[str, Any], unused: UnusedTensors) -> MethodAndTensors:
    rows = _take_prompt_tensor(options, unused)
    method = prompt(rows.shape[0])
    (edit,) = resolve(anatomy, method, lambda: 0).edits
    return method, {f"edit.{edit.key}.rows": rows}


def _read_saved_modules(
    anatomy: Anatomy, unused: UnusedTensors, tied: bool
) -> tuple[list[Method], dict[str, torch.Tensor]]:
    """Read the modules that were trained as a whole (`modules_to_save`), which PEFT copies one by one, tied or not."""
    values: dict[str, torch.Tensor] = {}
    problems = []
    for tensor in anatomy.tensors:
        names = (tensor.name, *tensor.aliases)
        if saved := unused.take_all(names):
            values[tensor.name], *others = saved.values()
            if not tied and (len(saved) < len(names) or not all(torch.equal(values[tensor.name], o) for o in others)):
                content = "values of their own" if others else f"{next(iter(saved))} alone"
                problems.append(
                    f"{word_list(names)} are one tensor of this model, and the file has {content}: give each its own "
                    "first, for example by: output = model.get_output_embeddings(); output.weight = "
                    "torch.nn.Parameter(output.weight.detach().clone())"
                )
    if problems:
        raise error_from_problems("modules_to_save", problems)
    scopes = {(t.role, t.area, t.layer) for t in anatomy.tensors if t.name in values}
    selections: list[Method] = []
    for role, area in sorted({(role, area) for role, area, _ in scopes}):
        layers = tuple(sorted(layer for r, a, layer in scopes if (r, a) == (role, area) and layer is not None))
        names_there = {t.name for t in anatomy.tensors if (t.role, t.area) == (role, area)} & values.keys()
        scoped = [partial(Selection, (role,), (area,), of=of) for of in ("both", "attention", "ffn")]
        choices = [*scoped, *(partial(make, layers=layers) for make in scoped)]
        selections.append(method_selecting(anatomy, names_there, choices))
    return selections, {f"base.{name}": value for name, value in values.items()}


def _take_prompt_tensor(options: Mapping[str, Any], unused: UnusedTensors) -> torch.Tensor:
    rows = unused.take(next((n for n in unused.tensors if n.endswith(PROMPT_TENSOR)), PROMPT_TENSOR))
    if rows is None or rows.dim() != 2:
        raise DeltuneError(f"missing tensor {PROMPT_TENSOR}, a matrix with a row for each virtual token")
    tokens = options.get("num_virtual_tokens")
    if tokens not in (None, len(rows)):
        raise DeltuneError(f"{PROMPT_TENSOR} has {len(rows)} rows, and option num_virtual_tokens is {tokens}")
    return rows


def _read_prefix(anatomy: Anatomy, options: Mapping[str, Any], unused: UnusedTensors) -> MethodAndTensors:
    rows = _take_prompt_tensor(options, unused)
    method = prefix(rows.shape[0], shift_positions=True)
    edits = resolve(anatomy, method, lambda: 0).edits
    widths = edits[0].place.widths
    row_width = 2 * len(edits) * widths.kv_heads * widths.head_width
    if rows.shape[1] != row_width or widths.head_width != widths.value_width:
        raise DeltuneError(
            f"{PROMPT_TENSOR} has rows of {rows.shape[1]}; the {len(edits)} layers of this model take {row_width}"
        )
    pairs = rows.reshape(rows.shape[0], 2 * len(edits), widths.kv_heads, widths.head_width)
    tensors: dict[str, torch.Tensor] = {}
    for index, edit in enumerate(edits):
        tensors[f"edit.{edit.key}.keys"] = pairs[:, 2 * index].contiguous()
        tensors[f"edit.{edit.key}.values"] = pairs[:, 2 * index + 1].contiguous()
    return method, tensors


_READERS: dict[str, Callable[[Anatomy, Mapping[str, Any], UnusedTensors], MethodAndTensors]] = {
    "IA3": _read_ia3, "LN_TUNING": _read_norms, "PROMPT_TUNING": _read_prompt, "P_TUNING": _read_prompt,
    "PREFIX_TUNING": _read_prefix, "CARTRIDGE": _read_prefix,
}  # fmt: skip
