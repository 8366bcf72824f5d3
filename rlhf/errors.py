"""The project's errors, and how a command turns them into an exit status.

Everything a user can get wrong is an `InputError`: it carries every problem found, each saying the rule,
the value received, where it was, and what to do.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
_SHOWN_PROBLEMS = 40
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)  # no fault of the arguments


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


@contextlib.contextmanager
def collected(problems: list[str]) -> Iterator[None]:
    """Add the problems of one check to the list, and go on with the next."""
    try:
        yield
    except InputError as error:
        problems += error.problems


def run_command(main: Callable[[], int | None]) -> None:
    """Run a command's `main` and exit: 0 or its own status, 1 for a failure, 2 for bad input, 130 for Ctrl-C."""
    try:
        status = main() or 0
        sys.stdout.flush()
    except InputError as error:
        shown = error.problems[:_SHOWN_PROBLEMS]
        for problem in shown:
            print(f"error: {problem}", file=sys.stderr)
        if len(error.problems) > len(shown):
            print(f"error: ... and {len(error.problems) - len(shown)} more problems", file=sys.stderr)
        status = EXIT_BAD_INPUT
    except BrokenPipeError:  # whoever read the answer has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = EXIT_FAILED
    except OSError as error:
        if error.filename is None and error.errno not in _FULL:
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
