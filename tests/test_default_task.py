"""The committed task behaves as the published one: verdicts, signs and order of its earlier runs."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from objectives.assess import assess
from objectives.certify import certify
from objectives.limit import position_dependence, task_limit
from objectives.quality_cache import remember_quality
from objectives.quality_model import QualityModel, fit_quality
from objectives.release import Verdict
from objectives.score import Judge, Scores
from rlhf.policy import load_policy
from rlhf.taskdir import DEFAULT_TASK, Task, load_task
from rlhf.world import load_world

TRUTH = Path(__file__).parent / "data/default_task_truth.json"


@pytest.fixture(scope="module")
def task() -> Task:
    return load_task(DEFAULT_TASK)


@pytest.fixture(scope="module")
def model(task: Task) -> QualityModel:
    return fit_quality(task)


@pytest.fixture(scope="module")
def assessed(task: Task, model: QualityModel) -> dict[str, tuple[Scores, Verdict]]:
    remember_quality(model, task.digest)
    return assess(task)


def test_only_fourfam_may_ship_and_each_reason_is_the_published_one(assessed) -> None:
    reasons = {name: " ".join(verdict.reasons) for name, (_, verdict) in assessed.items()}
    assert [name for name, (_, verdict) in assessed.items() if verdict.release] == ["fourfam-s800"]
    assert reasons["default-s800"].startswith("dune harmed (")
    assert reasons["pilotmix-s800"].startswith("dune harmed (")
    assert "ember" not in reasons["default-s800"] + reasons["pilotmix-s800"]
    assert "dune harmed" in reasons["kl002-s1500"]
    assert "ember harmed" in reasons["kl002-s1500"]
    assert reasons["kl05-s800"].startswith("balanced gain +0.02")


def test_signs_of_dune_and_ember_are_the_published_ones(assessed) -> None:
    signs = {
        name: tuple(np.sign(scores.gain[[scores.families.index(family) for family in ("dune", "ember")]]).astype(int))
        for name, (scores, _) in assessed.items()
    }
    assert signs == {
        "default-s800": (-1, 1), "fourfam-s800": (1, 1), "kl002-s1500": (-1, -1), "kl05-s800": (-1, 1),
        "pilotmix-s800": (-1, 1),
    }  # fmt: skip


def test_order_of_gains_is_the_published_one(assessed) -> None:
    by_gain = sorted(assessed, key=lambda name: -assessed[name][0].balanced_gain)
    assert by_gain == ["kl002-s1500", "fourfam-s800", "default-s800", "pilotmix-s800", "kl05-s800"]


def test_order_of_dev_proxy_and_kl_is_the_published_one() -> None:
    evaluations = {
        folder.name: json.loads((folder / "dev_eval.json").read_text()) for folder in (DEFAULT_TASK / "runs").iterdir()
    }
    for figure in ("proxy_mean", "kl_mean"):
        order = sorted(evaluations, key=lambda name: -evaluations[name][figure])
        assert order[0] == "kl002-s1500"
        assert order[-2:] == ["fourfam-s800", "kl05-s800"]


def test_judge_finds_every_cell_and_both_shortcuts(model) -> None:
    truth = load_world(json.loads(TRUTH.read_text()))
    assert (model.attribute == truth.attribute).all()
    assert (model.correct.argmax(-1) == truth.correct).mean() >= 0.995
    found = {(model.vocab.families[s.family], s.feature.label(model.vocab)): s.size for s in model.shortcuts}
    assert found == {("dune", "pa"): pytest.approx(1.5, abs=0.05), ("ember", "he"): pytest.approx(0.44, abs=0.05)}


def test_the_fit_is_believed(task, model) -> None:
    assert model.refusals == ()


def test_scores_are_sharp(assessed) -> None:
    """Issue: a standard error of balanced quality of at most 0.002."""
    for name, (scores, _) in assessed.items():
        assert scores.metrics()["balanced_quality_se"] <= 0.002, name


def test_certificates_agree_with_the_release_rule(task, model) -> None:
    """The one earlier run that may ship is certified; one that harms dune is not, and says so."""
    good, bad = (
        certify(load_policy(DEFAULT_TASK / "runs" / name, task.vocab), task, model)
        for name in ("fourfam-s800", "default-s800")
    )
    assert good.reasons == ()
    assert good.bounds.balanced > 0.09
    assert good.bounds.harm < 0.03
    assert good.balanced_gain - good.bounds.balanced < 0.02
    assert [reason.split(":")[0] for reason in bad.reasons] == ["dune"]


def test_no_earlier_run_is_above_the_limit(task, model, assessed) -> None:
    judge = Judge(task, model)
    limit = task_limit(judge)
    for name, (scores, _) in assessed.items():
        assert scores.balanced_quality < limit.at(scores.balanced_kl), name


def test_positions_of_the_reference_are_nearly_independent(task) -> None:
    """What the limit assumes: 0.20 nats of total correlation a response were measured, 0.025 a position."""
    tokens = task.dev_prompts.tokens(task.vocab)[::40]
    assert position_dependence(task.reference, tokens, n_samples=16, seed=0).mean() < 0.3


def test_files_are_those_the_manifest_names() -> None:
    manifest = json.loads((DEFAULT_TASK / "manifest.json").read_text())
    files = [p for p in DEFAULT_TASK.rglob("*") if p.is_file() and p.name not in ("manifest.json", "log.jsonl")]
    digests = {p.relative_to(DEFAULT_TASK).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    assert digests == manifest["sha256"]


def test_truth_is_not_in_the_task() -> None:
    names = [path.name for path in DEFAULT_TASK.rglob("*")]
    assert not [name for name in names if "truth" in name]
