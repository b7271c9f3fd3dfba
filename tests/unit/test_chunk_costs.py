"""Interpolation of recurrent operators' costs between measured chunk lengths."""

from __future__ import annotations

import pytest

from chrion import Graph, load
from chrion.graph.dag import Dag
from chrion.graph.recurrent import chunk_choices, unroll
from chrion.profiler.chunk_costs import interpolate, measured_chunks
from chrion.profiler.profiles import OperatorCost
from chrion.zoo import build


@pytest.fixture
def folded() -> Graph:
    """Return a folded stack of two layers over 24 steps."""
    return load(build("lstm", {"layers": 2, "seq": 24, "io": 4, "batch": 1, "chunk": 24}))


def steps_of(signature: str) -> int:
    """Return the number of steps in the signature of a recurrent operator."""
    return int(signature.split("[")[1].split("x", maxsplit=1)[0])


def affine_costs(dag: Dag, *, accelerator: bool = False) -> dict[str, OperatorCost]:
    """Return costs of 1 ms, and 0.5 ms a step, of recurrent operators; 0.1 ms of others."""
    costs = {}
    for i, signature in enumerate(dag.signatures):
        ms = 1.0 + 0.5 * steps_of(signature) if dag.op_types[i] == "LSTM" else 0.1
        costs[signature] = OperatorCost(dag.op_types[i], (ms, 2 * ms), ms / 4 if accelerator else None)
    return costs


@pytest.mark.parametrize("accelerator", [False, True])
def test_affine_costs_are_interpolated_exactly(folded: Graph, *, accelerator: bool) -> None:
    """Costs of chunk lengths that were not measured are those of the affine function; all operators have costs."""
    choices = chunk_choices(folded)
    known: dict[str, OperatorCost] = affine_costs(folded.dag, accelerator=accelerator)
    for chunk in measured_chunks(folded):
        known |= affine_costs(unroll(folded, chunk).dag, accelerator=accelerator)
    dags = [unroll(folded, chunk).dag for chunk in choices]
    found = interpolate(dags, known)
    assert set(found) | set(known) >= {s for dag in dags for s in dag.signatures}
    assert not set(found) & set(known)
    recurrent = [signature for signature in found if signature.startswith("LSTM")]
    assert recurrent
    for signature in recurrent:
        expected = 1.0 + 0.5 * steps_of(signature)
        assert found[signature].cpu_ms == pytest.approx((expected, 2 * expected))
        assert found[signature].accelerator_ms == (pytest.approx(expected / 4) if accelerator else None)


def test_times_on_several_cores_are_interpolated(folded: Graph) -> None:
    """A chunk that was too short to be measured on two cores takes as long there as on one."""
    known = {
        s: OperatorCost("LSTM", (ms, ms), wide_ms=wide)
        for chunk, ms, wide in ((2, 1.0, ()), (12, 6.0, (3.0,)))
        for s in unroll(folded, chunk).dag.signatures
        if s.startswith("LSTM")
    }
    middle = unroll(folded, 7).dag
    found = interpolate([middle], known)
    [full] = {found[s].wide_ms for s in middle.signatures if s.startswith("LSTM") and steps_of(s) == 7}
    assert full == pytest.approx((2.0,))  # half way between 1 and 3


def test_costs_are_never_negative(folded: Graph) -> None:
    """A remainder far below the shortest measured chunk does not get a negative time."""
    [short, middle, long] = (unroll(folded, chunk).dag for chunk in (2, 8, 12))
    known = {
        s: OperatorCost("LSTM", (ms,))
        for dag, ms in ((middle, 1.0), (long, 9.0))
        for s in dag.signatures
        if s.startswith("LSTM")
    }
    found = interpolate([short], known)
    assert {found[s].cpu_ms for s in short.signatures if s.startswith("LSTM")} == {(0.0,)}


def test_the_shortest_and_the_longest_chunk_are_measured() -> None:
    """A single choice is measured once; of an unfolded network, the folded form is measured, too."""

    def measured(**parameters: int) -> tuple[int, ...]:
        return measured_chunks(load(build("lstm", {"layers": 1, "batch": 1, "io": 8, **parameters})))

    assert measured(seq=96, chunk=96) == (48, 8)
    assert measured(seq=2, chunk=2) == (1,)
    assert measured(seq=1, chunk=1) == ()
    assert measured(seq=96, chunk=1) == (96, 48, 8)
