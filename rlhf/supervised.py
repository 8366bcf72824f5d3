"""Supervised minibatch training, shared by the reference policy (next token) and the reward model (MSE)."""

from collections.abc import Callable

import torch
from torch import nn

from rlhf.cli import say
from rlhf.errors import raise_if_any


def check_schedule(epochs: int, lr: float) -> None:
    """Raise `InputError` for options that would train nothing, or not end."""
    problems = [f"--epochs must be at least 1, got {epochs}"] if epochs < 1 else []
    if not 0 < lr < 1:
        problems.append(f"--lr must be between 0 and 1, got {lr}")
    raise_if_any(problems)


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

    Returns the mean loss of the last epoch.
    """
    generator = torch.Generator().manual_seed(seed)
    adam = torch.optim.Adam(model.parameters(), lr=lr, fused=True)
    mean_loss = float("nan")
    for epoch in range(epochs):
        total = 0.0
        for rows in torch.randperm(n_rows, generator=generator).split(batch):
            loss = loss_of(rows)
            adam.zero_grad()
            loss.backward()
            adam.step()
            total += loss.item() * len(rows)
        mean_loss = total / n_rows
        say(f"epoch {epoch + 1}/{epochs}  loss {mean_loss:.4f}", quiet=quiet)
    return mean_loss
