"""Command line: train a reference policy on demonstrations.

    python -m rlhf.train_sft --data F --out DIR [--epochs 30 --lr 1e-3 --seed 0] [--task DIR] [--quiet]

F holds labelled or unlabelled demonstrations: `id`, `family`, `attrs`, `response`. Only `vocab.json` of the
task directory is used.
"""

import argparse
from pathlib import Path

import torch
from torch.nn import functional as F

from rlhf.data import Prompts, read_demonstrations
from rlhf.errors import collected, raise_if_any, run_command
from rlhf.policy import POLICY_WEIGHTS, Policy, init_policy, save_policy
from rlhf.supervised import fit, parse_fit_options
from rlhf.taskdir import find_task_dir
from rlhf.vocab import Vocab, load_vocab

EPOCHS = 30
LR = 1e-3
_BATCH = 256


def train_sft(
    prompts: Prompts,
    responses: torch.Tensor,
    vocab: Vocab,
    *,
    epochs: int = EPOCHS,
    lr: float = LR,
    seed: int = 0,
    quiet: bool = False,
) -> Policy:
    """Fit a new policy to responses (N, resp_len) of content-token indices by maximum likelihood."""
    policy = init_policy(vocab, seed=seed)
    tokens = prompts.tokens(vocab)

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        logp = policy.response_logp(tokens[rows], responses[rows])
        return F.nll_loss(logp.flatten(0, 1), responses[rows].flatten())

    fit(policy, loss_of, n_rows=len(prompts), epochs=epochs, lr=lr, batch=_BATCH, seed=seed, quiet=quiet)
    return policy


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rlhf.train_sft", description="Train a reference policy.")
    parser.add_argument("--data", required=True, type=Path, help="JSON lines of demonstrations")
    args, problems = parse_fit_options(parser, what="policy", weights=POLICY_WEIGHTS, epochs=EPOCHS, lr=LR)
    with collected(problems):
        vocab = load_vocab(find_task_dir(args.task))
        prompts, responses = read_demonstrations(args.data, vocab)
    raise_if_any(problems)
    policy = train_sft(
        prompts, torch.from_numpy(responses), vocab, epochs=args.epochs, lr=args.lr, seed=args.seed, quiet=args.quiet
    )
    save_policy(policy, args.out)


if __name__ == "__main__":
    run_command(main)
