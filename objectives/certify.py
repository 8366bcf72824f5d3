"""Certify a frozen checkpoint on prompts and random numbers that no search has seen: bounds, not scores.

    python -m objectives.certify --policy DIR [--task DIR] [--json] [--quiet]

Bounds come from the posterior draws of the label model and from the finite number of prompts. Nothing is certified
where the fit's own checks refuse. Exit status: 0 certified, 3 not certified, 2 bad input.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from objectives.bounds import TAIL, GainBounds, bound_gains
from objectives.quality_cache import load_quality
from objectives.quality_model import ESTIMATE_NOTE, QualityModel
from objectives.release import MAX_WORST_FAMILY_HARM, MIN_BALANCED_GAIN
from objectives.score import Judge
from objectives.token_mass import quality_by_probability, quality_by_table
from rlhf.cli import add_report_options, say, write_json
from rlhf.errors import run_command
from rlhf.json_values import finite_or_none
from rlhf.policy import Policy
from rlhf.taskdir import Task, find_task_dir, load_task_and_policy

EXIT_NOT_CERTIFIED = 3


@dataclass(frozen=True, slots=True)
class Certificate:
    """Hold what can be claimed of one checkpoint, on certification prompts.

    quality, gain, gain_se: (F,) estimates, and the error of the gain between prompts. bounds: of the gains. refusals:
    why the fit is not believed. cross_fit_difference: balanced quality by the model that rewards are made of, minus by
    the judge's, which has seen more labels. selection_gain: balanced gain on the prompts the search saw, if known.
    """

    families: tuple[str, ...]
    quality: np.ndarray
    gain: np.ndarray
    gain_se: np.ndarray
    bounds: GainBounds
    refusals: tuple[str, ...]
    cross_fit_difference: float
    selection_gain: float | None = None
    n_finalists: int = 1
    max_harm: float = MAX_WORST_FAMILY_HARM

    @property
    def certified(self) -> bool:
        return not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """Every reason not to certify, with its number; NaN never passes."""
        reasons = list(self.refusals)
        if not self.bounds.balanced >= MIN_BALANCED_GAIN:
            reasons.append(
                f"balanced gain may be as low as {self.bounds.balanced:+.4f}; "
                f"at least {MIN_BALANCED_GAIN:+.2f} is needed"
            )
        reasons += [
            f"{family}: gain may be as low as {lower:+.4f}, a harm above {self.max_harm}"
            for family, lower in zip(self.families, self.bounds.family, strict=True)
            if not lower >= -self.max_harm
        ]
        return tuple(reasons)

    @property
    def balanced_gain(self) -> float:
        return float(self.gain.mean())

    @property
    def optimism(self) -> float | None:
        """Selection score minus certified score (balanced gain): how much the search flattered its pick."""
        return None if self.selection_gain is None else self.selection_gain - self.balanced_gain

    @property
    def improved(self) -> tuple[str, ...]:
        """Families that improved, by Holm's procedure."""
        return tuple(name for name, yes in zip(self.families, self.bounds.improved, strict=True) if yes)

    def to_json(self) -> dict[str, Any]:
        """Return the certificate as a document; numbers that are not finite become null."""
        return {
            "certified": self.certified,
            "reasons": list(self.reasons),
            "note": f"{ESTIMATE_NOTE} {self.level_note}",
            "tail": TAIL / self.n_finalists,
            "n_finalists": self.n_finalists,
            "max_harm": self.max_harm,
            "balanced_quality": finite_or_none(self.quality.mean()),
            "balanced_gain": finite_or_none(self.balanced_gain),
            "balanced_gain_lower": finite_or_none(self.bounds.balanced),
            "worst_family_harm_upper": finite_or_none(self.bounds.harm),
            "improved_families": list(self.improved),
            "selection_balanced_gain": self.selection_gain,
            "optimism": self.optimism,
            "cross_fit_difference": finite_or_none(self.cross_fit_difference),
            "families": {
                name: {
                    "quality": finite_or_none(self.quality[f]),
                    "gain": finite_or_none(self.gain[f]),
                    "gain_se_of_prompts": finite_or_none(self.gain_se[f]),
                    "gain_lower": finite_or_none(self.bounds.family[f]),
                }
                for f, name in enumerate(self.families)
            },
        }

    @property
    def level_note(self) -> str:
        shared = f", shared by {self.n_finalists} finalists" if self.n_finalists > 1 else ""
        return f"Bounds are the lower ends of two-sided {1 - 2 * TAIL:.0%} intervals ({TAIL:.1%} tails{shared})."


