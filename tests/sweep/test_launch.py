"""The whole path: a sweep run as a command, then looked at through MLflow itself."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts
from mlflow.entities import Run

from rlhf.config import RunConfig
from rlhf.policy import load_policy
from rlhf.vocab import DEFAULT_VOCAB
from sweep.schedule import INTERRUPTED
from sweep.tracking import Ledger

METRICS = (
    "eval/balanced_quality", "eval/balanced_gain", "eval/worst_family_gain", "eval/worst_family_harm", "eval/kl",
    "eval/proxy_reward", "eval/quality/dune", "eval/gain/dune", "eval/kl/dune",
)  # fmt: skip
CURVES = (
    "train/proxy_reward", "train/shaped_reward", "train/kl", "train/kl_per_token", "train/entropy", "train/loss",
    "train/grad_norm",
)  # fmt: skip


@pytest.fixture(scope="module")
def client(first_sweep):
    return MlflowClient(tracking_uri=first_sweep.uri)


@pytest.fixture(scope="module")
def runs(client) -> list[Run]:
    experiment = client.get_experiment_by_name("smoke")
    return list(client.search_runs([experiment.experiment_id]))


def parent_of(runs: list[Run]) -> Run:
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    return parent


def children_of(runs: list[Run]) -> list[Run]:
    return [run for run in runs if "mlflow.parentRunId" in run.data.tags]


def test_one_parent_and_a_child_for_each_trial_all_finished(runs) -> None:
    assert len(children_of(runs)) == 3
    assert {run.data.tags["mlflow.parentRunId"] for run in children_of(runs)} == {parent_of(runs).info.run_id}
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert sorted(run.data.tags["sweep.trial"] for run in children_of(runs)) == ["0", "1", "2"]
    assert {run.data.tags["sweep.name"] for run in runs} == {"first"}


def test_parent_says_what_was_run(runs, client) -> None:
    tags = parent_of(runs).data.tags
    assert "sweep.launch --tracking-uri" in tags["sweep.fact.command"]
    assert len(tags["sweep.fact.task_digest"]) == 64
    assert "torch=2." in tags["sweep.fact.versions"]
    assert tags["sweep.fact.code"]
    artifacts = {file.path for file in client.list_artifacts(parent_of(runs).info.run_id)}
    assert {"front.html", "space.json", "screen.json", "screen.png"} <= artifacts


def test_launch_says_what_optimising_the_reward_model_would_hack(first_sweep) -> None:
    said = (first_sweep.folder / "first.log").read_text()
    assert "warning: optimising the reward model would hack dune: crowd labels pay 1." in said
    assert "warning: optimising the reward model would hack ember: crowd labels pay 0." in said


def test_one_checkpoint_of_each_trial_is_left(first_sweep) -> None:
    trials = list((first_sweep.folder / "ray").glob("first-*/trial-*"))
    assert len(trials) == 3
    assert all(len(list(trial.glob("checkpoint_*"))) == 1 for trial in trials)


def test_child_has_every_config_key_and_training_curve(runs, client) -> None:
    for child in children_of(runs):
        assert set(RunConfig.__dataclass_fields__) <= set(child.data.params)
        assert child.data.params["steps"] == "60"
        for curve in CURVES:
            assert client.get_metric_history(child.info.run_id, curve), curve


def test_every_judged_checkpoint_is_a_model_with_metrics_and_files(first_sweep, client, runs, tmp_path) -> None:
    models = client.search_logged_models([parent_of(runs).info.experiment_id])
    assert len(models) == 3 * 2  # two rungs a trial
    for model in models:
        values = {metric.key: metric.value for metric in model.metrics}
        assert set(METRICS) <= set(values)
        assert {f"{name}_se" for name in METRICS} <= set(values)
        folder = Path(download_artifacts(artifact_uri=model.artifact_location, dst_path=str(tmp_path / model.model_id)))
        load_policy(folder, DEFAULT_VOCAB)
        assert model.source_run_id in {run.info.run_id for run in children_of(runs)}


def test_eval_curves_have_a_point_at_each_rung(client, runs) -> None:
    for child in children_of(runs):
        history = client.get_metric_history(child.info.run_id, "eval/balanced_quality")
        assert sorted(metric.step for metric in history) == [30, 60]


def test_anchor_is_tried_first(runs) -> None:
    (first,) = [run for run in children_of(runs) if run.data.tags["sweep.trial"] == "0"]
    assert (first.data.params["kl_coef"], first.data.params["reward_wrapper"]) == ("0.02", "label_quality")


def test_plain_lines_when_not_a_terminal(first_sweep) -> None:
    log = (first_sweep.folder / "first.log").read_text()
    assert "3/3 trials done, 0 running, 0 failed" in log
    assert "\x1b" not in log
    assert "sweep first: FINISHED" in log


def test_a_failing_trial_is_recorded_with_its_reason_and_does_not_stop_the_search(place) -> None:
    wrapper = place.folder / "fails_late.py"
    wrapper.write_text(
        "calls = 0\n"
        "def transform(records, response_tokens, rewards):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls > 5:\n"
        "        raise ValueError('the vendor is closed')\n"
        "    return rewards\n"
    )
    space = place.folder / "half_broken.py"
    space.write_text(
        "from optuna.distributions import CategoricalDistribution, FloatDistribution\n"
        "from search_spaces.space import SearchSpace\n"
        f"WRAPPERS = ('raw', {str(wrapper)!r})\n"
        "SPACE = SearchSpace(name='half_broken', distributions={'kl_coef': FloatDistribution(0.01, 0.2),\n"
        "    'reward_wrapper': CategoricalDistribution(WRAPPERS)}, max_steps=10, rungs=1, trials=2,\n"
        "    anchors=tuple({'kl_coef': 0.1, 'reward_wrapper': name} for name in WRAPPERS))\n"
    )
    done = place.run("sweep.launch", "--space", str(space), "--name", "broken")
    assert done.returncode == 0, done.stderr
    ledger = Ledger(place.uri)
    trials = ledger.trials(ledger.find("broken"))
    assert [trial.status for trial in trials] == ["FINISHED", "FAILED"]
    assert "the vendor is closed" in str(trials[1].reason)
    assert "fails_late.py" in str(trials[1].reason)
    assert {candidate.trial for candidate in ledger.candidates(ledger.find("broken"))} == {0}
    assert "1 failed" in done.stderr


def test_a_trial_that_cannot_start_is_recorded_and_a_sweep_without_candidates_fails(place) -> None:
    wrapper = place.folder / "cannot_start.py"
    wrapper.write_text(
        "import os\n"
        "def prepare(task_dir, config):\n"
        "    if config['steps'] == 10:\n"
        "        raise ValueError('no licence on this machine')\n"
        "def transform(records, response_tokens, rewards):\n"
        "    return rewards\n"
    )
    space = place.folder / "cannot_start_space.py"
    space.write_text(
        "from optuna.distributions import FloatDistribution\n"
        "from search_spaces.space import SearchSpace\n"
        "SPACE = SearchSpace(name='cannot_start', distributions={'kl_coef': FloatDistribution(0.01, 0.2)},\n"
        f"    fixed={{'reward_wrapper': {str(wrapper)!r}}}, max_steps=10, rungs=1, trials=2)\n"
    )
    done = place.run("sweep.launch", "--space", str(space), "--name", "none-starts")
    assert done.returncode == 1, done.stderr
    ledger = Ledger(place.uri)
    trials = ledger.trials(ledger.find("none-starts"))
    assert [trial.status for trial in trials] == ["FAILED", "FAILED"]
    assert "no licence on this machine" in str(trials[0].reason)
    assert str(wrapper) in str(trials[0].reason)


@pytest.mark.slow
def test_time_budget_ends_with_a_closed_record_and_its_reason(place) -> None:
    options = ["--trials", "500", "--max-steps", "60", "--time-budget-s", "40"]
    done = place.run("sweep.launch", "--space", "smoke", *options, "--name", "out-of-time")
    assert done.returncode == 0, done.stderr
    ledger = Ledger(place.uri)
    sweep = ledger.find("out-of-time")
    assert sweep.status == "FINISHED"
    reasons = {trial.reason for trial in ledger.trials(sweep) if trial.status != "FINISHED"}
    assert reasons <= {"the time budget of 40 s ran out"}
    assert len(ledger.candidates(sweep)) >= 1


@pytest.mark.chaos
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("concurrency", ["1", "2"])
def test_interrupt_leaves_a_closed_readable_record(place, sent, concurrency) -> None:
    name = f"interrupted-{sent.name}-{concurrency}"
    options = ["--trials", "40", "--max-steps", "60", "--concurrency", concurrency]
    command = place.command("sweep.launch", "--space", "smoke", *options, "--name", name)
    driver = subprocess.Popen(
        command, cwd=place.folder, env=place.environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    seen = _read_until(driver, "step 30", timeout_s=120)
    os.kill(driver.pid, sent)
    _, rest = driver.communicate(timeout=120)
    assert driver.returncode == 130, seen + rest
    ledger = Ledger(place.uri)
    sweep = ledger.find(name)
    assert (sweep.status, sweep.reason) == ("KILLED", INTERRUPTED)
    trials = ledger.trials(sweep)
    assert {trial.status for trial in trials} <= {"FINISHED", "KILLED"}
    assert "KILLED" in {trial.status for trial in trials}
    assert len(ledger.candidates(sweep)) >= 1


def _read_until(driver: subprocess.Popen[str], text: str, *, timeout_s: float) -> str:
    deadline, seen = time.monotonic() + timeout_s, ""
    assert driver.stderr is not None
    while text not in seen:
        line = driver.stderr.readline()
        seen += line
        assert line, f"ended early: {seen}"
        assert time.monotonic() < deadline, seen
    return seen
