"""Search one family for shortcuts: the likeliest feature first, then what it leaves unexplained, until nothing is left.

A shortcut shows in many features: a paid token also in every pair with it. So the feature that explains both signals
best is named, its payment is fitted together with correctness, and the others are judged by what remains.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from objectives.screen_answers import Effects, Scored, answer_slopes, fit_effects
from objectives.screen_evidence import label_odds, weigh
from objectives.screen_features import Catalogue
from objectives.screen_labels import fit_payments
from objectives.screen_slopes import Slopes
from rlhf.features import KINDS

MAX_FINDINGS = 4
FOUND = 0.5  # posterior probability from which a feature is named
_RARE_KINDS = [list(KINDS).index(kind) for kind in ("pair", "adjacent", "position")]
_ASKED = 6  # features that the reward model is asked about
_ASKED_ROUNDS = 2
_DOUBTFUL = 4  # tokens, and tokens at a position, whose payment is judged with the table of correct tokens free


@dataclass(frozen=True, slots=True)
class Search:
    """Hold what was found in one family.

    probability: of any shortcut, from all features together. found: columns of the catalogue, likeliest first.
    labels, model: slopes (K,) of every feature given those found. suspect: the likeliest feature, found or not.
    """

    probability: float
    found: tuple[int, ...]
    suspect: int
    labels: Slopes
    model: Slopes
    effects: Effects


def search_family(
    labels: Scored, probes: Scored, log_prior: np.ndarray, catalogue: Catalogue, ask: Callable[[list[int]], Scored]
) -> Search:
    """Search in crowd-labelled rows and in reward-model scores of randomised responses.

    ask: scores responses with the given features put in. Rare features occur in few probes, and few rows; so the reward
    model is asked about those that crowd labels propose.
    """
    found: list[int] = []
    probability, suspect = 0.0, 0
    while True:
        if len(found) < _ASKED_ROUNDS:
            probes = probes.extended(ask(_proposed(labels, fit_effects(probes, log_prior, catalogue, found), found)))
        effects = fit_effects(probes, log_prior, catalogue, found)
        answers = answer_slopes(probes, effects, found)
        payments = fit_payments(labels, effects, found, _doubtful(answers, catalogue.kind, found))
        evidence = weigh(payments, answers, catalogue.kind, found)
        best = int(evidence.log_odds.argmax())
        if not found:
            probability, suspect = evidence.probability, best
        if evidence.probability < FOUND or len(found) == MAX_FINDINGS:
            return Search(probability, tuple(found), suspect, payments, answers, effects)
        found.append(best)


def _proposed(labels: Scored, effects: Effects, found: list[int]) -> list[int]:
    """Return the rare features that crowd labels alone speak most for."""
    kind = effects.catalogue.kind
    rare = np.where(np.isin(kind, _RARE_KINDS), label_odds(fit_payments(labels, effects, found, []), kind), -np.inf)
    rare[found] = -np.inf
    return np.argsort(-rare, kind="stable")[:_ASKED].tolist()


def _doubtful(answers: Slopes, kind: np.ndarray, found: list[int]) -> list[int]:
    """Return the tokens, and tokens at a position, that the reward model answers most clearly."""
    z = np.abs(answers.slope) / answers.se
    z[found] = 0.0
    names = list(KINDS)
    groups = [np.flatnonzero(kind == names.index(name)) for name in ("token", "position")]
    return [int(column) for group in groups for column in group[np.argsort(-z[group], kind="stable")[:_DOUBTFUL]]]