def certify(
    policy: Policy,
    task: Task,
    model: QualityModel,
    *,
    selection_gain: float | None = None,
    n_finalists: int = 1,
    max_harm: float = MAX_WORST_FAMILY_HARM,
) -> Certificate:
    """Judge a frozen checkpoint on the certification prompts. Raises `InputError` if its figures are not finite.

    selection_gain: its balanced gain on the selection prompts, to report the optimism. n_finalists: how many are
    certified together; each is then held to a smaller tail.
    """
    judge = Judge(task, model, part="certification")
    sampled = judge.sample(policy)
    scores = judge.score_sampled(sampled)
    return certify_mass(
        judge.mass(sampled), judge.mass(judge.reference), scores.gain_se, model,
        selection_gain=selection_gain, n_finalists=n_finalists, max_harm=max_harm,
    )  # fmt: skip


def certify_mass(
    mass: np.ndarray,
    reference_mass: np.ndarray,
    gain_se: np.ndarray,
    model: QualityModel,
    *,
    selection_gain: float | None = None,
    n_finalists: int = 1,
    max_harm: float = MAX_WORST_FAMILY_HARM,
) -> Certificate:
    """Certify from token masses (F, L, n_values, V) of checkpoint and reference on the same prompts.

    gain_se: (F,), standard error of the gain between prompts, at the posterior mean.
    """
    quality = quality_by_probability(mass, model.correct)
    by_reward = quality_by_probability(mass, model.reward_correct)
    return Certificate(
        families=model.vocab.families,
        quality=quality,
        gain=quality - quality_by_probability(reference_mass, model.correct),
        gain_se=gain_se,
        bounds=bound_gains(quality_by_table(mass - reference_mass, model.draws), gain_se, n_finalists=n_finalists),
        refusals=model.refusals,
        cross_fit_difference=float(by_reward.mean() - quality.mean()),
        selection_gain=selection_gain,
        n_finalists=n_finalists,
        max_harm=max_harm,
    )


def format_certificate(certificate: Certificate) -> str:
    """Lay a certificate out for a terminal."""
    lines = [f"{'family':<12}{'quality':>9}{'gain':>9}{'at least':>10}"]
    columns = (certificate.quality, certificate.gain, certificate.bounds.family)
    for name, quality, gain, lower in zip(certificate.families, *columns, strict=True):
        lines.append(f"{name:<12}{quality:>9.3f}{gain:>+9.3f}{lower:>+10.3f}")
    lines += [
        f"{'balanced':<12}{certificate.quality.mean():>9.3f}{certificate.balanced_gain:>+9.3f}"
        f"{certificate.bounds.balanced:>+10.3f}",
        "",
        f"worst-family harm    at most {certificate.bounds.harm:.3f} (allowed: {certificate.max_harm})",
        f"improved             {', '.join(certificate.improved) or 'no family'} (Holm)",
    ]
    if certificate.optimism is not None:
        lines.append(
            f"optimism             {certificate.optimism:+.4f}: balanced gain {certificate.selection_gain:+.4f} on "
            "selection prompts minus the one above"
        )
    lines += [
        f"cross-fit difference {certificate.cross_fit_difference:+.4f}: balanced quality by the labels that rewards "
        "may use, minus by all labels",
        "",
        *([f"NOT CERTIFIED: {reason}" for reason in certificate.reasons] or ["CERTIFIED"]),
        certificate.level_note,
        ESTIMATE_NOTE,
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m objectives.certify", description="Certify one checkpoint.")
    parser.add_argument("--policy", required=True, type=Path, help="policy folder")
    add_report_options(parser)
    args = parser.parse_args()
    task, policy = load_task_and_policy(find_task_dir(args.task), args.policy)
    say(f"certifying {args.policy}", quiet=args.quiet)
    model = load_quality(task.root)
    selection = Judge(task, model).score(policy)
    certificate = certify(policy, task, model, selection_gain=selection.balanced_gain)
    if args.json:
        write_json({"policy": str(args.policy), **certificate.to_json()}, None)
    else:
        print(format_certificate(certificate))
    return 0 if certificate.certified else EXIT_NOT_CERTIFIED


if __name__ == "__main__":
    run_command(main)
