"""Explain scores of one family by correctness and features: the same model for crowd labels and reward-model scores.

    score = intercept + unit * (number of correct positions) + sum_k size_k feature_k + noise

Which token is correct in a cell (position, value of the deciding attribute) is unknown: a mean-field posterior over
tables, from a prior and the scores. What the table explains is not a shortcut: one position pays one unit, in one of
its cells. Left out: draws from the posterior, as `objectives.label_gibbs` makes; here only its mean is needed, fast.
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import softmax  # type: ignore[import-untyped]

_ROUNDS = 25
_MIN_NOISE = 0.02


@dataclass(frozen=True, slots=True)
class Scored:
    """Hold N scored responses of one family: `cell` and `token` (N, L), `features` (N, K), `scores` (N,)."""

    cell: np.ndarray
    token: np.ndarray
    features: np.ndarray
    scores: np.ndarray

    def __len__(self) -> int:
        return len(self.scores)


@dataclass(frozen=True, slots=True)
class Fit:
    """Hold `table` (L, n_values, V), each token's probability of being correct, and what it leaves unexplained.

    unit: what a correct position pays. sizes: of the features given. residual: (N,), features given still included.
    noise: standard deviation of what neither table nor features explain.
    """

    table: np.ndarray
    unit: float
    sizes: np.ndarray
    residual: np.ndarray
    noise: float


def fit_table(scored: Scored, log_prior: np.ndarray, chosen: list[int], *, unit: float | None = None) -> Fit:
    """Fit table and the sizes of the `chosen` features (column indices). `unit` is fitted where it is not given."""
    length, n_values, n_tokens = log_prior.shape
    slots = (np.arange(length) * n_values + scored.cell) * n_tokens + scored.token  # (N, L)
    extra = np.concatenate([np.ones((len(scored), 1)), scored.features[:, chosen].astype(float)], 1)
    ridge = np.diag([0.0] + [1e-3] * len(chosen))
    table = softmax(log_prior, -1)
    unit_now, noise = unit or 1 / length, float(scored.scores.std()) + _MIN_NOISE
    matches = table.ravel()[slots]
    coefficients = np.zeros(extra.shape[1])
    for _ in range(_ROUNDS):
        if unit is None:
            columns = np.concatenate([matches.sum(1, keepdims=True), extra], 1)
            unit_now = float(np.clip(_least_squares(columns, scored.scores, np.pad(ridge, ((1, 0), (1, 0))))[0],
                                     0.2 / length, 1 / length))  # fmt: skip
        explained = unit_now * matches.sum(1)
        coefficients = _least_squares(extra, scored.scores - explained, ridge)
        rest = scored.scores - extra @ coefficients - explained
        noise = float(np.sqrt(np.mean(rest**2))) + _MIN_NOISE
        for position in range(length):
            without = rest + unit_now * matches[:, position]
            gain = (unit_now * without - unit_now**2 / 2) / noise**2
            evidence = np.bincount(slots[:, position] - position * n_values * n_tokens, gain, n_values * n_tokens)
            table[position] = softmax(log_prior[position] + evidence.reshape(n_values, n_tokens), -1)
            now = table.ravel()[slots[:, position]]
            rest = without - unit_now * now
            matches[:, position] = now
    residual = scored.scores - unit_now * matches.sum(1) - coefficients[0]
    return Fit(table, unit_now, coefficients[1:], residual, noise)


def _least_squares(columns: np.ndarray, target: np.ndarray, ridge: np.ndarray) -> np.ndarray:
    return np.linalg.solve(columns.T @ columns + ridge * len(target) + 1e-9 * np.eye(columns.shape[1]), columns.T @ target)
