"""The command lines of `objectives`, run as a user runs them, on a small built task."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from objectives import assess, certify, fit_quality, quality_cache, score
from objectives.quality_cache import load_quality, remember_quality
from objectives.quality_model import ESTIMATE_NOTE, QualityModel
from rlhf.errors import run_command
from rlhf.policy import Policy, save_policy
from rlhf.taskdir import task_digest

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shared_cache: Path) -> Run:
    """Run a command's main and return its exit status, standard output and standard error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_cache))
    monkeypatch.delenv("TASK", raising=False)
    quality_cache._in_memory.clear()

    def call(module: ModuleType, *arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            run_command(module.main)
        out, err = capsys.readouterr()
        return int(exit_.value.code or 0), out, err

    return call


@pytest.fixture
def task_with_runs(tiny_task: Path, tmp_path: Path) -> Path:
    """The tiny task with two earlier runs, both the reference under another name."""
    task = shutil.copytree(tiny_task, tmp_path / "task")
    for name in ("first-s800", "second-s800"):
        shutil.copytree(task / "policy", task / "runs" / name)
    return task


def one_document(text: str) -> dict[str, Any]:
    document = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert isinstance(document, dict)
    return document


def test_fit_quality_prints_one_document(run: Run, tiny_task: Path) -> None:
    status, out, err = run(fit_quality, "--task", tiny_task, "--json")
    document = one_document(out)
    assert status == 0
    assert "fitting 72 expert and 120 crowd labels" in err
    assert document == json.loads(json.dumps(load_quality(tiny_task).to_json()))
    assert document["note"] == ESTIMATE_NOTE
    assert list(document["families"]) == ["anvil", "birch", "cobalt", "dune", "ember", "fjord"]


def test_fit_quality_prints_a_table_and_says_it_is_an_estimate(run: Run, tiny_task: Path) -> None:
    status, out, _ = run(fit_quality, "--task", tiny_task, "--quiet")
    assert status == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:7]] == ["anvil", "birch", "cobalt", "dune", "ember", "fjord"]
    assert lines[7].startswith("held-out expert labels overall: RMSE ")
    assert lines[8].startswith("NOT TO BE BELIEVED: anvil: 12 expert labels, at least 20 are needed")
    assert lines[-1] == ESTIMATE_NOTE


def test_out_writes_the_same_document(run: Run, tiny_task: Path, tmp_path: Path) -> None:
    _, shown, _ = run(fit_quality, "--task", tiny_task, "--json", "--out", tmp_path / "new/fit.json")
    assert json.loads((tmp_path / "new/fit.json").read_text()) == one_document(shown)
    _, shown, _ = run(score, "--policy", tiny_task / "policy", "--task", tiny_task, "--out", tmp_path / "score.json")
    assert not shown.startswith("{")
    assert json.loads((tmp_path / "score.json").read_text())["metrics"]["balanced_gain"] == 0.0


def test_score_prints_one_document(run: Run, tiny_task: Path) -> None:
    status, out, err = run(score, "--policy", tiny_task / "policy", "--task", tiny_task, "--json")
    document = one_document(out)
    assert status == 0
    assert err.startswith("scoring ")
    assert document["note"] == ESTIMATE_NOTE
    metrics = document["metrics"]
    assert metrics["balanced_gain"] == 0.0
    assert abs(metrics["kl"]) < 1e-6
    for name, value in metrics.items():
        assert name.endswith("_se") or f"{name}_se" in metrics
        assert isinstance(value, float)


def test_score_prints_a_table_and_says_it_is_an_estimate(run: Run, tiny_task: Path) -> None:
    status, out, err = run(score, "--policy", tiny_task / "policy", "--task", tiny_task, "--quiet")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    table_end = [line.split()[0] for line in lines].index("balanced")
    assert lines[table_end + 1].startswith("NOT TO BE BELIEVED: anvil: 12 expert labels")
    assert lines[-1] == ESTIMATE_NOTE


def test_assess_prints_one_document(run: Run, task_with_runs: Path) -> None:
    status, out, _ = run(assess, "--task", task_with_runs, "--json")
    document = one_document(out)
    assert status == 0
    assert document["note"] == ESTIMATE_NOTE
    assert document["refusals"][0].startswith("anvil: 12 expert labels")
    assert list(document["runs"]) == ["first-s800", "second-s800"]
    for entry in document["runs"].values():
        assert entry["release"] is False
        assert entry["reasons"] == ["balanced gain +0.0000 is under +0.03"]
        assert entry["metrics"]["worst_family_harm"] == 0.0


def test_assess_prints_a_line_a_run_with_verdict_and_reason(
    run: Run,
    task_folder: Path,
    one_token_policy: Callable[[int], Policy],
    one_token_is_correct: Callable[..., QualityModel],
) -> None:
    remember_quality(one_token_is_correct(1, 1, 1), task_digest(task_folder))
    save_policy(one_token_policy(0), task_folder / "runs/bad")
    save_policy(one_token_policy(1), task_folder / "runs/good")
    status, out, _ = run(assess, "--task", task_folder, "--quiet")
    header, bad, good, note = out.splitlines()
    assert status == 0
    assert header.split() == ["run", "quality", "gain", "worst", "family", "KL", "proxy", "release?"]
    assert bad.split()[0] == "bad"
    assert " no: ash harmed (-0." in bad
    assert good.split()[0] == "good"
    assert good.endswith("  yes")
    assert note == ESTIMATE_NOTE


@pytest.mark.parametrize("module", [score, certify])
def test_a_missing_policy_ends_with_status_2(module: ModuleType, run: Run, tiny_task: Path, tmp_path: Path) -> None:
    status, out, err = run(module, "--policy", tmp_path / "nowhere", "--task", tiny_task, "--json")
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {tmp_path / 'nowhere'}")
    assert "Traceback" not in err


