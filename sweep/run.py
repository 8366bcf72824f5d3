"""One sweep from start to end: make the space, search, record, stop."""

import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf.errors import InputError, raise_if_any
from search_spaces.space import SearchSpace
from sweep.options import SweepOptions
from sweep.progress import Progress
from sweep.recording import Recording
from sweep.schedule import cluster, run_trials
from sweep.search import ConstrainedSearch
from sweep.spaces import load_space
from sweep.store import project_folder, runs_folder
from sweep.summary import write_summary
from sweep.tracking import FAILED, FINISHED, KILLED, Ledger, SweepRecord, open_ledger
from sweep.workload import Workload, open_workload

_RECORDED_PACKAGES = ("ray", "optuna", "mlflow", "torch", "numpy")


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a sweep needs, checked: what is wrong is known before anything is written."""

    space: SearchSpace
    workload: Workload
    n_trials: int


def plan_sweep(options: SweepOptions) -> Plan:
    """Check space, task, settings and name together. Raises one `InputError` with all problems."""
    problems: list[str] = []
    try:
        taken = [sweep.name for sweep in Ledger(options.tracking_uri).sweeps()]
        if options.name in taken:
            problems.append(f"--name {options.name}: a sweep of that name is recorded; choose another")
    except InputError as error:
        problems += error.problems
    try:
        space = load_space(options.space)
    except InputError as error:
        raise InputError([*problems, *error.problems]) from error
    try:
        space = space.capped(options.max_steps or space.max_steps)
        workload = open_workload(space.workload, options.task_dir, space)
        workload.check(space)
    except InputError as error:
        problems += error.problems
    raise_if_any(problems)
    return Plan(space, workload, options.trials or space.trials)


def run_sweep(options: SweepOptions, plan: Plan) -> SweepRecord:
    """Run a planned sweep and close its record, whatever happens; return the record as closed."""
    with cluster(address=options.address, concurrency=options.concurrency) as concurrency:
        ledger = open_ledger(options.tracking_uri)
        sweep = ledger.open_sweep(options.name, space=plan.space.name, facts=_facts(options, plan))
        progress = Progress(options.name, n_trials=plan.n_trials, max_harm=options.max_harm)
        recording = Recording(ledger, sweep, progress)

        def configure(number: int, params: Mapping[str, Any]) -> Mapping[str, Any]:
            return plan.workload.config({**plan.space.fixed, **params}, seed=options.seed + number)

        search = ConstrainedSearch(
            plan.space, configure=configure, n_trials=plan.n_trials, seed=options.seed, max_harm=options.max_harm
        )
        status = FAILED
        try:
            with progress:
                completed = run_trials(
                    plan.workload, plan.space, search, recording, concurrency=concurrency,
                    storage=options.storage_path or runs_folder() / "ray", time_budget_s=options.time_budget_s,
                )  # fmt: skip
            status = FINISHED if completed else KILLED
        except KeyboardInterrupt:
            status = KILLED
        finally:
            recording.kill_open_trials("the sweep was interrupted")
            write_summary(ledger, sweep, recording.candidates, max_harm=options.max_harm)
            ledger.close_run(sweep.run_id, status, reason=None if status == FINISHED else "the sweep was interrupted")
    return ledger.find(options.name)


def _facts(options: SweepOptions, plan: Plan) -> dict[str, str]:
    """Return what it takes to understand the sweep later, and to run it again."""
    versions = [f"{name}={importlib.metadata.version(name)}" for name in _RECORDED_PACKAGES]
    return {
        "command": options.command,
        "space": options.space,
        "task": str(options.task_dir),
        "task_digest": plan.workload.digest,
        "trials": str(plan.n_trials),
        "max_steps": str(plan.space.max_steps),
        "seed": str(options.seed),
        "max_harm": str(options.max_harm),
        "code": _code_version(),
        "versions": " ".join([f"python={platform.python_version()}", *versions]),
    }


def _code_version() -> str:
    """Return the commit this code is at, `-dirty` if changed since; the package version outside a checkout."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=project_folder(), capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return importlib.metadata.version("rlhf-sweep")
    return described.stdout.strip()
