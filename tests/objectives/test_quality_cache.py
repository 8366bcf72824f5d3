from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from objectives import quality_cache
from objectives.fit_checks import FitChecks
from objectives.quality_cache import load_quality, quality_from_arrays, quality_to_arrays, remember_quality
from objectives.quality_model import FittedShortcut, QualityModel
from rlhf.features import Feature
from rlhf.taskdir import task_digest


def assert_same_model(first: QualityModel, second: QualityModel) -> None:
    assert first.vocab == second.vocab
    assert first.shortcuts == second.shortcuts
    for name in ("attribute", "correct", "reward_correct", "draws", "noise"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name), err_msg=name)
    for field in fields(FitChecks):
        mine, other = (getattr(model.checks, field.name) for model in (first, second))
        np.testing.assert_array_equal(mine, other, err_msg=field.name)


def a_model(fitted: QualityModel) -> QualityModel:
    """Give a fitted model shortcuts of every kind."""
    shortcuts = (
        *fitted.shortcuts,
        FittedShortcut(0, Feature("position", (3,), 0), 0.25, 0.75),
        FittedShortcut(1, Feature("pair", (3, 5)), -0.5, 1.0),
        FittedShortcut(1, Feature("repetition"), 0.125, 0.5),
    )
    return replace(fitted, shortcuts=shortcuts)


def test_writing_as_arrays_and_back_changes_nothing(fitted: QualityModel) -> None:
    model = a_model(fitted)
    assert_same_model(quality_from_arrays(quality_to_arrays(model)), model)


@pytest.fixture
def counted_fits(fitted: QualityModel, monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> list[Path]:
    """Replace reading and fitting a task by handing out a finished model; return the tasks it was done for."""
    asked: list[Path] = []

    def fit(root: Path) -> QualityModel:
        asked.append(root)
        return fitted

    monkeypatch.setattr(quality_cache, "load_task", lambda root: root)
    monkeypatch.setattr(quality_cache, "fit_quality", fit)
    return asked


def task_folder(root: Path) -> Path:
    (root / "data").mkdir(parents=True)
    (root / "data/gold_calib.jsonl").write_text("one\n")
    return root


def test_a_second_load_does_not_fit_again(tmp_path: Path, counted_fits: list[Path], fitted: QualityModel) -> None:
    folder = task_folder(tmp_path / "task")
    first = load_quality(folder)
    quality_cache._in_memory.clear()  # as in another process
    second = load_quality(folder)
    assert counted_fits == [folder]
    assert_same_model(first, second)
    assert_same_model(first, fitted)


def test_a_copy_of_a_task_shares_its_fit(tmp_path: Path, counted_fits: list[Path]) -> None:
    load_quality(task_folder(tmp_path / "task"))
    load_quality(task_folder(tmp_path / "copy"))
    assert len(counted_fits) == 1


def test_changed_labels_are_fitted_again(tmp_path: Path, counted_fits: list[Path]) -> None:
    folder = task_folder(tmp_path / "task")
    load_quality(folder)
    (folder / "data/gold_calib.jsonl").write_text("two\n")
    load_quality(folder)
    assert len(counted_fits) == 2


def test_another_earlier_run_does_not_ask_for_another_fit(tmp_path: Path, counted_fits: list[Path]) -> None:
    folder = task_folder(tmp_path / "task")
    load_quality(folder)
    (folder / "runs/new").mkdir(parents=True)
    (folder / "runs/new/NOTES.md").write_text("new\n")
    load_quality(folder)
    assert len(counted_fits) == 1


def test_a_remembered_model_is_used(
    tmp_path: Path, counted_fits: list[Path], fitted: QualityModel, empty_cache: Path
) -> None:
    folder = task_folder(tmp_path / "task")
    remember_quality(a_model(fitted), task_digest(folder))
    assert_same_model(load_quality(folder), a_model(fitted))
    assert counted_fits == []
    assert len(list(empty_cache.iterdir())) == 1


def test_remembering_never_replaces_a_fit(tmp_path: Path, counted_fits: list[Path], fitted: QualityModel) -> None:
    folder = task_folder(tmp_path / "task")
    load_quality(folder)
    remember_quality(a_model(fitted), task_digest(folder))
    quality_cache._in_memory.clear()
    assert_same_model(load_quality(folder), fitted)


def test_a_cache_that_cannot_be_written_costs_a_warning_and_not_the_fit(
    tmp_path: Path, counted_fits: list[Path], fitted: QualityModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = task_folder(tmp_path / "task")
    with pytest.warns(UserWarning, match="cannot be kept"):
        assert_same_model(load_quality(folder), fitted)
    assert_same_model(load_quality(folder), fitted)
    assert len(counted_fits) == 1
    other = task_folder(tmp_path / "other")
    (other / "data/gold_calib.jsonl").write_text("other labels\n")
    with pytest.warns(UserWarning, match="cannot be kept"):
        remember_quality(a_model(fitted), task_digest(other))
    assert_same_model(load_quality(other), a_model(fitted))
