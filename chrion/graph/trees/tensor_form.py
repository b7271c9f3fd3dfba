"""Exact forms of tree ensembles: as tensors, for devices without a kernel for them, and in parts, for several cores.

onnxruntime runs tree ensembles on the CPU only. As ordinary tensor operators they run on an accelerator, and their
inputs and outputs stay there. There are two forms, with the comparisons of the original in its element type:

- **gathers**: all rows descend all trees level by level. A level gathers the feature and the threshold of the node
  that each row has reached, compares, and goes to one of the two children, which are neighbours. A leaf is its own
  child. Work is proportional to the depth.
- **gemm**: all inner nodes are compared at once. A product with the paths, a matrix of 1 (the true child is on the path
  to a leaf), -1 (the false one) and 0, counts the decisions that agree; the leaf for which all agree is reached. Work
  is proportional to nodes times leaves of a tree (Nakandala et al., OSDI 2020, section 4.1). Counts are small integers,
  so that the result is exact in any precision that devices multiply in.

Membership in a set of categories is a lookup in a table of integers (:mod:`chrion.graph.trees.sets`).

On cores, onnxruntime's kernel runs batches of up to about 50 rows on one thread, however many it has. In **parts**, of
some trees each, an ensemble of such a batch runs on several lanes.

Leaves are equal to those of the original. The sums over trees are in another order, so that scores differ by rounding.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
from onnx import helper, version_converter

from chrion.errors import ModelError
from chrion.graph.model import Graph
from chrion.graph.rewrite import STANDARD, RewriteError, Rewriter, standard_opset
from chrion.graph.trees.ensemble import Array, Rule, TreeEnsemble
from chrion.graph.trees.joined import part_of
from chrion.graph.trees.operators import read_ensemble, write_ensemble
from chrion.graph.trees.scores import ScoreWriter, check_scores
from chrion.graph.trees.sets import SetTable
from chrion.graph.unsafe_trees import ENSEMBLE, REGRESSOR, is_tree_ensemble
from chrion.graph.variants import rewritten

log = logging.getLogger(__name__)

#: The tensor forms by name.
FORMS = ("gathers", "gemm")
#: The numbers of parts by form.
PARTS = {f"{count} parts": count for count in (2, 4, 8)}
#: The most rows for parts: with more of them, onnxruntime's kernel uses all of its threads.
_MOST_ROWS = 50
#: The fewest trees of a part.
_LEAST_TREES = 16
#: The opset from which on all operators have the form that is used, and onnxruntime infers their shapes.
_OPSET = 16
#: The most elements of a constant of a tensor form.
_MOST_ELEMENTS = 1 << 26
#: The most levels that are written, seven operators each.
_MOST_LEVELS = 256
#: The rules that a normalised ensemble has, and the operators for them.
_OPERATORS = {Rule.LEQ: "LessOrEqual", Rule.LT: "Less", Rule.EQ: "Equal"}
#: The rules that are the opposite of another one.
_OPPOSITE = {Rule.GT: Rule.LEQ, Rule.GTE: Rule.LT, Rule.NEQ: Rule.EQ}
_DOUBLE = "tensor(double)"


def tensor_trees(graph: Graph, form: str) -> Graph:
    """Return the graph with all tree ensembles as tensor operators.

    Args:
        graph: The graph.
        form: One of :data:`FORMS` or :data:`PARTS`.

    Returns:
        A graph with the same results except for rounding, or the graph itself if it has no tree ensembles. The other
        operators, and the outputs of the ensembles, keep their names.

    Raises:
        RewriteError: An ensemble has no such form; the message names the operator.
    """
    if not any(map(is_tree_ensemble, graph.model.graph.node)):
        return graph

    def rewrite() -> onnx.ModelProto:
        model = with_tensor_trees(graph.model, form, {name: info.type for name, info in graph.values.items()})
        for tensor in model.graph.initializer:
            if tensor.name not in graph.weight_names:
                graph.folder.store(tensor)
        return model

    return rewritten(graph, ("trees", form), rewrite)


def with_tensor_trees(model: onnx.ModelProto, form: str, types: dict[str, str]) -> onnx.ModelProto:
    """Return a model with all tree ensembles as tensor operators; see :func:`tensor_trees`.

    Args:
        model: The model.
        form: One of :data:`FORMS` or :data:`PARTS`.
        types: The types of the values that ensembles read, as onnxruntime writes them.
    """
    if form not in {*FORMS, *PARTS}:
        raise RewriteError(f"tree ensembles have no form {form!r}", hint=f"one of {', '.join([*FORMS, *PARTS])}")
    rewriter = Rewriter(with_tensor_opset(model))
    for node in rewriter.model.graph.node:
        if is_tree_ensemble(node):
            _TreeWriter(rewriter, node, types.get(node.input[0], "")).write(form)
        else:
            rewriter.nodes.append(node)
    return rewriter.finish()


def with_tensor_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with the opset of the tensor forms; the weights of the model are left as they are.

    Raises:
        RewriteError: ONNX cannot convert the model.
    """
    whole = onnx.ModelProto()
    if not any(opset.domain in STANDARD for opset in model.opset_import):  # it has trees alone
        whole.CopyFrom(model)
        whole.opset_import.add(version=_OPSET)
        return whole
    if standard_opset(model) >= _OPSET:
        return model
    try:
        converted = version_converter.convert_version(model, _OPSET)
    except (version_converter.ConvertError, RuntimeError, ValueError) as error:
        found = standard_opset(model)
        raise RewriteError(
            f"tree ensembles have tensor forms from opset {_OPSET} on, found {found}: {error}"
        ) from error
    whole.CopyFrom(model)
    known = {tensor.name for tensor in model.graph.initializer}
    del whole.graph.node[:]
    del whole.opset_import[:]
    whole.graph.node.extend(converted.graph.node)
    whole.graph.initializer.extend(tensor for tensor in converted.graph.initializer if tensor.name not in known)
    whole.opset_import.extend(converted.opset_import)
    return whole


