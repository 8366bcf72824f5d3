from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from objectives.assess import assess
from objectives.quality_cache import remember_quality
from objectives.quality_model import QualityModel
from objectives.release import release_verdict
from objectives.score import Judge
from rlhf.errors import InputError
from rlhf.policy import Policy, save_policy
from rlhf.taskdir import Task, load_task, task_digest


@pytest.fixture
def judged_folder(
    task_folder: Path, empty_cache: Path, one_token_is_correct: Callable[..., QualityModel],
    one_token_policy: Callable[[int], Policy], network_task: Task,
) -> Path:  # fmt: skip
    """A task in which token 0 is correct in the first two families and token 2 in the third, with three runs."""
    remember_quality(one_token_is_correct(0, 0, 2), task_digest(task_folder))
    save_policy(network_task.reference, task_folder / "runs/nothing-learnt")
    save_policy(one_token_policy(0), task_folder / "runs/forgets-elm")
    save_policy(one_token_policy(1), task_folder / "runs/always-wrong")
    (task_folder / "runs/README.md").write_text("not a run\n")
    return task_folder


def test_every_run_has_a_verdict_and_its_reasons(judged_folder: Path) -> None:
    results = assess(load_task(judged_folder))
    assert list(results) == ["always-wrong", "forgets-elm", "nothing-learnt"]
    reasons = {name: verdict.reasons for name, (_, verdict) in results.items()}
    assert [reason.split()[0] for reason in reasons["always-wrong"]] == ["ash", "oak", "elm", "balanced"]
    assert len(reasons["forgets-elm"]) == 1
    assert reasons["forgets-elm"][0].startswith("elm harmed (-0.")
    assert reasons["nothing-learnt"] == ("balanced gain +0.0000 is under +0.03",)
    assert not any(verdict.release for _, verdict in results.values())
    np.testing.assert_allclose(results["forgets-elm"][0].quality, [1, 1, 0], atol=1e-12)


def test_a_run_that_helps_every_family_is_released(
    task_folder: Path, empty_cache: Path, one_token_is_correct: Callable[..., QualityModel],
    one_token_policy: Callable[[int], Policy],
) -> None:  # fmt: skip
    remember_quality(one_token_is_correct(1, 1, 1), task_digest(task_folder))
    save_policy(one_token_policy(1), task_folder / "runs/good")
    [(scores, verdict)] = assess(load_task(task_folder)).values()
    assert verdict.release
    assert scores.balanced_quality == pytest.approx(1.0)
    assert 0.5 < scores.balanced_gain < 0.8  # the reference chooses among three tokens


def test_a_run_is_scored_as_it_would_be_alone(
    judged_folder: Path, one_token_is_correct: Callable[..., QualityModel], one_token_policy: Callable[[int], Policy]
) -> None:
    task = load_task(judged_folder)
    alone = Judge(task, one_token_is_correct(0, 0, 2)).score(one_token_policy(0))
    scores, verdict = assess(task)["forgets-elm"]
    assert scores.metrics() == alone.metrics()
    assert verdict == release_verdict(alone)


@pytest.mark.parametrize("make_folder", [True, False])
def test_a_task_without_runs_is_refused(make_folder: bool, task_folder: Path, empty_cache: Path) -> None:
    if make_folder:
        (task_folder / "runs").mkdir()
    with pytest.raises(InputError, match="runs: holds no run to assess"):
        assess(load_task(task_folder))
    assert not empty_cache.exists()  # refused before the fit


def test_a_run_without_weights_is_named(judged_folder: Path) -> None:
    (judged_folder / "runs/forgets-elm/policy.safetensors").unlink()
    with pytest.raises(InputError, match=r"forgets-elm.policy\.safetensors"):
        assess(load_task(judged_folder))
