import math

import pytest
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import TrialState
from ray.tune.search import Searcher

from search_spaces.space import SearchSpace
from sweep import search as search_module
from sweep.messages import ASSIGNMENT, REPORT, Assignment, Report, from_text, to_text
from sweep.search import ConstrainedSearch

SPACE = SearchSpace(
    name="s",
    distributions={"kl_coef": FloatDistribution(0.01, 0.5, log=True), "steps": IntDistribution(100, 400, step=50)},
    anchors=({"kl_coef": 0.1, "steps": 400},),
    fixed={"lr": 0.001},
    max_steps=400,
    rungs=4,
)


def make_search(*, n_trials=5, space=SPACE) -> ConstrainedSearch:
    return ConstrainedSearch(
        space, configure=lambda number, params: {"seed": number, **params}, n_trials=n_trials, seed=0, max_harm=0.03
    )


def report(step: int, *, quality=0.5, worst=0.1, kl=1.0) -> dict[str, Report]:
    scores = {
        "balanced_quality": quality, "worst_family_gain": worst, "worst_family_harm": max(0.0, -worst), "kl": kl
    }  # fmt: skip
    return {REPORT: to_text(Report(step, scores, []))}


def test_anchor_first_then_exactly_the_budget() -> None:
    search = make_search(n_trials=3)
    assignments = [from_text(Assignment, search.suggest(str(n))[ASSIGNMENT]) for n in range(3)]
    assert assignments[0].params == {"kl_coef": 0.1, "steps": 400}
    assert [assignment.number for assignment in assignments] == [0, 1, 2]
    assert assignments[2].config == {"seed": 2, **assignments[2].params}
    assert search.suggest("3") == Searcher.FINISHED


def test_optuna_is_told_objectives_and_constraint_of_the_last_checkpoint() -> None:
    search = make_search()
    search.suggest("a")
    search.on_trial_complete("a", report(400, quality=0.7, worst=-0.05, kl=2.0))
    (trial,) = search.study.get_trials()
    assert trial.state == TrialState.COMPLETE
    assert trial.values == [0.7, -0.05, 2.0]
    assert trial.constraints == {"worst_family_harm": pytest.approx(0.02)}
    assert search.study.best_trials == []  # infeasible


def test_earlier_checkpoints_are_finished_trials_with_fewer_steps() -> None:
    search = make_search()
    search.suggest("a")
    for step in (100, 200, 300, 400):
        search.on_trial_result("a", report(step, quality=step / 1000))
    search.on_trial_complete("a", report(400, quality=0.4))
    told = {trial.params["steps"]: trial.values[0] for trial in search.study.get_trials()}
    assert told == {100: 0.1, 200: 0.2, 300: 0.3, 400: 0.4}
    assert all(trial.constraints == {"worst_family_harm": -0.03} for trial in search.study.get_trials())


def test_without_steps_in_the_space_only_the_last_checkpoint_is_told() -> None:
    search = make_search(space=SPACE.capped(100))
    search.suggest("a")
    search.on_trial_result("a", report(50))
    assert all(trial.state == TrialState.RUNNING for trial in search.study.get_trials())


def test_a_failed_trial_fails_and_does_not_block() -> None:
    search = make_search()
    search.suggest("a")
    search.on_trial_complete("a", error=True)
    search.suggest("b")
    search.on_trial_complete("b", None)  # ended before its first report
    states = [trial.state for trial in search.study.get_trials()]
    assert states == [TrialState.FAIL, TrialState.FAIL]
    assert ASSIGNMENT in search.suggest("c")


def test_the_same_seed_searches_the_same_way() -> None:
    def path() -> list[float]:
        search, seen = make_search(n_trials=40), []
        for n in range(40):
            params = from_text(Assignment, search.suggest(str(n))[ASSIGNMENT]).params
            seen.append(params["kl_coef"])
            quality = 1 - abs(math.log(params["kl_coef"] / 0.05))
            search.on_trial_complete(str(n), report(params["steps"], quality=quality))
        return seen

    assert path() == path()


def test_what_is_known_stays_bounded_and_loses_neither_the_front_nor_open_trials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search_module, "_MAX_KNOWN", 8)
    search = make_search(n_trials=100)
    opened = from_text(Assignment, search.suggest("open")[ASSIGNMENT])
    for n in range(60):
        search.suggest(str(n))
        search.on_trial_complete(str(n), report(400, quality=0.9 if n == 3 else 0.5, kl=1.0))
        assert len(search.study.get_trials(states=(TrialState.COMPLETE,))) <= 10
    assert [trial.values[0] for trial in search.study.best_trials] == [0.9]
    (running,) = search.study.get_trials(states=(TrialState.RUNNING,))
    assert running.params == opened.params
    search.on_trial_complete("open", report(400, quality=0.95))
    assert [trial.values[0] for trial in search.study.best_trials] == [0.95]
