from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectives.candidates import CandidateTokens
from objectives.fit_checks import MIN_INTERACTION_P, FitChecks, check_fit, interaction_p_value
from objectives.label_gibbs import LabelRows
from objectives.quality_model import QualityModel, fit_labels, fit_quality
from rlhf.data import Labelled
from rlhf.taskdir import Task
from rlhf.world import World, draw_prompts

FAMILIES = ("ash", "oak")


def good() -> FitChecks:
    ones = np.ones(2)
    return FitChecks(0.05, 0.05 * ones, 0.9 * ones, 100 * ones, ones, ones)


def noisy_rows(seed: int, n: int = 100, length: int = 8) -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
    rng = np.random.default_rng(seed)
    return rng.normal(0, 0.05, n), (rng.random((length, n)) < 0.35).astype(float), rng


def test_a_good_fit_is_believed() -> None:
    assert good().refusals(FAMILIES) == ()


def test_every_reason_is_given_at_once_with_its_number() -> None:
    checks = replace(
        good(), n_expert=np.array([19, 100]), correlation=np.array([0.9, 0.7]), rhat=np.array([1.06, 1.0]),
        interaction_p=np.array([1.0, 0.0004]),
    )  # fmt: skip
    assert checks.refusals(FAMILIES) == (
        "ash: 19 expert labels, at least 20 are needed",
        "ash: the chains have not converged (R-hat 1.060 above 1.05)",
        "oak: held-out expert labels correlate 0.70 with their prediction, at least 0.75 is needed: more labels, or "
        "labels of another kind",
        "oak: positions interact (p = 0.0004); an additive quality does not explain its expert labels",
    )


def test_a_planted_pair_is_found() -> None:
    residuals, matches, rng = noisy_rows(0)
    residuals = residuals + 0.2 * (matches[2] * matches[5] - 0.12)
    assert interaction_p_value(residuals, matches, rng=rng) <= 0.0002


def test_a_weak_interaction_of_neighbours_is_found() -> None:
    residuals, matches, rng = noisy_rows(4)
    centred = matches - matches.mean(1, keepdims=True)  # what single positions do, the tables explain
    residuals = residuals + 0.05 * (centred[:-1] * centred[1:]).sum(0)
    assert interaction_p_value(residuals, matches, rng=rng) <= 0.0002


def test_a_weak_interaction_of_all_pairs_is_found() -> None:
    residuals, matches, rng = noisy_rows(1)
    residuals = residuals + 0.03 * (matches.sum(0) - matches.sum(0).mean()) ** 2
    assert interaction_p_value(residuals, matches, rng=rng) <= 0.0002


def test_without_an_interaction_p_values_are_uniform() -> None:
    p = np.array([interaction_p_value(*noisy_rows(seed)[:2], rng=np.random.default_rng(seed)) for seed in range(60)])
    assert p.min() > MIN_INTERACTION_P
    assert 0.35 < p.mean() < 0.65
    assert np.mean(p < 0.25) == pytest.approx(0.25, abs=0.17)


def test_single_positions_are_no_interaction() -> None:
    """Residuals that go with one position are the tables' fault, not an interaction's."""
    residuals, matches, rng = noisy_rows(2)
    assert interaction_p_value(residuals + 0.02 * matches[3], matches, rng=rng) > 0.01


@settings(max_examples=8)
@given(st.integers(0, 1000))
def test_p_value_ignores_order_and_shift_and_scale(seed: int) -> None:
    residuals, matches, _ = noisy_rows(seed, n=40, length=4)
    first = interaction_p_value(residuals, matches, rng=np.random.default_rng(0))
    order = np.random.default_rng(seed).permutation(40)
    other = interaction_p_value(3 * residuals[order] + 0.5, matches[::-1][:, order], rng=np.random.default_rng(1))
    assert other == pytest.approx(first, abs=5 * np.sqrt(first * (1 - first) / 9999) + 0.001)


@pytest.mark.parametrize(("n", "length"), [(2, 4), (10, 1)])
def test_too_little_to_test_is_no_interaction(n: int, length: int) -> None:
    residuals, matches, rng = noisy_rows(3, n=n, length=length)
    assert interaction_p_value(residuals, matches, rng=rng) == 1.0


