"""Search one family for shortcuts: the likeliest feature first, then what it leaves unexplained, until nothing is left.

A shortcut shows in many features: a paid token also in every pair with it. So the feature that explains both signals
best is named, its payment is fitted together with correctness, and the others are judged by what remains.
"""

from dataclasses import dataclass

import numpy as np

from objectives.screen_evidence import Slopes, residual_slopes, weigh
from objectives.screen_features import Catalogue
from objectives.screen_fit import Fit, Scored, fit_table

MAX_FINDINGS = 4
FOUND = 0.5  # posterior probability from which a feature is named
_MODEL_TRUST = 0.9  # in the tables that reward-model scores propose to the label fit; the rest stays with the reference
_FLOOR = 1e-6


@dataclass(frozen=True, slots=True)
class Search:
    """Hold what was found in one family.

    probability: of any shortcut, from all features together. found: columns of the catalogue, likeliest first.
    labels, model: slopes (K,) of every feature given the others found. suspect: the likeliest feature, found or not.
    """

    probability: float
    found: tuple[int, ...]
    suspect: int
    labels: Slopes
    model: Slopes
    label_fit: Fit
    model_fit: Fit


def search_family(labels: Scored, probes: Scored, log_prior: np.ndarray, catalogue: Catalogue) -> Search:
    """Search in crowd-labelled rows and in reward-model scores of randomised responses."""
    found: list[int] = []
    probability, suspect = 0.0, 0
    while True:
        model_fit = fit_table(probes, log_prior, found)
        proposed = np.log(_MODEL_TRUST * model_fit.table + (1 - _MODEL_TRUST) * np.exp(log_prior) + _FLOOR)
        label_fit = fit_table(labels, proposed, found, unit=1 / log_prior.shape[0])
        label_slopes = _slopes(labels, label_fit, found, catalogue)
        model_slopes = _slopes(probes, model_fit, found, catalogue)
        evidence = weigh(label_slopes, model_slopes, catalogue.kind, found)
        best = int(evidence.log_odds.argmax())
        if not found:
            probability, suspect = evidence.probability, best
        if evidence.probability < FOUND or len(found) == MAX_FINDINGS:
            break
        found.append(best)
    return Search(probability, tuple(found), suspect, label_slopes, model_slopes, label_fit, model_fit)


def _slopes(scored: Scored, fit: Fit, found: list[int], catalogue: Catalogue) -> Slopes:
    """Return the slopes of what the fit leaves, and the fitted sizes of the features found."""
    slopes = residual_slopes(scored.features, fit.residual - scored.features[:, found] @ fit.sizes, catalogue.kind)
    slopes.slope[found] = fit.sizes
    return slopes
