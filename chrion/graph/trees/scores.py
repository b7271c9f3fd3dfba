"""From the leaves that rows reach to what an ensemble's node returns: scores, and the labels of classifiers.

ONNX says little about classifiers of two classes; these are onnxruntime's rules (``TreeAggregatorClassifier``). If all
weights are for one class, a single score decides: against 0.5 if no weight is negative, else against 0. If there are
weights for both, the class is the one that the score of the second one says against 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from chrion.graph.rewrite import RewriteError, Rewriter, standard_opset
from chrion.graph.trees.ensemble import TreeEnsemble

#: The absolute value up to which SOFTMAX_ZERO treats a score as zero.
_ZERO = 1e-7
#: The operators of aggregates other than sums, and what they leave out.
_EXTREMES = {"MIN": ("ReduceMin", np.inf), "MAX": ("ReduceMax", -np.inf)}


def check_scores(ensemble: TreeEnsemble, node: onnx.NodeProto) -> None:
    """Raise a RewriteError if the scores of an ensemble have no form as tensor operators."""
    if ensemble.transform == "PROBIT":
        raise RewriteError("has the transform PROBIT, which no other operator has", node)
    scored = _scored(ensemble)
    if (ensemble.aggregate in _EXTREMES or (len(ensemble.base) and ensemble.labels is None)) and not scored.all():
        raise RewriteError("has targets that some rows have no score for", node)
    if ensemble.labels is None:
        return
    if ensemble.targets == 1:
        raise RewriteError("has a single class", node)
    if ensemble.targets == 2 and len(ensemble.base) == 2:
        raise RewriteError("has two classes and two base values, for which ONNX has no rule", node)
    if not scored.any() or (scored != ensemble.leaf_entries.any(axis=0)).any():
        raise RewriteError("has classes that some rows have no score for", node)


def _scored(ensemble: TreeEnsemble) -> Any:
    """Return for each target whether some tree has an entry for it in all leaves, so that each row has a score."""
    whole = np.ones((ensemble.trees, ensemble.targets), bool)
    np.logical_and.at(whole, ensemble.leaf_trees, ensemble.leaf_entries)
    return whole.any(axis=0)


class ScoreWriter:
    """Writes the operators after the leaves of one ensemble.

    Args:
        rewriter: The model that is being rewritten.
        node: The node of the ensemble.
        ensemble: The ensemble.
        name: The beginning of the names of new values.
    """

    def __init__(self, rewriter: Rewriter, node: onnx.NodeProto, ensemble: TreeEnsemble, name: str) -> None:
        self.rewriter, self.node, self.ensemble, self.name = rewriter, node, ensemble, name

    def write(self, leaves: str) -> None:
        """Write the operators from the leaf of each row in each tree, [rows, trees], to the outputs of the node."""
        self.write_totals(self._aggregate(leaves))

    def write_totals(self, totals: str) -> None:
        """Write the operators from sums, or the least or the largest values, over trees, [rows, targets]."""
        ensemble = self.ensemble
        if ensemble.aggregate == "AVERAGE":
            totals = self.add("Div", [totals, self._number(ensemble.trees)], "average")
        scores = self._add_base(totals)
        if ensemble.labels is None:
            if ensemble.targets > 1:  # onnxruntime applies no other transform than PROBIT to one target
                scores = self._transformed(scores)
            self._finish(scores, self.node.output[0])
            return
        label, scores = self._two_classes(scores) if ensemble.targets == 2 else (self._largest(scores), scores)
        if ensemble.targets > 2:
            scores = self._transformed(scores)
        outputs = [*self.node.output, ""]
        if outputs[0]:
            labels = np.array(ensemble.labels, object if isinstance(ensemble.labels[0], str) else np.int64)
            self.rewriter.add("Gather", [self.rewriter.weight(f"{self.name}/labels", labels), label], outputs[0])
        if outputs[1]:
            self._finish(scores, outputs[1])

    def add(self, kind: str, inputs: list[Any], output: str, **attributes: Any) -> str:
        """Add a node, and return its output."""
        return self.rewriter.add(kind, inputs, f"{self.name}/score/{output}", **attributes)

    def _number(self, value: float) -> str:
        return self.rewriter.constant(np.array(value, self.ensemble.dtype))

    def _finish(self, scores: str, output: str) -> None:
        """Return scores under the name of an output; older operators return float32, whatever they read."""
        if self.node.op_type != "TreeEnsemble" and self.ensemble.dtype == np.float64:
            self.rewriter.add("Cast", [scores], output, to=onnx.TensorProto.FLOAT)
        else:
            self.rewriter.add("Identity", [scores], output)

    def _aggregate(self, leaves: str) -> str:
        """Return sums, or the least or the largest values, over trees, [rows, targets]."""
        ensemble = self.ensemble
        reduce, empty = _EXTREMES.get(ensemble.aggregate, ("ReduceSum", 0.0))
        of_tree = self._targets_of_trees()
        if len(of_tree):
            first, last = int(of_tree[0]), int(of_tree[-1])
            weights = ensemble.leaf_weights[np.arange(ensemble.leaf_count), of_tree[ensemble.leaf_trees]]
            own = self.add("Gather", [self.rewriter.weight(f"{self.name}/weights", weights), leaves], "own")
            shape = self.rewriter.constant(np.array([-1, 1 + last - first, ensemble.trees // (1 + last - first)]))
            total = self._reduce(reduce, self.add("Reshape", [own, shape], "by_target"), 2)
            if last - first < ensemble.targets - 1:  # no tree has the others
                total = self.add("Pad", [total, (0, first, 0, ensemble.targets - 1 - last), self._number(0)], "padded")
        else:
            weights = np.where(ensemble.leaf_entries, ensemble.leaf_weights, np.array(empty, ensemble.dtype))
            own = self.add("Gather", [self.rewriter.weight(f"{self.name}/weights", weights), leaves], "own", axis=0)
            total = self._reduce(reduce, own, 1)
        return total

    def _targets_of_trees(self) -> Any:
        """Return the target of each tree if all leaves have an entry for it alone, and it has as many trees as others.

        Targets are in ascending order without gaps. If this is not the case, the result is empty.
        """
        ensemble = self.ensemble
        entries = ensemble.leaf_entries
        of_tree = np.zeros(ensemble.trees, np.int64)
        of_tree[ensemble.leaf_trees] = entries.argmax(axis=1)
        targets, counts = np.unique(of_tree, return_counts=True)
        alone = (entries.sum(axis=1) == 1).all() and entries[
            np.arange(len(entries)), of_tree[ensemble.leaf_trees]
        ].all()
        even = len(set(counts.tolist())) == 1 and len(targets) == 1 + targets[-1] - targets[0]
        return of_tree if alone and even and (np.diff(of_tree) >= 0).all() else of_tree[:0]

    def _reduce(self, kind: str, value: str, axis: int, output: str = "total", keepdims: int = 0) -> str:
        by_input = kind == "ReduceSum" or standard_opset(self.rewriter.model) >= 18
        given: dict[str, Any] = {} if by_input else {"axes": [axis]}
        return self.add(kind, [value, (axis,)] if by_input else [value], output, keepdims=keepdims, **given)

    def _add_base(self, scores: str) -> str:
        base = self.ensemble.base
        if not len(base) or (len(base) < self.ensemble.targets and not _scored(self.ensemble)[0]):
            return scores
        if len(base) < self.ensemble.targets:  # of two classes, the first one gets it
            base = np.array([base[0], 0], base.dtype)
        return self.add("Add", [scores, self.rewriter.constant(base)], "with_base")

    def _largest(self, scores: str) -> str:
        """Return the class with the largest score among those that have one."""
        never = ~_scored(self.ensemble)
        if len(self.ensemble.base) == 0 and never.any():
            ruled_out = np.where(never, -np.inf, 0).astype(self.ensemble.dtype)
            scores = self.add("Add", [scores, self.rewriter.constant(ruled_out)], "candidates")
        return self.add("ArgMax", [scores], "class", axis=1, keepdims=0)

    def _two_classes(self, scores: str) -> tuple[str, str]:
        """Return the class of each row, and the two scores."""
        ensemble = self.ensemble
        both = _scored(ensemble)[1]
        deciding = self.add("Gather", [scores, np.array([1 if both else 0])], "deciding", axis=1)
        binary = len(np.unique(ensemble.entry_targets)) == 1
        positive = bool((ensemble.entry_weights >= 0).all())
        limit = 0.5 if binary and positive else 0.0
        above = self.add("Greater", [deciding, self._number(limit)], "above")
        flat = self.add("Reshape", [above, (-1,)], "flat")
        label = self.add("Cast", [flat], "class", to=onnx.TensorProto.INT64)
        if both:
            return label, self._transformed(scores)
        if ensemble.transform == "LOGISTIC":
            pair = self._pair(self.add("Neg", [deciding], "other"), deciding)
            return label, self.add("Sigmoid", [pair], "pair_logistic")
        opposite = self.add("Sub", [self._number(1.0 if positive else 0.0), deciding], "other")
        return label, self._pair(opposite, deciding)

    def _pair(self, first: str, second: str) -> str:
        return self.add("Concat", [first, second], "pair", axis=1)

    def _transformed(self, scores: str) -> str:
        transform = self.ensemble.transform
        if transform == "LOGISTIC":
            return self.add("Sigmoid", [scores], "logistic")
        if transform == "SOFTMAX":
            return self.add("Softmax", [scores], "softmax", axis=1)
        return self._softmax_zero(scores) if transform == "SOFTMAX_ZERO" else scores

    def _softmax_zero(self, scores: str) -> str:
        """Return the softmax over the scores that are not zero; the others stay about zero."""
        largest = self._reduce("ReduceMax", scores, 1, "largest", keepdims=1)
        powers = self.add("Exp", [self.add("Sub", [scores, largest], "below")], "powers")
        scale = self.add("Exp", [self.add("Neg", [largest], "opposite")], "scale")
        size = self.add("Abs", [scores], "size")
        counts = self.add("Greater", [size, self._number(_ZERO)], "counts")
        parts = self.add("Where", [counts, powers, self.add("Mul", [scores, scale], "scaled")], "parts")
        kept = self.add("Where", [counts, powers, self._number(0)], "kept")
        total = self._reduce("ReduceSum", kept, 1, "softmax_total", keepdims=1)
        return self.add("Div", [parts, total], "softmax_zero")
