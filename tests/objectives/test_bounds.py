from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectives.bounds import TAIL, bound_gains, mixture_quantile

Z = NormalDist().inv_cdf(1 - TAIL)


def test_with_one_certain_table_a_bound_is_gain_minus_z_errors() -> None:
    gain, error = np.array([0.2, -0.01, 0.1]), np.array([0.01, 0.02, 0.005])
    bounds = bound_gains(np.tile(gain, (9, 1)), error)
    np.testing.assert_allclose(bounds.family, gain - Z * error, rtol=1e-9)
    balanced_error = np.sqrt((error**2).sum()) / 3
    assert bounds.balanced == pytest.approx(gain.mean() - Z * balanced_error, rel=1e-9)
    assert bounds.harm == pytest.approx(0.01 + Z * 0.02, rel=1e-9)


def test_with_known_tables_and_no_noise_a_bound_is_their_quantile() -> None:
    """Of 200 draws, 2.5% are 5: the fifth smallest."""
    draws = np.random.default_rng(0).permutation(np.arange(200) / 100)[:, None]
    bounds = bound_gains(draws, np.zeros(1))
    assert bounds.family[0] == 0.04
    assert bounds.balanced == 0.04


def test_two_tables_and_noise_give_the_quantile_of_a_mixture_of_two_normals() -> None:
    found = mixture_quantile(np.array([0.0, 1.0]), 0.1, 0.025)
    assert (NormalDist(0, 0.1).cdf(found) + NormalDist(1, 0.1).cdf(found)) / 2 == pytest.approx(0.025)
    assert found == pytest.approx(NormalDist(0, 0.1).inv_cdf(0.05), abs=1e-9)  # the other normal is far away


def test_mixture_quantile_agrees_with_sampling() -> None:
    rng = np.random.default_rng(1)
    centres = rng.normal(0, 0.3, 50)
    drawn = rng.choice(centres, 400_000) + rng.normal(0, 0.2, 400_000)
    for level in (0.025, 0.3, 0.9):
        assert mixture_quantile(centres, 0.2, level) == pytest.approx(np.quantile(drawn, level), abs=0.006)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=20), st.floats(0, 1), st.floats(-1, 1), st.integers(0, 99))
def test_quantile_moves_with_the_draws_and_ignores_order_and_copies(
    values: list[float], sd: float, shift: float, seed: int
) -> None:
    centres = np.array(values)
    found = mixture_quantile(centres, sd, TAIL)
    shuffled = np.random.default_rng(seed).permutation(np.repeat(centres, 3))
    assert mixture_quantile(shuffled, sd, TAIL) == pytest.approx(found, abs=1e-9)
    assert mixture_quantile(centres + shift, sd, TAIL) == pytest.approx(found + shift, abs=1e-9)
    assert found <= centres.max()


def test_balanced_bound_knows_that_families_err_independently() -> None:
    rng = np.random.default_rng(2)
    draws = rng.normal(0.1, 0.05, (4000, 4))
    bounds = bound_gains(draws, np.zeros(4))
    np.testing.assert_allclose(bounds.family, 0.1 - Z * 0.05, atol=0.01)
    assert bounds.balanced == pytest.approx(0.1 - Z * 0.05 / 2, abs=0.004)


def test_several_finalists_share_the_tail() -> None:
    bounds = bound_gains(np.full((3, 1), 0.1), np.array([0.01]), n_finalists=5)
    assert bounds.family[0] == pytest.approx(0.1 - 0.01 * NormalDist().inv_cdf(1 - TAIL / 5))


def test_no_family_harmed_is_tested_at_the_full_level_and_naming_takes_holm() -> None:
    """Gains of 2.2 errors: each is above 0 by its own bound, but not with six to choose from."""
    error = np.full(6, 0.01)
    bounds = bound_gains(np.tile(2.2 * error, (3, 1)), error)
    assert bounds.family.min() > 0
    assert bounds.harm == 0
    assert not bounds.improved.any()


def test_holm_goes_on_with_what_is_left() -> None:
    """Levels 0.025/3, 0.025/2, 0.025: the second and third would fail at the first's."""
    p = np.array([0.008, 0.012, 0.02])
    error = np.full(3, 0.01)
    gains = error * [NormalDist().inv_cdf(1 - value) for value in p]
    assert bound_gains(gains[None], error).improved.tolist() == [True, True, True]
    worse = error * [NormalDist().inv_cdf(1 - value) for value in (0.008, 0.013, 0.02)]
    assert bound_gains(worse[None], error).improved.tolist() == [True, False, False]


def test_nan_stays_nan() -> None:
    bounds = bound_gains(np.array([[np.nan, 0.1]]), np.array([0.01, 0.01]))
    assert np.isnan([bounds.family[0], bounds.balanced, bounds.harm]).all()
    assert bounds.improved.tolist() == [False, True]


def test_one_prompt_bounds_nothing() -> None:
    assert bound_gains(np.array([[0.1], [0.2]]), np.array([np.inf])).family[0] == -np.inf
