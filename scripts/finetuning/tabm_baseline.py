"""TabM (Gorishniy et al., ICLR 2025), a network for tables, as a baseline that is trained on the new rows alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
#: Smaller than by default (512 units, 32 members), which takes minutes on two cores for a few thousand rows.
_UNITS, _MEMBERS, _BATCH, _EPOCHS, _PATIENCE = 256, 16, 256, 60, 8


def fit_tabm(
    x: Array, y: Array, chosen: tuple[Array, Array], seed: int, epochs: int = _EPOCHS
) -> Callable[[Array], Array]:
    """Train TabM, stopped early by other rows, and return a function from features to probabilities of class 1.

    Args:
        x: The features, [rows, features], without missing values.
        y: The class of each row.
        chosen: The features and classes of the rows to choose with.
        seed: The seed of weights and batches.
        epochs: The most epochs.
    """
    import tabm  # noqa: PLC0415 - an optional baseline
    import torch  # noqa: PLC0415
    from rtdl_num_embeddings import PiecewiseLinearEmbeddings, compute_bins  # noqa: PLC0415

    torch.manual_seed(seed)
    mean, deviation = x.mean(axis=0), x.std(axis=0) + 1e-6
    varied = x.std(axis=0) > 1e-6

    def tensor(values: Array) -> Any:
        return torch.as_tensor(((values - mean) / deviation)[:, varied], dtype=torch.float32)

    features, target = tensor(x), torch.as_tensor(y, dtype=torch.float32)
    bins = compute_bins(features, n_bins=min(32, len(x) // 4))
    embeddings = PiecewiseLinearEmbeddings(bins, 16, activation=False, version="B")
    model = tabm.TabM.make(
        n_num_features=features.shape[1], d_out=1, num_embeddings=embeddings, d_block=_UNITS, k=_MEMBERS
    )
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=3e-4)
    loss_of = torch.nn.functional.binary_cross_entropy_with_logits

    def predict(values: Array) -> Array:
        model.eval()
        with torch.no_grad():
            parts = [torch.sigmoid(model(part)).mean(1)[:, 0] for part in tensor(values).split(4096)]
        return np.asarray(torch.cat(parts).numpy(), np.float64)

    best, state, waited = float("inf"), model.state_dict(), 0
    for _ in range(min(epochs, _EPOCHS)):
        model.train()
        for rows in torch.randperm(len(features)).split(_BATCH):
            scores = model(features[rows])[..., 0]  # one a member, which are trained as models of their own
            loss = loss_of(scores, target[rows, None].expand_as(scores))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        found = np.clip(predict(chosen[0]), 1e-7, 1 - 1e-7)
        held = float(-np.where(chosen[1] > 0, np.log(found), np.log(1 - found)).mean())
        waited = 0 if held < best else waited + 1
        if held < best:
            best, state = held, {name: value.clone() for name, value in model.state_dict().items()}
        if waited >= _PATIENCE:
            break
    model.load_state_dict(state)
    return predict
