"""Hints for names that are not known."""

from __future__ import annotations

import pytest

from chrion.common.suggestions import did_you_mean

OPTIONS = ("--slo", "--alpha", "--gpu-budget", "--memory", "--policy", "--streams", "--profile", "--output", "--force")


@pytest.mark.parametrize(
    ("given", "near"),
    [("--polcy", "--policy"), ("--gpu_budget", "--gpu-budget"), ("--budget", "--gpu-budget"), ("--SLO", "--slo")],
)
def test_a_misspelt_name_and_a_word_of_a_name_are_suggested(given: str, near: str) -> None:
    """Case, and the separator of words, do not count."""
    assert did_you_mean(given, OPTIONS) == f"did you mean {near!r}?"


@pytest.mark.parametrize("given", ["--frobnicate", "--theme", "--polish", "--pro", "--", ""])
def test_names_that_share_letters_only_are_not_suggested(given: str) -> None:
    """The known names are listed instead, or the given hint is used."""
    assert did_you_mean(given, OPTIONS) == f"known: {', '.join(OPTIONS)}"
    assert did_you_mean(given, OPTIONS, "see the manual") == "see the manual"


def test_of_many_names_the_most_similar_ones_are_listed() -> None:
    """The hint stays short, and has the number of names."""
    many = [f"{letter}{letter}{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    hint = did_you_mean("xzz", many)
    assert hint.startswith("26 are known, such as zzz, xxx, ")
    assert hint.count(",") == 12
