"""Shared by all tests: a small built task with its truth, one thread, and Hypothesis without deadlines."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

PROJECT = Path(__file__).parents[1]
SMALL_SIZES = [
    *("--demos", "1200", "--sft-epochs", "2", "--prompts-per-family", "60", "--dev", "60"),
    *("--expert-per-family", "12", "--crowd", "240", "--crowd-shipped", "120", "--rm-epochs", "2"),
    *("--no-runs", "--quiet"),
]

# A deadline would be a timing test; derandomized, so that a red run can be looked at twice.
settings.register_profile("project", deadline=None, derandomize=True, database=None)
settings.load_profile("project")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _denormals_restored() -> Iterator[None]:
    """Undo a run's `set_flush_denormal`: Hypothesis refuses to draw floats where denormals are flushed."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what is cached between runs away from this machine's own cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def _built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("built")
    task, truth = folder / "task", folder / "truth.json"
    command = [sys.executable, str(PROJECT / "scripts/build_task.py"), "--seed", "3"]
    subprocess.run(
        [*command, "--out", str(task), "--truth", str(truth), *SMALL_SIZES],
        check=True, cwd=PROJECT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return task, truth


@pytest.fixture(scope="session")
def tiny_task(_built: tuple[Path, Path]) -> Path:
    """Give a small task directory with the default vocabulary. Shared by the session: copy it before changing it."""
    return _built[0]


@pytest.fixture(scope="session")
def tiny_truth(_built: tuple[Path, Path]) -> Path:
    """Give the hidden truth of `tiny_task`: a file for `rlhf.world.load_world`."""
    return _built[1]
