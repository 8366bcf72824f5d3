"""One sweep from start to end: make the space, search, record, stop."""

import contextlib
import functools
import importlib.metadata
import json
import platform
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhf.errors import InputError, SweepError, collected, raise_if_any
from rlhf.files import output_folder_problems
from search_spaces.space import SearchSpace
from sweep.options import SweepOptions
from sweep.progress import Progress
from sweep.recording import Recording
from sweep.schedule import INTERRUPTED, check_cpus, cluster, run_trials
from sweep.search import ConstrainedSearch
from sweep.spaces import load_space
from sweep.store import driver_id, is_checkout, project_folder, runs_folder
from sweep.summary import write_summary
from sweep.tracking import FAILED, FINISHED, KILLED, Ledger, SweepRecord, open_ledger
from sweep.workload import DEFAULT_WORKLOAD, Workload, check_task, open_workload

SPACE_FILE = "space.json"  # artifact of the parent run: the space as searched
_RECORDED_PACKAGES = ("ray", "optuna", "mlflow", "torch", "numpy")


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a sweep needs, checked: what is wrong is known before anything is written."""

    space: SearchSpace
    workload: Workload
    n_trials: int


def plan_sweep(options: SweepOptions) -> Plan:
    """Check name, space, task, settings and places together. Raises one `InputError` with all problems."""
    storage = options.storage_path
    problems = [] if not storage or "://" in storage else output_folder_problems("--storage-path", Path(storage))
    space: SearchSpace | None = None
    with collected(problems):
        if options.name in [sweep.name for sweep in Ledger(options.tracking_uri).sweeps()]:
            problems.append(f"--name {options.name}: a sweep of that name is recorded; choose another")
    with collected(problems):
        space = load_space(options.space, max_steps=options.max_steps)
    with collected(problems):
        check_task(space.workload if space else DEFAULT_WORKLOAD, options.task_dir)
    with collected(problems):
        check_cpus(address=options.address, concurrency=options.concurrency)
    raise_if_any(problems)  # what is cheap to find is found before the labels are fitted
    assert space is not None
    workload = open_workload(space.workload, options.task_dir, space)
    workload.check(space)
    return Plan(space, workload, options.trials or space.trials)


def run_sweep(options: SweepOptions, plan: Plan) -> SweepRecord:
    """Run a planned sweep and close its record, whatever happens; return the record as closed.

    Raises `SweepError` if the sweep cannot go on, such as when its candidates cannot be recorded.
    """
    storage = _storage(options)
    ledger = open_ledger(options.tracking_uri)
    cpus = cluster(address=options.address, concurrency=options.concurrency)
    with cpus as concurrency, _sigterm_as_interrupt():  # in this order: Ray sets a handler of its own when it starts
        facts = {**_facts(options, plan), "concurrency": str(concurrency), "storage": storage}
        search = ConstrainedSearch(
            plan.space,
            configure=functools.partial(_configure, plan, options.seed),
            n_trials=plan.n_trials, seed=options.seed, max_harm=options.max_harm,
        )  # fmt: skip
        progress = Progress(options.name, n_trials=plan.n_trials, max_harm=options.max_harm)
        sweep = ledger.open_sweep(options.name, space=plan.space.name, facts=facts)
        space_json = json.dumps(plan.space.to_json(), indent=2).encode()
        ledger.add_files(sweep, {SPACE_FILE: space_json, **plan.workload.documents()})
        recording = Recording(ledger, sweep, progress)
        status, reason = FAILED, None
        try:
            with progress:
                reason = run_trials(
                    plan.workload, plan.space, search, recording, folder=f"{options.name}-{sweep.run_id[:8]}",
                    concurrency=concurrency, storage=storage, time_budget_s=options.time_budget_s,
                )  # fmt: skip
            status = KILLED if reason == INTERRUPTED else FINISHED
        except KeyboardInterrupt:
            status, reason = KILLED, INTERRUPTED
        except Exception as error:
            reason = _last_line(error)
            raise SweepError(f"sweep {options.name} failed: {reason}") from error
        finally:
            _close(recording, status, reason, max_harm=options.max_harm)
    return ledger.find(options.name)


def _close(recording: Recording, status: str, reason: str | None, *, max_harm: float) -> None:
    """Leave a closed record even if a part of closing it fails. Raises `SweepError` if it could not be closed."""
    try:
        try:
            recording.kill_open_trials(reason or INTERRUPTED)
            write_summary(recording.ledger, recording.sweep, recording.candidates, max_harm=max_harm)
        finally:
            recording.ledger.close_run(recording.sweep.run_id, status, reason=reason)
    except Exception as error:
        told = f" after {reason}" if reason else ""
        raise SweepError(
            f"the record of sweep {recording.sweep.name} could not be closed{told}: {_last_line(error)}"
        ) from error


def _last_line(error: Exception) -> str:
    """Say an error in one line: Ray puts a traceback in front of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _configure(plan: Plan, seed: int, number: int, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Resolve a trial's settings; its seed follows from the sweep's and its number, and two sweeps share none."""
    (trial_seed,) = np.random.SeedSequence([seed, number]).generate_state(1)
    return plan.workload.config({**plan.space.fixed, **params}, seed=int(trial_seed) >> 1)


def _storage(options: SweepOptions) -> str:
    """Return where trial checkpoints go; a local folder is made now, so that one that cannot be is bad input."""
    storage = options.storage_path or str(runs_folder() / "ray")
    if "://" in storage:
        return storage
    try:
        Path(storage).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--storage-path {storage}: cannot be made ({error}); give another folder") from error
    return str(Path(storage).absolute())


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end a sweep as Ctrl-C does: Tune catches only the latter."""
    previous = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _facts(options: SweepOptions, plan: Plan) -> dict[str, str]:
    """Return what it takes to understand the sweep later, and to run it again."""
    versions = [f"{name}={importlib.metadata.version(name)}" for name in _RECORDED_PACKAGES]
    return {
        "command": options.command,
        "space": options.space,
        "workload": plan.space.workload,
        "task": str(options.task_dir),
        "task_digest": plan.workload.digest,
        "trials": str(plan.n_trials),
        "max_steps": str(plan.space.max_steps),
        "seed": str(options.seed),
        "max_harm": str(options.max_harm),
        "time_budget_s": str(options.time_budget_s),
        "code": _code_version(),
        "driver": driver_id(),
        "versions": " ".join([f"python={platform.python_version()}", *versions]),
    }


def _code_version() -> str:
    """Return the commit this code is at, `-dirty` if changed since; the package version outside a checkout."""
    if not is_checkout():
        return importlib.metadata.version("rlhf-sweep")
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=project_folder(), capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return importlib.metadata.version("rlhf-sweep")
    return described.stdout.strip()
