from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectives.release import release_verdict
from objectives.score import Scores


def scores_with(gain: Sequence[float]) -> Scores:
    """Make scores with these gains per family; nothing else matters to the rule."""
    zeros = np.zeros(len(gain))
    families = tuple(f"f{i}" for i in range(len(gain)))
    return Scores(families, zeros, zeros, np.array(gain, dtype=float), zeros, zeros, zeros, zeros, zeros)


def test_a_harmless_improvement_is_released() -> None:
    verdict = release_verdict(scores_with([0.1, 0.05, 0.0]))
    assert verdict.release
    assert verdict.reasons == ()


@pytest.mark.parametrize("n_families", range(1, 13))
def test_a_balanced_gain_of_exactly_the_limit_passes(n_families: int) -> None:
    assert release_verdict(scores_with([0.03] * n_families)).release


def test_a_harm_of_exactly_the_limit_passes() -> None:
    assert release_verdict(scores_with([-0.03, 0.2, 0.2])).release


def test_just_beyond_either_limit_fails() -> None:
    assert not release_verdict(scores_with([0.0299, 0.0299])).release
    assert not release_verdict(scores_with([-0.0301, 0.5])).release


def test_every_harmed_family_is_named_and_no_other() -> None:
    verdict = release_verdict(scores_with([-0.05, 0.4, -0.031, -0.029, 0.0]))
    assert not verdict.release
    assert [reason.split()[0] for reason in verdict.reasons] == ["f0", "f2"]
    assert verdict.reasons[0] == "f0 harmed (-0.0500)"


def test_harm_and_too_little_gain_are_both_given_as_reasons() -> None:
    verdict = release_verdict(scores_with([-0.05, 0.05]))
    assert verdict.reasons == ("f0 harmed (-0.0500)", "balanced gain +0.0000 is under +0.03")


def test_max_harm_can_be_stricter_or_looser() -> None:
    scores = scores_with([-0.05, 0.5])
    assert not release_verdict(scores).release
    assert release_verdict(scores, max_harm=0.05).release
    assert not release_verdict(scores_with([-0.01, 0.5]), max_harm=0.0).release


@pytest.mark.parametrize("gain", [[float("nan"), 0.5], [float("nan")] * 2])
def test_a_gain_that_is_not_a_number_is_never_released(gain: list[float]) -> None:
    assert not release_verdict(scores_with(gain)).release


gains = st.lists(st.floats(-1, 1).filter(lambda g: abs(abs(g) - 0.03) > 1e-6), min_size=1, max_size=8)


@settings(deadline=None)
@given(gain=gains)
def test_released_exactly_when_there_is_no_reason(gain: list[float]) -> None:
    verdict = release_verdict(scores_with(gain))
    assert verdict.release == (verdict.reasons == ())
    assert sum("harmed" in reason for reason in verdict.reasons) == sum(g < -0.03 for g in gain)


@settings(deadline=None)
@given(gain=gains, more=st.floats(0, 1))
def test_more_gain_everywhere_never_takes_a_release_away(gain: list[float], more: float) -> None:
    if release_verdict(scores_with(gain)).release:
        assert release_verdict(scores_with([g + more for g in gain])).release
