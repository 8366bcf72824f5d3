"""A task directory: everything one sweep needs, read and checked once.

The layout is public (README, "Your own task"). `load_task` reports all problems of all files together.
"""

import functools
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from rlhf.data import Labelled, Prompts, read_labelled, read_prompts
from rlhf.errors import InputError, collected, raise_if_any, why
from rlhf.policy import Policy, load_policy
from rlhf.reward_model import RewardModel, load_reward_model
from rlhf.vocab import TASK_VARIABLE, Vocab, load_vocab

DEFAULT_TASK = Path(__file__).parent / "task"
REFERENCE = "policy"
REWARD_MODEL = "reward_model"
QA_SAMPLE = "train.jsonl"  # beside a reward model: a sample of its crowd labels
CROWD_LABELS = f"{REWARD_MODEL}/{QA_SAMPLE}"
TRAIN_PROMPTS = "data/prompts_train.jsonl"
DEV_PROMPTS = "data/prompts_dev.jsonl"
EXPERT_LABELS = "data/gold_calib.jsonl"
RUNS = "runs"

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """Hold a checked task: models, prompts, labels, and the digest of the files they came from. Not to be changed."""

    root: Path
    vocab: Vocab
    reference: Policy
    reward_model: RewardModel
    train_prompts: Prompts
    dev_prompts: Prompts
    expert: Labelled
    crowd: Labelled
    digest: str


def find_task_dir(task: str | Path | None) -> Path:
    """Return the task directory asked for: the argument, then `TASK`, then the built-in one."""
    return Path(task or os.environ.get(TASK_VARIABLE) or DEFAULT_TASK).expanduser().absolute()


def load_task(root: Path) -> Task:
    """Read and check a task directory. Raises `InputError` with the problems of every file.

    A process reads a task once: as long as its files stay as they are, the same one is returned.
    """
    return _read_task(root, task_digest(root))


def load_task_and_policy(root: Path, folder: Path) -> tuple[Task, Policy]:
    """Read a task directory and a policy of its vocabulary. Raises `InputError` with the problems of both."""
    problems: list[str] = []
    with collected(problems):
        task = load_task(root)
    with collected(problems):
        policy = load_policy(folder, load_vocab(root))
    raise_if_any(problems)
    return task, policy


@functools.lru_cache(maxsize=2)
def _read_task(root: Path, digest: str) -> Task:
    vocab = load_vocab(root)
    problems: list[str] = []

    def read(reader: Callable[[Path, Vocab], Part], name: str) -> Part | None:
        try:
            return reader(root / name, vocab)
        except InputError as error:
            problems.extend(error.problems)
            return None

    reference = read(load_policy, REFERENCE)
    reward_model = read(load_reward_model, REWARD_MODEL)
    train, dev = read(read_prompts, TRAIN_PROMPTS), read(read_prompts, DEV_PROMPTS)
    expert, crowd = read(read_labelled, EXPERT_LABELS), read(read_labelled, CROWD_LABELS)
    if train is not None:
        problems += _missing_families(root / TRAIN_PROMPTS, train, vocab, what="training prompt")
    if expert is not None:
        problems += _missing_families(root / EXPERT_LABELS, expert.prompts, vocab, what="expert label")
    raise_if_any(problems)
    assert reference and reward_model and train and dev and expert and crowd  # noqa: PT018  (narrows six types)
    return Task(root, vocab, reference, reward_model, train, dev, expert, crowd, digest)


def task_digest(root: Path) -> str:
    """Return a SHA-256 over the names and contents of the files a sweep reads; earlier runs are left out.

    Raises `InputError` for a file that cannot be read.
    """
    digest = hashlib.sha256()
    for path in task_files(root):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({why(error)})") from error
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _is_ours(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".")  # what a killed writer or an editor leaves is none of it


def task_files(root: Path) -> list[Path]:
    """List the files of a task that a sweep reads, in a fixed order; earlier runs are left out."""
    names = ("vocab.json", "policy", "reward_model", "data")
    return [path for name in names for path in sorted([root / name, *(root / name).rglob("*")]) if _is_ours(path)]


def resolve_path(path: str, root: Path) -> Path:
    """Find a path given by a user: absolute, then inside the task directory, then from the current folder."""
    given = Path(path).expanduser()
    if given.is_absolute():
        return given
    return root / given if (root / given).exists() else given.absolute()


def _missing_families(path: Path, prompts: Prompts, vocab: Vocab, *, what: str) -> list[str]:
    counts = np.bincount(prompts.family, minlength=len(vocab.families))
    return [
        f"{path}: family {family} has no {what}; every family needs some"
        for family, count in zip(vocab.families, counts, strict=True)
        if count == 0
    ]
