"""Slopes of every feature at once, given other columns: ridge regression and what is left of each feature after it.

A feature's slope is what the score gains for one unit more of it while the design's columns stay as they are.
"""

from dataclasses import dataclass

import numpy as np

from rlhf.features import KINDS
from rlhf.json_values import finite_or_none

FREE_SD = 10.0  # prior sd of a size that data alone shall decide
_MIN_SQUARES = 0.3  # of a feature, given the design: below, it was not seen
_MANY = 8  # features of a kind, from which their middle tells something
_TOLD = 1e-2  # precision that data must add to a prior, as a share of it, to say anything
_MIN_SE = 1e-4
_MIN_NOISE = 1e-6  # of a score, where a fit explains it to the last digit


@dataclass(frozen=True, slots=True)
class Slopes:
    """Hold slope and standard error (K,) of each feature in one signal; an infinite error where it never varies."""

    slope: np.ndarray
    se: np.ndarray

    def se_or_none(self, column: int) -> float | None:
        """Return a standard error as JSON can hold it."""
        return finite_or_none(self.se[column])


@dataclass(frozen=True, slots=True)
class Ridge:
    """Hold a fit of D columns: `sizes` (D,), `variance` (D, D), `residual` (N,) and its deviation `noise`, above 0."""

    sizes: np.ndarray
    variance: np.ndarray
    residual: np.ndarray
    noise: float


def fit_ridge(design: np.ndarray, target: np.ndarray, sd: np.ndarray, *, noise: float) -> Ridge:
    """Fit target (N,) by design (N, D) with normal priors of standard deviation `sd` (D,) on the sizes."""
    solve = np.linalg.inv(design.T @ design + np.diag(noise**2 / sd**2))
    sizes = solve @ (design.T @ target)
    residual = target - design @ sizes
    noise = max(float(np.sqrt(np.mean(residual**2))), _MIN_NOISE)
    return Ridge(sizes, solve * noise**2, residual, noise)


def slopes_given(features: np.ndarray, design: np.ndarray, fit: Ridge, columns: np.ndarray, sd: np.ndarray) -> Slopes:
    """Return each feature's slope (N, K) given the design (N, D) that was fitted.

    columns: the features that the design's last columns are. Their prior `sd` is taken out
    again: a slope is what data say.
    """
    crossed = design.astype(np.float32).T @ features  # single precision: counts, and twice as fast
    projected = (fit.variance / fit.noise**2).astype(np.float32) @ crossed
    squares = np.einsum("nk,nk->k", features, features) - np.einsum("dk,dk->k", crossed, projected)
    seen = squares > _MIN_SQUARES
    squares = np.where(seen, squares, 1.0)
    slope = np.where(seen, fit.residual.astype(np.float32) @ features / squares, 0.0).astype(np.float64)
    se = np.where(seen, fit.noise / np.sqrt(squares), np.inf).astype(np.float64)
    first = design.shape[1] - len(columns)
    variance = np.diag(fit.variance)[first:]
    precision = 1 / variance - 1 / sd[first:] ** 2
    told = precision > _TOLD / sd[first:] ** 2
    precision = np.where(told, precision, 1.0)
    slope[columns] = np.where(told, fit.sizes[first:] / (variance * precision), 0.0)
    se[columns] = np.where(told, 1 / np.sqrt(precision), np.inf)
    return Slopes(slope, se)


def spread_by_kind(slopes: Slopes, kind: np.ndarray) -> np.ndarray:
    """Return how much wider than chance the middle of a kind's slopes is, at least 1, for each feature (K,).

    What is left unexplained is not independent noise; and most features of a kind pay nothing, so their middle shows by
    how much standard errors are too small. Around the kind's median: a paid repetition moves all pairs alike, and is no
    noise. Kinds of few features take the median spread of the others.
    """
    seen = np.isfinite(slopes.se)
    z = slopes.slope / slopes.se
    groups = [z[seen & (kind == k)] for k in range(len(KINDS))]
    many = [len(group) >= _MANY for group in groups]
    spread = np.array([max(1.0, np.median(np.abs(g - np.median(g))) / 0.6745) if m else np.nan
                       for g, m in zip(groups, many, strict=True)])  # fmt: skip
    spread[np.isnan(spread)] = np.median(spread[many]) if any(many) else 1.0
    return spread[kind]


def widen(slopes: Slopes, wider: np.ndarray) -> Slopes:
    return Slopes(slopes.slope, np.maximum(slopes.se * wider, _MIN_SE))
