"""What driver and trial tell each other. Dataclasses, because Tune flattens dictionaries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ASSIGNMENT = "assignment"  # key in a Tune configuration
REPORT = "report"  # key in a Tune result


@dataclass(frozen=True, slots=True)
class Assignment:
    """A trial's number, the searched settings, and the full configuration they resolve to."""

    number: int
    params: Mapping[str, Any]
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """A judged checkpoint: training steps done, the judge's metrics, the rows logged since the last report."""

    step: int
    scores: Mapping[str, float]
    train_rows: Sequence[Mapping[str, float]]
