"""Prompt mixes by name: how often each family is trained on."""

from collections.abc import Collection

import numpy as np

from rlhf.taskdir import Task

LOW_TRAFFIC = 2 / 3  # of an equal share: families below this are "low traffic"
_TILT = 3.0  # the weakest family's weight, the strongest's being 1


def prompt_mixes(task: Task, reference_quality: np.ndarray, *, flagged: Collection[str]) -> dict[str, dict[str, float]]:
    """Return family weights for every mix a task allows; reference_quality is (F,).

    balanced: all alike. pilot: as in the dev prompts, which mirror the pilot's traffic. no_low_traffic: only
    families with at least two thirds of an equal share of it. weakest: tilted towards families where the
    reference is weakest, by rank. without_flagged: only families that are not `flagged` by the shortcut screen, or
    all where every one is.
    """
    families = task.vocab.families
    traffic = np.bincount(task.dev_prompts.family, minlength=len(families)).astype(float)
    frequent = traffic >= LOW_TRAFFIC * traffic.mean()
    weakness = (-reference_quality).argsort().argsort()  # 0: the strongest family
    tilt = 1 + (_TILT - 1) * weakness / max(1, len(families) - 1)
    unflagged = np.array([family not in flagged for family in families])
    weights = {
        "balanced": np.ones(len(families)),
        "pilot": traffic,
        "no_low_traffic": frequent.astype(float),
        "weakest": tilt,
        "without_flagged": (unflagged if unflagged.any() else ~unflagged).astype(float),
    }
    return {name: dict(zip(families, map(float, values), strict=True)) for name, values in weights.items()}