def tree_forms(graph: Graph, cores: int = 0) -> dict[str, Graph | ModelError]:
    """Return the graph in each form that its tree ensembles may have, or why they do not have it; nothing without any.

    Args:
        graph: The graph.
        cores: The number of cores of a machine without an accelerator, for parts; 0 for tensor forms.
    """
    found: dict[str, Graph | ModelError] = {}
    ensembles = [node for node in graph.model.graph.node if is_tree_ensemble(node)]
    few = all(_rows(graph, node.input[0]) <= _MOST_ROWS for node in ensembles)
    forms = [form for form, count in PARTS.items() if few and count <= cores] if cores else FORMS
    for form in forms if ensembles else ():
        try:
            found[form] = tensor_trees(graph, form)
        except ModelError as refusal:  # of the rewrite, or of onnxruntime for the rewritten model
            log.info("model %s: tree ensembles are not tried as %s: %s", graph.name, form, refusal)
            found[form] = refusal
    return found


def _rows(graph: Graph, name: str) -> int:
    """Return the rows of a table of features; 1 if they are not known."""
    shape = graph.values[name].shape if name in graph.values else ()
    return shape[0] if shape and len(shape) > 1 and isinstance(shape[0], int) else 1


def tree_variants(graph: Graph, cores: int = 0) -> dict[str, Graph]:
    """Return the graph in each form that its tree ensembles have; see :func:`tree_forms`."""
    return {form: found for form, found in tree_forms(graph, cores).items() if isinstance(found, Graph)}


