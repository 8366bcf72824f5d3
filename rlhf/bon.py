"""Command line: best-of-n sampling, the baseline that needs no training.

    python -m rlhf.bon --policy DIR --n 32 --limit 300 [--seed 0 --out F] [--task DIR] [--quiet]

Of `n` responses to each dev prompt, keeps the one the reward model likes most. With `--out`, writes the kept
responses as JSON lines; the summary goes to standard output.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch

from rlhf.cli import add_quiet_option, add_seed_option, add_task_option, say, write_json
from rlhf.data import Prompts, Record, decode, write_jsonl
from rlhf.errors import collected, raise_if_any, run_command
from rlhf.files import output_problems
from rlhf.policy import Policy
from rlhf.taskdir import Task, find_task_dir, load_task_and_policy, task_files


@torch.no_grad()
def best_of_n(
    policy: Policy, task: Task, prompts: Prompts, *, n: int, seed: int = 0
) -> tuple[dict[str, Any], list[Record]]:
    """Return a summary and, for each prompt, the best of `n` responses with its proxy reward."""
    tokens = prompts.tokens(task.vocab)
    uniforms = torch.rand(len(prompts) * n, task.vocab.resp_len, generator=torch.Generator().manual_seed(seed))
    responses, _ = policy.sample(tokens, uniforms)
    proxy = task.reward_model.score(tokens, responses).view(len(prompts), n)
    best, chosen = proxy.max(1)
    kept = decode(responses.view(len(prompts), n, -1)[torch.arange(len(prompts)), chosen], task.vocab)
    rows = [
        {**record, "response": response, "proxy_reward": reward}
        for record, response, reward in zip(prompts.records(task.vocab), kept, best.tolist(), strict=True)
    ]
    summary = {
        "n": n,
        "n_prompts": len(prompts),
        "proxy_mean": proxy.mean().item(),
        "best_proxy_mean": best.mean().item(),
        "kl_upper_bound": math.log(n) - (n - 1) / n,  # Beirami et al. 2024: the usual formula is an upper bound
    }
    return summary, rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rlhf.bon", description="Best-of-n by the reward model.")
    parser.add_argument("--policy", required=True, type=Path, help="policy folder")
    parser.add_argument("--n", type=int, default=32, help="responses to choose from")
    parser.add_argument("--limit", type=int, default=300, help="how many dev prompts")
    add_seed_option(parser)
    parser.add_argument("--out", type=Path, help="write the kept responses here, as JSON lines")
    add_quiet_option(parser)
    add_task_option(parser)
    args = parser.parse_args()
    task_dir = find_task_dir(args.task)
    problems = output_problems({"--out": args.out}, inputs=[*task_files(task_dir), *args.policy.glob("*")])
    if args.n < 1 or args.limit < 1:
        problems.append(f"--n and --limit must be at least 1, got {args.n} and {args.limit}")
    with collected(problems):
        task, policy = load_task_and_policy(task_dir, args.policy)
    raise_if_any(problems)
    prompts = Prompts(
        task.dev_prompts.ids[: args.limit], task.dev_prompts.family[: args.limit], task.dev_prompts.attrs[: args.limit]
    )
    say(f"best of {args.n} on {len(prompts)} prompts", quiet=args.quiet)
    summary, rows = best_of_n(policy, task, prompts, n=args.n, seed=args.seed)
    if args.out:
        write_jsonl(args.out, rows)
    write_json(summary, None)


if __name__ == "__main__":
    run_command(main)
