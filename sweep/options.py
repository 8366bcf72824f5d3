"""What a sweep is launched with, checked as a whole."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from objectives.release import MAX_WORST_FAMILY_HARM
from rlhf.errors import raise_if_any

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """Options of `sweep.launch`. None means: the space's default. Raises `InputError` with every bad option."""

    space: str
    name: str
    task_dir: Path
    tracking_uri: str
    trials: int | None = None
    max_steps: int | None = None
    concurrency: int | None = None
    seed: int = 0
    max_harm: float = MAX_WORST_FAMILY_HARM
    time_budget_s: float | None = None
    address: str | None = None
    storage_path: str | None = None
    command: str = ""

    def __post_init__(self) -> None:
        problems = []
        if not _NAME.fullmatch(self.name):
            problems.append(f"--name must be letters, digits, '.', '_' or '-', at most 80, got {self.name!r}")
        for option in ("trials", "max_steps", "concurrency"):
            value = getattr(self, option)
            if value is not None and value < 1:
                problems.append(f"--{option.replace('_', '-')} must be at least 1, got {value}")
        if not 0 <= self.seed < 2**31:
            problems.append(f"--seed must be from 0 to {2**31 - 1}, got {self.seed}")
        if not 0 <= self.max_harm <= 1:
            problems.append(f"--max-harm must be between 0 and 1, got {self.max_harm}")
        if self.time_budget_s is not None and not 0 < self.time_budget_s < math.inf:
            problems.append(f"--time-budget-s must be above 0, got {self.time_budget_s}")
        raise_if_any(problems)
