import pytest

from rlhf.errors import InputError, SweepError, TrainingError, raise_if_any, run_command


def status_of(main: object) -> object:
    with pytest.raises(SystemExit) as caught:
        run_command(main)  # type: ignore[arg-type]
    return caught.value.code


def failing(error: BaseException) -> object:
    def main() -> None:
        raise error

    return main


def test_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(lambda: None) == 0
    assert status_of(lambda: 7) == 7
    assert status_of(failing(KeyboardInterrupt())) == 130
    assert status_of(failing(InputError(["one", "two"]))) == 2
    assert capsys.readouterr() == ("", "interrupted\nerror: one\nerror: two\n")


def test_many_problems_are_counted_past_the_twentieth(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(failing(InputError([f"p{n}" for n in range(23)]))) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == [*(f"error: p{n}" for n in range(20)), "error: ... and 3 more problems"]


def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 // 0)


def test_problems_are_kept_apart() -> None:
    assert InputError("one").problems == ("one",)
    assert str(InputError(["one", "two"])) == "one\ntwo"
    raise_if_any([])
    with pytest.raises(InputError, match="one"):
        raise_if_any(["one"])
    assert issubclass(InputError, SweepError)
    assert issubclass(TrainingError, SweepError)
