"""The ledger: everything a sweep did, in MLflow. The only module that knows MLflow.

One experiment per space; one parent run per sweep; one child run per trial; one LoggedModel per judged checkpoint,
with its metrics and files. Together with the trial checkpoints a sweep could be rebuilt from it.
Never written: a metric that is not finite (MLflow stores NaN on a model as 0, which would pass a constraint).
"""

import functools
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

import logging

import mlflow
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts
from mlflow.entities import Experiment, LoggedModel, LoggedModelStatus, Metric, Param, Run, ViewType
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from rlhf.errors import InputError, SweepError
from sweep.candidate import Candidate
from sweep.store import runs_folder, sqlite_path

logging.getLogger("alembic").setLevel(logging.WARNING)
logging.getLogger("mlflow").setLevel(logging.WARNING)

EVAL, TRAIN = "eval/", "train/"  # metric name prefixes
_SWEEP, _RUN, _ROLE = "sweep.name", "sweep.run", "sweep.role"
_NUMBER, _REASON, _PARAMS, _STEP, _PICK = "sweep.trial", "sweep.failure", "sweep.params", "sweep.step", "sweep.pick"
_FACT = "sweep.fact."  # what the sweep was launched with
_PARENT_RUN = "mlflow.parentRunId"
_KIND = "mlflow.experimentKind"  # which of its two layouts the UI opens with
FINISHED, FAILED, KILLED, RUNNING = "FINISHED", "FAILED", "KILLED", "RUNNING"
_PATIENCE_S = 90.0  # how long a write is tried again while the store is locked or cannot be reached
_MAX_TAG = 8000
_MAX_PARAM = 6000
_MAX_BATCH = 1000


@dataclass(frozen=True, slots=True)
class SweepRecord:
    """A sweep as recorded: its parent run and the facts it was launched with."""

    name: str
    run_id: str
    experiment_id: str
    status: str
    started: float
    facts: Mapping[str, str]  # space, task, max_harm, trials, seed ...
    reason: str | None = None  # why it ended before its time


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """A trial as recorded: its child run, status, and why it failed if it did."""

    number: int
    run_id: str
    status: str
    reason: str | None


class _Patient:
    """Call a client again for a while when its store is busy or away for a moment: a sweep is worth the wait."""

    def __init__(self, client: MlflowClient | ArtifactRepository) -> None:
        self._wrapped = client

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._wrapped, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            deadline = time.monotonic() + _PATIENCE_S
            while True:
                try:
                    return method(*args, **kwargs)
                except Exception as error:  # the client raises MLflow, SQL and network errors alike
                    if not _may_pass(error) or time.monotonic() > deadline:
                        raise
                    time.sleep(1)

        return call


