import pytest

from objectives import task_screen
from objectives.task_screen import TaskScreen, screen_task
from rlhf.taskdir import DEFAULT_TASK, load_task


def test_the_default_tasks_screen_is_kept_with_its_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    task = load_task(DEFAULT_TASK)
    found = screen_task(task)
    assert found.flagged == {"dune", "ember"}
    dune, ember = found.warnings
    assert dune.startswith("optimising the reward model would hack dune: crowd labels pay 1.")
    assert "`pa`" in dune
    assert "`he`" in ember
    assert found.picture.startswith(b"\x89PNG")
    monkeypatch.setattr(task_screen, "_screen", None)  # a second time nothing is screened
    assert screen_task(task) == found


def test_a_family_that_cannot_be_screened_is_not_called_hacked() -> None:
    reason = "dune: the QA sample holds no row of this family; nothing can be said, so the risk is 1"
    unknown = {"risk": 1.0, "flag": True, "reasons": [reason], "findings": []}
    assert TaskScreen({"families": {"dune": unknown}}, b"").warnings == [reason]
