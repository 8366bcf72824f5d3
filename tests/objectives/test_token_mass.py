import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectives.token_mass import (
    mean_by_family,
    prompt_quality,
    quality_by_probability,
    quality_by_table,
    token_mass,
)

SHAPE = (2, 3, 4, 5)  # families, positions, values, tokens
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


def some_rows(seed: int, n: int = 30) -> Rows:
    rng = np.random.default_rng(seed)
    family = np.concatenate([[0, 1], rng.integers(2, size=n - 2)])
    return rng.dirichlet(np.ones(5), size=(n, 3)), family, rng.integers(4, size=(n, 3))


def naive_quality(rows: Rows, table: np.ndarray) -> np.ndarray:
    """Average one prompt and one position at a time."""
    by_family: list[list[float]] = [[], []]
    for probability, family, cells in zip(*rows, strict=True):
        total = sum(probability[p, table[family, p, cells[p]]] for p in range(3))
        by_family[family].append(total / 3)
    return np.array([np.mean(values) for values in by_family])


def test_quality_by_table_is_the_naive_loop() -> None:
    rows = some_rows(0)
    tables = np.random.default_rng(1).integers(5, size=(7, 2, 3, 4)).astype(np.int16)
    found = quality_by_table(token_mass(*rows, shape=SHAPE), tables)
    np.testing.assert_allclose(found, [naive_quality(rows, table) for table in tables], rtol=1e-12)


def test_quality_by_probability_is_the_mean_over_tables_and_over_prompts() -> None:
    rows = some_rows(2)
    tables = np.random.default_rng(3).integers(5, size=(7, 2, 3, 4))
    correct = np.eye(5)[tables].mean(0)
    mass = token_mass(*rows, shape=SHAPE)
    expected = quality_by_table(mass, tables).mean(0)
    np.testing.assert_allclose(quality_by_probability(mass, correct), expected, rtol=1e-12)
    probability, family, cells = rows
    by_prompt = prompt_quality(probability, correct[family[:, None], np.arange(3), cells])
    np.testing.assert_allclose(mean_by_family(by_prompt, family, 2)[0], expected, rtol=1e-12)


def test_mass_of_a_position_is_1() -> None:
    np.testing.assert_allclose(token_mass(*some_rows(4), shape=SHAPE).sum((2, 3)), 1.0, rtol=1e-12)


def test_a_family_without_prompts_has_no_mass() -> None:
    probability, family, cells = some_rows(5)
    assert not token_mass(probability, 0 * family, cells, shape=SHAPE)[1].any()


@given(st.integers(0, 10_000))
def test_order_copies_and_names_of_families_do_not_matter(seed: int) -> None:
    probability, family, cells = some_rows(seed)
    mass = token_mass(probability, family, cells, shape=SHAPE)
    order = np.random.default_rng(seed).permutation(len(family))
    np.testing.assert_allclose(token_mass(probability[order], family[order], cells[order], shape=SHAPE), mass)
    twice = np.repeat(np.arange(len(family)), 2)
    np.testing.assert_allclose(token_mass(probability[twice], family[twice], cells[twice], shape=SHAPE), mass)
    np.testing.assert_allclose(token_mass(probability, 1 - family, cells, shape=SHAPE), mass[::-1])


def test_standard_error_of_copies_is_smaller_and_of_one_prompt_infinite() -> None:
    values, family = np.array([1.0, 2.0, 4.0]), np.array([0, 0, 1])
    means, errors = mean_by_family(values, family, 2)
    np.testing.assert_allclose(means, [1.5, 4.0])
    assert errors[0] == pytest.approx(0.5)
    assert np.isinf(errors[1])
