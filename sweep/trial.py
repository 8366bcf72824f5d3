"""One trial as a Ray Tune trainable: train to the next rung, judge, report; save and load on demand.

Runs on one CPU with one torch thread. The worker process is reused by later trials.
"""

from pathlib import Path
from typing import Any

from ray import tune

from search_spaces.space import STEPS, SearchSpace
from sweep.messages import ASSIGNMENT, REPORT, REPORT_FILE, Assignment, Report, for_search, from_text, to_text
from sweep.workload import TrialRun, Workload


class SweepTrial(tune.Trainable):
    """Advance a workload's run one rung at a time. Every report is a candidate."""

    _run: TrialRun
    _report: Report
    _rungs: list[int]

    def setup(  # type: ignore[override]  # tune.with_parameters passes the rest
        self, config: dict[str, Any], workload: Workload, space: SearchSpace
    ) -> None:
        self._workload, self._space = workload, space
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._begin(new_config)
        return True

    def step(self) -> dict[str, Any]:
        rung = next(rung for rung in self._rungs if rung > self._run.step)
        rows = self._run.advance(rung)
        self._report = Report(self._run.step, self._run.judge(), rows)
        return {REPORT: to_text(for_search(self._report)), "done": self._report.step >= self._rungs[-1]}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        self._run.save(Path(checkpoint_dir))
        Path(checkpoint_dir, REPORT_FILE).write_text(to_text(self._report))

    def load_checkpoint(self, checkpoint: str) -> None:  # type: ignore[override]  # a folder, as saved
        self._run.load(Path(checkpoint))

    def _begin(self, config: dict[str, Any]) -> None:
        resolved = from_text(Assignment, config[ASSIGNMENT]).config
        self._run = self._workload.start(resolved)
        self._rungs = self._space.rung_steps(resolved[STEPS])
