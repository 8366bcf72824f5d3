"""Bounds on gain and harm from posterior draws of gains and the noise of a finite number of prompts.

Every bound is the lower end of a two-sided 95% interval: it is missed in 2.5% of cases, not 5%. "No family is harmed"
holds only if it holds for each family (intersection-union), so no level is shared out between families. Naming the
families that improved picks some of many, so that takes Holm's correction.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq  # type: ignore[import-untyped]
from scipy.special import ndtr, ndtri  # type: ignore[import-untyped]
from statsmodels.stats.multitest import multipletests  # type: ignore[import-untyped]

TAIL = 0.025
_NO_NOISE = 1e-9  # an sd below this is rounding


@dataclass(frozen=True, slots=True)
class GainBounds:
    """Hold lower bounds of gains, by family (F,) and balanced, and which families (F,) improved."""

    family: np.ndarray
    balanced: float
    improved: np.ndarray

    @property
    def harm(self) -> float:
        """Upper bound of the worst family's harm; NaN stays NaN."""
        return float(np.maximum(0.0, -self.family.min()))


def bound_gains(draws: np.ndarray, standard_error: np.ndarray, *, n_finalists: int = 1) -> GainBounds:
    """Bound the gains of one finalist.

    draws: (D, F), each family's gain under each posterior draw of the tables. standard_error: (F,), of the mean gain
    between prompts. n_finalists: how many are certified together; the tail level is divided by it (Bonferroni), so that
    D must grow with it: of 800 draws, five finalists leave four in a tail.
    """
    tail = TAIL / n_finalists
    balanced_error = float(np.sqrt((standard_error**2).sum()) / len(standard_error))
    return GainBounds(
        family=np.array([mixture_quantile(gains, sd, tail) for gains, sd in zip(draws.T, standard_error, strict=True)]),
        balanced=mixture_quantile(draws.mean(1), balanced_error, tail),
        improved=multipletests(_no_gain_probability(draws, standard_error), alpha=tail, method="holm")[0],
    )


def mixture_quantile(centres: np.ndarray, sd: float, level: float) -> float:
    """Return the quantile of an equal mixture of normals at centres (D,) with one sd; NaN if anything is NaN.

    >>> round(mixture_quantile(np.array([0.5]), 0.1, 0.025), 3)
    0.304
    """
    if np.isnan(centres).any() or np.isnan(sd):
        return float("nan")
    if sd < _NO_NOISE:
        return float(np.quantile(centres, level, method="inverted_cdf"))
    if np.isinf(sd):
        return float(np.copysign(sd, ndtri(level)))
    low, high = centres.min() + sd * (ndtri(level) - 1), centres.max() + sd * (ndtri(level) + 1)
    return float(brentq(lambda x: ndtr((x - centres) / sd).mean() - level, low, high, xtol=1e-12))


def _no_gain_probability(draws: np.ndarray, standard_error: np.ndarray) -> np.ndarray:
    """Return the posterior probability that a family's gain is not above 0: (F,); 1 if it is not a number.

    Holm's procedure of statsmodels takes NaN for the smallest p-value.
    """
    probability = ndtr(-draws / np.maximum(standard_error, _NO_NOISE)).mean(0)
    return np.where(np.isnan(probability), 1.0, probability)
