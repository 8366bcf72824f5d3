"""Command line: run a sweep.

    python -m sweep.launch --space NAME|FILE [--task DIR] [--trials N] [--max-steps N] [--name NAME] ...

Exit status: 0 when the sweep came to its end, 2 for bad input, 130 when it was interrupted.
"""

import argparse
import re
import shlex
import sys
import time
from pathlib import Path

from objectives.release import MAX_WORST_FAMILY_HARM
from rlhf.cli import add_task_option, say
from rlhf.errors import EXIT_FAILED, EXIT_INTERRUPTED, run_command
from rlhf.taskdir import find_task_dir
from sweep.cli import add_tracking_option
from sweep.options import SweepOptions
from sweep.store import tracking_uri


def main() -> int:
    args = _parse()
    options = SweepOptions(
        space=args.space,
        name=args.name or f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', Path(args.space).stem)}-{time.strftime('%Y%m%d-%H%M%S')}",
        task_dir=find_task_dir(args.task),
        tracking_uri=tracking_uri(args.tracking_uri),
        trials=args.trials,
        max_steps=args.max_steps,
        concurrency=args.concurrency,
        seed=args.seed,
        max_harm=args.max_harm,
        time_budget_s=args.time_budget_s,
        address=args.address,
        storage_path=args.storage_path,
        command=shlex.join(["python", "-m", "sweep.launch", *sys.argv[1:]]),
    )
    say(
        f"sweep {options.name}: reading {options.task_dir}, fitting its labels, screening its reward model; the first "
        "time for a task, that takes half a minute"
    )
    from sweep.candidate import ranked
    from sweep.run import plan_sweep, run_sweep  # ray, mlflow and torch take seconds to import
    from sweep.summary import print_front, wide_console
    from sweep.tracking import FINISHED, Ledger

    plan = plan_sweep(options)
    for warning in plan.workload.warnings():
        say(f"warning: {warning}")
    say(f"{plan.n_trials} trials of up to {plan.space.max_steps} steps; record: {options.tracking_uri}; starting Ray")
    sweep = run_sweep(options, plan)
    ledger = Ledger(options.tracking_uri)
    candidates = ledger.candidates(sweep)
    print_front(candidates, max_harm=options.max_harm, console=wide_console())
    if sweep.status != FINISHED:
        say(f"sweep {sweep.name}: {sweep.status}; what was judged so far is recorded")
        return EXIT_INTERRUPTED
    if not candidates:
        say(f"sweep {sweep.name}: no trial gave a candidate; see python -m sweep.status --name {sweep.name}")
        return EXIT_FAILED
    if not ranked(candidates, prefer="quality", max_harm=options.max_harm):
        say(f"sweep {sweep.name}: {sweep.status}. Nothing meets the release rule yet: try other prompt mixes or reward")
        say("wrappers (debias, label_quality), or more steps where gains are small; sweep.pick shows the nearest")
        return 0
    say(f"sweep {sweep.name}: {sweep.status}. Next: python -m sweep.pick --name {sweep.name}, or python -m sweep.ui")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sweep.launch", description="Run a sweep.")
    parser.add_argument(
        "--space", required=True, metavar="NAME|FILE", help="kl_mix, smoke, or a Python file that sets SPACE"
    )
    add_task_option(parser)
    parser.add_argument("--trials", type=int, help="how many trials (default: the space's)")
    parser.add_argument("--max-steps", type=int, help="longest trial, in training steps (default: the space's)")
    parser.add_argument("--concurrency", type=int, help="trials at once, one CPU each (default: all CPUs)")
    parser.add_argument("--seed", type=int, default=0, help="decides all random numbers (default: 0)")
    parser.add_argument("--name", help="name of the sweep (default: space and time)")
    parser.add_argument(
        "--max-harm",
        type=float,
        default=MAX_WORST_FAMILY_HARM,
        help="most harm to a family that a checkpoint may do (default: %(default)s)",
    )
    parser.add_argument("--time-budget-s", type=float, help="stop after this many seconds (default: never)")
    add_tracking_option(parser)
    parser.add_argument("--address", help="join the Ray cluster at this address (default: this machine only)")
    parser.add_argument("--storage-path", help="trial checkpoints: what all nodes share (default: mlruns/ray)")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
