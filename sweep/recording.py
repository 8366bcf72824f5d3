"""Turn the events of a running sweep into ledger entries and progress. Knows nothing of Ray."""

from dataclasses import dataclass, field
from pathlib import Path

from search_spaces.space import STEPS
from sweep.candidate import Candidate
from sweep.messages import Assignment, Report
from sweep.progress import Progress
from sweep.tracking import FAILED, FINISHED, KILLED, Ledger, SweepRecord


@dataclass(slots=True)
class Recording:
    """Record each trial from start to end; keep the candidates seen so far."""

    ledger: Ledger
    sweep: SweepRecord
    progress: Progress
    candidates: list[Candidate] = field(default_factory=list)
    _open: dict[str, tuple[Assignment, str]] = field(default_factory=dict)

    @property
    def has_open_trials(self) -> bool:
        return bool(self._open)

    def start_trial(self, trial_id: str, assignment: Assignment) -> None:
        """Open a trial's record; a second call for the same trial does nothing."""
        if trial_id not in self._open:
            run_id = self.ledger.open_trial(self.sweep, assignment.number, assignment.config, assignment.params)
            self._open[trial_id] = (assignment, run_id)
            self.progress.started(assignment.number, assignment.params, steps=assignment.config[STEPS])

    def add_candidate(self, trial_id: str, report: Report, files: Path) -> None:
        assignment, run_id = self._open[trial_id]
        candidate = self.ledger.add_candidate(
            self.sweep, run_id, trial=assignment.number, step=report.step, params=assignment.params,
            metrics=report.scores, train_rows=report.train_rows, files=files,
        )  # fmt: skip
        self.candidates.append(candidate)
        self.progress.judged(candidate)

    def finish_trial(self, trial_id: str) -> None:
        self._close(trial_id, FINISHED, None)

    def fail_trial(self, trial_id: str, reason: str) -> None:
        self._close(trial_id, FAILED, reason)

    def kill_open_trials(self, reason: str) -> None:
        """Close what is still open, so that nothing stays RUNNING after the driver is gone.

        One trial that cannot be closed does not keep the others open; its error is raised at the end.
        """
        failure: Exception | None = None
        for trial_id in list(self._open):
            try:
                self._close(trial_id, KILLED, reason)
            except Exception as error:  # whatever the ledger raises
                failure = error
        if failure:
            raise failure

    def _close(self, trial_id: str, status: str, reason: str | None) -> None:
        assignment, run_id = self._open[trial_id]
        self.ledger.close_run(run_id, status, reason=reason)
        del self._open[trial_id]
        self.progress.ended(assignment.number, status, reason)
