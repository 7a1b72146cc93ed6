"""Host mirror of the rows and validator of plans (under construction)."""

from __future__ import annotations

from data_plane.step_work import (
    BlockCopies,
    Forks,
    NewRow,
    PendingStep,
    RowSampling,
    StepError,
    StepOutput,
    StepRunner,
    StepWork,
)

__all__ = [
    "BlockCopies",
    "Forks",
    "NewRow",
    "PendingStep",
    "RowSampling",
    "StepError",
    "StepOutput",
    "StepRunner",
    "StepWork",
]
