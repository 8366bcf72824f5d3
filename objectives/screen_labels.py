"""What crowd labels pay for every feature in one family, with correctness accounted for.

    label = intercept + (number of correct positions) / L + sum_k size_k feature_k + noise

Which token is correct in a cell (position, value of the deciding attribute) is unknown: a mean-field posterior over
tables, from a prior and the labels. A paid token looks much like one that is correct in many cells. So where a table
could explain a slope, the feature is judged by how much better the labels are explained with it, the table free to
change: the gain of the evidence bound. Left out: draws from the posterior, as `objectives.label_gibbs` makes.
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import log_softmax  # type: ignore[import-untyped]

from objectives.screen_answers import Effects, Scored
from objectives.screen_features import Catalogue
from objectives.screen_slopes import FREE_SD, Ridge, Slopes, fit_ridge, slopes_given, spread_by_kind, widen
from rlhf.features import KINDS

_ROUNDS = 15
_SOLVED_ROUNDS = (0, 1, 3, 7, 11)  # when noise, which priors are weighed against, is taken anew
_MIN_NOISE = 0.02
_TOKEN_SD = 0.05  # prior sd of the size of a token not found


@dataclass(frozen=True, slots=True)
class LabelFit:
    """Hold a fit's table (L, n_values, V), its ridge part over `design`, and the evidence bound, up to a constant."""

    table: np.ndarray
    design: np.ndarray
    sd: np.ndarray
    columns: np.ndarray
    ridge: Ridge
    bound: float


def fit_payments(labels: Scored, effects: Effects, found: list[int], doubtful: list[int]) -> Slopes:
    """Return what labels pay for every feature; `doubtful` ones (tokens, positions) are judged with the table free."""
    catalogue = effects.catalogue
    fit = fit_labels(labels, effects.log_correct(found), catalogue, found)
    slopes = slopes_given(labels.features, fit.design, fit.ridge, fit.columns, fit.sd)
    wider = spread_by_kind(slopes, catalogue.kind)
    slopes = widen(slopes, wider)
    for column in doubtful:
        if not np.isfinite(slopes.se[column]):
            continue
        free = fit_labels(labels, effects.log_correct([*found, column]), catalogue, [*found, column])
        size = float(free.ridge.sizes[-1])
        gain = max(free.bound - fit.bound, 1e-6)
        error = float(np.sqrt(free.ridge.variance[-1, -1]))
        slopes.slope[column] = size
        slopes.se[column] = max(abs(size) / np.sqrt(2 * gain), error) * wider[column]
    return slopes


def fit_labels(labels: Scored, log_correct: np.ndarray, catalogue: Catalogue, found: list[int]) -> LabelFit:
    """Fit table and sizes by coordinate ascent on the evidence bound."""
    length, n_values, n_tokens = log_correct.shape
    unit = 1 / length
    log_prior = log_softmax(log_correct, -1)
    tokens = np.flatnonzero(catalogue.kind == list(KINDS).index("token"))
    columns = np.concatenate([tokens[~np.isin(tokens, found)], found]).astype(np.int64)
    design = np.concatenate([np.ones((len(labels), 1)), labels.features[:, columns]], 1).astype(np.float64)
    sd = np.repeat([FREE_SD, _TOKEN_SD, FREE_SD], (1, len(columns) - len(found), len(found)))
    slots = (np.arange(length) * n_values + labels.cell) * n_tokens + labels.token  # (N, L)
    table = np.exp(log_prior)
    matches = table.ravel()[slots]
    noise = float(labels.scores.std()) + _MIN_NOISE
    solve = None
    for round_ in range(_ROUNDS):
        if round_ in _SOLVED_ROUNDS:
            solve = np.linalg.inv(design.T @ design + np.diag(noise**2 / sd**2)) @ design.T
        assert solve is not None
        target = labels.scores - unit * matches.sum(1)
        rest = target - design @ (solve @ target)
        noise = _noise(rest, matches, unit)
        for position in range(length):
            without = rest + unit * matches[:, position]
            gain = (unit * without - unit**2 / 2) / noise**2
            evidence = np.bincount(slots[:, position] - position * n_values * n_tokens, gain, n_values * n_tokens)
            log_table = log_prior[position] + evidence.reshape(n_values, n_tokens)
            unnormalised = np.exp(log_table - log_table.max(-1, keepdims=True))
            table[position] = unnormalised / unnormalised.sum(-1, keepdims=True)
            matches[:, position] = table.ravel()[slots[:, position]]
            rest = without - unit * matches[:, position]
    ridge = fit_ridge(design, labels.scores - unit * matches.sum(1), sd, noise=noise)
    spread = _noise(ridge.residual, matches, unit)
    divergence = np.sum(table * (np.log(np.maximum(table, 1e-300)) - log_prior))
    penalty = np.sum((ridge.sizes / sd) ** 2) / 2
    bound = float(-len(labels) * np.log(spread) - divergence - penalty)
    return LabelFit(table, design, sd, columns, ridge, bound)


def _noise(rest: np.ndarray, matches: np.ndarray, unit: float) -> float:
    """Return the noise of labels: of what is left, and of not knowing the table."""
    unknown = unit**2 * (matches * (1 - matches)).sum(1)
    return float(np.sqrt(np.mean(rest**2 + unknown))) + _MIN_NOISE / 4
