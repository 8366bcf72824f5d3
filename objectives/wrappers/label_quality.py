"""Built-in wrapper `label_quality`: replace the score with label-inferred quality.

A quarter of the expert labels is withheld from it, so that the judge has seen labels that the reward has not.
"""

from operator import getitem
from pathlib import Path
from typing import Any

from objectives.quality_cache import load_quality

USES_REWARDS = False

_correct: dict[str, list[list[dict[str, float]]]] = {}  # family -> position -> value -> token -> probability
_attribute: dict[str, list[int]] = {}


def prepare(task_dir: Path, config: dict[str, Any]) -> None:
    """Look up the task's fitted quality model and lay it out by name."""
    model = load_quality(task_dir)
    tokens = model.vocab.content_tokens
    for f, family in enumerate(model.vocab.families):
        _attribute[family] = model.attribute[f].tolist()
        _correct[family] = [
            [dict(zip(tokens, cell, strict=True)) for cell in by_value] for by_value in model.reward_correct[f].tolist()
        ]


def transform(records: list[dict[str, Any]], response_tokens: list[list[str]], rewards: list[float]) -> list[float]:
    distinct = {id(record): record for record in records}  # a prompt's record comes once for each response
    cells = {key: _cells(record) for key, record in distinct.items()}
    return [
        sum(map(getitem, cells[id(record)], response)) / len(response)
        for record, response in zip(records, response_tokens, strict=True)
    ]


def _cells(record: dict[str, Any]) -> list[dict[str, float]]:
    """Return each position's probabilities of being correct, by token."""
    family, attrs = record["family"], record["attrs"]
    return [
        by_value[attrs[attribute]] for by_value, attribute in zip(_correct[family], _attribute[family], strict=True)
    ]
