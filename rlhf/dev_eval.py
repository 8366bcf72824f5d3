"""Command line: evaluate a policy the vendor's way, by its reward model.

    python -m rlhf.dev_eval --policy DIR [--prompts F --n 1 --seed 0 --out F] [--task DIR] [--quiet]

Reports the proxy reward's mean, standard deviation, median and 90th percentile, the mean KL from the reference,
and the reward model's Pearson correlation with the expert labels. None of these sees a shortcut: see `objectives`.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf.cli import add_quiet_option, add_seed_option, add_task_option, say, write_json
from rlhf.correlation import pearson
from rlhf.data import Prompts, read_prompts
from rlhf.errors import collected, raise_if_any, run_command
from rlhf.files import output_problems
from rlhf.policy import Policy
from rlhf.reinforce import sequence_kl, taken_logp
from rlhf.taskdir import Task, find_task_dir, load_task_and_policy, task_files
from rlhf.vocab import load_vocab


@torch.no_grad()
def dev_eval(policy: Policy, task: Task, prompts: Prompts, *, n: int = 1, seed: int = 0) -> dict[str, Any]:
    """Sample `n` responses to each prompt and summarise proxy reward, KL and reward-model agreement."""
    tokens = prompts.tokens(task.vocab)
    uniforms = torch.rand(len(prompts) * n, task.vocab.resp_len, generator=torch.Generator().manual_seed(seed))
    responses, logp = policy.sample(tokens, uniforms)
    ref_logp = task.reference.response_logp(tokens, responses)
    kl = sequence_kl(taken_logp(logp, responses), taken_logp(ref_logp, responses))
    proxy = task.reward_model.score(tokens, responses)
    return {
        "n_prompts": len(prompts),
        "n_samples": len(responses),
        "proxy_mean": proxy.mean().item(),
        "proxy_std": proxy.std(correction=0).item(),
        "proxy_p50": proxy.quantile(0.5).item(),
        "proxy_p90": proxy.quantile(0.9).item(),
        "kl_mean": kl.mean().item(),
        "rm_expert_pearson": rm_expert_pearson(task),
    }


@torch.no_grad()
def rm_expert_pearson(task: Task) -> dict[str, float | None]:
    """Correlate reward-model scores with expert labels: overall and per family; None where undefined."""
    expert = task.expert
    scores = task.reward_model.score(expert.prompts.tokens(task.vocab), torch.from_numpy(expert.responses)).numpy()
    groups = {"overall": np.ones(len(expert), dtype=bool)}
    groups |= {family: expert.prompts.family == i for i, family in enumerate(task.vocab.families)}
    return {name: pearson(scores[rows], expert.labels[rows]) for name, rows in groups.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rlhf.dev_eval", description="Evaluate by the reward model.")
    parser.add_argument("--policy", required=True, type=Path, help="policy folder")
    parser.add_argument("--prompts", type=Path, help="prompt file (default: the task's dev prompts)")
    parser.add_argument("--n", type=int, default=1, help="responses to each prompt")
    add_seed_option(parser)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    add_quiet_option(parser)
    add_task_option(parser)
    args = parser.parse_args()
    task_dir = find_task_dir(args.task)
    given = [args.prompts] if args.prompts else []
    problems = output_problems({"--out": args.out}, inputs=[*task_files(task_dir), *args.policy.glob("*"), *given])
    if args.n < 1:
        problems.append(f"--n must be at least 1, got {args.n}")
    with collected(problems):
        task, policy = load_task_and_policy(task_dir, args.policy)
    with collected(problems):
        prompts = read_prompts(args.prompts, load_vocab(task_dir)) if args.prompts else None
    raise_if_any(problems)
    prompts = prompts or task.dev_prompts
    say(f"evaluating {args.policy} on {len(prompts)} prompts", quiet=args.quiet)
    write_json(dev_eval(policy, task, prompts, n=args.n, seed=args.seed), args.out)


if __name__ == "__main__":
    run_command(main)
