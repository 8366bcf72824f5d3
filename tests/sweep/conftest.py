"""A real small sweep, run once as its user would, and a store with nothing in it."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlhf.taskdir import DEFAULT_TASK
from sweep.tracking import Ledger, open_ledger

PROJECT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Place:
    """A folder of its own for a store and trial checkpoints."""

    folder: Path
    task: Path

    @property
    def uri(self) -> str:
        return f"sqlite:///{self.folder / 'mlflow.db'}"

    def run(self, module: str, *args: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(module, *args), capture_output=True, text=True, timeout=timeout_s, cwd=self.folder,
            env=self.environment(), check=False,
        )  # fmt: skip

    def command(self, module: str, *args: str) -> list[str]:
        storage = ["--storage-path", str(self.folder / "ray")] if module == "sweep.launch" else []
        return [sys.executable, "-m", module, "--tracking-uri", self.uri, *storage, *args]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "TASK": str(self.task), "COLUMNS": "160"}


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("sweep"), DEFAULT_TASK)


@pytest.fixture(scope="session")
def first_sweep(place: Place) -> Place:
    """Run three trials of the smoke space under the name `first`."""
    done = place.run("sweep.launch", "--space", "smoke", "--trials", "3", "--max-steps", "60", "--name", "first")
    assert done.returncode == 0, done.stderr
    (place.folder / "first.log").write_text(done.stderr)
    return place


@pytest.fixture(scope="session")
def empty_ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    return open_ledger(f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}")
