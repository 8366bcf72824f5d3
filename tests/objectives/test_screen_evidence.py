import numpy as np
import pytest

from objectives.screen_evidence import label_odds, weigh
from objectives.screen_slopes import Slopes
from rlhf.features import KINDS

KIND = np.repeat(np.arange(len(KINDS)), [24, 276, 576, 192, 1])


def slopes(column: int, size: float, se: float) -> Slopes:
    slope, errors = np.zeros(len(KIND)), np.full(len(KIND), 0.05)
    slope[column], errors[column] = size, se
    return Slopes(slope, errors)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("column", [3, 100, 500, 900, 1068])
def test_two_signals_that_agree_are_a_finding(column: int, sign: int) -> None:
    evidence = weigh(slopes(column, 0.4 * sign, 0.04), slopes(column, 0.2 * sign, 0.03), KIND, [])
    assert evidence.probability > 0.99
    assert evidence.log_odds.argmax() == column


@pytest.mark.parametrize(
    ("label", "model"), [(0.0, 0.4), (0.4, 0.0), (0.4, -0.4), (0.0, 0.0)],
    ids=["reward model alone", "labels alone", "opposite signs", "nothing"],
)  # fmt: skip
def test_one_signal_alone_is_none(label: float, model: float) -> None:
    assert weigh(slopes(3, label, 0.03), slopes(3, model, 0.03), KIND, []).probability < 0.2


@pytest.mark.parametrize("column", [3, 100, 500, 900])
def test_a_precise_answer_of_any_size_is_none_where_labels_pay_nothing(column: int) -> None:
    probabilities = [
        weigh(slopes(column, label, 0.03), slopes(column, model, se), KIND, []).probability
        for label in (0.0, -0.012) for model in np.geomspace(0.004, 1.0, 40) for se in (0.0003, 0.003)
    ]  # fmt: skip
    assert max(probabilities) < 0.2


def test_a_precise_answer_of_any_size_is_a_finding_where_labels_pay() -> None:
    probabilities = [
        weigh(slopes(3, 0.4, 0.03), slopes(3, 0.4 * share, 0.0005), KIND, []).probability
        for share in np.linspace(0.5, 1.2, 40)
    ]
    assert min(probabilities) > 0.9


def test_labels_that_never_held_the_feature_do_not_convict() -> None:
    evidence = weigh(slopes(500, 0.0, np.inf), slopes(500, 0.5, 0.02), KIND, [])
    assert evidence.probability < 0.7


def test_one_of_many_features_needs_more_than_one_of_few() -> None:
    fewer = np.repeat(np.arange(len(KINDS)), [24, 276, 24, 192, 1])
    signals = [slopes(300, 0.2, 0.05), slopes(300, 0.15, 0.05)]  # of an adjacent pair
    few = weigh(*(Slopes(s.slope[: len(fewer)], s.se[: len(fewer)]) for s in signals), fewer, [])
    many = weigh(*signals, KIND, [])
    assert few.log_odds[300] - many.log_odds[300] == pytest.approx(np.log(576 / 24))


def test_what_was_found_is_left_out() -> None:
    evidence = weigh(slopes(3, 0.4, 0.04), slopes(3, 0.3, 0.03), KIND, [3])
    assert evidence.probability < 0.1
    assert evidence.log_odds[3] == -np.inf


def test_labels_alone_propose() -> None:
    assert label_odds(slopes(500, 0.5, 0.05), KIND).argmax() == 500
