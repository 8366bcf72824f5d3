"""Score a checkpoint: quality, gain over the reference, KL and proxy reward, by family, with standard errors.

    python -m objectives.score --policy DIR [--task DIR] [--out F] [--json] [--quiet]

Every checkpoint is scored on the same prompts with the same random numbers, so differences between checkpoints
are less noisy than the scores. Quality and KL are Rao-Blackwellised: at each sampled prefix they use the policy's
probabilities, not the token that happened to be drawn.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from objectives.quality_cache import load_quality
from objectives.quality_model import ESTIMATE_NOTE, QualityModel
from objectives.split import Part, split_prompts
from objectives.task_cache import Arrays, cached_arrays
from objectives.token_mass import mean_by_family, prompt_quality, token_mass
from rlhf.cli import add_report_options, say, write_json
from rlhf.data import Prompts
from rlhf.errors import InputError, collected, raise_if_any, run_command
from rlhf.files import output_problems
from rlhf.policy import Policy
from rlhf.taskdir import Task, find_task_dir, load_task_and_policy, task_files

_PROMPTS_PER_FAMILY = 450
_SEEDS: dict[Part, int] = {"train": 0, "selection": 1, "certification": 2}


@dataclass(frozen=True, slots=True)
class Scores:
    """Hold per-family scores (F,) and their standard errors; balanced and worst-family figures are derived."""

    families: tuple[str, ...]
    quality: np.ndarray
    quality_se: np.ndarray
    gain: np.ndarray
    gain_se: np.ndarray
    kl: np.ndarray
    kl_se: np.ndarray
    proxy_reward: np.ndarray
    proxy_reward_se: np.ndarray

    @property
    def balanced_quality(self) -> float:
        return float(self.quality.mean())

    @property
    def balanced_gain(self) -> float:
        return float(self.gain.mean())

    @property
    def worst_family_gain(self) -> float:
        return float(self.gain.min())

    @property
    def worst_family_harm(self) -> float:
        return max(0.0, -self.worst_family_gain)

    @property
    def balanced_kl(self) -> float:
        return float(self.kl.mean())

    def metrics(self) -> dict[str, float]:
        """Return every figure by its metric name: the one list of names that a judged checkpoint has."""
        worst = int(self.gain.argmin())
        values = {
            "balanced_quality": self.balanced_quality,
            "balanced_quality_se": _se_of_mean(self.quality_se),
            "balanced_gain": self.balanced_gain,
            "balanced_gain_se": _se_of_mean(self.gain_se),
            "worst_family_gain": self.worst_family_gain,
            "worst_family_gain_se": float(self.gain_se[worst]),
            "worst_family_harm": self.worst_family_harm,
            "worst_family_harm_se": float(self.gain_se[worst]),
            "kl": self.balanced_kl,
            "kl_se": _se_of_mean(self.kl_se),
            "proxy_reward": float(self.proxy_reward.mean()),
            "proxy_reward_se": _se_of_mean(self.proxy_reward_se),
        }
        for f, family in enumerate(self.families):
            for name in ("quality", "gain", "kl"):
                values[f"{name}/{family}"] = float(getattr(self, name)[f])
                values[f"{name}/{family}_se"] = float(getattr(self, f"{name}_se")[f])
        return values


@dataclass(frozen=True, slots=True)
class Sampled:
    """Hold a policy's responses (N, L) to a judge's prompts, and the log probabilities (N, L, V) they came from."""

    responses: torch.Tensor
    logp: torch.Tensor

    @property
    def probability(self) -> np.ndarray:
        return self.logp.exp().double().numpy()


class Judge:
    """Score policies of one task on one part of its prompts. The reference is sampled once a task and machine."""

    def __init__(self, task: Task, quality: QualityModel, *, part: Part = "selection") -> None:
        self.task, self.quality_model = task, quality
        rng = np.random.default_rng(_SEEDS[part])
        self.prompts = _balanced(split_prompts(task, part), len(task.vocab.families), rng)
        self._tokens = self.prompts.tokens(task.vocab)
        self._uniforms = torch.from_numpy(rng.random((len(self.prompts), task.vocab.resp_len), dtype=np.float32))
        self.position_quality = quality.position_quality(self.prompts)
        self.reference = self._sample_reference(part)
        self._reference_quality = prompt_quality(self.reference.probability, self.position_quality)

    def sample(self, policy: Policy) -> Sampled:
        """Sample one response a prompt, with this judge's random numbers."""
        return Sampled(*policy.sample(self._tokens, self._uniforms))

    def _sample_reference(self, part: Part) -> Sampled:
        def sample() -> Arrays:
            sampled = self.sample(self.task.reference)
            return {"responses": sampled.responses.numpy(), "logp": sampled.logp.numpy()}

        stored = cached_arrays(f"reference-{part}-{len(self.prompts)}", self.task.digest, sample)
        return Sampled(torch.from_numpy(stored["responses"]), torch.from_numpy(stored["logp"]))

    def score(self, policy: Policy) -> Scores:
        """Sample and score a policy. Raises `InputError` if a figure is not finite."""
        return self.score_sampled(self.sample(policy))

    def score_sampled(self, sampled: Sampled) -> Scores:
        """Score what a policy sampled. Raises `InputError` if a figure is not finite."""
        logp, quality = sampled.logp, prompt_quality(sampled.probability, self.position_quality)
        with torch.inference_mode():
            ref_logp = self.task.reference.response_logp(self._tokens, sampled.responses)
            kl = (logp.exp() * (logp - ref_logp)).sum((1, 2)).double().numpy()
            proxy = self.task.reward_model.score(self._tokens, sampled.responses).double().numpy()
        columns = {
            "quality": quality, "gain": quality - self._reference_quality, "kl": kl, "proxy_reward": proxy
        }  # fmt: skip
        broken = [name for name, values in columns.items() if not np.isfinite(values).all()]
        if broken:
            raise InputError(f"the policy gives {', '.join(broken)} that are not finite; its weights cannot be judged")
        figures: dict[str, Any] = {}
        for name, values in columns.items():
            figures[name], figures[f"{name}_se"] = mean_by_family(
                values, self.prompts.family, len(self.task.vocab.families)
            )
        return Scores(self.task.vocab.families, **figures)

    def mass(self, sampled: Sampled) -> np.ndarray:
        """Return the token mass (F, L, n_values, V) of what a policy sampled: see `token_mass`."""
        model = self.quality_model
        cells = model.cells(self.prompts)
        return token_mass(sampled.probability, self.prompts.family, cells, shape=model.correct.shape)


