"""Fitted quality models kept between runs: in memory, and in this machine's cache folder."""

import json
from dataclasses import fields
from pathlib import Path

import numpy as np

from objectives.fit_checks import FitChecks
from objectives.quality_model import FittedShortcut, QualityModel, fit_quality
from objectives.task_cache import Arrays, cache_path, cached_arrays, keep_arrays
from rlhf.features import Feature
from rlhf.taskdir import load_task, task_digest
from rlhf.vocab import Vocab

_NAME = "quality"
_ARRAYS = ("attribute", "correct", "reward_correct", "draws", "noise")
_in_memory: dict[str, QualityModel] = {}  # by task digest


def load_quality(task_dir: Path) -> QualityModel:
    """Return a task's fitted model: from memory, from the cache folder, or by fitting it now."""
    digest = task_digest(task_dir)
    if digest not in _in_memory:
        stored = cached_arrays(_NAME, digest, lambda: quality_to_arrays(fit_quality(load_task(task_dir))))
        _in_memory[digest] = quality_from_arrays(stored)
    return _in_memory[digest]


def remember_quality(model: QualityModel, digest: str) -> None:
    """Put a fitted model in memory and in the cache, under the digest of its task; an earlier one stays."""
    _in_memory.setdefault(digest, model)
    if not cache_path(_NAME, digest).exists():
        keep_arrays(_NAME, digest, quality_to_arrays(model))


def quality_to_arrays(model: QualityModel) -> Arrays:
    """Write a fitted model as arrays; `quality_from_arrays` gives the same model."""
    shortcuts = [
        [s.family, s.feature.kind, s.feature.tokens, s.feature.position, s.size, s.probability] for s in model.shortcuts
    ]
    document = json.dumps({"vocab": model.vocab.to_json(), "shortcuts": shortcuts})
    checks = {field.name: np.asarray(getattr(model.checks, field.name)) for field in fields(FitChecks)}
    return {"document": np.array(document), **{name: getattr(model, name) for name in _ARRAYS}, **checks}


def quality_from_arrays(arrays: Arrays) -> QualityModel:
    document = json.loads(str(arrays["document"]))
    shortcuts = tuple(
        FittedShortcut(family, Feature(kind, tuple(tokens), position), size, probability)
        for family, kind, tokens, position, size, probability in document["shortcuts"]
    )
    by_family = {field.name: arrays[field.name] for field in fields(FitChecks) if field.name != "rmse"}
    checks = FitChecks(rmse=float(arrays["rmse"]), **by_family)
    vocab = Vocab.from_json(document["vocab"])
    return QualityModel(vocab, **{name: arrays[name] for name in _ARRAYS}, shortcuts=shortcuts, checks=checks)
