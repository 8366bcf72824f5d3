"""Built-in wrapper `debias`: subtract from the score the bonuses that only the crowd pays."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from objectives.quality_cache import load_quality
from objectives.quality_model import FittedShortcut
from rlhf.features import feature_values

_shortcuts: dict[str, list[FittedShortcut]] = defaultdict(list)
_index: dict[str, int] = {}


def prepare(task_dir: Path, config: dict[str, Any]) -> None:
    """Look up the bonuses of the task's fitted quality model."""
    model = load_quality(task_dir)
    _shortcuts.clear()
    _index.update({token: i for i, token in enumerate(model.vocab.content_tokens)})
    for shortcut in model.shortcuts:
        _shortcuts[model.vocab.families[shortcut.family]].append(shortcut)


def transform(records: list[dict[str, Any]], response_tokens: list[list[str]], rewards: list[float]) -> list[float]:
    shaped = np.array(rewards)
    for family, shortcuts in _shortcuts.items():
        rows = [row for row, record in enumerate(records) if record["family"] == family]
        if rows:
            responses = np.array([[_index[token] for token in response_tokens[row]] for row in rows])
            for shortcut in shortcuts:
                shaped[rows] -= shortcut.size * feature_values(shortcut.feature, responses)
    return shaped.tolist()
