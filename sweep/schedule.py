"""Run a sweep's trials under Ray Tune and pass its events on."""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # MLflow is the record
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "1e9")  # a snapshot writes all trials, and the ledger is the record

import ray
from ray import tune
from ray.tune.experiment import Trial

from rlhf.errors import InputError
from search_spaces.space import STEPS, SearchSpace
from sweep.messages import ASSIGNMENT, REPORT_FILE, Assignment, Report, from_text
from sweep.recording import Recording
from sweep.search import ConstrainedSearch
from sweep.trial import SweepTrial
from sweep.workload import MODEL_FOLDER, Workload

INTERRUPTED = "the sweep was interrupted"
logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # a trial's failure is recorded with its reason


def check_cpus(*, address: str | None, concurrency: int | None) -> None:
    """Raise `InputError` if this machine has too few CPUs; a cluster is asked once it is joined."""
    if address is None and concurrency and concurrency > _cpus_here():
        raise InputError(
            f"--concurrency must be at most {_cpus_here()}, this machine's CPUs, one a trial; got {concurrency}"
        )


def _cpus_here() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def cluster(*, address: str | None, concurrency: int | None) -> Iterator[int]:
    """Start Ray on this machine, or join a cluster; yield how many trials run at once, one CPU each.

    Raises `InputError` if fewer CPUs are there than asked for, or the address cannot be reached.
    """
    try:
        ray.init(
            address=address or "local", num_cpus=None if address else (concurrency or _cpus_here()),
            include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, configure_logging=True,
        )  # fmt: skip
    except ConnectionError as error:
        raise InputError(f"--address {address}: no Ray cluster can be reached there ({error})") from error
    try:
        cpus = int(ray.cluster_resources().get("CPU", 0))
        if concurrency and concurrency > cpus:
            raise InputError(f"--concurrency must be at most the {cpus} CPUs of the cluster; got {concurrency}")
        yield concurrency or cpus
    finally:
        ray.shutdown()


def run_trials(
    workload: Workload,
    space: SearchSpace,
    search: ConstrainedSearch,
    recording: Recording,
    *,
    folder: str,
    concurrency: int,
    storage: str,
    time_budget_s: float | None,
) -> str | None:
    """Run trials until the search has no more; return why it ended early, or None if it did not.

    Raises what the record raised: a sweep whose candidates cannot be recorded must not go on.
    """
    started = time.monotonic()
    tuner = tune.Tuner(
        tune.with_parameters(SweepTrial, workload=workload, space=space),
        tune_config=tune.TuneConfig(
            search_alg=search, num_samples=-1, max_concurrent_trials=concurrency, reuse_actors=True,
            time_budget_s=time_budget_s, trial_dirname_creator=_folder_name, trial_name_creator=_folder_name,
        ),
        run_config=tune.RunConfig(
            name=folder, storage_path=storage, callbacks=[_Events(recording)], verbose=0,
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
            failure_config=tune.FailureConfig(max_failures=0),
        ),
    )  # fmt: skip
    tuner.fit()
    if search.exhausted and not recording.has_open_trials:
        return None
    if time_budget_s is not None and time.monotonic() - started >= time_budget_s:
        return f"the time budget of {time_budget_s:g} s ran out"
    return INTERRUPTED


class _Events(tune.Callback):
    """Record a candidate once its checkpoint is saved: the two together are what a sweep can be rebuilt from.

    Tune calls `on_trial_complete` before the last checkpoint is saved, and swallows what `on_checkpoint` raises; so
    a failure there is kept, and raised at the end of Tune's step. A trial's earlier checkpoint is deleted here: told to
    keep one, Tune writes a snapshot of all trials for nearly every checkpoint.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._saved: dict[str, tune.Checkpoint] = {}
        self._failure: Exception | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave nothing in Tune's own snapshots: a sweep is rebuilt from the ledger, not from them."""
        return {}

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._recording.start_trial(trial.trial_id, _assignment(trial))

    def on_checkpoint(
        self, iteration: int, trials: list[Trial], trial: Trial, checkpoint: tune.Checkpoint, **info: Any
    ) -> None:
        try:
            with checkpoint.as_directory() as folder:
                report = from_text(Report, Path(folder, REPORT_FILE).read_text())
                self._recording.add_candidate(trial.trial_id, report, Path(folder, MODEL_FOLDER))
            earlier = self._saved.pop(trial.trial_id, None)
            if earlier and earlier.filesystem:
                earlier.filesystem.delete_dir(earlier.path)
            if report.step >= _assignment(trial).config[STEPS]:
                self._recording.finish_trial(trial.trial_id)
            else:
                self._saved[trial.trial_id] = checkpoint
        except Exception as error:
            self._failure = error
            raise

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._saved.pop(trial.trial_id, None)
        self._recording.start_trial(trial.trial_id, _assignment(trial))  # one that failed before it started
        self._recording.fail_trial(trial.trial_id, _reason(trial))

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        if self._failure:
            raise self._failure


def _reason(trial: Trial) -> str:
    """Say in one line why a trial failed: the last line of the traceback that Tune wrote beside its results."""
    path = Path(trial.error_file) if trial.error_file else None
    lines = path.read_text().splitlines() if path and path.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "the worker died")


def _folder_name(trial: Trial) -> str:
    return f"trial-{_assignment(trial).number:03d}"


def _assignment(trial: Trial) -> Assignment:
    return from_text(Assignment, trial.config[ASSIGNMENT])
