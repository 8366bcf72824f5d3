"""The project's errors, and how a command turns them into an exit status.

Everything a user can get wrong is an `InputError`: it carries every problem found, each saying the rule,
the value received, where it was, and what to do.
"""

import contextlib
import errno
import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_READER_WENT_AWAY = 141
_SHOWN_PROBLEMS = 10  # of one file
_BAD_PLACE = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class SweepError(Exception):
    """Root of all errors this project raises on purpose."""


class InputError(SweepError):
    """Report bad input: all problems at once, nothing written."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class TrainingError(SweepError):
    """A run that cannot go on, such as a loss that is not finite. Says the step and the value."""


def raise_if_any(problems: Sequence[str]) -> None:
    """Raise one `InputError` for all `problems`, each once, if there are any."""
    if problems:
        raise InputError(list(dict.fromkeys(problems)))


def why(error: Exception) -> str:
    """Say what is wrong with a file, without its path, which stands before it in every message."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


@contextlib.contextmanager
def collected(problems: list[str]) -> Iterator[None]:
    """Add the problems of one check to the list, and go on with the next."""
    try:
        yield
    except InputError as error:
        problems += error.problems


def run_command(main: Callable[[], int | None]) -> None:
    """Run a command's `main` and exit.

    0 or its own status; 1 for a failure, 2 for bad input, 130 for Ctrl-C, 141 if whoever reads the answer went away.
    """
    try:
        status = main() or 0
        if sys.stdout:  # None if it was closed from the start
            sys.stdout.flush()
    except InputError as error:
        for line in _shown(error.problems):
            print(f"error: {line}", file=sys.stderr)
        status = EXIT_BAD_INPUT
    except BrokenPipeError:
        if not _reader_went_away():
            raise
        status = EXIT_READER_WENT_AWAY
    except OSError as error:
        if error.errno not in _BAD_PLACE + _FULL:
            raise
        print(f"error: {error.filename or 'writing'}: {error.strerror}; give another place", file=sys.stderr)
        status = EXIT_FAILED if error.errno in _FULL else EXIT_BAD_INPUT
    except SweepError as error:
        print(f"error: {error}", file=sys.stderr)
        status = EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = EXIT_INTERRUPTED
    sys.exit(status)


def _shown(problems: Sequence[str]) -> Iterator[str]:
    """Yield problems source by source (a problem begins with its file), the first few of each."""
    by_source: dict[str, list[str]] = {}
    for problem in problems:
        by_source.setdefault(problem.split(":")[0], []).append(problem)
    for source, its_problems in by_source.items():
        yield from its_problems[:_SHOWN_PROBLEMS]
        if len(its_problems) > _SHOWN_PROBLEMS:
            yield f"{source}: ... and {len(its_problems) - _SHOWN_PROBLEMS} more problems"


def _reader_went_away() -> bool:
    """Say whether standard output is the pipe that broke; if so, let nothing more be written to it."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
