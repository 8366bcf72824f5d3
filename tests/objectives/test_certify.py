import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from objectives.bounds import bound_gains
from objectives.certify import certify, certify_mass, format_certificate
from objectives.quality_model import ESTIMATE_NOTE, QualityModel
from objectives.score import Judge
from rlhf.policy import Policy
from rlhf.taskdir import Task

Models = Callable[..., QualityModel]
Policies = Callable[[int], Policy]


def masses(model: QualityModel, gain: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return masses of a checkpoint and a reference of quality 0.4: token 0 correct everywhere, so much more of it."""
    shape = model.correct.shape

    def mass(share: np.ndarray) -> np.ndarray:
        result = np.zeros(shape)
        result[..., 0] = share[:, None, None] / shape[2]
        result[..., 1] = (1 - share[:, None, None]) / shape[2]
        return result

    reference = np.full(shape[0], 0.4)
    return mass(reference + gain), mass(reference)


def certificate(model: QualityModel, *gain: float, error: float = 0.005, **options):
    return certify_mass(*masses(model, gain), np.full(3, error), model, **options)


def test_a_sure_gain_is_certified(one_token_is_correct: Models) -> None:
    found = certificate(one_token_is_correct(0, 0, 0), 0.1, 0.2, 0.05)
    assert found.certified
    assert found.reasons == ()
    np.testing.assert_allclose(found.gain, [0.1, 0.2, 0.05])
    np.testing.assert_allclose(found.quality, [0.5, 0.6, 0.45])
    np.testing.assert_allclose(found.bounds.family, np.array([0.1, 0.2, 0.05]) - 1.96 * 0.005, atol=1e-5)
    assert found.improved == ("ash", "oak", "elm")
    assert found.cross_fit_difference == 0


def test_the_bound_decides_and_not_the_estimate(one_token_is_correct: Models) -> None:
    """Harm is estimated at 0.025, under the limit, but may be 0.035."""
    found = certificate(one_token_is_correct(0, 0, 0), 0.1, 0.2, -0.025)
    assert not found.certified
    assert found.reasons == ("elm: gain may be as low as -0.0348, a harm above 0.03",)
    assert certificate(one_token_is_correct(0, 0, 0), 0.1, 0.2, -0.025, max_harm=0.04).certified
    assert certificate(one_token_is_correct(0, 0, 0), 0.1, 0.2, -0.025, error=0.001).certified
    small = certificate(one_token_is_correct(0, 0, 0), 0.034, 0.034, 0.034)
    assert small.reasons == ("balanced gain may be as low as +0.0283; at least +0.03 is needed",)


def test_an_unsure_table_lowers_the_bound(one_token_is_correct: Models) -> None:
    sure = one_token_is_correct(0, 0, 0)
    draws = np.concatenate([sure.draws] * 9 + [one_token_is_correct(0, 0, 1).draws])
    unsure = replace(sure, draws=draws)
    found = certificate(unsure, 0.1, 0.2, 0.05)
    assert found.bounds.family[2] < -0.05  # in a tenth of the draws the third family lost 0.05
    np.testing.assert_allclose(found.bounds.family[:2], certificate(sure, 0.1, 0.2, 0.05).bounds.family[:2])
    assert not found.certified


@pytest.mark.parametrize(
    ("check", "value", "reason"),
    [
        ("n_expert", 19, "oak: 19 expert labels, at least 20 are needed"),
        ("correlation", 0.5, "oak: held-out expert labels correlate 0.50"),
        ("correlation", np.nan, "oak: the correlation of expert labels with their prediction is undefined"),
        ("interaction_p", 0.0001, "oak: positions interact (p = 0.0001)"),
        ("rhat", 1.2, "oak: the chains have not converged (R-hat 1.200 above 1.05)"),
        ("rhat", np.nan, "oak: the chains have not converged"),
    ],
)
def test_nothing_is_certified_by_a_fit_that_is_not_believed(
    check: str, value: float, reason: str, one_token_is_correct: Models
) -> None:
    model = one_token_is_correct(0, 0, 0)
    values = getattr(model.checks, check).copy().astype(type(value))
    values[1] = value
    found = certificate(replace(model, checks=replace(model.checks, **{check: values})), 0.3, 0.3, 0.3)
    assert not found.certified
    assert len(found.reasons) == 1
    assert found.reasons[0].startswith(reason)


def test_nan_never_passes(one_token_is_correct: Models) -> None:
    found = certificate(one_token_is_correct(0, 0, 0), 0.1, float("nan"), 0.1)
    assert not found.certified
    assert len(found.reasons) == 2
    json.dumps(found.to_json(), allow_nan=False)


def test_several_finalists_are_held_to_a_smaller_tail(one_token_is_correct: Models) -> None:
    model = one_token_is_correct(0, 0, 0)
    one, five = (certificate(model, 0.1, 0.2, 0.05, n_finalists=n) for n in (1, 5))
    assert (five.bounds.family < one.bounds.family).all()
    assert five.to_json()["tail"] == pytest.approx(0.005)


def test_cross_fit_difference_is_what_the_rewards_model_adds(one_token_is_correct: Models) -> None:
    """The reward believed in token 1 in the third family; a checkpoint that follows it is flattered by the reward."""
    model = one_token_is_correct(0, 0, 0)
    by_reward = replace(model, reward_correct=one_token_is_correct(0, 0, 1).correct)
    found = certificate(by_reward, 0.1, 0.1, -0.3)
    assert found.cross_fit_difference == pytest.approx((0.9 - 0.1) / 3)


def test_certification_is_judge_and_bounds_on_certification_prompts(
    network_task: Task, one_token_is_correct: Models, one_token_policy: Policies
) -> None:
    model, policy = one_token_is_correct(1, 1, 1), one_token_policy(1)
    found = certify(policy, network_task, model, selection_gain=0.75)
    scores = Judge(network_task, model, part="certification").score(policy)
    np.testing.assert_allclose(found.gain, scores.gain, rtol=1e-9)
    np.testing.assert_allclose(found.quality, scores.quality, rtol=1e-9)
    expected = bound_gains(scores.gain[None], scores.gain_se)
    np.testing.assert_allclose(found.bounds.family, expected.family, rtol=1e-9)
    assert found.bounds.balanced == pytest.approx(expected.balanced)
    assert found.optimism == pytest.approx(0.75 - scores.balanced_gain)
    assert found.certified


def test_the_reference_gains_nothing(network_task: Task, one_token_is_correct: Models) -> None:
    found = certify(network_task.reference, network_task, one_token_is_correct(0, 1, 2))
    np.testing.assert_allclose(found.bounds.family, 0, atol=1e-12)
    assert found.optimism is None
    assert found.reasons == ("balanced gain may be as low as +0.0000; at least +0.03 is needed",)


def test_relabelling_families_only_relabels_the_certificate(one_token_is_correct: Models) -> None:
    model = one_token_is_correct(0, 0, 0)
    first, second = certificate(model, 0.1, 0.2, -0.05), certificate(model, -0.05, 0.2, 0.1)
    np.testing.assert_allclose(first.bounds.family, second.bounds.family[::-1])
    assert first.bounds.balanced == pytest.approx(second.bounds.balanced)


def test_document_and_table_hold_every_number(one_token_is_correct: Models) -> None:
    found = certificate(one_token_is_correct(0, 0, 0), 0.1, 0.2, -0.05, selection_gain=0.09)
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert document["certified"] is False
    assert document["reasons"] == list(found.reasons)
    assert document["worst_family_harm_upper"] == pytest.approx(0.05 + 1.96 * 0.005, abs=1e-5)
    assert document["optimism"] == pytest.approx(0.09 - 0.25 / 3)
    assert document["improved_families"] == ["ash", "oak"]
    assert document["families"]["elm"]["gain_lower"] == pytest.approx(-0.0598, abs=1e-4)
    assert "2.5% tails" in document["note"]
    lines = format_certificate(found).splitlines()
    assert lines[3].split() == ["elm", "0.350", "-0.050", "-0.060"]
    assert "worst-family harm    at most 0.060 (allowed: 0.03)" in lines
    assert "NOT CERTIFIED: elm: gain may be as low as -0.0598, a harm above 0.03" in lines
    assert lines[-1] == ESTIMATE_NOTE
