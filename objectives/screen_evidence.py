"""How likely is it that crowd labels pay for a feature and the reward model has learnt it? Two signals, one posterior.

Each feature has a slope in the crowd labels and one in the reward model's scores. Four explanations compete: nothing;
a shortcut, seen by both with the same sign, the reward model answering with a share of what labels pay; a quirk of the
reward model that labels do not pay; a payment that the reward model has not learnt. Only the second is a finding.
Prior odds are shared out evenly over kinds, then over the features of a kind, so that looking at more features
demands more evidence of each (Bayesian multiplicity control: Scott and Berger 2010, arXiv:1011.2333).
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import expit, logsumexp  # type: ignore[import-untyped]

from objectives.screen_slopes import Slopes
from rlhf.features import KINDS

_SHORTCUT_PRIOR = 0.2  # that a family has one
_QUIRK_PRIOR = 0.4  # that the reward model answers what labels do not pay: it smears one family's shortcut over others
_UNLEARNT_PRIOR = 0.1  # that labels pay what the reward model does not answer
MAX_SIZE = 3.0
_STEP = 0.14  # of sizes, in logs: each stands for sizes around it, so that precise slopes do not fall between two
_SIZES = np.exp(np.arange(np.log(0.06), np.log(MAX_SIZE), _STEP))  # per unit, log-uniform prior
_SHARES = {  # of what labels pay that the reward model answers, evenly likely: the rarer the feature, the less
    "token": (0.5, 0.7, 0.85, 1.0),
    "pair": (0.15, 0.35, 0.6, 1.0),
    "adjacent": (0.07, 0.13, 0.25, 0.5),
    "position": (0.2, 0.35, 0.6, 1.0),
    "repetition": (0.2, 0.35, 0.6, 1.0),
}
_QUIRKS = np.exp(np.arange(np.log(0.004), np.log(MAX_SIZE), _STEP))  # down to the least that a shortcut is answered
_KNOWN_SE = 0.1  # of a label slope: one row's worth at the usual noise of crowd labels
_LEAST_KNOWN = 0.25  # weight of a feature that no row holds: a reward model learns from rows like these


@dataclass(frozen=True, slots=True)
class Evidence:
    """Hold the posterior `probability` that the family has a shortcut not yet found, and `log_odds` (K,) of each."""

    probability: float
    log_odds: np.ndarray


def weigh(labels: Slopes, model: Slopes, kind: np.ndarray, found: list[int]) -> Evidence:
    """Compare the four explanations of every feature's two slopes, those already `found` left out."""
    sizes, quirks = _both_signs(_SIZES), _both_signs(_QUIRKS)
    label_fit = _log_ratio(labels, sizes, width=_STEP / 2)  # (K, S)
    shares = np.array([_SHARES[name] for name in KINDS])[kind]  # (K, shares)
    gaps = np.diff(np.log(shares)).mean(1)
    model_fit = np.stack([_log_ratio(model, share[:, None] * sizes, width=gaps / 2) for share in shares.T])
    both = logsumexp(label_fit + model_fit, axis=(0, 2)) - np.log(model_fit.shape[0] * len(sizes))
    label_only = logsumexp(label_fit, axis=1) - np.log(len(sizes))
    model_only = logsumexp(_log_ratio(model, quirks, width=_STEP / 2), axis=1) - np.log(len(quirks))
    share = _prior_share(kind)
    share[found] = -np.inf
    rows = (_KNOWN_SE / labels.se) ** 2
    log_odds = np.log(_SHORTCUT_PRIOR) + share + np.log((_LEAST_KNOWN + rows) / (1 + rows)) + both
    one_sided = np.logaddexp(np.log(_UNLEARNT_PRIOR) + label_only, np.log(_QUIRK_PRIOR) + model_only)
    other = np.logaddexp(0.0, logsumexp(share + one_sided))
    weight = logsumexp(log_odds)
    return Evidence(float(expit(weight - other)), log_odds)


def label_odds(labels: Slopes, kind: np.ndarray) -> np.ndarray:
    """Return each feature's log odds by crowd labels alone (K,), up to a constant."""
    return _prior_share(kind) + logsumexp(_log_ratio(labels, _both_signs(_SIZES), width=_STEP / 2), axis=1)


def _both_signs(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([sizes, -sizes])


def _prior_share(kind: np.ndarray) -> np.ndarray:
    """Return the log of each feature's share (K,) of a prior probability."""
    return -np.log(np.bincount(kind)[kind] * np.unique(kind).size)


def _log_ratio(slopes: Slopes, sizes: np.ndarray, *, width: float | np.ndarray) -> np.ndarray:
    """Return log N(slope; size, spread) - log N(slope; 0, se): (K, S), `sizes` (S,) or (K, S).

    spread: of error and, since each size stands for those around it up to the next, of `width` () or (K,) times it.
    """
    seen = np.isfinite(slopes.se)[:, None]
    slope, variance = slopes.slope[:, None], np.where(seen, slopes.se[:, None], 1.0) ** 2
    spread = variance + (np.reshape(width, (-1, 1)) * sizes) ** 2
    ratio = (slope**2 / variance - (slope - sizes) ** 2 / spread - np.log(spread / variance)) / 2
    return np.where(seen, ratio, 0.0)
