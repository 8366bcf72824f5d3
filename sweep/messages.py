"""What driver and trial tell each other, as JSON text.

Tune flattens dictionaries, and writes every other object as a pickle into each of its snapshots.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

ASSIGNMENT = "assignment"  # key in a Tune configuration
REPORT = "report"  # key in a Tune result

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


def to_text(message: Assignment | Report) -> str:
    return json.dumps(asdict(message))


def from_text(kind: type[Message], text: str) -> Message:
    """Read what `to_text` wrote of a message of this kind."""
    return kind(**json.loads(text))
