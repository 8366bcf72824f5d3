"""What driver and trial tell each other, as JSON text.

Tune flattens dictionaries, writes every other object as a pickle into its snapshots, and keeps every result for good:
so its results carry only what the search needs. The whole report lies in the checkpoint that it is about.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

ASSIGNMENT = "assignment"  # key in a Tune configuration
REPORT = "report"  # key in a Tune result
REPORT_FILE = "report.json"  # in a trial checkpoint

# Objective, and the direction the search is to move it; and what is feasible up to `max_harm`.
OBJECTIVES: dict[str, Literal["maximize", "minimize"]] = {
    "balanced_quality": "maximize",
    "worst_family_gain": "maximize",
    "kl": "minimize",
}
HARM = "worst_family_harm"

Message = TypeVar("Message", "Assignment", "Report")


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


def for_search(report: Report) -> Report:
    """Return a report of the objectives and the constraint alone."""
    return Report(report.step, {name: report.scores[name] for name in (*OBJECTIVES, HARM)}, [])


def to_text(message: Assignment | Report) -> str:
    return json.dumps(asdict(message))


def from_text(kind: type[Message], text: str) -> Message:
    """Read what `to_text` wrote of a message of this kind."""
    return kind(**json.loads(text))
