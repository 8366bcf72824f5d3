"""Options that the commands about a recorded sweep share."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.errors import InputError
from rlhf.taskdir import task_digest
from sweep.store import TRACKING_VARIABLE

if TYPE_CHECKING:
    from sweep.tracking import SweepRecord  # mlflow takes seconds to import


def add_sweep_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help="name of the sweep (default: the latest)")
    parser.add_argument("--task", metavar="DIR", help="where the sweep's task lies now (default: where it lay)")
    add_tracking_option(parser)


def add_tracking_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tracking-uri", help=f"MLflow store (default: ${TRACKING_VARIABLE}, then mlruns/mlflow.db)")


def task_of(sweep: "SweepRecord", given: str | None) -> Path:
    """Return the task directory of a sweep: the one given, else the one in its record.

    Raises `InputError` if it is not there, or is not the task that the sweep was run on.
    """
    path = Path(given or sweep.facts["task"]).expanduser().absolute()
    if not path.is_dir():
        raise InputError(f"{path}: the task of sweep {sweep.name} is not there; give its folder with --task DIR")
    if task_digest(path) != sweep.facts["task_digest"]:
        raise InputError(f"{path}: is not the task that sweep {sweep.name} was run on (its digest differs)")
    return path
