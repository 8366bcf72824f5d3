"""Supervised minibatch training, shared by the reference policy (next token) and the reward model (MSE)."""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from rlhf.cli import add_quiet_option, add_seed_option, add_task_option, say
from rlhf.errors import TrainingError
from rlhf.files import output_folder_problems
from rlhf.weights import CONFIG_FILE


def parse_fit_options(
    parser: argparse.ArgumentParser, *, what: str, weights: str, epochs: int, lr: float
) -> tuple[argparse.Namespace, list[str]]:
    """Add the options of a command that fits a model, and parse.

    Returns them with what is wrong: options that would train nothing or not end, no place for the model. `weights`
    names the file that will hold it.
    """
    parser.add_argument("--out", required=True, type=Path, help=f"folder for the {what}")
    parser.add_argument("--epochs", type=int, default=epochs, help=f"passes over the data (default: {epochs})")
    parser.add_argument("--lr", type=float, default=lr, help=f"learning rate (default: {lr:g})")
    add_seed_option(parser)
    add_quiet_option(parser)
    add_task_option(parser)
    args = parser.parse_args()
    problems = output_folder_problems("--out", args.out, new=(weights, CONFIG_FILE))
    if args.epochs < 1:
        problems.append(f"--epochs must be at least 1, got {args.epochs}")
    if not 0 < args.lr < 1:
        problems.append(f"--lr must be between 0 and 1, got {args.lr}")
    return args, problems


def fit(
    model: nn.Module,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    *,
    n_rows: int,
    epochs: int,
    lr: float,
    batch: int,
    seed: int,
    quiet: bool,
) -> float:
    """Minimise `loss_of(rows)`, a mean over row indices (B,), with Adam at a constant learning rate.

    Returns the mean loss of the last epoch. Raises `TrainingError` if a loss is not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    adam = torch.optim.Adam(model.parameters(), lr=lr, fused=True)
    mean_loss = float("nan")
    for epoch in range(epochs):
        total = 0.0
        for rows in torch.randperm(n_rows, generator=generator).split(batch):
            loss = loss_of(rows)
            if not torch.isfinite(loss):
                raise TrainingError(f"epoch {epoch + 1}: the loss is {loss.item()}; check the data, or lower --lr")
            adam.zero_grad()
            loss.backward()
            adam.step()
            total += loss.item() * len(rows)
        mean_loss = total / n_rows
        say(f"epoch {epoch + 1}/{epochs}  loss {mean_loss:.4f}", quiet=quiet)
    return mean_loss
