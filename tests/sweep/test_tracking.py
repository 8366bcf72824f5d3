import time

import pytest

from rlhf.errors import InputError
from sweep import tracking
from sweep.tracking import FAILED, FINISHED, KILLED, Ledger


@pytest.fixture
def sweep(empty_ledger: Ledger, request: pytest.FixtureRequest):
    return empty_ledger.open_sweep(request.node.name, space="kl_mix", facts={"max_harm": "0.03", "trials": "2"})


def add(ledger: Ledger, sweep, run_id: str, files, *, metrics=None, train_rows=()) -> None:
    ledger.add_candidate(
        sweep, run_id, trial=0, step=1, params={}, metrics=metrics or {"kl": 2.0}, train_rows=train_rows, files=files
    )


def test_a_candidate_comes_back_as_it_was_written(empty_ledger, sweep, tmp_path) -> None:
    (tmp_path / "policy.safetensors").write_bytes(b"weights")
    run_id = empty_ledger.open_trial(sweep, 0, {"kl_coef": 0.1, "family_weights": None}, {"kl_coef": 0.1})
    metrics = {"balanced_quality": 0.5, "worst_family_harm": 0.0, "gain/dune": -0.25}
    written = empty_ledger.add_candidate(
        sweep, run_id, trial=0, step=200, params={"kl_coef": 0.1}, metrics=metrics, train_rows=[], files=tmp_path
    )
    assert empty_ledger.candidates(sweep) == [written]
    empty_ledger.download(written, tmp_path / "back")
    assert (tmp_path / "back/policy.safetensors").read_bytes() == b"weights"


def test_metrics_that_are_not_finite_are_never_written(empty_ledger, sweep, tmp_path) -> None:
    run_id = empty_ledger.open_trial(sweep, 0, {}, {})
    with pytest.raises(AssertionError, match="finite"):
        add(empty_ledger, sweep, run_id, tmp_path, metrics={"worst_family_harm": float("nan")})
    assert empty_ledger.candidates(sweep) == []
    add(empty_ledger, sweep, run_id, tmp_path, train_rows=[{"step": 1, "loss": float("inf"), "kl": 0.5}])
    assert empty_ledger._client.get_run(run_id).data.metrics == {"train/kl": 0.5, "eval/kl": 2.0}


def test_trials_keep_status_and_reason(empty_ledger, sweep) -> None:
    for number, (status, reason) in enumerate([(FINISHED, None), (FAILED, "out of luck"), (KILLED, "stopped")]):
        run_id = empty_ledger.open_trial(sweep, number, {"steps": 1}, {})
        empty_ledger.close_run(run_id, status, reason=reason)
    records = [(trial.number, trial.status, trial.reason) for trial in empty_ledger.trials(sweep)]
    assert records == [(0, FINISHED, None), (1, FAILED, "out of luck"), (2, KILLED, "stopped")]


def test_more_training_rows_than_one_batch_holds(empty_ledger, sweep, tmp_path) -> None:
    run_id = empty_ledger.open_trial(sweep, 0, {}, {})
    rows = [{"step": step, "loss": 0.1, "kl": 0.2} for step in range(700)]
    add(empty_ledger, sweep, run_id, tmp_path, train_rows=rows)
    history = empty_ledger._client.get_metric_history(run_id, "train/loss")
    assert len(history) == 700


def test_find_takes_the_latest_or_the_named_and_lists_what_there_is(empty_ledger, sweep) -> None:
    later = empty_ledger.open_sweep("later", space="other", facts={"max_harm": "0.03"})
    assert empty_ledger.find(None).name == "later"
    assert empty_ledger.find(sweep.name).run_id == sweep.run_id
    assert later.experiment_id != sweep.experiment_id
    with pytest.raises(InputError, match=r"no sweep absent in sqlite.*recorded sweeps: later"):
        empty_ledger.find("absent")


def test_reading_a_store_that_is_not_there_writes_nothing(tmp_path) -> None:
    assert Ledger(f"sqlite:///{tmp_path / 'none.db'}").sweeps() == []
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_a_database_is_refused(tmp_path) -> None:
    (tmp_path / "bad.db").write_text("not a database " * 100)
    with pytest.raises(InputError, match="cannot be read"):
        Ledger(f"sqlite:///{tmp_path / 'bad.db'}").sweeps()


def test_the_second_of_two_sweeps_started_under_one_name_is_refused(empty_ledger, sweep) -> None:
    with pytest.raises(InputError, match="has just been started"):
        empty_ledger.open_sweep(sweep.name, space="kl_mix", facts={})
    assert [s.run_id for s in empty_ledger.sweeps() if s.name == sweep.name] == [sweep.run_id]


class FlakyClient:
    def __init__(self, *errors: str) -> None:
        self.errors = list(errors)

    def log(self, value: int) -> int:
        if self.errors:
            raise RuntimeError(self.errors.pop(0))
        return value


def test_a_store_that_is_locked_for_a_moment_is_tried_again(monkeypatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    client = tracking._Patient(FlakyClient("database is locked", "Max retries exceeded with url"))
    assert client.log(7) == 7


def test_a_refusal_is_not_tried_again() -> None:
    flaky = FlakyClient("INVALID_PARAMETER_VALUE", "never reached")
    with pytest.raises(RuntimeError, match="INVALID_PARAMETER_VALUE"):
        tracking._Patient(flaky).log(7)
    assert flaky.errors == ["never reached"]


def test_patience_ends(monkeypatch) -> None:
    monkeypatch.setattr(tracking, "_PATIENCE_S", -1.0)
    with pytest.raises(RuntimeError, match="locked"):
        tracking._Patient(FlakyClient("database is locked")).log(7)
