"""Split prompts once, by a hash of (family, attributes): train, selection, certification.

No attribute tuple of a family is in two parts, whichever file it came from and whatever its id.
"""

import hashlib
from typing import Literal

import numpy as np

from rlhf.data import Prompts, concat_prompts
from rlhf.errors import raise_if_any
from rlhf.taskdir import TRAIN_PROMPTS, Task

Part = Literal["train", "selection", "certification"]
PARTS: tuple[Part, ...] = ("train", "selection", "certification")
_UPPER_EDGES: dict[Part, float] = {"train": 0.5, "selection": 0.75, "certification": 1.0}


def split_part(family: str, attrs: tuple[int, ...]) -> Part:
    """Say which part a prompt belongs to.

    >>> split_part("anvil", (3, 0, 7, 1))
    'certification'
    """
    digest = hashlib.sha256(f"{family}:{','.join(map(str, attrs))}".encode()).digest()
    share = int.from_bytes(digest[:8]) / 2**64
    return next(part for part, edge in _UPPER_EDGES.items() if share < edge)


def split_prompts(task: Task, part: Part) -> Prompts:
    """Return one part of the task's prompts: for training from the RL pool only, for judging each tuple once.

    Raises `InputError` if a family has too few prompts in the part: one to train on, two for a standard error.
    """
    pool = task.train_prompts if part == "train" else concat_prompts([task.train_prompts, task.dev_prompts])
    seen: set[tuple[int, tuple[int, ...]]] = set()
    rows = []
    for row, (family, attrs) in enumerate(zip(pool.family.tolist(), map(tuple, pool.attrs.tolist()), strict=True)):
        if part != "train" and (family, attrs) in seen:
            continue
        seen.add((family, attrs))
        if split_part(task.vocab.families[family], attrs) == part:
            rows.append(row)
    chosen = pool[np.array(rows, dtype=np.int64)]
    _require_every_family(chosen, part, task)
    return chosen


def _require_every_family(prompts: Prompts, part: Part, task: Task) -> None:
    needed = 1 if part == "train" else 2
    families = task.vocab.families
    counts = np.bincount(prompts.family, minlength=len(families))
    path = task.root / TRAIN_PROMPTS
    raise_if_any(
        [
            f"{path}: family {family} has {count} prompts in the {part} part, it needs {needed}; add other prompts"
            for family, count in zip(families, counts, strict=True)
            if count < needed
        ]
    )
