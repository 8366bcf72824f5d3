import errno
import os
import subprocess
import sys

import pytest

from rlhf.errors import InputError, SweepError, TrainingError, collected, raise_if_any, run_command


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


def test_one_file_of_many_problems_does_not_hide_another(capsys: pytest.CaptureFixture[str]) -> None:
    problems = [*(f"a.jsonl:{n}: bad" for n in range(13)), "b.json: missing", "a.jsonl:99: bad"]
    assert status_of(failing(InputError(problems))) == 2
    lines = capsys.readouterr().err.splitlines()
    shown = [f"error: a.jsonl:{n}: bad" for n in range(10)]
    assert lines == [*shown, "error: a.jsonl: ... and 4 more problems", "error: b.json: missing"]


def test_places_that_cannot_be_written_are_bad_input_and_a_full_disk_is_a_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status_of(failing(OSError(errno.ENAMETOOLONG, "File name too long", "/a"))) == 2
    assert status_of(failing(OSError(errno.ENOSPC, "No space left on device"))) == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: /a: File name too long; give another place",
        "error: writing: No space left on device; give another place",
    ]
    with pytest.raises(OSError, match="something else"):
        run_command(failing(OSError("something else")))  # type: ignore[arg-type]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_seen_enough_is_no_traceback(unbuffered: str) -> None:
    program = "from rlhf.errors import run_command; run_command(lambda: print('x' * 10**6))"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_another_pipe_that_breaks_keeps_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BrokenPipeError):
        run_command(failing(BrokenPipeError(errno.EPIPE, "Broken pipe")))  # type: ignore[arg-type]
    assert capfd.readouterr().err == ""


def test_problems_of_several_checks_are_collected_and_each_is_raised_once() -> None:
    problems = ["one"]
    with collected(problems):
        raise InputError(["two", "one"])
    with collected(problems):
        pass
    assert problems == ["one", "two", "one"]
    with pytest.raises(InputError) as caught:
        raise_if_any(problems)
    assert caught.value.problems == ("one", "two")


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
