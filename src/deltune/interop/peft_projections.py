"""The types of PEFT's that change projections: which modification each module has, and its tensors by our names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..anatomy.types import Anatomy
from ..errors import DeltuneError, first_of
from ..methods.forms.base import Place
from ..methods.forms.low_rank import LowRank
from ..methods.resolve import resolve
from ..methods.sites import Location, resolve_locations
from ..methods.spec import OTHER_PROJECTIONS, PROJECTIONS, Method, Modification, NamedMethod, is_pattern
from .base import (
    Patterns,
    PlacedTensors,
    UnusedTensors,
    linears_at,
    method_from_pieces,
    rows_of_columns,
    tensors_by_deltune_name,
)
from .peft_table import GLOBAL_PREFIX, PATTERNS, Row, companion_rows, frod_tensors, options_of_module, unilora_entries

MethodAndTensors = tuple[Method, dict[str, torch.Tensor]]

_GATED = ("gate_proj", "up_proj")
_OUTSIDE_FFN = tuple(site for site in OTHER_PROJECTIONS if site not in _GATED)


class ProjectionReader:
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
        self.first: NamedMethod | None = None

    def read(self, paths: list[str]) -> MethodAndTensors:
        """Return the method of these modules, and its tensors by their names in our files."""
        self.of_modules = of_modules = self._of_modules(paths)
        shared = {name: self.common.pop(f"{GLOBAL_PREFIX}{leaf}", None) for name, leaf in self.row.shared.items()}
        known = {name: value for name, value in shared.items() if value is not None}
        sites = sites_by_path(self.anatomy, paths)
        for path in paths:
            options = self.options_of(path)
            for row in (self.row, *companion_rows(self.row, options)):
                self._read_module(path, row, options, sites.get(path, []), known | of_modules.get(path, {}))
        if self.problems or not self.pieces:
            problems = self.problems or [self._other_model()]
            raise DeltuneError(f"{self.row.kind}: {'; '.join(first_of(problems, 3))}")
        method = self._method()
        tensors = tensors_by_deltune_name(self.anatomy, method, self.pieces)
        return method, tensors | self._shared_tensors(method, known)

    def _other_model(self) -> str:
        """Return the problem of a file with no tensor of a module that this model has and can change."""
        names, base = sorted(self.unused.names.values()), self.options.get("base_model_name_or_path")
        return (
            f"it was trained on {f'another model ({base})' if base else 'another model'}: it has "
            f"{names[0] if names else 'no tensors'}, and no tensor of a module that this {self.anatomy.model} has and "
            "that can be changed"
        )

    def plan(self, paths: list[str]) -> Method:
        """Return the method that changes these modules, which no file has tensors of."""
        sites = sites_by_path(self.anatomy, paths)
        for path in paths:
            options = self.options_of(path)
            for row in (self.row, *companion_rows(self.row, options)):
                modification = self._modification(row, options)
                if isinstance(modification.form, LowRank) and sites.get(path) == ["embedding"]:
                    modification = replace(modification, form=replace(modification.form, dropout=0.0))
                places = self._places(path, sites.get(path, []), modification, bool(row.outputs))
                if not places:
                    raise DeltuneError(f"{path} is no projection that this model shows")
                biases = row.leaves.get("vector") == "base_layer.bias"
                self.pieces += [
                    PlacedTensors(replace(modification, site=site), place, {})
                    for site, place in places
                    if place.has_bias or not biases
                ]
        return self._method()

    def _modification(self, row: Row, options: dict[str, Any]) -> Modification:
        """Return the modification of a module, and keep the first method of the type."""
        method = row.method(options)
        self.first = self.first or method
        part = method.parts[0]
        assert isinstance(part, Modification)
        return part

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
        numbers = range(sum(name.startswith(f"{path}.") for name in self.unused.tensors))
        values = {}
        for ours in (name.replace("*", str(n)) for name in names for n in (numbers if "*" in name else (0,))):
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
            parts = self._with_buffers(modification, place, parts, known)
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
        modification = self._modification(row, options)
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

    def _take_repeated(self, path: str, row: Row, known: dict[str, torch.Tensor]) -> None:
        """Take what a file has once more for a module, or as zeros for what the module lacks."""
        for name, leaf in row.copies.items():
            copy = self.unused.take(f"{path}.{leaf}")
            if copy is not None and (name not in known or not torch.equal(copy, known[name])):
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
        self,
        modification: Modification,
        place: Location,
        values: dict[str, torch.Tensor],
        known: dict[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Add what a file lacks because it follows from the weight or from a seed, and compare what follows too."""
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
            form.initialize(known | empty, at)
        for name, value in values.items():
            if not specs[name].trained and not torch.allclose(value.double(), empty[name].cpu().double(), 1e-3, 1e-4):
                raise DeltuneError(
                    f"{place.linear.path if place.linear else place.name} has other weights than the model that the "
                    f"folder was trained on: {name} of its {self.row.kind} does not follow from them"
                )
        return {n: t.cpu() for n, t in empty.items()} | values

    def _of_modules(self, paths: list[str]) -> dict[str, dict[str, torch.Tensor]]:
        """Return what the file has in common tensors for each module, by the order of the modules."""
        if self.row.kind == "TINYLORA" and not self.options.get("weight_tying"):
            of_modules = {}
            for number, path in enumerate(paths):
                value = self.common.pop(f"{GLOBAL_PREFIX}tinylora_v.{number}", None)
                of_modules[path] = {} if value is None else {"v": value}
            return of_modules
        if self.row.kind == "FROD":
            return frod_tensors(self.common, paths)
        if self.row.kind == "UNILORA" and not self.options.get("save_indices"):
            linears = {x.path: x for x in self.anatomy.linears}
            widths = {path: (linears[path].in_width, linears[path].out_width) for path in paths if path in linears}
            return unilora_entries(self.options, widths)
        return {}

    def _method(self) -> Method:
        """Return the shortest method of the pieces."""
        sites = tuple(dict.fromkeys(piece.modification.site for piece in self.pieces))
        at = ("query", "value") if set(sites) == {"query", "value"} else sites
        assert self.first is not None
        arguments = dict(self.first.arguments) | {"at": at}
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
        resolved = resolve(self.anatomy, method, lambda: 0)
        users = {
            (e.owner(s.shared), e.place.target.path) for e in resolved.edits for s in e.tensors.values() if s.shared
        }
        for owner, specs in resolved.shared_tensors(folded=True).items():
            of_users = [self.of_modules.get(path, {}) for of, path in users if of == owner]
            drawn = {name: spec for name, spec in specs.items() if spec.seed is not None}
            if drawn:
                form, widths = self.pieces[0].modification.form, [piece.place.widths for piece in self.pieces]
                greatest = [max(w.in_width for w in widths), max(w.out_width for w in widths)]
                of_peft = form.tensors(replace(widths[0], in_width=greatest[0], out_width=greatest[1]))
                if any(spec.shape != of_peft[name].shape for name, spec in drawn.items()):
                    raise DeltuneError(
                        "PEFT draws its random matrices for the greatest widths of all its modules, and here they have "
                        "others: no one method acts at all of them, or they are not alike"
                    )
            if drawn and known:
                generator = torch.Generator().manual_seed(next(iter(drawn.values())).seed or 0)
                for name, value in form.draw({n: spec.shape for n, spec in drawn.items()}, generator).items():
                    if name in known and not torch.equal(known[name].to(value.dtype), value):
                        raise DeltuneError(
                            f"{self.row.shared[name]} is not what the seed {drawn[name].seed} gives for these modules"
                        )
            for name, spec in specs.items():
                if spec.seed is None:
                    of_modules = {id(values[name]): values[name] for values in of_users if name in values}
                    if name in owners or len(of_modules) > 1:
                        raise DeltuneError(
                            f"its modules have {self.row.shared[name]} in common, and no one method acts at all of them"
                        )
                    if of_modules:
                        tensors[f"common.{owner}.{name}"] = next(iter(of_modules.values()))
                        continue
                    if name not in known:
                        raise DeltuneError(f"missing tensor {GLOBAL_PREFIX}{self.row.shared[name]}")
                    owners[name] = owner
                    tensors[f"common.{owner}.{name}"] = known[name]
        return tensors


def sites_by_path(anatomy: Anatomy, paths: Iterable[str]) -> dict[str, list[str]]:
    """Return the sites of the modules that are projections; a fused one has several.

    Where the file changes one of the two linears before a gated FFN's activation and not the other, the two are sites
    of their own instead of `ffn_up`.
    """
    changed = set(paths)
    linears = [(site, linear) for site in PROJECTIONS for _, linear in linears_at(anatomy, site)]
    in_file: dict[str, set[bool]] = {}
    for site, linear in linears:
        if site == "ffn_up":
            in_file.setdefault(linear.path.rpartition(".")[0], set()).add(linear.path in changed)
    if any(len(both) > 1 for both in in_file.values()):
        linears = [(site, linear) for site, linear in linears if site != "ffn_up"]
        linears += [(site, linear) for site in _GATED for _, linear in linears_at(anatomy, site)]
    linears += [(site, linear) for site in _OUTSIDE_FFN for _, linear in linears_at(anatomy, site)]
    by_path: dict[str, list[str]] = {}
    for site, linear in linears:
        of_path = by_path.setdefault(linear.path, [])
        of_path += [site] if site not in of_path else []
    return by_path
