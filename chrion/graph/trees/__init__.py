"""Tree ensembles: one record for the operators of ``ai.onnx.ml`` that hold them, and the same function as tensors."""

from chrion.graph.trees.ensemble import Rule, TreeEnsemble
from chrion.graph.trees.joined import joined
from chrion.graph.trees.operators import read_ensemble, write_ensemble
from chrion.graph.trees.tensor_form import FORMS, PARTS, tensor_trees, tree_forms, tree_variants
from chrion.graph.unsafe_trees import is_tree_ensemble

__all__ = [
    "FORMS",
    "PARTS",
    "Rule",
    "TreeEnsemble",
    "is_tree_ensemble",
    "joined",
    "read_ensemble",
    "tensor_trees",
    "tree_forms",
    "tree_variants",
    "write_ensemble",
]