def test_weights_that_are_not_numbers_end_with_status_2(
    run: Run, task_folder: Path, one_token_policy: Callable[[int], Policy], tmp_path: Path
) -> None:
    broken = one_token_policy(0)
    broken.head.weight.data[0, 0] = float("nan")
    save_policy(broken, tmp_path / "broken")
    status, out, err = run(score, "--policy", tmp_path / "broken", "--task", task_folder)
    assert (status, out) == (2, "")
    assert "tensor head.weight holds values that are NaN or infinite" in err


def test_missing_runs_end_with_status_2(run: Run, tiny_task: Path) -> None:
    status, out, err = run(assess, "--task", tiny_task, "--json", "--quiet")
    assert (status, out) == (2, "")
    assert err == f"error: {tiny_task / 'runs'}: holds no run to assess\n"


@pytest.fixture
def certified_folder(
    task_folder: Path, one_token_policy: Callable[[int], Policy], one_token_is_correct: Callable[..., QualityModel]
) -> Path:
    """A task whose fit is believed, token 1 correct everywhere, with a good and a bad run."""
    remember_quality(one_token_is_correct(1, 1, 1), task_digest(task_folder))
    save_policy(one_token_policy(0), task_folder / "runs/bad")
    save_policy(one_token_policy(1), task_folder / "runs/good")
    return task_folder


def test_certify_ends_with_status_0_and_one_document(run: Run, certified_folder: Path) -> None:
    policy = certified_folder / "runs/good"
    status, out, err = run(certify, "--policy", policy, "--task", certified_folder, "--json")
    document = one_document(out)
    assert status == 0
    assert err.startswith("certifying ")
    assert document["policy"] == str(policy)
    assert document["certified"] is True
    assert document["reasons"] == []
    assert document["improved_families"] == ["ash", "oak", "elm"]
    assert abs(document["optimism"]) < 0.05
    assert document["balanced_gain_lower"] < document["balanced_gain"]


def test_certify_ends_with_status_3_and_the_reasons(run: Run, certified_folder: Path) -> None:
    status, out, err = run(certify, "--policy", certified_folder / "runs/bad", "--task", certified_folder, "--quiet")
    assert (status, err) == (3, "")
    reasons = [line for line in out.splitlines() if line.startswith("NOT CERTIFIED: ")]
    assert [reason.split()[2] for reason in reasons] == ["balanced", "ash:", "oak:", "elm:"]
    assert out.splitlines()[-1] == ESTIMATE_NOTE


def test_certify_refuses_a_fit_of_too_few_labels(run: Run, tiny_task: Path) -> None:
    status, out, _ = run(certify, "--policy", tiny_task / "policy", "--task", tiny_task, "--json", "--quiet")
    assert status == 3
    assert "anvil: 12 expert labels, at least 20 are needed" in one_document(out)["reasons"]


@pytest.mark.parametrize("module", [fit_quality, assess, score, certify])
def test_a_missing_task_ends_with_status_2(module: ModuleType, run: Run, tmp_path: Path) -> None:
    policy = ["--policy", tmp_path] if module in (score, certify) else []
    status, out, err = run(module, *policy, "--task", tmp_path / "nowhere", "--json")
    assert (status, out) == (2, "")
    assert f"{tmp_path / 'nowhere'}: no such task directory; give one with --task DIR or TASK" in err


def test_bad_labels_are_reported_all_at_once_and_nothing_is_fitted(
    run: Run, tiny_task: Path, tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = shutil.copytree(tiny_task, tmp_path / "task")
    monkeypatch.setenv("XDG_CACHE_HOME", str(empty_cache.parent))
    for name in ("data/gold_calib.jsonl", "reward_model/train.jsonl"):
        lines = (task / name).read_text().splitlines()
        row = json.loads(lines[2])
        row["label"] = None
        lines[2] = json.dumps(row)
        (task / name).write_text("\n".join(lines))
    status, out, err = run(fit_quality, "--task", task, "--out", tmp_path / "fit.json")
    assert (status, out) == (2, "")
    for name in ("gold_calib.jsonl", "train.jsonl"):
        assert f"{name}:3: label must be a finite number, got None" in err
    assert not (tmp_path / "fit.json").exists()
    assert not empty_cache.exists()


def test_the_task_variable_is_used(run: Run, tiny_task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASK", str(tiny_task))
    _, by_variable, _ = run(score, "--policy", tiny_task / "policy", "--json")
    _, by_option, _ = run(score, "--policy", tiny_task / "policy", "--task", tiny_task, "--json")
    assert one_document(by_variable) == one_document(by_option)


def test_as_a_real_process_standard_output_is_the_document_alone(tiny_task: Path, shared_cache: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "objectives.score", "--policy", "policy", "--task", str(tiny_task), "--json"],
        cwd=tiny_task, env={**os.environ, "XDG_CACHE_HOME": str(shared_cache), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert one_document(result.stdout)["metrics"]["worst_family_gain"] == 0.0


@pytest.mark.parametrize("module", [fit_quality, score])
def test_an_answer_that_has_no_place_is_found_before_the_work(
    run: Run, tiny_task: Path, tmp_path: Path, module: ModuleType
) -> None:
    policy = [] if module is fit_quality else ["--policy", tiny_task / "nowhere"]
    status, out, err = run(module, "--task", tiny_task, "--out", tmp_path, *policy)
    assert (status, out) == (2, "")
    assert f"--out must name a file, got the folder {tmp_path}" in err
    assert ("nowhere" in err) == bool(policy)
    assert "fitting" not in err
