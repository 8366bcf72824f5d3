"""The release rule: balanced gain of at least +0.03 and no family harmed by more than 0.03."""

from dataclasses import dataclass

from objectives.score import Scores

MIN_BALANCED_GAIN = 0.03
MAX_WORST_FAMILY_HARM = 0.03


def shortfall(balanced_gain: float, worst_family_gain: float, *, max_harm: float = MAX_WORST_FAMILY_HARM) -> float:
    """Return by how much the release rule is missed, its two parts added up; 0 where it is met. NaN misses it.

    >>> shortfall(0.05, -0.03), shortfall(0.02, -0.04) > 0
    (0.0, True)
    """
    if not (balanced_gain >= MIN_BALANCED_GAIN and worst_family_gain >= -max_harm):
        return max(0.0, -max_harm - worst_family_gain) + max(0.0, MIN_BALANCED_GAIN - balanced_gain) or float("inf")
    return 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Say whether a checkpoint may ship, and every reason why not."""

    release: bool
    reasons: tuple[str, ...]


def release_verdict(scores: Scores, *, max_harm: float = MAX_WORST_FAMILY_HARM) -> Verdict:
    """Apply the release rule to scores; NaN never passes. The scores are estimates; so is the verdict."""
    reasons = [
        f"{family} harmed ({gain:+.4f})"
        for family, gain in zip(scores.families, scores.gain, strict=True)
        if not gain >= -max_harm
    ]
    if not scores.balanced_gain >= MIN_BALANCED_GAIN:
        reasons.append(f"balanced gain {scores.balanced_gain:+.4f} is under {MIN_BALANCED_GAIN:+.2f}")
    return Verdict(release=not reasons, reasons=tuple(reasons))