class _TreeWriter:
    """Writes the tensor operators of one ensemble."""

    def __init__(self, rewriter: Rewriter, node: onnx.NodeProto, kind: str) -> None:
        self.rewriter, self.node, self.kind = rewriter, node, kind
        ensemble = read_ensemble(node, np.dtype(np.float64) if kind == _DOUBLE else None)
        check_scores(ensemble, node)
        self.ensemble = _by_target(normalised(ensemble))
        self.columns = _rule_columns(self.ensemble)
        self.name = node.name or node.output[0]

    def write(self, form: str) -> None:
        """Write the operators of a form; their last outputs are those of the node."""
        x = self.node.input[0]
        wanted = onnx.TensorProto.DOUBLE if self.ensemble.dtype == np.float64 else onnx.TensorProto.FLOAT
        if self.kind != ("tensor(double)" if wanted == onnx.TensorProto.DOUBLE else "tensor(float)"):
            x = self.add("Cast", [x], "x", to=wanted)
        ensemble = self.ensemble
        if form in PARTS:
            self._parts(x, PARTS[form])
            return
        if not len(ensemble.features):
            leaves = self._single_leaves(x)
        else:
            sources = {"value": x} | self._sets(x)
            leaves = (self._gathers if form == "gathers" else self._gemm)(sources)
        ScoreWriter(self.rewriter, self.node, ensemble, self.name).write(leaves)

    def add(self, kind: str, inputs: list[Any], output: str, **attributes: Any) -> str:
        """Add a node, and return its output, of which the name begins with that of the ensemble."""
        return self.rewriter.add(kind, inputs, f"{self.name}/{output}", **attributes)

    def weight(self, name: str, value: Array) -> str:
        """Add a constant, and return its name."""
        if value.size > _MOST_ELEMENTS:
            raise RewriteError(f"is too large for this form: {value.size:,} numbers in one constant", self.node)
        return self.rewriter.weight(f"{self.name}/{name}", value)

    def _parts(self, x: str, count: int) -> None:
        """Write the parts of the ensemble and the operators after them."""
        ensemble, node = self.ensemble, self.node
        if ensemble.aggregate not in {"SUM", "AVERAGE"} or ensemble.trees < _LEAST_TREES * count:
            raise RewriteError("has too few trees for parts, or no sum over them", node)
        if ensemble.dtype == np.float64 and node.op_type != ENSEMBLE:
            raise RewriteError("returns sums of float64 as float32, so that parts would be less exact", node)
        ends = np.linspace(0, ensemble.trees, count + 1).astype(int).tolist()
        totals = []
        for at, (first, last) in enumerate(pairwise(ends)):
            kind = ENSEMBLE if node.op_type == ENSEMBLE else REGRESSOR
            totals.append(f"{self.name}/part{at}")
            like = helper.make_node(kind, [x], totals[-1:], totals[-1], domain=node.domain)
            self.rewriter.nodes.append(write_ensemble(part_of(ensemble, slice(first, last)), like))
        ScoreWriter(self.rewriter, node, ensemble, self.name).write_totals(self.add("Sum", totals, "sum"))

    def _single_leaves(self, x: str) -> str:
        """Return the leaf of each row in each tree, [rows, trees], of trees without inner nodes."""
        rows = self.add("Shape", [x], "rows", start=0, end=1)
        size = self.add("Concat", [rows, np.array([self.ensemble.trees])], "size", axis=0)
        return self.add("Expand", [self.weight("leaves", ~self.ensemble.roots[None, :]), size], "leaf")

    def _sets(self, x: str) -> dict[str, str]:
        """Return the columns of features in the table of sets, [rows, features]; nothing for an ensemble without sets.

        A node that tests membership gets a comparison that does not hold.
        """
        ensemble = self.ensemble
        if not ensemble.members:
            return {}
        try:
            table = SetTable.of(ensemble, _MOST_ELEMENTS)
        except ValueError as error:
            raise RewriteError(str(error), self.node) from error
        own, rules, thresholds = list(ensemble.members), ensemble.rules.copy(), ensemble.thresholds.copy()
        others = np.delete(rules, own)
        rules[own], thresholds[own] = others[0] if len(others) else Rule.EQ, np.nan
        self.ensemble = replace(ensemble, rules=rules, thresholds=thresholds)
        self.columns = _rule_columns(self.ensemble) | {"set": table.starts}
        self.weight("members", table.members.ravel())
        return {"column": table.columns_of(self.rewriter, x, f"{self.name}/sets", ensemble.dtype)}

    def _gathers(self, sources: dict[str, str]) -> str:
        """Return the leaf of each row in each tree, [rows, trees].

        Args:
            sources: What comparisons read, [rows, features]: values, and the columns of a table of sets.
        """
        if self.ensemble.depth > _MOST_LEVELS:
            raise RewriteError(f"has {self.ensemble.depth} levels, too many for this form", self.node)
        table = _Table(self.ensemble, self.columns)
        constants = {name: self.weight(name, value) for name, value in table.columns.items()}
        at = ""
        for level in range(self.ensemble.depth):
            tag = f"{level}"
            if level:
                own = {name: self.add("Gather", [given, at], f"{name}{tag}") for name, given in constants.items()}
            else:  # all rows are at the roots
                own = {name: self.weight(f"{name}0", column[table.roots]) for name, column in table.columns.items()}
            read = "GatherElements" if level else "Gather"
            own |= {n: self.add(read, [given, own["feature"]], f"{n}{tag}", axis=1) for n, given in sources.items()}
            taken = self._decide(own, tag)
            step = self.add("Cast", [taken], f"step{tag}", to=onnx.TensorProto.INT32)
            at = self.add("Add", [own["child"], step], f"at{tag}")
        return self.add("Gather", [self.weight("leaf_of", table.leaf_of), at], "leaf")

    def _decide(self, own: dict[str, str], tag: str) -> str:
        """Return whether values lead to the true children of nodes, as a value of bools.

        Args:
            own: The columns of the nodes, and what they read.
            tag: The end of the names of new values.
        """
        parts, value = [], own["value"]
        for rule, operator in _OPERATORS.items():
            if f"is_{rule.name}" in own or self._only(rule):
                met = self.add(operator, [value, own["threshold"]], f"{rule.name}{tag}")
                if not self._only(rule):
                    met = self.add("And", [met, own[f"is_{rule.name}"]], f"{rule.name}_here{tag}")
                parts.append(met)
        if "missing" in own:
            absent = self.add("IsNaN", [value], f"absent{tag}")
            parts.append(self.add("And", [absent, own["missing"]], f"default{tag}"))
        if "set" in own:
            at_member = self.add("Add", [own["set"], own["column"]], f"at_member{tag}")
            parts.append(self.add("Gather", [f"{self.name}/members", at_member], f"member{tag}"))
        taken = parts[0]
        for at, part in enumerate(parts[1:]):
            taken = self.add("Or", [taken, part], f"taken{tag}_{at}")
        return taken

    def _only(self, rule: Rule) -> bool:
        return bool((self.ensemble.rules == rule).all())

    def _gemm(self, sources: dict[str, str]) -> str:
        """Return the leaf of each row in each tree, [rows, trees]; see :meth:`_gathers`."""
        ensemble = self.ensemble
        nodes = ensemble.node_table(np.arange(len(ensemble.features)))
        leaves = ensemble.leaf_table(np.arange(ensemble.leaf_count))
        if nodes.size * leaves.shape[1] > _MOST_ELEMENTS:
            raise RewriteError("has too many leaves for this form", self.node)
        paths, literals = path_matrices(ensemble)
        of_nodes = {"threshold": ensemble.thresholds} | self.columns
        columns = {name: self.weight(name, value[nodes][..., None]) for name, value in of_nodes.items()}
        features = self.weight("feature", ensemble.features[nodes])
        for name, source in sources.items():
            flipped = self.add("Transpose", [source], f"flipped_{name}", perm=[1, 0])
            columns[name] = self.add("Gather", [flipped, features], f"own_{name}", axis=0)
        taken = self._decide(columns, "")
        decisions = self.add("Cast", [taken], "decisions", to=onnx.TensorProto.FLOAT)
        agreeing = self.add("MatMul", [self.weight("paths", paths), decisions], "agreeing")
        reached = self.add("Equal", [agreeing, self.weight("literals", literals)], "reached")
        ones = self.add("Cast", [reached], "ones", to=onnx.TensorProto.FLOAT)
        best = self.add("ArgMax", [ones], "best", axis=1, keepdims=0)
        by_row = self.add("Transpose", [best], "by_row", perm=[1, 0])
        first = np.arange(ensemble.trees)[None, :] * leaves.shape[1]
        at = self.add("Add", [by_row, self.weight("first", first)], "at")
        return self.add("Gather", [self.weight("leaf_of", leaves.ravel()), at], "leaf")


