"""Repeat the whole judgement over many label sets and worlds with known truth: are its bounds right, and how wide?

    python scripts/study_judge.py [--worlds 3] [--label-sets 40] [--expert 100] [--crowd 200] [--quick]

No network takes part: the reference is the world's own demonstration distribution, policies are tables. Those to be
judged are tilted towards what rewards are made of (strongly: one that exploits the errors of the fit, and mildly),
or harm one family by a known amount, near the limit and far beyond it, while the others improve.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch

from objectives.candidates import CandidateTokens
from objectives.certify import Certificate, certify_mass
from objectives.quality_model import QualityModel, fit_labels
from objectives.release import MAX_WORST_FAMILY_HARM
from objectives.token_mass import mean_by_family, prompt_quality, token_mass
from rlhf.data import Labelled, Prompts
from rlhf.features import parse_feature
from rlhf.vocab import DEFAULT_VOCAB
from rlhf.world import Shortcut, World, draw_prompts, make_world, quality_of_matches

VOCAB = DEFAULT_VOCAB
SHORTCUTS = (  # world by world, in turn: family, kind, tokens, position, size
    (("dune", "token", ["pa"], None, 1.5), ("ember", "token", ["he"], None, 0.44)),
    (("dune", "pair", ["pa", "he"], None, 0.6), ("anvil", "adjacent", ["ba", "da"], None, 0.5)),
    (("ember", "position", ["ka"], 2, -0.5), ("birch", "repetition", [], None, 0.2)),
)
STRONG_BETA, MILD_BETA = 0.01, 0.05
HARMS = {"near": 0.035, "far": 0.15}
CERTIFICATION_PROMPTS = 450  # a family, as in objectives.score
LOG_FLOOR = 1e-4  # as in objectives.candidates


@dataclass(frozen=True, slots=True)
class Scenario:
    """Say how labels are made: how many a family, from which kind of world, shuffled or not."""

    name: str
    label_sets: int
    n_expert: int
    n_crowd: int
    interaction: float = 0.0
    shuffled: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy judged: its certificate and its true gains (F,)."""

    certificate: Certificate
    gain: np.ndarray

    @property
    def harmful(self) -> bool:
        return bool(self.gain.min() < -MAX_WORST_FAMILY_HARM)


