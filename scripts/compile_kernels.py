"""Compile the fast passes' kernels now, so that the first sweep on a machine need not: one step on the default task."""

from rlhf.config import RunConfig
from rlhf.run import ReinforceRun
from rlhf.taskdir import DEFAULT_TASK


def main() -> None:
    for _ in ReinforceRun(RunConfig(steps=1), DEFAULT_TASK).advance(1):
        pass


if __name__ == "__main__":
    main()
