import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectives.front import front_mask, knee_height

# Few different values, so that ties and duplicates are frequent.
points = st.lists(st.tuples(*[st.integers(-3, 3)] * 3), max_size=12)
curves = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=10)


def _knee(kl, quality) -> int:
    return int(knee_height(kl, quality).argmax())


def dominates(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    """Quality and worst-family gain count upwards, KL downwards."""
    no_worse = a[0] >= b[0] and a[1] >= b[1] and a[2] <= b[2]
    return no_worse and tuple(a) != tuple(b)


@settings(deadline=None)
@given(values=points)
def test_the_front_is_what_no_other_point_dominates(values: list[tuple[float, ...]]) -> None:
    expected = [not any(dominates(other, value) for other in values) for value in values]
    found = front_mask(np.array(values, dtype=float).reshape(-1, 3))
    assert found.dtype == bool
    assert found.tolist() == expected


@settings(deadline=None)
@given(values=points.filter(bool), seed=st.integers(0, 100))
def test_the_front_does_not_depend_on_the_order(values: list[tuple[float, ...]], seed: int) -> None:
    array = np.array(values, dtype=float)
    order = np.random.default_rng(seed).permutation(len(array))
    np.testing.assert_array_equal(front_mask(array[order]), front_mask(array)[order])


@settings(deadline=None)
@given(values=points.filter(bool))
def test_the_front_is_its_own_front_and_covers_the_rest(values: list[tuple[float, ...]]) -> None:
    array = np.array(values, dtype=float)
    mask = front_mask(array)
    assert mask.any()
    assert front_mask(array[mask]).all()
    for beaten in array[~mask]:
        assert any(dominates(tuple(kept), tuple(beaten)) for kept in array[mask])


def test_equal_rows_all_stay() -> None:
    assert front_mask(np.array([[0.5, 0.1, 2.0], [0.5, 0.1, 2.0], [0.5, 0.1, 2.1]])).tolist() == [True, True, False]


def test_no_rows_give_an_empty_front() -> None:
    assert front_mask(np.zeros((0, 3))).tolist() == []
    assert front_mask(np.array([])).dtype == bool


def test_the_input_is_left_alone() -> None:
    values = np.array([[0.5, 0.1, 2.0], [0.4, 0.2, 1.0]])
    before = values.copy()
    front_mask(values)
    np.testing.assert_array_equal(values, before)


def test_each_direction_counts() -> None:
    base = [0.5, 0.0, 2.0]
    for better in ([0.6, 0.0, 2.0], [0.5, 0.1, 2.0], [0.5, 0.0, 1.0]):
        assert front_mask(np.array([base, better])).tolist() == [False, True]


def test_the_knee_of_a_known_curve() -> None:
    # sqrt(x) is farthest above the chord y = x where 1 / (2 sqrt(x)) = 1: at x = 1/4.
    x = np.linspace(0, 1, 101)
    assert x[_knee(x.tolist(), np.sqrt(x).tolist())] == pytest.approx(0.25)


def test_the_knee_of_one_point_and_of_a_straight_line_is_on_the_front() -> None:
    assert _knee([2.0], [0.5]) == 0
    assert _knee([1.0, 2.0], [0.5, 0.5]) == 0
    assert _knee([1.0, 1.0], [0.5, 0.7]) == 1


@settings(deadline=None)
@given(
    curve=curves, kl_shift=st.integers(-100, 100), quality_shift=st.integers(-100, 100),
    kl_power=st.integers(-8, 8), quality_power=st.integers(-8, 8),
)  # fmt: skip
def test_units_and_origins_do_not_move_the_knee(
    curve: list[tuple[int, int]], kl_shift: int, quality_shift: int, kl_power: int, quality_power: int
) -> None:
    """Whole numbers and powers of two, so that rounding cannot decide between ties."""
    kl, quality = (np.array(column, dtype=float) for column in zip(*curve, strict=True))
    moved = _knee(((kl + kl_shift) * 2.0**kl_power).tolist(), ((quality + quality_shift) * 2.0**quality_power).tolist())
    assert moved == _knee(kl.tolist(), quality.tolist())


@settings(deadline=None)
@given(curve=curves)
def test_no_point_lies_farther_above_the_chord_than_the_knee(curve: list[tuple[int, int]]) -> None:
    start = min(range(len(curve)), key=lambda i: curve[i][0])
    end = max(range(len(curve)), key=lambda i: curve[i][1])
    (x0, y0), (x1, y1) = curve[start], curve[end]
    knee = _knee(*zip(*curve, strict=True))
    if x1 <= x0 or y1 <= y0:
        assert knee == end
        return
    # Twice the area between the chord and a point: whole numbers, above the chord positive.
    area = [(y - y0) * (x1 - x0) - (x - x0) * (y1 - y0) for x, y in curve]
    assert area[knee] == max(area)
