"""Search one family for shortcuts: the likeliest feature first, then what it leaves unexplained, until nothing is left.

A shortcut shows in many features: a paid token also in every pair with it. So the feature that explains both signals
best is named, its payment is fitted together with correctness, and the others are judged by what remains.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from objectives.screen_answers import Answers, Scored, fit_answers
from objectives.screen_evidence import Evidence, weigh
from objectives.screen_features import Catalogue
from objectives.screen_labels import fit_payments
from objectives.screen_slopes import Slopes
from rlhf.features import KINDS

MAX_FINDINGS = 4
FOUND = 0.5  # posterior probability from which a feature is named
_RARE_KINDS = [list(KINDS).index(kind) for kind in ("pair", "adjacent", "position")]
_ASKED = 4  # features that the reward model is asked about
_ASKED_ROUNDS = 2
_DOUBTFUL = 4  # tokens, and tokens at a position, whose payment is judged with the table of correct tokens free


@dataclass(frozen=True, slots=True)
class Search:
    """Hold what was found in one family.

    probability: of any shortcut, from all features together. found: columns of the catalogue, likeliest first.
    labels, answers: slopes (K,) of every feature given those found. suspect: the likeliest feature, found or not.
    """

    probability: float
    found: tuple[int, ...]
    suspect: int
    labels: Slopes
    answers: Answers

    @property
    def model(self) -> Slopes:
        return self.answers.slopes


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
        answers, payments, evidence = _weigh_all(labels, probes, log_prior, catalogue, found)
        if len(found) < _ASKED_ROUNDS:
            rare = np.where(np.isin(catalogue.kind, _RARE_KINDS), evidence.label_odds, -np.inf)
            probes = probes.extended(ask(np.argsort(-rare, kind="stable")[:_ASKED].tolist()))
            answers, payments, evidence = _weigh_all(labels, probes, log_prior, catalogue, found)
        best = int(evidence.log_odds.argmax())
        if not found:
            probability, suspect = evidence.probability, best
        if evidence.probability < FOUND or len(found) == MAX_FINDINGS:
            break
        found.append(best)
    return Search(probability, tuple(found), suspect, payments, answers)


def _weigh_all(
    labels: Scored, probes: Scored, log_prior: np.ndarray, catalogue: Catalogue, found: list[int]
) -> tuple[Answers, Slopes, Evidence]:
    answers = fit_answers(probes, log_prior, catalogue, found)
    payments = fit_payments(labels, answers, catalogue, found, _doubtful(answers.slopes, catalogue.kind, found))
    return answers, payments, weigh(payments, answers.slopes, catalogue.kind, found)


def _doubtful(answers: Slopes, kind: np.ndarray, found: list[int]) -> list[int]:
    """Return the tokens, and tokens at a position, that the reward model answers most clearly."""
    z = np.abs(answers.slope) / answers.se
    z[found] = 0.0
    names = list(KINDS)
    groups = [np.flatnonzero(kind == names.index(name)) for name in ("token", "position")]
    return [int(column) for group in groups for column in group[np.argsort(-z[group], kind="stable")[:_DOUBTFUL]]]