def normalised(ensemble: TreeEnsemble) -> TreeEnsemble:
    """Return an ensemble with the rules LEQ, LT, EQ and MEMBER alone, and with the same leaves.

    An opposite rule is replaced, and its children change places; so does the child of missing values. NEQ leads them to
    the true child in any case. A comparison with a threshold that is NaN does not hold, whatever the rule, except NEQ.
    """
    rules, missing = ensemble.rules.copy(), ensemble.missing_true.copy()
    missing |= rules == Rule.NEQ
    unordered = np.isnan(ensemble.thresholds) & np.isin(rules, [Rule.GT, Rule.GTE])
    rules[unordered] = Rule.EQ
    swapped = np.isin(rules, list(_OPPOSITE))
    for rule, opposite in _OPPOSITE.items():
        rules[rules == rule] = opposite
    true, false = (
        np.where(swapped, *sides) for sides in ((ensemble.false, ensemble.true), (ensemble.true, ensemble.false))
    )
    return replace(ensemble, rules=rules, true=true, false=false, missing_true=missing ^ swapped)


def _by_target(ensemble: TreeEnsemble) -> TreeEnsemble:
    """Return the ensemble with its trees sorted by their first target, so that trees of a target are neighbours."""
    first = np.full(ensemble.trees, ensemble.targets)
    np.minimum.at(first, ensemble.leaf_trees[ensemble.entry_leaves], ensemble.entry_targets)
    return replace(ensemble, roots=ensemble.roots[np.argsort(first, kind="stable")])