def study(scenario: Scenario, n_worlds: int) -> dict[str, float | dict[str, float]]:
    """Judge every policy under every label set of every world, and summarise."""
    models: list[tuple[QualityModel, World]] = []
    outcomes: dict[str, list[Outcome]] = defaultdict(list)
    started = time.monotonic()
    for world_seed in range(n_worlds):
        world = build_world(world_seed, interaction=scenario.interaction)
        for label_seed in range(scenario.label_sets):
            rng = np.random.default_rng([world_seed, label_seed, scenario.n_expert])
            model = fit(world, scenario, rng)
            models.append((model, world))
            prompts = draw_prompts(VOCAB, np.full(len(VOCAB.families), CERTIFICATION_PROMPTS), rng)
            reference = mass_and_quality(world.shares, prompts, model)
            for name, policy in policies(world, model, harmed=label_seed % len(VOCAB.families)).items():
                certificate = certify_table(mass_and_quality(policy, prompts, model), reference, prompts, model)
                truth = true_quality(world, policy) - true_quality(world, world.shares)
                outcomes[name].append(Outcome(certificate, truth))
        print(f"{scenario.name}: world {world_seed}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return summarise(models, outcomes)


def build_world(seed: int, *, interaction: float) -> World:
    shortcuts = tuple(
        Shortcut(VOCAB.families.index(family), parse_feature(kind, tokens, position, VOCAB), size)
        for family, kind, tokens, position, size in SHORTCUTS[seed % len(SHORTCUTS)]
    )
    return replace(make_world(VOCAB, shortcuts, np.random.default_rng(seed)), interaction=interaction)


def fit(world: World, scenario: Scenario, rng: np.random.Generator) -> QualityModel:
    def labelled(count: int, *, by_crowd: bool) -> Labelled:
        prompts = draw_prompts(VOCAB, np.full(len(VOCAB.families), count), rng)
        label = world.crowd_labels if by_crowd else world.expert_labels
        rows = label(prompts, world.demonstrate(prompts, rng), rng)
        if scenario.shuffled:
            for family in range(len(VOCAB.families)):
                of_family = prompts.family == family
                rows.labels[of_family] = rng.permutation(rows.labels[of_family])
        return rows

    candidates = CandidateTokens(world.attribute, np.log(world.shares + LOG_FLOOR))
    expert = labelled(scenario.n_expert, by_crowd=False)
    return fit_labels(
        expert, labelled(scenario.n_crowd, by_crowd=True), candidates, VOCAB, seed=int(rng.integers(2**31))
    )


def policies(world: World, model: QualityModel, *, harmed: int) -> dict[str, np.ndarray]:
    """Return the policies to judge as token probabilities (F, L, n_values, V)."""
    mild = tilted(world.shares, model.reward_correct, beta=MILD_BETA)
    judged = {"exploiting": tilted(world.shares, model.reward_correct, beta=STRONG_BETA), "mild": mild}
    piled = np.zeros_like(world.shares)
    paid = [t for s in world.shortcuts if s.family == harmed for t in s.feature.tokens]
    piled[..., paid[0] if paid else 0] = 1.0
    lost = true_quality(world, world.shares)[harmed] - true_quality(world, piled)[harmed]
    for name, harm in HARMS.items():
        share = harm / lost  # exact for an additive quality, close to it for another
        policy = mild.copy()
        policy[harmed] = (1 - share) * world.shares[harmed] + share * piled[harmed]
        judged[f"harmful, {name}"] = policy
    return judged


def tilted(shares: np.ndarray, correct: np.ndarray, *, beta: float) -> np.ndarray:
    """Return the KL-regularised optimum for a reward of correctness probabilities."""
    weights = shares * np.exp(correct / (VOCAB.resp_len * beta))
    return weights / weights.sum(-1, keepdims=True)


def true_quality(world: World, policy: np.ndarray) -> np.ndarray:
    """Return exact quality by family, over all attribute tuples: (F,)."""
    attrs = np.array(list(product(range(VOCAB.n_values), repeat=VOCAB.n_attrs)))
    matched = np.take_along_axis(policy, world.correct[..., None], -1)[..., 0]  # (F, L, n_values)
    return np.array(
        [
            quality_of_matches(
                by_value[np.arange(VOCAB.resp_len), attrs[:, attribute]], interaction=world.interaction
            ).mean()
            for by_value, attribute in zip(matched, world.attribute, strict=True)
        ]
    )


def certify_table(
    checkpoint: tuple[np.ndarray, np.ndarray],
    reference: tuple[np.ndarray, np.ndarray],
    prompts: Prompts,
    model: QualityModel,
) -> Certificate:
    """Certify by token masses and prompt qualities, with the functions that certify a checkpoint."""
    gain_se = mean_by_family(checkpoint[1] - reference[1], prompts.family, len(VOCAB.families))[1]
    return certify_mass(checkpoint[0], reference[0], gain_se, model)


def mass_and_quality(policy: np.ndarray, prompts: Prompts, model: QualityModel) -> tuple[np.ndarray, np.ndarray]:
    cells = model.cells(prompts)
    probability = policy[prompts.family[:, None], np.arange(VOCAB.resp_len), cells]
    mass = token_mass(probability, prompts.family, cells, shape=model.correct.shape)
    return mass, prompt_quality(probability, model.position_quality(prompts))


def summarise(
    models: list[tuple[QualityModel, World]], outcomes: dict[str, list[Outcome]]
) -> dict[str, float | dict[str, float]]:
    judged = [outcome for group in outcomes.values() for outcome in group]
    return {
        "fits": len(models),
        "cell_accuracy": float(np.mean([(m.correct.argmax(-1) == w.correct).mean() for m, w in models])),
        "held_out_rmse": float(np.mean([m.checks.rmse for m, _ in models])),
        "balanced_coverage": float(np.mean([covered(o)[0] for o in judged])),
        "balanced_width": float(np.median([o.gain.mean() - o.certificate.bounds.balanced for o in judged])),
        "family_coverage": float(np.mean([covered(o)[1] for o in judged])),
        "family_width": float(np.median([o.gain - o.certificate.bounds.family for o in judged])),
        "balanced_coverage_by_policy": {n: float(np.mean([covered(o)[0] for o in g])) for n, g in outcomes.items()},
        "family_coverage_by_policy": {n: float(np.mean([covered(o)[1] for o in g])) for n, g in outcomes.items()},
        "harmful": sum(o.harmful for o in judged),
        "harmful_certified": sum(o.harmful and o.certificate.certified for o in judged),
        "certified": float(np.mean([o.certificate.certified for o in judged if not o.harmful])),
        "certified_count": sum(o.certificate.certified for o in judged),
        "refused": float(np.mean([bool(m.refusals) for m, _ in models])),
        "rhat_median": float(np.median([m.checks.rhat.max() for m, _ in models])),
        "rhat_max": float(np.max([m.checks.rhat.max() for m, _ in models])),
    }


def covered(outcome: Outcome) -> tuple[bool, float]:
    """Say whether the balanced bound lies below the truth, and for which share of families theirs does."""
    bounds = outcome.certificate.bounds
    return bool(bounds.balanced <= outcome.gain.mean()), float((bounds.family <= outcome.gain).mean())


COLUMNS = (
    ("fits", "fits", "d"), ("cells", "cell_accuracy", ".4f"), ("RMSE", "held_out_rmse", ".4f"),
    ("balanced", "balanced_coverage", ".1%"), ("width", "balanced_width", ".4f"),
    ("family", "family_coverage", ".1%"), ("width", "family_width", ".4f"),
    ("harmful", "harmful", "d"), ("passed", "harmful_certified", "d"), ("good passed", "certified", ".0%"),
    ("refused", "refused", ".1%"), ("R-hat", "rhat_median", ".3f"), ("largest", "rhat_max", ".3f"),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/study_judge.py", description="Study the judge on known truths.")
    parser.add_argument("--worlds", type=int, default=3)
    parser.add_argument("--label-sets", type=int, default=40, help="in each world; the other scenarios take fewer")
    parser.add_argument("--expert", type=int, default=100, help="expert labels a family")
    parser.add_argument("--crowd", type=int, default=200, help="crowd labels a family")
    parser.add_argument("--quick", action="store_true", help="two label sets a scenario: only to see that it runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    n = 2 if args.quick else args.label_sets
    few, sizes = max(2, n // 20), (args.expert, args.crowd)
    scenarios = [
        Scenario(f"{args.expert}+{args.crowd}", n, *sizes),
        Scenario("25+50", max(2, n // 4), 25, 50),
        Scenario("shuffled", few, *sizes, shuffled=True),
        Scenario("interacting", few, *sizes, interaction=0.5),
    ]
    started = time.monotonic()
    print(f"{'labels':<13}" + "".join(f"{title:>{max(9, len(title) + 2)}}" for title, _, _ in COLUMNS))
    results = {}
    for scenario in scenarios:
        results[scenario.name] = row = study(scenario, args.worlds)
        cells = (f"{format(row[key], spec):>{max(9, len(title) + 2)}}" for title, key, spec in COLUMNS)
        print(f"{scenario.name:<13}" + "".join(cells), flush=True)
    print(
        "balanced, family: how often the lower bound of the gain lies below the truth (nominal 97.5%); width: median\n"
        "of truth minus bound. harmful: policies judged whose true harm is above 0.03; passed: certified among them;\n"
        f"good passed: certified among the others. {args.worlds} worlds, "
        f"{time.process_time():.0f} s of one core ({time.monotonic() - started:.0f} s on the clock)."
    )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
