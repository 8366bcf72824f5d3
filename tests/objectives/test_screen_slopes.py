import numpy as np
import pytest

from objectives.screen_slopes import FREE_SD, Slopes, fit_ridge, slopes_given, spread_by_kind


def test_slopes_are_those_of_least_squares_with_the_design_beside_them() -> None:
    rng = np.random.default_rng(0)
    features = rng.integers(3, size=(400, 5)).astype(np.float32)
    design = np.concatenate([np.ones((400, 1)), features[:, :2]], 1)
    target = features @ [0.5, -0.2, 0.3, 0.0, 0.1] + rng.normal(0, 0.1, 400)
    sd = np.array([FREE_SD, 0.05, 0.05])  # a prior, which the slopes must not show
    noise = 0.2
    for _ in range(9):
        noise = (fit := fit_ridge(design, target, sd, noise=noise)).noise
    slopes = slopes_given(features, design, fit, np.array([0, 1]), sd)
    free = fit_ridge(design, target, np.full(3, 1e6), noise=0.2)
    assert slopes.slope[:2] == pytest.approx(free.sizes[1:], abs=0.002)
    assert np.abs(fit.sizes[1:] - free.sizes[1:]).max() > 0.005
    by_hand = np.linalg.lstsq(np.concatenate([design, features[:, 2:3]], 1), target, rcond=None)[0][-1]
    assert slopes_given(features, design, free, np.array([0, 1]), np.full(3, 1e6)).slope[2] == pytest.approx(
        by_hand, abs=1e-4
    )


def test_a_feature_that_never_varies_says_nothing() -> None:
    features = np.zeros((50, 2), dtype=np.float32)
    features[::2, 0] = 1
    design = np.ones((50, 1))
    sd = np.array([FREE_SD])
    slopes = slopes_given(features, design, fit_ridge(design, np.arange(50.0), sd, noise=1.0), np.array([], int), sd)
    assert np.isfinite(slopes.se[0])
    assert (slopes.slope[1], slopes.se[1]) == (0.0, np.inf)
    assert slopes.se_or_none(1) is None


def test_a_column_decided_by_its_prior_alone_says_nothing() -> None:
    """Data that add nothing once gave slopes of ten thousand million."""
    design = np.concatenate([np.ones((50, 1)), np.ones((50, 1))], 1)
    sd = np.array([FREE_SD, 0.05])
    features = np.ones((50, 1), dtype=np.float32)
    slopes = slopes_given(features, design, fit_ridge(design, np.arange(50.0), sd, noise=1.0), np.array([0]), sd)
    assert (slopes.slope[0], slopes.se[0]) == (0.0, np.inf)


def test_errors_widen_until_the_middle_of_a_kind_is_chance() -> None:
    rng = np.random.default_rng(1)
    kind = np.repeat([0, 1, 4], [300, 300, 1])
    slope = np.concatenate([rng.normal(0, 1, 300), rng.normal(0, 3, 300), [50.0]])
    wider = spread_by_kind(Slopes(slope, np.ones(601)), kind)
    assert wider[0] == pytest.approx(1, abs=0.15)
    assert wider[300] == pytest.approx(3, rel=0.15)
    assert wider[600] == pytest.approx(2, rel=0.15)  # one feature has no middle: the median of the others


def test_a_kind_that_moves_together_is_not_noise() -> None:
    slope = 7 + np.random.default_rng(2).normal(0, 1, 300)
    assert spread_by_kind(Slopes(slope, np.ones(300)), np.zeros(300, int))[0] == pytest.approx(1, abs=0.15)
