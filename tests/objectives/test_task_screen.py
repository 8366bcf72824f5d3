import pytest

from objectives import task_screen
from objectives.task_screen import screen_task
from rlhf.taskdir import DEFAULT_TASK, load_task


def test_the_default_tasks_screen_is_kept_with_its_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    task = load_task(DEFAULT_TASK)
    found = screen_task(task)
    assert found.flagged == {"dune", "ember"}
    dune, ember = found.reasons
    assert dune.startswith("dune: crowd labels pay 1.")
    assert "`pa`" in dune
    assert "`he`" in ember
    assert found.picture.startswith(b"\x89PNG")
    monkeypatch.setattr(task_screen, "_screen", None)  # a second time nothing is screened
    assert screen_task(task) == found
