"""Command line: where a sweep stands.

python -m sweep.status [--name NAME] [--tracking-uri URI] [--json]
"""

import argparse
import json
from collections import Counter
from typing import Any

from rlhf.errors import run_command
from sweep.candidate import front, ranked
from sweep.cli import add_sweep_options, task_of
from sweep.progress import describe
from sweep.store import is_gone, tracking_uri


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sweep.status", description="Say where a sweep stands.")
    add_sweep_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    from sweep.tracking import RUNNING, Ledger  # mlflow takes seconds to import

    ledger = Ledger(tracking_uri(args.tracking_uri))
    sweep = ledger.find(args.name)
    if args.task:
        task_of(sweep, args.task)
    trials, candidates = ledger.trials(sweep), ledger.candidates(sweep)
    max_harm = float(sweep.facts["max_harm"])
    best = next(iter(ranked(candidates, prefer="quality", max_harm=max_harm)), None)
    counts = Counter(trial.status for trial in trials)
    if args.json:
        document: dict[str, Any] = {
            "sweep": sweep.name,
            "status": sweep.status,
            "reason": sweep.reason,
            "driver_gone": sweep.status == RUNNING and is_gone(sweep.facts["driver"]),
            "facts": dict(sweep.facts),
            "trials": dict(counts),
            "failures": {str(trial.number): trial.reason for trial in trials if trial.reason},
            "candidates": len(candidates),
            "front": [{"trial": c.trial, "step": c.step, **c.metrics} for c in front(candidates, max_harm=max_harm)],
        }
        print(json.dumps(document, indent=2))
        return
    gone = ", but its driver is gone" if sweep.status == RUNNING and is_gone(sweep.facts["driver"]) else ""
    why = f" ({sweep.reason})" if sweep.reason else ""
    print(f"{sweep.name}: {sweep.status}{why}{gone}, {sum(counts.values())} of {sweep.facts['trials']} trials started")
    print("trials: " + (", ".join(f"{n} {status}" for status, n in counts.items()) or "none"))
    for trial in trials:
        if trial.reason:
            print(f"  trial {trial.number} {trial.status}: {trial.reason}")
    print(f"candidates: {len(candidates)}, on the front: {len(front(candidates, max_harm=max_harm))}")
    if best:
        print(f"best by its scores: trial {best.trial} step {best.step}, quality {best.quality:.3f}, "
              f"worst-family gain {best.worst_gain:+.3f}, KL {best.kl:.2f} ({describe(best.params)})")  # fmt: skip


if __name__ == "__main__":
    run_command(main)
