"""Run options that end a request, before or after its parts have theirs."""

from __future__ import annotations

import onnxruntime as ort
import pytest

from chrion.runtime.options.terminable import TerminableRunOptions, fits_native_lanes


@pytest.mark.parametrize("early", [False, True], ids=["derived first", "ended first"])
def test_the_end_reaches_all_derived_options(*, early: bool) -> None:
    """Options of single runs have their entries, and end with the request whichever came first."""
    request = TerminableRunOptions()
    if early:
        request.end()
    derived = [request.derive({"disable_synchronize_execution_providers": value}) for value in "01"]
    assert [options.terminate for options in derived] == [early] * 2
    assert [o.get_run_config_entry("disable_synchronize_execution_providers") for o in derived] == ["0", "1"]
    request.end()
    request.end()
    assert [options.terminate for options in (request, *derived)] == [True] * 3


def test_other_options_do_not_fit_native_lanes() -> None:
    """Native lanes take no options, or those that only terminate."""
    assert [fits_native_lanes(given) for given in (None, TerminableRunOptions(), ort.RunOptions())] == [
        True,
        True,
        False,
    ]
