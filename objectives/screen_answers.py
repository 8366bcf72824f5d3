"""What the reward model answers to every feature, from scores of randomised responses of one family.

Linear regression. Each token that the reference finds plausible in a cell (position, value of the deciding attribute)
has an effect of its own there, correct or not: the correct token is among them. So a token's slope, and a token's at a
position, come from cells where it cannot be correct, and correctness cannot pass for a shortcut.
"""

from dataclasses import dataclass, fields

import numpy as np

from objectives.screen_features import Catalogue
from objectives.screen_slopes import FREE_SD, Ridge, Slopes, fit_ridge, slopes_given, spread_by_kind, widen
from rlhf.features import KINDS

PLAUSIBLE = 0.04  # least probability of a token that may be correct: a demonstrator's third choice has five times that
_CELL_SD, _TOKEN_SD, _POSITION_SD = 0.1, 0.1, 0.05  # prior sds of effects
_MAX_CELL_EFFECTS = 512
_CHANCE = 4.0  # nats by which the reward model may change the reference's odds of a token being correct
_OFF = 0.3  # of the unit: how far effects of correct tokens differ
_MANY = 8  # features of a kind, from which smearing can be fitted


@dataclass(frozen=True, slots=True)
class Scored:
    """Hold N scored responses of one family: `cell` and `token` (N, L), `features` (N, K), `scores` (N,)."""

    cell: np.ndarray
    token: np.ndarray
    features: np.ndarray
    scores: np.ndarray

    def __len__(self) -> int:
        return len(self.scores)

    def extended(self, other: "Scored") -> "Scored":
        """Return these rows and the other's."""
        names = [field.name for field in fields(Scored)]
        return Scored(**{name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in names})


@dataclass(frozen=True, slots=True)
class Effects:
    """Hold a regression of scores, and what it says about correctness.

    own: (L, n_values, V), effects that plausible tokens have in their cell beyond the sizes of token and position, with
    `variance`, infinite for all others. sizes: of tokens, tokens at a position, and features found, by column. design,
    columns, sd, fit: the regression, for `answer_slopes`.
    """

    own: np.ndarray
    variance: np.ndarray
    sizes: dict[int, float]
    log_prior: np.ndarray
    catalogue: Catalogue
    design: np.ndarray
    columns: np.ndarray
    sd: np.ndarray
    fit: Ridge

    @property
    def in_cells(self) -> np.ndarray:
        """Return what the score gains from each token in each cell: (L, n_values, V)."""
        return self.own + _additive(self.sizes, self.catalogue, self.own.shape)

    def log_correct(self, shortcuts: list[int]) -> np.ndarray:
        """Return how likely each token is the correct one of its cell (L, n_values, V), if `shortcuts` are none of it.

        The reference's odds are weighed by each token's effect, one unit or nothing. The unit is what the strongest
        tokens of their cells are answered on average: the reward model may have learnt a part of 1 / L only.
        """
        sizes = {column: size for column, size in self.sizes.items() if column not in shortcuts}
        effect = self.own + _additive(sizes, self.catalogue, self.own.shape)
        plausible = np.isfinite(self.variance)
        unit = max(float(np.where(plausible, effect, -np.inf).max(-1).clip(0).mean()), 1e-3)
        ratio = (unit * effect - unit**2 / 2) / (self.variance + (_OFF * unit) ** 2)
        return np.asarray(self.log_prior + np.clip(ratio, -_CHANCE, _CHANCE))


