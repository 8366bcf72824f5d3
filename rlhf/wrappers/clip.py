"""Built-in wrapper `clip`: cap the score at a quantile of the reference's own scores in the same family.

It limits how much a shortcut can pay to what the reference already earns now and then.
"""

from pathlib import Path
from typing import Any

import torch

from rlhf.taskdir import load_task

QUANTILE = 0.9
_SAMPLES_PER_FAMILY = 512

_ceilings: dict[str, float] = {}


def prepare(task_dir: Path, config: dict[str, Any]) -> None:
    """Sample the reference on training prompts, with the run's seed, and keep each family's quantile."""
    task = load_task(task_dir)
    generator = torch.Generator().manual_seed(config["seed"])
    for index, family in enumerate(task.vocab.families):
        rows = torch.from_numpy((task.train_prompts.family == index).nonzero()[0])
        chosen = rows[torch.randint(len(rows), (_SAMPLES_PER_FAMILY,), generator=generator)]
        prompts = task.train_prompts[chosen.numpy()].tokens(task.vocab)
        uniforms = torch.rand(_SAMPLES_PER_FAMILY, task.vocab.resp_len, generator=generator)
        responses, _ = task.reference.sample(prompts, uniforms)
        _ceilings[family] = task.reward_model.score(prompts, responses).quantile(QUANTILE).item()


def transform(records: list[dict[str, Any]], response_tokens: list[list[str]], rewards: list[float]) -> list[float]:
    return [min(reward, _ceilings[record["family"]]) for record, reward in zip(records, rewards, strict=True)]
