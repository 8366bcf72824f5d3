"""Candidates: judged checkpoints, which of them are feasible, and which are on the front."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from objectives.front import front_mask, knee_height
from objectives.release import MAX_WORST_FAMILY_HARM, shortfall

PREFERENCES = ("quality", "knee", "low-kl")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One checkpoint of one trial, judged. `metrics` are the judge's, by name, all finite."""

    trial: int
    step: int
    params: Mapping[str, Any]
    metrics: Mapping[str, float]
    model_id: str

    @property
    def quality(self) -> float:
        return self.metrics["balanced_quality"]

    @property
    def gain(self) -> float:
        return self.metrics["balanced_gain"]

    @property
    def worst_gain(self) -> float:
        return self.metrics["worst_family_gain"]

    @property
    def harm(self) -> float:
        return self.metrics["worst_family_harm"]

    @property
    def kl(self) -> float:
        return self.metrics["kl"]


def is_feasible(candidate: Candidate, *, max_harm: float) -> bool:
    return candidate.harm <= max_harm


def front(candidates: Sequence[Candidate], *, max_harm: float) -> list[Candidate]:
    """Return the non-dominated feasible candidates, lowest KL first."""
    feasible = [candidate for candidate in candidates if is_feasible(candidate, max_harm=max_harm)]
    values = np.array([[c.quality, c.worst_gain, c.kl] for c in feasible]).reshape(-1, 3)
    kept = [candidate for candidate, on_front in zip(feasible, front_mask(values), strict=True) if on_front]
    return sorted(kept, key=lambda candidate: candidate.kl)


def ranked(candidates: Sequence[Candidate], *, prefer: str, max_harm: float) -> list[Candidate]:
    """Return the candidates of the front that meet the release rule by their scores, the preferred first.

    quality: by balanced quality. knee: by height above the chord of quality against KL. low-kl: by KL.
    A sweep's `max_harm` can make the rule stricter, not laxer.
    """
    eligible = [c for c in front(candidates, max_harm=max_harm) if _shortfall(c, max_harm) == 0]
    if prefer == "low-kl":
        return eligible
    if prefer == "knee":
        height = knee_height([c.kl for c in eligible], [c.quality for c in eligible]) if eligible else np.zeros(0)
        return [eligible[index] for index in np.argsort(-height, kind="stable")]
    return sorted(eligible, key=lambda candidate: -candidate.quality)


def nearest(candidates: Sequence[Candidate], *, max_harm: float) -> Candidate | None:
    """Return the candidate that misses the release rule by least."""
    return min(candidates, key=lambda candidate: _shortfall(candidate, max_harm), default=None)


def _shortfall(candidate: Candidate, max_harm: float) -> float:
    return shortfall(candidate.gain, candidate.worst_gain, max_harm=min(max_harm, MAX_WORST_FAMILY_HARM))