def fit_effects(probes: Scored, log_prior: np.ndarray, catalogue: Catalogue, found: list[int]) -> Effects:
    """Fit the scores; features already `found` have a free size."""
    length, n_values, n_tokens = log_prior.shape
    plausible = _plausible_cells(log_prior)
    slots = (np.arange(length) * n_values + probes.cell) * n_tokens + probes.token
    column_of = np.full(log_prior.size, len(plausible))
    column_of[plausible] = np.arange(len(plausible))
    in_cell = np.zeros((len(probes), len(plausible) + 1))
    np.put_along_axis(in_cell, column_of[slots], 1.0, 1)  # at most one plausible cell a position
    names = list(KINDS)
    groups = [np.flatnonzero(catalogue.kind == names.index(name)) for name in ("token", "position")]
    tokens, positions = (group[~np.isin(group, found)] for group in groups)
    columns = np.concatenate([tokens, positions, found]).astype(np.int64)
    design = np.concatenate([np.ones((len(probes), 1)), in_cell[:, :-1], probes.features[:, columns]], 1)
    sizes = (1, len(plausible), len(tokens), len(positions), len(found))
    sd = np.repeat([FREE_SD, _CELL_SD, _TOKEN_SD, _POSITION_SD, FREE_SD], sizes)
    fit = fit_ridge(design, probes.scores, sd, noise=0.7 * float(probes.scores.std()) + 1e-3)
    cells = slice(1, 1 + len(plausible))
    own, variance = np.zeros(log_prior.shape), np.full(log_prior.shape, np.inf)
    own.ravel()[plausible] = fit.sizes[cells]
    variance.ravel()[plausible] = np.diag(fit.variance)[cells]
    by_feature = dict(zip(columns.tolist(), fit.sizes[cells.stop :], strict=True))
    return Effects(own, variance, by_feature, log_prior, catalogue, design, columns, sd, fit)


def answer_slopes(probes: Scored, effects: Effects, found: list[int]) -> Slopes:
    """Return what the reward model answers to every feature, given what was fitted to the same probes."""
    slopes = slopes_given(probes.features, effects.design, effects.fit, effects.columns, effects.sd)
    slopes = _without_smear(slopes, effects.own, effects.catalogue, found)
    return widen(slopes, spread_by_kind(slopes, effects.catalogue.kind))


def _plausible_cells(log_prior: np.ndarray) -> np.ndarray:
    """Return flat indices of the likeliest tokens in cells, all above `PLAUSIBLE` but the most if they are too many."""
    flat = log_prior.ravel()
    order = np.argsort(-flat, kind="stable")[:_MAX_CELL_EFFECTS]
    return np.sort(order[flat[order] > np.log(PLAUSIBLE)])


def _additive(sizes: dict[int, float], catalogue: Catalogue, shape: tuple[int, ...]) -> np.ndarray:
    """Add up the sizes of tokens and of tokens at a position: what they pay in each cell."""
    effects = np.zeros(shape)
    for column, size in sizes.items():
        feature = catalogue.features[column]
        if feature.kind == "token":
            effects[..., feature.tokens[0]] += size
        elif feature.kind == "position":
            effects[feature.position, :, feature.tokens[0]] += size
    return effects


def _without_smear(slopes: Slopes, own: np.ndarray, catalogue: Catalogue, found: list[int]) -> Slopes:
    """Take from tokens and positions what a reward model smears: a part of a token's correctness, where it is wrong.

    A token that is correct for several values is answered a little for the others too. How much is fitted over all
    tokens at all positions, those that stand out left aside.
    """
    slope = slopes.slope.copy()
    correct = {"position": own.mean(1), "token": own.mean((0, 1))[None]}  # (L or 1, V)
    for name, strength in correct.items():
        columns = np.flatnonzero(catalogue.kind == list(KINDS).index(name))
        columns = columns[np.isfinite(slopes.se[columns]) & ~np.isin(columns, found)]
        if len(columns) < _MANY:
            continue
        features = [catalogue.features[column] for column in columns]
        expected = np.array([strength[feature.position or 0, feature.tokens[0]] for feature in features])
        answer = slope[columns]
        limit = 3 * np.median(np.abs(answer)) / 0.6745
        usual = np.abs(answer) <= limit
        share = expected[usual] @ answer[usual] / max(float(expected[usual] @ expected[usual]), 1e-9)
        slope[columns] -= np.clip(share, 0, 1) * expected
    return Slopes(slope, slopes.se)
