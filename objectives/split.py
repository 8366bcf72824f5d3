"""Split prompts once, by a hash of (family, attributes): train, selection, certification.

No attribute tuple of a family is in two parts, whichever file it came from and whatever its id.
"""

import hashlib
from typing import Literal

import numpy as np

from rlhf.data import Prompts, concat_prompts
from rlhf.errors import raise_if_any
from rlhf.taskdir import TRAIN_PROMPTS, Task
from rlhf.vocab import Vocab

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
    """Return one part of the task's prompts, each attribute tuple once. Training uses the RL pool only.

    Raises `InputError` if a family has no prompt in the part.
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
    _require_every_family(chosen, task.vocab, part, task)
    return chosen


def _require_every_family(prompts: Prompts, vocab: Vocab, part: Part, task: Task) -> None:
    counts = np.bincount(prompts.family, minlength=len(vocab.families))
    problems = [
        f"{task.root / TRAIN_PROMPTS}: family {family} has no prompt in the {part} part; add other prompts"
        for family, count in zip(vocab.families, counts, strict=True)
        if count == 0
    ]
    raise_if_any(problems)
