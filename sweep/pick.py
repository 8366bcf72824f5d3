"""Command line: take one checkpoint from the feasible front.

    python -m sweep.pick [--name NAME] [--prefer quality|knee|low-kl] [--out DIR] [--register MODEL] [--json]

Exit status: 0 with a pick, 2 for bad input, 3 when no candidate may ship (the nearest is shown).
"""

import argparse
import json
from pathlib import Path
from typing import Any

from rlhf.cli import add_task_option, say
from rlhf.errors import InputError, run_command
from sweep.candidate import PREFERENCES, Candidate, choose, front, nearest
from sweep.cli import add_sweep_options
from sweep.store import tracking_uri

EXIT_NOTHING_FEASIBLE = 3
_WHY = {
    "quality": "highest balanced quality",
    "knee": "farthest above the chord of quality against KL",
    "low-kl": "lowest KL",
}


def main() -> int:
    args = _parse()
    if args.out and args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise InputError(f"--out {args.out}: already holds files; give a new or empty folder")
    from sweep.tracking import Ledger  # mlflow takes seconds to import

    ledger = Ledger(tracking_uri(args.tracking_uri))
    sweep = ledger.find(args.name)
    max_harm = float(sweep.facts["max_harm"])
    candidates = ledger.candidates(sweep)
    picked = choose(candidates, prefer=args.prefer, max_harm=max_harm)
    if picked is None:
        return _say_nothing_feasible(sweep.name, candidates, max_harm=max_harm, as_json=args.json)
    size = len(front(candidates, max_harm=max_harm))
    why = (
        f"{_WHY[args.prefer]} of the candidates on the front ({size} of {len(candidates)}) that meet the release rule: "
        f"balanced gain {picked.gain:+.3f}, worst-family harm {picked.harm:.3f} <= {max_harm}"
    )
    document: dict[str, Any] = {
        "sweep": sweep.name,
        "picked": _document(picked),
        "why": why,
        "max_harm": max_harm,
        "note": "Scores are label-inferred, on the prompts the search saw.",
    }
    if args.out:
        ledger.download(picked, args.out)
        (args.out / "pick.json").write_text(json.dumps(document, indent=2) + "\n")
        say(f"wrote the checkpoint to {args.out}")
    if args.register:
        document["registered"] = {"model": args.register, "version": ledger.register(picked, args.register)}
        say(f"registered as {args.register} version {document['registered']['version']}")
    ledger.note_pick(sweep, picked, document)
    print(json.dumps(document, indent=2) if args.json else _describe(sweep.name, picked, why))
    return 0


def _say_nothing_feasible(name: str, candidates: list[Candidate], *, max_harm: float, as_json: bool) -> int:
    closest = nearest(candidates, max_harm=max_harm)
    why = f"none of the {len(candidates)} candidates of sweep {name} meets the release rule"
    if as_json:
        print(json.dumps({"sweep": name, "picked": None, "why": why, "max_harm": max_harm,
                          "nearest": _document(closest) if closest else None}, indent=2))  # fmt: skip
    else:
        print(f"No pick: {why}.")
        if closest:
            print(_describe(name, closest, "the nearest; it may not ship"))
    return EXIT_NOTHING_FEASIBLE


def _document(candidate: Candidate) -> dict[str, Any]:
    return {
        "trial": candidate.trial,
        "step": candidate.step,
        "model_id": candidate.model_id,
        "params": dict(candidate.params),
        "metrics": dict(sorted(candidate.metrics.items())),
    }


def _describe(name: str, candidate: Candidate, why: str) -> str:
    metrics = candidate.metrics
    lines = [f"{name}: trial {candidate.trial}, step {candidate.step}: {why}", ""]
    lines += [f"  {key:<16}{value}" for key, value in candidate.params.items()]
    lines += ["", f"  {'family':<16}{'quality':>8}{'gain':>9}"]
    families = [key.removeprefix("gain/") for key in metrics if key.startswith("gain/") and not key.endswith("_se")]
    lines += [f"  {f:<16}{metrics[f'quality/{f}']:>8.3f}{metrics[f'gain/{f}']:>+9.3f}" for f in sorted(families)]
    lines.append(f"  {'balanced':<16}{candidate.quality:>8.3f}{candidate.gain:>+9.3f}   KL {candidate.kl:.2f}")
    return "\n".join(lines)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sweep.pick", description="Pick a checkpoint from the front.")
    add_sweep_options(parser)
    add_task_option(parser)
    parser.add_argument("--prefer", choices=PREFERENCES, default="quality", help="which end of the front")
    parser.add_argument("--out", type=Path, help="write the checkpoint to this folder")
    parser.add_argument("--register", metavar="MODEL", help="register it in the MLflow model registry")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
