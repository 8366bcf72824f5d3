"""Built-in wrapper `clip`: cap the score at a quantile of the reference's own scores in the same family.

It limits how much a shortcut can pay to what the reference already earns now and then.
"""

from pathlib import Path
from typing import Any

from rlhf.reference_scores import reference_scores
from rlhf.taskdir import load_task

QUANTILE = 0.9

_ceilings: dict[str, float] = {}


def prepare(task_dir: Path, config: dict[str, Any]) -> None:
    """Keep each family's quantile. It depends on the task alone: trials with other seeds have the same ceilings."""
    for family, scores in reference_scores(load_task(task_dir)).items():
        _ceilings[family] = scores.quantile(QUANTILE).item()


def transform(records: list[dict[str, Any]], response_tokens: list[list[str]], rewards: list[float]) -> list[float]:
    return [min(reward, _ceilings[record["family"]]) for record, reward in zip(records, rewards, strict=True)]
