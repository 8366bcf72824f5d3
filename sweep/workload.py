"""The narrow interface through which a sweep knows what it trains.

A `Workload` is made and checked on the driver, shipped to the workers (so it must be picklable and carry all it
needs: nothing may rely on the driver's disk), and starts trials there. Nothing else in `sweep` knows more.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlhf.errors import InputError
from search_spaces.space import SearchSpace

if TYPE_CHECKING:  # it brings statistics packages along, a second to import that every worker would pay
    from objectives.certify import Certificate

DEFAULT_WORKLOAD = "rlhf"
MODEL_FOLDER = "model"  # inside a trial checkpoint: the files a user would ship
STATE_FOLDER = "state"  # inside a trial checkpoint: what it takes to go on


class TrialRun(Protocol):
    """One training run that can be advanced, judged, saved and resumed."""

    @property
    def step(self) -> int:
        """Training steps done."""
        ...

    def advance(self, until_step: int) -> list[dict[str, float]]:
        """Train up to a step; return the rows logged on the way, each with a `step`."""
        ...

    def judge(self) -> dict[str, float]:
        """Score the current weights: metric name -> finite value."""
        ...

    def save(self, folder: Path) -> None:
        """Write `model/` and `state/`."""
        ...

    def load(self, folder: Path) -> None:
        """Go on from a saved `state/`."""
        ...


class Workload(Protocol):
    """What a sweep trains."""

    @property
    def digest(self) -> str:
        """SHA-256 of the task's files."""
        ...

    def check(self, space: SearchSpace) -> None:
        """Raise `InputError` with every setting of the space that this workload cannot use."""
        ...

    def warnings(self) -> tuple[str, ...]:
        """Return what a user should know before the first trial, such as why nothing could be certified."""
        ...

    def documents(self) -> Mapping[str, bytes]:
        """Return files that belong to the sweep's record, by name: what is known before the first trial."""
        ...

    def config(self, params: Mapping[str, Any], *, seed: int) -> dict[str, Any]:
        """Resolve a trial's parameters to the full configuration, as it is recorded."""
        ...

    def start(self, config: Mapping[str, Any]) -> TrialRun:
        """Start a run on a worker."""
        ...


class Certifier(Protocol):
    """Certify the files of one frozen checkpoint on data that no search has seen."""

    def __call__(self, files: Path, *, selection_gain: float, n_finalists: int, max_harm: float) -> "Certificate": ...


def open_certifier(name: str, task_dir: Path) -> Certifier:
    """Make the certifier of a workload by name. Raises `InputError` for an unknown name or a bad task."""
    from sweep.rlhf_workload import RlhfCertifier  # torch takes seconds to import

    _require_known(name)
    return RlhfCertifier.open(task_dir)


def _require_known(name: str) -> None:
    if name != DEFAULT_WORKLOAD:
        raise InputError(f"workload must be {DEFAULT_WORKLOAD}, got {name!r}")


def check_task(name: str, task_dir: Path) -> None:
    """Raise `InputError` with everything wrong with a task that can be found by reading it."""
    from sweep.rlhf_workload import read_task  # torch takes seconds to import

    _require_known(name)
    read_task(task_dir)


def open_workload(name: str, task_dir: Path, space: SearchSpace) -> Workload:
    """Make a workload by name. Raises `InputError` for an unknown name or a bad task."""
    from sweep.rlhf_workload import RlhfWorkload  # torch takes seconds to import

    _require_known(name)
    return RlhfWorkload.open(task_dir, space)
