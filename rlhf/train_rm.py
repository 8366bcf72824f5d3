"""Command line: train a reward model on labelled responses by mean squared error.

    python -m rlhf.train_rm --data F --out DIR [--epochs 40 --lr 2e-3 --seed 0] [--task DIR] [--quiet]

Only `vocab.json` of the task directory is used.
"""

import argparse
from pathlib import Path

import torch
from torch.nn import functional as F

from rlhf.data import Labelled, read_labelled
from rlhf.errors import collected, raise_if_any, run_command
from rlhf.reward_model import RM_WEIGHTS, RewardModel, init_reward_model, save_reward_model
from rlhf.supervised import fit, parse_fit_options
from rlhf.taskdir import find_task_dir
from rlhf.vocab import Vocab, load_vocab

EPOCHS = 40
LR = 2e-3
_BATCH = 256


def train_rm(
    labelled: Labelled, vocab: Vocab, *, epochs: int = EPOCHS, lr: float = LR, seed: int = 0, quiet: bool = False
) -> RewardModel:
    """Fit a new reward model to the labels."""
    model = init_reward_model(vocab, seed=seed)
    responses = torch.from_numpy(labelled.responses) + vocab.first_content_id
    ids = torch.cat([labelled.prompts.tokens(vocab), responses], 1)
    labels = torch.from_numpy(labelled.labels).float()

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(ids[rows]), labels[rows])

    fit(model, loss_of, n_rows=len(labels), epochs=epochs, lr=lr, batch=_BATCH, seed=seed, quiet=quiet)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rlhf.train_rm", description="Train a reward model.")
    parser.add_argument("--data", required=True, type=Path, help="JSON lines of labelled responses")
    args, problems = parse_fit_options(parser, what="reward model", weights=RM_WEIGHTS, epochs=EPOCHS, lr=LR)
    with collected(problems):
        vocab = load_vocab(find_task_dir(args.task))
        labelled = read_labelled(args.data, vocab)
    raise_if_any(problems)
    save_reward_model(
        train_rm(labelled, vocab, epochs=args.epochs, lr=args.lr, seed=args.seed, quiet=args.quiet), args.out
    )


if __name__ == "__main__":
    run_command(main)