class Ledger:
    """Read and write sweeps in one tracking store."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    @functools.cached_property
    def _client(self) -> MlflowClient:
        """Connect on first use: for SQLite this creates the database, which a mere question must not do."""
        mlflow.set_tracking_uri(self.uri)  # the model registry follows the global setting, not the client's
        return cast("MlflowClient", _Patient(MlflowClient(tracking_uri=self.uri)))

    # --- reading

    def sweeps(self) -> list[SweepRecord]:
        """Return all sweeps, latest first. Raises `InputError` if the store cannot be reached."""
        if (path := sqlite_path(self.uri)) and not path.exists():
            return []
        try:
            MlflowClient(tracking_uri=self.uri).search_experiments(max_results=1)  # no patience: is it there at all?
            experiments = [experiment.experiment_id for experiment in self._client.search_experiments()]
            runs = _all_pages(
                lambda token: self._client.search_runs(
                    experiments, f"tags.`{_ROLE}` = 'sweep'", order_by=["start_time DESC"], page_token=token
                )
            ) if experiments else []  # fmt: skip
        except Exception as error:  # the client raises MLflow, SQL and network errors alike
            raise InputError(
                f"tracking store {self.uri} cannot be read ({_first_line(error)}); check --tracking-uri, or start it"
            ) from error
        return [_sweep_record(run) for run in runs]

    def find(self, name: str | None) -> SweepRecord:
        """Return the sweep of that name, or the latest. Raises `InputError` if there is none."""
        sweeps = self.sweeps()
        if name is None and sweeps:
            return sweeps[0]
        for sweep in sweeps:
            if sweep.name == name:
                return sweep
        if not sweeps:
            raise InputError(f"{self.uri} holds no sweep yet; run one first: python -m sweep.launch --space kl_mix")
        known = ", ".join(sweep.name for sweep in sweeps)
        raise InputError(f"no sweep {name} in {self.uri}; recorded sweeps: {known}")

    def trials(self, sweep: SweepRecord) -> list[TrialRecord]:
        runs = _all_pages(
            lambda token: self._client.search_runs(
                [sweep.experiment_id], f"tags.`{_PARENT_RUN}` = '{sweep.run_id}'", page_token=token
            )
        )
        records = [
            TrialRecord(int(run.data.tags[_NUMBER]), run.info.run_id, run.info.status, run.data.tags.get(_REASON))
            for run in runs
        ]
        return sorted(records, key=lambda record: record.number)

    def candidates(self, sweep: SweepRecord) -> list[Candidate]:
        """Return every judged checkpoint of a sweep, in the order of trial and step."""
        models = _all_pages(
            lambda token: self._client.search_logged_models(
                [sweep.experiment_id], f"tags.`{_RUN}` = '{sweep.run_id}'", page_token=token
            )
        )
        ready = [model for model in models if model.status == LoggedModelStatus.READY]
        return sorted(map(_candidate, ready), key=lambda candidate: (candidate.trial, candidate.step))

    def download(self, candidate: Candidate, folder: Path) -> None:
        """Copy a candidate's files to `folder`, new or empty, all or none.

        Raises `InputError` if the store has lost them, `SweepError` if they cannot be written.
        """
        location = self._client.get_logged_model(candidate.model_id).artifact_location
        what = f"the files of trial {candidate.trial}, step {candidate.step}"
        with tempfile.TemporaryDirectory() as temporary:
            try:
                files = download_artifacts(artifact_uri=location, dst_path=temporary, tracking_uri=self.uri)
            except (MlflowException, OSError) as error:
                raise InputError(f"{location}: {what} cannot be read ({_first_line(error)})") from error
            try:
                shutil.copytree(files, folder, dirs_exist_ok=True)
            except (shutil.Error, OSError) as error:
                shutil.rmtree(folder, ignore_errors=True)
                raise SweepError(f"{folder}: {what} cannot be written there ({_first_line(error)})") from error

    # --- writing

    def open_sweep(self, name: str, *, space: str, facts: Mapping[str, str]) -> SweepRecord:
        """Start the parent run of a new sweep. Raises `InputError` if another of that name was there first."""
        experiment_id = self._experiment(space)
        tags = {_SWEEP: name, _ROLE: "sweep", **{_FACT + key: value[:_MAX_TAG] for key, value in facts.items()}}
        opened = _sweep_record(self._client.create_run(experiment_id, tags=tags, run_name=name))
        first = min((s for s in self.sweeps() if s.name == name), key=lambda s: (s.started, s.run_id))
        if first.run_id != opened.run_id:  # launched twice at the same moment
            self._client.delete_run(opened.run_id)
            raise InputError(f"--name {name}: a sweep of that name has just been started; choose another")
        return opened

    def open_trial(self, sweep: SweepRecord, number: int, config: Mapping[str, Any], params: Mapping[str, Any]) -> str:
        """Start a trial's child run with every config key as a param; return its run id."""
        tags = {
            _SWEEP: sweep.name, _ROLE: "trial", _NUMBER: str(number), _PARENT_RUN: sweep.run_id,
            _PARAMS: json.dumps(dict(params)),
        }  # fmt: skip
        run = self._client.create_run(sweep.experiment_id, tags=tags, run_name=f"trial-{number:03d}")
        values = [Param(key, _text(value)[:_MAX_PARAM]) for key, value in config.items()]
        self._client.log_batch(run.info.run_id, params=values)
        return str(run.info.run_id)

    def add_candidate(
        self,
        sweep: SweepRecord,
        run_id: str,
        *,
        trial: int,
        step: int,
        params: Mapping[str, Any],
        metrics: Mapping[str, float],
        train_rows: Sequence[Mapping[str, float]],
        files: Path,
    ) -> Candidate:
        """Record a judged checkpoint: metrics on the child run and on a LoggedModel, which also gets the files.

        `train_rows` are the training curves since the last one, each row with its `step`.
        """
        assert all(map(math.isfinite, metrics.values())), "a judge's figures are finite"
        model = self._client.create_logged_model(
            sweep.experiment_id,
            name=f"trial-{trial:03d}-step-{step}",
            source_run_id=run_id,
            tags={
                _SWEEP: sweep.name,
                _RUN: sweep.run_id,
                _NUMBER: str(trial),
                _STEP: str(step),
                _PARAMS: json.dumps(dict(params)),
            },
            params={key: _text(value) for key, value in params.items()},
            model_type="policy",
        )  # fmt: skip
        now = int(time.time() * 1000)
        values = [Metric(EVAL + name, value, now, step, model_id=model.model_id) for name, value in metrics.items()]
        values += [
            Metric(TRAIN + name, value, now, int(row["step"]))
            for row in train_rows
            for name, value in row.items()
            if name not in ("step", "elapsed_s") and math.isfinite(value)
        ]
        for start in range(0, len(values), _MAX_BATCH):
            self._client.log_batch(run_id, metrics=values[start : start + _MAX_BATCH])
        self._artifacts(model).log_artifacts(str(files))
        self._client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
        return Candidate(trial, step, dict(params), dict(metrics), model.model_id)

    def close_run(self, run_id: str, status: str, *, reason: str | None = None) -> None:
        """End a run as FINISHED, FAILED or KILLED, with the reason for anything but FINISHED."""
        if reason:
            self._client.set_tag(run_id, _REASON, reason[:_MAX_TAG])
        self._client.set_terminated(run_id, status)

    def pick_of(self, sweep: SweepRecord) -> str | None:
        """Return the model id of the noted pick."""
        return self._client.get_run(sweep.run_id).data.tags.get(_PICK)

    def add_text(self, sweep: SweepRecord, name: str, text: str) -> None:
        self._client.log_text(sweep.run_id, text, name)

    def add_files(self, sweep: SweepRecord, contents: Mapping[str, bytes]) -> None:
        """Log files to the parent run, by name."""
        with tempfile.TemporaryDirectory() as folder:
            for name, content in contents.items():
                Path(folder, name).write_bytes(content)
            self._client.log_artifacts(sweep.run_id, folder)

    def add_table(self, sweep: SweepRecord, name: str, columns: Mapping[str, Sequence[Any]]) -> None:
        self._client.log_table(sweep.run_id, {key: list(values) for key, values in columns.items()}, name)

    def add_summary(self, sweep: SweepRecord, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(sweep.run_id, metrics=[Metric(name, value, now, 0) for name, value in metrics.items()])

    def note_pick(self, sweep: SweepRecord, candidate: Candidate, document: Mapping[str, Any]) -> None:
        self._client.set_tag(sweep.run_id, _PICK, candidate.model_id)
        self._client.log_text(sweep.run_id, json.dumps(document, indent=2), "pick.json")

    def register(self, candidate: Candidate, model: str) -> str:
        """Register a candidate in the model registry; return its version."""
        try:
            self._client.create_registered_model(model)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise InputError(f"--register {model}: {_first_line(error)}") from error
        source = f"models:/{candidate.model_id}"
        return str(self._client.create_model_version(model, source, model_id=candidate.model_id).version)

    def _artifacts(self, model: LoggedModel) -> ArtifactRepository:
        """Return where a model's files go. The client has a way of its own, which reads the model again first."""
        repository = get_artifact_repository(model.artifact_location, tracking_uri=self.uri)
        return cast("ArtifactRepository", _Patient(repository))

    def _experiment(self, space: str) -> str:
        experiment: Experiment | None = self._client.get_experiment_by_name(space)
        if experiment and experiment.lifecycle_stage != "active":
            raise InputError(
                f"experiment {space} in {self.uri} is deleted; restore it: "
                f"mlflow experiments restore --experiment-id {experiment.experiment_id}"
            )
        if experiment:
            return str(experiment.experiment_id)
        if self.uri.startswith("http"):  # a tracking server decides for itself where artifacts go
            location = None
        else:
            path = sqlite_path(self.uri)
            location = ((path.parent if path else runs_folder()) / "artifacts" / space).as_uri()
        return str(
            self._client.create_experiment(space, artifact_location=location, tags={_KIND: "custom_model_development"})
        )


def open_ledger(uri: str) -> Ledger:
    """Open a store for writing, creating a SQLite database once, before any other process needs it."""
    ledger = Ledger(uri)
    try:
        if path := sqlite_path(uri):
            path.parent.mkdir(parents=True, exist_ok=True)
        ledger._client.search_experiments(view_type=ViewType.ALL, max_results=1)
    except Exception as error:  # the client raises MLflow, SQL and network errors alike
        raise InputError(
            f"tracking store {uri} cannot be used ({_first_line(error)}); check --tracking-uri, or start it"
        ) from error
    return ledger


def _may_pass(error: Exception) -> bool:
    """Say whether an error is a store that is locked or away, rather than a request it refuses."""
    text = str(error)
    return "database is locked" in text or "Max retries exceeded" in text or "Connection refused" in text


def _sweep_record(run: Run) -> SweepRecord:
    tags = run.data.tags
    facts = {key.removeprefix(_FACT): value for key, value in tags.items() if key.startswith(_FACT)}
    info = run.info
    started = info.start_time / 1000
    return SweepRecord(
        tags[_SWEEP], info.run_id, info.experiment_id, info.status, started, facts, tags.get(_REASON)
    )  # fmt: skip


def _candidate(model: LoggedModel) -> Candidate:
    metrics = {m.key.removeprefix(EVAL): m.value for m in model.metrics or [] if m.key.startswith(EVAL)}
    tags = model.tags
    return Candidate(int(tags[_NUMBER]), int(tags[_STEP]), json.loads(tags[_PARAMS]), metrics, model.model_id)


def _all_pages(fetch: Any) -> list[Any]:
    items: list[Any] = []
    token = None
    while True:
        page = fetch(token)
        items.extend(page)
        token = page.token
        if not token:
            return items


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
