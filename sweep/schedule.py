"""Run a sweep's trials under Ray Tune and pass its events on."""

import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # MLflow is the record
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S", "0")

import ray
from ray import tune
from ray.tune.experiment import Trial

from rlhf.errors import InputError
from search_spaces.space import SearchSpace
from sweep.messages import ASSIGNMENT, REPORT
from sweep.recording import Recording
from sweep.search import ConstrainedSearch
from sweep.trial import SweepTrial
from sweep.workload import MODEL_FOLDER, Workload

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def cluster(*, address: str | None, concurrency: int | None) -> Iterator[int]:
    """Start Ray on this machine, or join a cluster; yield how many trials run at once, one CPU each.

    Raises `InputError` if fewer CPUs are there than asked for, or the address cannot be reached.
    """
    here = len(os.sched_getaffinity(0))
    if address is None and concurrency and concurrency > here:
        raise InputError(f"--concurrency must be at most {here}, this machine's CPUs, one a trial; got {concurrency}")
    try:
        ray.init(
            address=address or "local", num_cpus=None if address else (concurrency or here), include_dashboard=False,
            log_to_driver=False, logging_level=logging.ERROR, configure_logging=True,
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
    concurrency: int,
    storage: Path | str,
    time_budget_s: float | None,
) -> bool:
    """Run trials until the search has no more; say whether it came to its end without an interrupt."""
    events = _Events(recording)
    tuner = tune.Tuner(
        tune.with_parameters(SweepTrial, workload=workload, space=space),
        tune_config=tune.TuneConfig(
            search_alg=search, num_samples=-1, max_concurrent_trials=concurrency, reuse_actors=True,
            time_budget_s=time_budget_s, trial_dirname_creator=_folder_name, trial_name_creator=_folder_name,
        ),
        run_config=tune.RunConfig(
            name=recording.sweep.name, storage_path=str(storage), callbacks=[events], verbose=0,
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1, num_to_keep=1),
            failure_config=tune.FailureConfig(max_failures=0),
        ),
    )  # fmt: skip
    with _sigterm_as_interrupt():
        tuner.fit()
    return not events.interrupted


class _Events(tune.Callback):
    """Record a candidate once its checkpoint is saved: the two together are what a sweep can be rebuilt from."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._unsaved: dict[str, dict[str, Any]] = {}
        self.interrupted = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave nothing in Tune's own snapshots: a sweep is rebuilt from the ledger, not from them."""
        return {}

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._recording.start_trial(trial.trial_id, trial.config[ASSIGNMENT])

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        self._recording.log_training(trial.trial_id, result[REPORT].train_rows)
        self._unsaved[trial.trial_id] = result

    def on_checkpoint(
        self, iteration: int, trials: list[Trial], trial: Trial, checkpoint: tune.Checkpoint, **info: Any
    ) -> None:
        result = self._unsaved.pop(trial.trial_id, None)
        if result is None:
            return
        with checkpoint.as_directory() as folder:
            self._recording.add_candidate(trial.trial_id, result[REPORT], Path(folder) / MODEL_FOLDER)
        if result["done"]:
            self._recording.finish_trial(trial.trial_id)

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        if trial.trial_id not in self._unsaved:
            self._recording.finish_trial(trial.trial_id)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._unsaved.pop(trial.trial_id, None)
        self._recording.fail_trial(trial.trial_id, _reason(trial))

    def on_experiment_end(self, trials: list[Trial], **info: Any) -> None:
        self.interrupted = any(trial.status not in (Trial.TERMINATED, Trial.ERROR) for trial in trials)


def _reason(trial: Trial) -> str:
    """Say in one line why a trial failed: the last line of the traceback that Tune wrote beside its results."""
    path = Path(trial.error_file) if trial.error_file else None
    lines = path.read_text().splitlines() if path and path.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "the worker died")


def _folder_name(trial: Trial) -> str:
    return f"trial-{trial.config[ASSIGNMENT].number:03d}"


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end a sweep as Ctrl-C does: Tune catches only the latter."""
    previous = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