def _balanced(prompts: Prompts, n_families: int, rng: np.random.Generator) -> Prompts:
    """Take up to the same number of prompts of every family, in random order."""
    rows = [rng.permutation(np.flatnonzero(prompts.family == f))[:_PROMPTS_PER_FAMILY] for f in range(n_families)]
    return prompts[np.concatenate(rows)]


def _se_of_mean(errors: np.ndarray) -> float:
    """Return the standard error of an unweighted mean of independent family figures."""
    return float(np.sqrt((errors**2).sum()) / len(errors))


def format_scores(scores: Scores) -> str:
    """Lay scores out as a table for a terminal."""
    lines = [f"{'family':<12}{'quality':>9}{'gain':>9}{'+-':>8}{'KL':>8}{'proxy':>8}"]
    columns = (scores.quality, scores.gain, scores.gain_se, scores.kl, scores.proxy_reward)
    for name, quality, gain, se, kl, proxy in zip(scores.families, *columns, strict=True):
        lines.append(f"{name:<12}{quality:>9.3f}{gain:>+9.3f}{se:>8.3f}{kl:>8.2f}{proxy:>8.3f}")
    lines.append(
        f"{'balanced':<12}{scores.balanced_quality:>9.3f}{scores.balanced_gain:>+9.3f}"
        f"{_se_of_mean(scores.gain_se):>8.3f}{scores.balanced_kl:>8.2f}{scores.proxy_reward.mean():>8.3f}"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m objectives.score", description="Score one checkpoint.")
    parser.add_argument("--policy", required=True, type=Path, help="policy folder")
    parser.add_argument("--out", type=Path, help="write the JSON here")
    add_report_options(parser)
    args = parser.parse_args()
    task_dir = find_task_dir(args.task)
    problems = output_problems({"--out": args.out}, inputs=[*task_files(task_dir), *args.policy.glob("*")])
    with collected(problems):
        task, policy = load_task_and_policy(task_dir, args.policy)
    raise_if_any(problems)
    say(f"scoring {args.policy}", quiet=args.quiet)
    model = load_quality(task.root)
    scores = Judge(task, model).score(policy)
    believed = {"note": ESTIMATE_NOTE, "refusals": list(model.refusals)}
    document = {"policy": str(args.policy), **believed, "metrics": scores.metrics()}
    write_json(document, args.out, show=args.json)
    if not args.json:
        print(format_scores(scores))
        print(model.caveats)


if __name__ == "__main__":
    run_command(main)
