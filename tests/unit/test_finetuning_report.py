"""What a report of fine-tuning says beside its figures."""

from __future__ import annotations

import pytest

from chrion.pipelines.measures import Interval, Measures
from chrion.pipelines.report import ComparedModel, FinetuningReport


def report_of(measures: dict[str, tuple[float, float, float | None]], *, adopted: bool = True) -> FinetuningReport:
    """Return a report of models with a gain, a loss and a calibration error."""
    compared = tuple(ComparedModel(name, Measures(*own)) for name, own in measures.items())
    none = Interval(0.0, 0.0, 0.0)
    return FinetuningReport(adopted, "", (1, 1, 1), ("auc", "log_loss"), none, none, None, compared, 0.0)


def test_what_is_better_than_the_tuned_model_is_named() -> None:
    """In both measures, on the same rows; the original may be."""
    report = report_of(
        {"original": (0.6, 0.5, 0.1), "tuned": (0.8, 0.4, 0.1), "new": (0.9, 0.3, 0.1), "a": (0.9, 0.5, 0.1)}
    )
    line = "better than the tuned model in both measures on these rows, but not proven or not a candidate: new"
    assert report.better_line == line
    assert report_of({"original": (0.6, 0.5, None), "tuned": (0.8, 0.4, None)}).better_line == ""
    assert report_of({}).better_line == ""


@pytest.mark.parametrize(
    ("old", "new", "adopted", "text"),
    [
        (0.1108, 0.2243, True, "probabilities are less calibrated than before: error 0.2243, 0.1108 before"),
        (0.1108, 0.2243, False, ""),
        (0.0123, 0.01231, True, ""),  # printed alike
        (0.2, 0.1, True, ""),
        (None, None, True, ""),  # of numbers
    ],
)
def test_less_calibrated_probabilities_are_named(
    old: float | None, new: float | None, *, adopted: bool, text: str
) -> None:
    """Of a model that is returned."""
    report = report_of({"original": (0.6, 0.5, old), "tuned": (0.8, 0.4, new)}, adopted=adopted)
    assert report.calibration_line == text