def test_weak_interactions_of_all_families_add_up() -> None:
    checks = replace(good(), interaction_p=np.array([0.004, 0.004]))
    assert [reason.split(":")[0] for reason in checks.refusals(FAMILIES)] == ["all families together"]
    assert replace(good(), interaction_p=np.array([0.02, 0.02])).refusals(FAMILIES) == ()


def checked(traces: np.ndarray, *, unseen_error: float = 0.0) -> FitChecks:
    """Check a fit of six expert rows a family, labelled 0 to 5."""
    rng = np.random.default_rng(0)
    labels = np.tile(np.arange(6.0), (2, 1))
    rows = LabelRows(
        labels=labels, crowd=np.zeros((2, 6), dtype=bool), present=np.ones((2, 6), dtype=bool),
        cell=rng.integers(2, size=(2, 3, 6)), token=rng.integers(3, size=(2, 3, 6)), features=np.zeros((2, 1, 6)),
    )  # fmt: skip
    return check_fit(rows, labels + unseen_error, np.full((2, 3, 2, 3), 1 / 3), traces, rng=rng)


def test_chains_that_disagree_refuse_and_chains_that_agree_do_not() -> None:
    traces = np.random.default_rng(1).normal(size=(4, 200, 2, 3))
    traces[2, :, 1, 0] += 2.0  # one chain of the second family elsewhere
    rhat = checked(traces).rhat
    assert rhat[0] < 1.02
    assert rhat[1] > 1.1


def test_chains_stuck_at_different_values_refuse() -> None:
    traces = np.zeros((4, 200, 2, 1))
    traces[:, :, 1, 0] = np.arange(4)[:, None]
    rhat = checked(traces).rhat
    assert rhat[0] == 1.0  # nothing moves, nothing disagrees
    assert rhat[1] > 1e3


def test_held_out_error_and_correlation_are_those_of_the_predictions() -> None:
    checks = checked(np.zeros((4, 10, 2, 1)), unseen_error=0.5)
    assert checks.rmse == pytest.approx(0.5)
    np.testing.assert_allclose(checks.family_rmse, 0.5)
    np.testing.assert_allclose(checks.correlation, 1.0)
    assert checks.n_expert.tolist() == [6, 6]


def shuffled(part: Labelled, rng: np.random.Generator) -> Labelled:
    labels = part.labels.copy()
    for family in np.unique(part.prompts.family):
        of_family = part.prompts.family == family
        labels[of_family] = rng.permutation(labels[of_family])
    return replace(part, labels=labels)


def refused_families(model: QualityModel, word: str) -> set[str]:
    return {reason.split(":")[0] for reason in model.refusals if word in reason}


def test_published_sizes_are_believed(fitted: QualityModel) -> None:
    assert fitted.refusals == ()


def test_shuffled_labels_refuse_in_every_family(default_world_task: Task) -> None:
    rng = np.random.default_rng(0)
    task = default_world_task
    model = fit_quality(replace(task, expert=shuffled(task.expert, rng), crowd=shuffled(task.crowd, rng)))
    assert refused_families(model, "correlate") == set(model.vocab.families)


def test_too_few_labels_refuse(small_task: Callable[..., tuple[World, Task]]) -> None:
    _, task = small_task(seed=60, n_expert=19, n_crowd=100)
    assert refused_families(fit_quality(task), "19 expert labels") == set(FAMILIES)


def test_a_world_whose_positions_interact_is_refused(default_world: World) -> None:
    world, rng = replace(default_world, interaction=0.25), np.random.default_rng(5)

    def prompts(count: int):
        return draw_prompts(world.vocab, np.full(6, count), rng)

    gold, crowd = prompts(100), prompts(200)
    model = fit_labels(
        world.expert_labels(gold, world.demonstrate(gold, rng), rng),
        world.crowd_labels(crowd, world.demonstrate(crowd, rng), rng),
        CandidateTokens(world.attribute, np.log(world.shares + 1e-4)),
        world.vocab,
    )
    assert "all families together" in refused_families(model, "interact")
