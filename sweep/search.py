"""Optuna as Ray Tune's searcher, told the objectives and the constraint of every judged checkpoint.

Ray's own OptunaSearch reports only a trial's last result and has no route for constraints. Here a trial of `steps`
steps that was judged on the way also tells Optuna what a shorter trial would have given: its earlier checkpoints
are finished trials with smaller `steps`.
"""

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import optuna
from optuna.distributions import IntDistribution
from optuna.trial import Trial, TrialState, create_trial
from ray.tune.search import Searcher

from search_spaces.space import STEPS, SearchSpace, contains
from sweep.messages import ASSIGNMENT, HARM, OBJECTIVES, REPORT, Assignment, Report, from_text, to_text

optuna.logging.set_verbosity(optuna.logging.WARNING)
logging.getLogger("ray.tune.search").setLevel(logging.WARNING)

_RANDOM_TRIALS = 6  # after the anchors and before the model of good settings takes over
_MAX_KNOWN = 1000  # finished trials, at which half are forgotten: asking takes time in proportion to them


class ConstrainedSearch(Searcher):
    """Suggest up to `n_trials` settings of a space; `configure(number, params)` resolves them for the trial."""

    def __init__(
        self,
        space: SearchSpace,
        *,
        configure: Callable[[int, Mapping[str, Any]], Mapping[str, Any]],
        n_trials: int,
        seed: int,
        max_harm: float,
    ) -> None:
        super().__init__(metric=None, mode=None)
        self._space, self._configure, self._n_trials, self._max_harm = space, configure, n_trials, max_harm
        with warnings.catch_warnings():  # multivariate and constant_liar are marked experimental
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._model_sampler = optuna.samplers.TPESampler(
                seed=seed, multivariate=True, constant_liar=True, n_startup_trials=1
            )
        self.study = _new_study(optuna.samplers.RandomSampler(seed=seed))
        for anchor in space.anchors:
            self.study.enqueue_trial(dict(anchor))
        self._open: dict[str, Trial] = {}
        self._n_suggested = 0
        self._forget_at = _MAX_KNOWN

    @property
    def exhausted(self) -> bool:
        """Say whether the whole budget has been suggested."""
        return self._n_suggested >= self._n_trials

    def suggest(self, trial_id: str) -> Any:
        """Return the next trial's number and parameters, or that there are no more."""
        if self.exhausted:
            return Searcher.FINISHED
        if self._n_suggested == len(self._space.anchors) + _RANDOM_TRIALS:
            self.study.sampler = self._model_sampler
        number, self._n_suggested = self._n_suggested, self._n_suggested + 1
        self._forget()
        trial = self.study.ask(dict(self._space.distributions))
        self._open[trial_id] = trial
        assignment = Assignment(number, trial.params, self._configure(number, trial.params))
        return {ASSIGNMENT: to_text(assignment)}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Tell Optuna about a checkpoint on the way, if the space has shorter trials."""
        trial, report = self._open[trial_id], from_text(Report, result[REPORT])
        steps = self._space.distributions.get(STEPS)
        if not isinstance(steps, IntDistribution) or report.step >= trial.params[STEPS]:
            return
        if contains(steps, report.step):
            self.study.add_trial(
                create_trial(
                    params={**trial.params, STEPS: report.step},
                    distributions=dict(self._space.distributions),
                    values=_values(report),
                    constraints={HARM: self._violation(report)},
                )
            )

    def on_trial_complete(self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False) -> None:
        """Close the trial: with its last checkpoint's figures, or as failed."""
        trial = self._open.pop(trial_id, None)
        if trial is None:
            return
        if error or not result or REPORT not in result:
            self.study.tell(trial, state=TrialState.FAIL)
            return
        report = from_text(Report, result[REPORT])
        trial.set_constraint(HARM, self._violation(report))  # before `tell`: afterwards it is too late
        self.study.tell(trial, _values(report))

    def _forget(self) -> None:
        """Keep the time it takes to ask bounded: go on with the front and the latest finished trials in a new study."""
        finished = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if len(finished) < self._forget_at:
            return
        kept = {trial.number: trial for trial in [*finished[-_MAX_KNOWN // 2 :], *self.study.best_trials]}
        self.study = _new_study(self.study.sampler)
        self.study.add_trials([kept[number] for number in sorted(kept)])
        self._forget_at = max(_MAX_KNOWN, 2 * len(kept))  # a large front is kept whole
        for trial_id, trial in self._open.items():
            self.study.enqueue_trial(trial.params)
            self._open[trial_id] = self.study.ask(dict(self._space.distributions))

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save: a search is rebuilt from the ledger."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore: a search is rebuilt from the ledger."""

    def _violation(self, report: Report) -> float:
        """Return by how much the constraint is missed: Optuna takes 0 and below as feasible."""
        return report.scores[HARM] - self._max_harm


def _new_study(sampler: optuna.samplers.BaseSampler) -> optuna.Study:
    return optuna.create_study(directions=list(OBJECTIVES.values()), sampler=sampler)


def _values(report: Report) -> list[float]:
    return [report.scores[name] for name in OBJECTIVES]
