"""Recording against a hand-written ledger: every trial is opened once and closed once."""

from pathlib import Path

import pytest

from sweep.messages import Assignment, Report
from sweep.recording import Recording
from sweep.tracking import FAILED, FINISHED, KILLED

ASSIGNMENT = Assignment(3, {"kl_coef": 0.1}, {"kl_coef": 0.1, "steps": 10})


class FakeLedger:
    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def open_trial(self, sweep, number, config, params) -> str:
        self.events.append(("open", number))
        return f"run-{number}"

    def close_run(self, run_id, status, *, reason=None) -> None:
        self.events.append(("close", run_id, status, reason))

    def add_candidate(self, sweep, run_id, **given):
        self.events.append(("candidate", run_id, given["step"]))
        return given


class FakeProgress:
    def started(self, number, params, *, steps) -> None: ...

    def judged(self, candidate) -> None: ...

    def ended(self, number, status, reason) -> None: ...


@pytest.fixture
def recording() -> Recording:
    return Recording(FakeLedger(), None, FakeProgress())


def test_a_trial_is_opened_once_and_closed_with_its_status(recording) -> None:
    recording.start_trial("t", ASSIGNMENT)
    recording.start_trial("t", ASSIGNMENT)
    recording.add_candidate("t", Report(10, {}, []), Path())
    recording.finish_trial("t")
    assert recording.ledger.events == [
        ("open", 3), ("candidate", "run-3", 10), ("close", "run-3", FINISHED, None)
    ]  # fmt: skip
    assert not recording.has_open_trials


def test_a_failure_keeps_its_reason(recording) -> None:
    recording.start_trial("t", ASSIGNMENT)
    recording.fail_trial("t", "it broke")
    assert recording.ledger.events[-1] == ("close", "run-3", FAILED, "it broke")


def test_what_is_open_at_the_end_is_killed_with_the_reason(recording) -> None:
    recording.start_trial("t", ASSIGNMENT)
    assert recording.has_open_trials
    recording.kill_open_trials("out of time")
    recording.kill_open_trials("out of time")
    assert recording.ledger.events[1:] == [("close", "run-3", KILLED, "out of time")]


def test_a_trial_cannot_be_closed_twice(recording) -> None:
    recording.start_trial("t", ASSIGNMENT)
    recording.finish_trial("t")
    with pytest.raises(KeyError):
        recording.fail_trial("t", "late")
