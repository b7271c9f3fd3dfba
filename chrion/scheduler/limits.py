"""Limits of plans."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that a plan must not exceed; None for no limit."""

    slo_ms: float | None = None
    #: Resident accelerator memory; see :mod:`chrion.scheduler.evaluation.memory`.
    budget_mb: float | None = None
