import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.errors import InputError
from rlhf.taskdir import DEFAULT_TASK, find_task_dir, load_task, resolve_path, task_digest
from rlhf.vocab import DEFAULT_VOCAB, Vocab


def test_a_built_task_loads_with_all_its_parts(tiny_task: Path) -> None:
    task = load_task(tiny_task)
    assert task.vocab == DEFAULT_VOCAB
    assert [len(part) for part in (task.train_prompts, task.expert, task.crowd)] == [360, 72, 120]
    assert 55 <= len(task.dev_prompts) <= 65
    assert task.digest == task_digest(tiny_task)
    assert {path.name for path in tiny_task.iterdir()} == {
        "policy", "reward_model", "data", "configs", "manifest.json",
    }  # fmt: skip


def test_a_process_reads_a_task_once_and_again_when_a_file_has_changed(small_task: Path) -> None:
    task = load_task(small_task)
    assert load_task(small_task) is task
    prompts = small_task / "data/prompts_train.jsonl"
    prompts.write_text(prompts.read_text() + prompts.read_text().splitlines()[0] + "\n")
    assert len(load_task(small_task).train_prompts) == len(task.train_prompts) + 1


def test_another_vocabulary_works_unchanged(tmp_path: Path, make_task: Callable[..., Path], odd_vocab: Vocab) -> None:
    task = load_task(make_task(tmp_path / "task", odd_vocab, per_family=2))
    assert task.vocab == odd_vocab
    assert task.reference.config.resp_len == odd_vocab.resp_len
    assert task.expert.responses.shape == (2 * len(odd_vocab.families), odd_vocab.resp_len)


def test_the_problems_of_every_file_are_reported_together(small_task: Path) -> None:
    (small_task / "policy/policy.safetensors").unlink()
    (small_task / "reward_model/config.json").write_text("{}")
    (small_task / "data/prompts_train.jsonl").write_text("{\n[]\n")
    (small_task / "data/prompts_dev.jsonl").unlink()
    rows = [json.loads(line) for line in (small_task / "data/gold_calib.jsonl").read_text().splitlines()]
    rows[2]["label"] = float("nan")
    (small_task / "data/gold_calib.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (small_task / "reward_model/train.jsonl").write_text("")
    with pytest.raises(InputError) as caught:
        load_task(small_task)
    named = {problem.removeprefix(f"{small_task}/").split(": ")[0] for problem in caught.value.problems}
    assert named == {
        "policy/policy.safetensors", "reward_model/config.json", "data/prompts_train.jsonl:1",
        "data/prompts_train.jsonl:2", "data/prompts_dev.jsonl", "data/gold_calib.jsonl:3", "reward_model/train.jsonl",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("data/gold_calib.jsonl", "family q has no expert label; every family needs some"),
        ("data/prompts_train.jsonl", "family q has no training prompt; every family needs some"),
    ],
)
def test_a_family_left_out_is_named(small_task: Path, name: str, message: str) -> None:
    path = small_task / name
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines() if '"family": "p"' in line))
    with pytest.raises(InputError) as caught:
        load_task(small_task)
    assert caught.value.problems == (f"{path}: {message}",)


def test_crowd_labels_and_dev_prompts_may_leave_a_family_out(small_task: Path) -> None:
    for name in ("reward_model/train.jsonl", "data/prompts_dev.jsonl"):
        path = small_task / name
        path.write_text("".join(line + "\n" for line in path.read_text().splitlines() if '"family": "p"' in line))
    task = load_task(small_task)
    assert set(task.crowd.prompts.family) == set(task.dev_prompts.family) == {0}


def test_a_missing_directory_says_how_to_give_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such task directory; give one with --task DIR or TASK"):
        load_task(tmp_path / "none")


def test_the_task_is_the_argument_then_the_variable_then_the_built_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TASK", "from_variable")
    assert find_task_dir("given") == tmp_path / "given"
    assert find_task_dir(None) == tmp_path / "from_variable"
    monkeypatch.delenv("TASK")
    assert find_task_dir(None) == DEFAULT_TASK


def test_paths_are_looked_for_in_the_task_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here/both.py").touch()
    (tmp_path / "here/only.py").touch()
    (tmp_path / "task/both.py").touch()
    assert resolve_path("both.py", tmp_path / "task") == tmp_path / "task/both.py"
    assert resolve_path("only.py", tmp_path / "task") == tmp_path / "here/only.py"
    assert resolve_path(str(tmp_path / "here/both.py"), tmp_path / "task") == tmp_path / "here/both.py"


def test_the_digest_depends_on_names_and_contents_but_not_on_place_or_runs(small_task: Path, tmp_path: Path) -> None:
    digest = task_digest(small_task)
    moved = tmp_path / "moved"
    shutil.copytree(small_task, moved)
    (moved / "runs/one").mkdir(parents=True)
    (moved / "runs/one/log.jsonl").write_text("{}")
    assert task_digest(moved) == digest
    seen = {digest}
    (moved / "data/extra.jsonl").write_text("ab")
    seen.add(task_digest(moved))
    (moved / "data/extra.jsonl").rename(moved / "data/other.jsonl")
    seen.add(task_digest(moved))
    (moved / "data/other.jsonl").write_text("ac")
    seen.add(task_digest(moved))
    (moved / "vocab.json").unlink()
    seen.add(task_digest(moved))
    assert len(seen) == 5
