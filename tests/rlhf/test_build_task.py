"""`scripts/build_task.py`, run as a user runs it."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf.taskdir import load_task

PROJECT = Path(__file__).parents[2]
SIZES = [
    *("--demos", "300", "--sft-epochs", "1", "--prompts-per-family", "10", "--dev", "30", "--expert-per-family", "4"),
    *("--crowd", "60", "--crowd-shipped", "30", "--rm-epochs", "1", "--quiet"),
]


def build(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROJECT / "scripts/build_task.py"), "--seed", "5"]
    return subprocess.run(
        [*command, "--out", str(folder / "task"), "--truth", str(folder / "truth.json"), *SIZES, *options],
        check=False, capture_output=True, text=True, cwd=PROJECT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def manifest_of(task: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((task / "manifest.json").read_text())
    return document


def test_the_manifest_has_the_digest_of_every_file(tiny_task: Path) -> None:
    files = {path.relative_to(tiny_task).as_posix(): path for path in tiny_task.rglob("*") if path.is_file()}
    del files["manifest.json"]
    manifest = manifest_of(tiny_task)
    assert manifest["sha256"] == {n: hashlib.sha256(path.read_bytes()).hexdigest() for n, path in files.items()}
    assert manifest["options"]["seed"] == 3
    assert set(manifest["versions"]) == {"torch", "numpy", "safetensors"}


def test_the_truth_is_not_in_the_task(tiny_task: Path, tiny_truth: Path) -> None:
    truth = json.loads(tiny_truth.read_text())
    assert not tiny_truth.is_relative_to(tiny_task)
    for path in tiny_task.rglob("*.json"):
        assert not truth.keys() & json.loads(path.read_text()).keys() - {"vocab"}, path
    secret = json.dumps(truth["correct"][0][0])
    assert all(secret.encode() not in path.read_bytes() for path in tiny_task.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("shortcut", "message"),
    [
        ("dune:token:pa", "--shortcut must look like dune:token:pa:1.5 with a known family, got 'dune:token:pa'"),
        ("dune:position:pa@9:1", "position must be 1 to 8 for kind position"),
        pytest.param("granite:token:pa:1", "with a known family, got 'granite:token:pa:1'", marks=pytest.mark.slow),
        pytest.param("dune:rhyme:qu:1", "shortcut kind must be one of", marks=pytest.mark.slow),
    ],
)
def test_a_bad_shortcut_exits_2_and_writes_nothing(tmp_path: Path, shortcut: str, message: str) -> None:
    done = build(tmp_path, "--shortcut", shortcut)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_neither_a_full_folder_nor_a_truth_inside_the_task_is_accepted(tmp_path: Path) -> None:
    inside = build(tmp_path, "--truth", str(tmp_path / "task/truth.json"))
    assert inside.returncode == 2
    assert "must lie outside the task directory" in inside.stderr
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "task").mkdir()
    (tmp_path / "task/mine.txt").write_text("kept")
    full = build(tmp_path)
    assert full.returncode == 2
    assert "already holds files; give a new or empty folder" in full.stderr
    assert [path.name for path in (tmp_path / "task").iterdir()] == ["mine.txt"]


@pytest.mark.slow
def test_a_task_with_runs_is_built_to_the_same_bytes_twice(tmp_path: Path) -> None:
    for name in ("one", "two"):
        done = build(tmp_path / name, "--run-steps-scale", "0.01")
        assert done.returncode == 0, done.stderr
    one, two = (manifest_of(tmp_path / name / "task") for name in ("one", "two"))
    assert one["sha256"] == two["sha256"]
    assert (tmp_path / "one/truth.json").read_bytes() == (tmp_path / "two/truth.json").read_bytes()
    runs = {path.parent.name for path in (tmp_path / "one/task/runs").glob("*/log.jsonl")}
    assert runs == {"default-s800", "fourfam-s800", "kl002-s1500", "kl05-s800", "pilotmix-s800"}
    for run in runs:
        files = {path.name for path in (tmp_path / "one/task/runs" / run).iterdir()}
        assert files == {
            "run_config.json", "log.jsonl", "policy.safetensors", "config.json", "dev_eval.json", "NOTES.md",
        }  # fmt: skip


@pytest.mark.slow
def test_another_vocabulary_and_every_kind_of_shortcut(tmp_path: Path) -> None:
    vocab = {"families": ["p", "q"], "n_attrs": 1, "n_values": 3, "content_tokens": list("abcde"), "resp_len": 2}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    texts = ["p:token:a:1.5", "p:pair:b+a:0.4", "q:adjacent:a+b:0.3", "q:position:c@2:-0.5", "p:repetition::0.2"]
    options = [part for text in texts for part in ("--shortcut", text)]
    done = build(tmp_path, "--vocab", str(tmp_path / "vocab.json"), "--no-runs", *options)
    assert done.returncode == 0, done.stderr
    assert load_task(tmp_path / "task").vocab.to_json() == vocab
    truth = json.loads((tmp_path / "truth.json").read_text())
    assert [(s["family"], s["kind"], s["tokens"], s["position"], s["size"]) for s in truth["shortcuts"]] == [
        ("p", "token", ["a"], None, 1.5), ("p", "pair", ["b", "a"], None, 0.4),
        ("q", "adjacent", ["a", "b"], None, 0.3),
        ("q", "position", ["c"], 1, -0.5), ("p", "repetition", [], None, 0.2),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("size", ["nan", "inf"])
def test_a_shortcut_size_must_be_finite(tmp_path: Path, size: str) -> None:
    assert build(tmp_path, "--no-runs", "--shortcut", f"dune:token:pa:{size}").returncode == 2


@pytest.mark.slow
def test_a_vocabulary_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert build(tmp_path, "--no-runs", "--vocab", str(tmp_path / "none.json")).returncode == 2


@pytest.mark.slow
def test_a_sample_larger_than_the_crowd_batch_is_refused(tmp_path: Path) -> None:
    assert build(tmp_path, "--no-runs", "--crowd-shipped", "600").returncode == 2
    assert not (tmp_path / "task").exists()
