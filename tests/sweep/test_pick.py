import json
import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

import sweep.pick
from rlhf.errors import run_command
from rlhf.policy import load_policy
from rlhf.vocab import DEFAULT_VOCAB
from sweep.tracking import Ledger


@pytest.fixture
def pick(first_sweep, monkeypatch, capsys):
    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["pick", "--name", "first", "--tracking-uri", first_sweep.uri, *args])
        with pytest.raises(SystemExit) as stopped:
            run_command(sweep.pick.main)
        said = capsys.readouterr()
        return int(stopped.value.code or 0), said.out, said.err

    return run


def test_json_gives_candidate_scores_and_reason(pick) -> None:
    status, out, _ = pick("--json")
    document = json.loads(out)
    assert status == 0
    assert document["sweep"] == "first"
    assert document["picked"]["metrics"]["worst_family_harm"] <= 0.03
    assert document["picked"]["metrics"]["balanced_gain"] >= 0.03
    assert "the highest balanced quality of the certified finalists" in document["why"]
    certificate = document["certificate"]
    assert certificate["certified"] is True
    assert certificate["n_finalists"] == 3
    assert certificate["balanced_gain_lower"] < certificate["balanced_gain"]
    assert certificate["selection_balanced_gain"] == document["picked"]["metrics"]["balanced_gain"]


def test_the_terminal_shows_the_certificate(pick) -> None:
    status, out, err = pick()
    assert status == 0
    assert "certifying 3 finalists" in err
    assert "CERTIFIED" in out
    assert "optimism" in out


def test_finalists_that_cannot_be_certified_are_not_picked(pick, monkeypatch) -> None:
    monkeypatch.setattr("objectives.fit_checks.MIN_EXPERT_LABELS", 101)
    status, out, _ = pick("--json")
    document = json.loads(out)
    assert status == 3
    assert document["picked"] is None
    assert "none of the 3 finalists of sweep first could be certified" in document["why"]
    assert "101" in document["certificate"]["reasons"][0]


def test_a_task_that_is_not_the_sweeps_is_refused(pick, tiny_task) -> None:
    status, _, err = pick("--task", str(tiny_task))
    assert status == 2
    assert "is not the task that sweep first was run on" in err


def test_out_writes_a_checkpoint_that_loads_and_the_pick(pick, tmp_path) -> None:
    status, _, _ = pick("--out", str(tmp_path / "picked"))
    assert status == 0
    load_policy(tmp_path / "picked", DEFAULT_VOCAB)
    assert json.loads((tmp_path / "picked/pick.json").read_text())["picked"]["step"] in (30, 60)


def test_out_never_overwrites(pick, tmp_path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    status, _, err = pick("--out", str(tmp_path))
    assert status == 2
    assert "already holds files" in err


def test_pick_is_noted_on_the_parent_run(pick, first_sweep) -> None:
    _, out, _ = pick("--prefer", "low-kl", "--json")
    ledger = Ledger(first_sweep.uri)
    assert ledger.pick_of(ledger.find("first")) == json.loads(out)["picked"]["model_id"]


def test_register_makes_a_model_version(pick) -> None:
    status, out, _ = pick("--register", "shipped", "--json")
    assert status == 0
    assert json.loads(out)["registered"] == {"model": "shipped", "version": "1"}


def test_nothing_feasible_shows_the_nearest_and_exits_3(pick, monkeypatch) -> None:
    monkeypatch.setattr("objectives.release.MIN_BALANCED_GAIN", 0.9)
    status, out, _ = pick()
    assert status == 3
    assert "No pick: none of the 6 candidates of sweep first meets the release rule." in out
    assert "the nearest; it may not ship" in out
    status, out, _ = pick("--json")
    assert status == 3
    assert json.loads(out)["picked"] is None
    assert json.loads(out)["nearest"]["params"]


def test_a_model_name_that_cannot_be_registered_is_refused_before_anything_is_written(pick, tmp_path) -> None:
    status, _, err = pick("--register", "a/b:c", "--out", str(tmp_path / "out"))
    assert status == 2
    assert "--register must be a name without '/' and ':'" in err
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_the_store_has_lost_is_named(pick, first_sweep, tmp_path, monkeypatch) -> None:
    def lost(*_: object, **__: object) -> str:
        raise MlflowException("no such artifact")

    monkeypatch.setattr("sweep.tracking.download_artifacts", lost)
    status, _, err = pick("--out", str(tmp_path / "picked"))
    assert status == 2
    assert "cannot be read (no such artifact)" in err
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_and_registers_nothing(pick, first_sweep, tmp_path, monkeypatch) -> None:
    copy, full = shutil.copytree, tmp_path / "picked"

    def copytree(source: str, target: Path, *, dirs_exist_ok: bool) -> None:
        if target != full:  # certification reads finalists too
            copy(source, target, dirs_exist_ok=dirs_exist_ok)
            return
        target.mkdir()
        (target / "half").write_text("")
        raise shutil.Error([(source, str(target), "[Errno 28] No space left on device")])

    monkeypatch.setattr("sweep.tracking.shutil.copytree", copytree)
    status, _, err = pick("--out", str(full), "--register", "never")
    assert status == 1
    assert f"{full}: the files of trial" in err
    assert "No space left on device" in err
    assert list(tmp_path.iterdir()) == []
    assert not MlflowClient(first_sweep.uri, first_sweep.uri).search_registered_models("name = 'never'")


def test_out_may_be_a_link_to_an_empty_folder(pick, tmp_path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert pick("--out", str(tmp_path / "link"))[0] == 0
    load_policy(tmp_path / "real", DEFAULT_VOCAB)
