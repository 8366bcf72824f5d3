"""Fitted quality models kept between runs: in memory, and in this machine's cache folder.

A fit is found again by the digest of its task and of the sources that made it. The folder may be lost, damaged or
unwritable at any time: that costs a fit, never the answer.
"""

import functools
import hashlib
import json
import os
import tempfile
import warnings
import zipfile
from dataclasses import fields
from pathlib import Path

import numpy as np

from objectives import candidates, fit_checks, label_gibbs, quality_model
from objectives.fit_checks import FitChecks
from objectives.quality_model import FittedShortcut, QualityModel, fit_quality
from rlhf.features import Feature
from rlhf.taskdir import load_task, task_digest
from rlhf.vocab import Vocab

_SOURCES = (candidates, fit_checks, label_gibbs, quality_model)
_ARRAYS = ("attribute", "correct", "reward_correct", "draws", "noise")
_in_memory: dict[str, QualityModel] = {}  # by task digest


def load_quality(task_dir: Path) -> QualityModel:
    """Return a task's fitted model: from memory, from the cache folder, or by fitting it now."""
    digest = task_digest(task_dir)
    if digest not in _in_memory:
        try:
            _in_memory[digest] = read_quality(cache_path(digest))
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):  # absent, or damaged
            _in_memory[digest] = fit_quality(load_task(task_dir))
            _try_to_save(_in_memory[digest], cache_path(digest))
    return _in_memory[digest]


def remember_quality(model: QualityModel, digest: str) -> None:
    """Put a fitted model in memory and in the cache, under the digest of its task; an earlier one stays."""
    _in_memory.setdefault(digest, model)
    if not cache_path(digest).exists():
        _try_to_save(model, cache_path(digest))


def cache_path(digest: str) -> Path:
    """Return where the fit of a task is kept: another task, or another way of fitting, is another file."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf-sweep"
    return folder / f"quality-{_source_digest()[:16]}-{digest}.npz"


def save_quality(model: QualityModel, path: Path) -> None:
    """Write a fitted model in one atomic step, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shortcuts = [
        [s.family, s.feature.kind, s.feature.tokens, s.feature.position, s.size, s.probability] for s in model.shortcuts
    ]
    document = json.dumps({"vocab": model.vocab.to_json(), "shortcuts": shortcuts})
    checks = {field.name: getattr(model.checks, field.name) for field in fields(FitChecks)}
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npz", delete=False) as file:
        np.savez_compressed(file, document=document, **{n: getattr(model, n) for n in _ARRAYS}, **checks)
    Path(file.name).replace(path)


def read_quality(path: Path) -> QualityModel:
    with np.load(path, allow_pickle=False) as stored:
        document = json.loads(str(stored["document"]))
        vocab = Vocab.from_json(document["vocab"])
        shortcuts = tuple(
            FittedShortcut(family, Feature(kind, tuple(tokens), position), size, probability)
            for family, kind, tokens, position, size, probability in document["shortcuts"]
        )
        by_family = {field.name: stored[field.name] for field in fields(FitChecks) if field.name != "rmse"}
        checks = FitChecks(rmse=float(stored["rmse"]), **by_family)
        return QualityModel(vocab, **{n: stored[n] for n in _ARRAYS}, shortcuts=shortcuts, checks=checks)


def _try_to_save(model: QualityModel, path: Path) -> None:
    try:
        save_quality(model, path)
    except OSError as error:
        warnings.warn(f"{path}: the fit cannot be kept ({error}); it will be repeated next time", stacklevel=3)


@functools.cache
def _source_digest() -> str:
    """Hash the sources of the fit, so that a changed fit never reads what an older one left."""
    digest = hashlib.sha256()
    for module in _SOURCES:
        assert module.__file__
        digest.update(Path(module.__file__).read_bytes())
    return digest.hexdigest()