def _rule_columns(ensemble: TreeEnsemble) -> dict[str, Array]:
    """Return what inner nodes need beside thresholds: their rules if there are several, and missing values."""
    columns: dict[str, Array] = {}
    present = [rule for rule in _OPERATORS if (ensemble.rules == rule).any()]
    if len(present) > 1:
        columns |= {f"is_{rule.name}": ensemble.rules == rule for rule in present}
    if ensemble.missing_true.any():
        columns["missing"] = ensemble.missing_true
    return columns


class _Table:
    """The nodes of all trees, level by level: the false child of a node, and after it the true one."""

    def __init__(self, ensemble: TreeEnsemble, columns: dict[str, Array]) -> None:
        inner = len(ensemble.features)
        total = inner + ensemble.leaf_count
        order = [np.where(ensemble.roots < 0, inner + ~ensemble.roots, ensemble.roots)]
        for level in ensemble.levels:
            pairs = np.stack([ensemble.false[level], ensemble.true[level]], axis=1).ravel()
            order.append(np.where(pairs < 0, inner + ~pairs, pairs))
        nodes = np.concatenate(order)
        place = np.empty(total, np.int32)
        place[nodes] = np.arange(total)
        is_inner = nodes < inner
        own = nodes[is_inner]
        false = ensemble.false[own]

        def column(values: Array, missing: Any) -> Array:
            whole = np.full((total, *values.shape[1:]), missing, values.dtype)
            whole[is_inner] = values[own]
            return whole

        child = place[nodes]
        child[is_inner] = place[np.where(false < 0, inner + ~false, false)]
        #: The columns of the table by name; a leaf fails its comparison with NaN, and is its own false child.
        self.columns: dict[str, Array] = {
            "feature": column(ensemble.features.astype(np.int32), missing=0),
            "threshold": column(ensemble.thresholds, missing=np.nan),
            "child": child,
        }
        for name, values in columns.items():
            self.columns[name] = column(values, missing=0)
        self.roots = place[order[0]]
        self.leaf_of = np.where(is_inner, 0, nodes - inner)


def path_matrices(ensemble: TreeEnsemble) -> tuple[Array, Array]:
    """Return the paths to the leaves, [trees, leaves, nodes], and the true children on each, [trees, leaves, 1].

    No row reaches the leaves that fill a tree: the count of true children on their paths is impossible.
    """
    trees, node_of, leaf_of = ensemble.node_trees, ensemble.node_places, ensemble.leaf_places
    literals = ensemble.leaf_table(np.zeros((ensemble.leaf_count, 1), np.float32), -1)
    paths = np.zeros((*literals.shape[:2], int(node_of.max()) + 1), np.float32)
    parents: dict[int, tuple[int, int]] = {}
    for sign, children in ((1, ensemble.true), (-1, ensemble.false)):
        parents.update({child: (node, sign) for node, child in enumerate(children.tolist())})
    for leaf in range(ensemble.leaf_count):
        at = ~leaf
        while at in parents:
            at, sign = parents[at]
            paths[trees[at], leaf_of[leaf], node_of[at]] = sign
            literals[trees[at], leaf_of[leaf]] += sign == 1
    return paths, literals
