"""Command line: take one certified checkpoint from the feasible front.

    python -m sweep.pick [--name NAME] [--prefer quality|knee|low-kl] [--out DIR] [--register MODEL] [--json]

The best candidates by the scores that the search saw are frozen as finalists and certified on prompts that it did not
see. The pick is the first of them that is certified; its certificate, not its score, is the result. Exit status: 0
with a pick, 2 for bad input, 3 when nothing may ship (the nearest is shown).
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.cli import say
from rlhf.errors import raise_if_any, run_command
from rlhf.files import output_folder_problems, write_whole
from sweep.candidate import PREFERENCES, Candidate, front, nearest, ranked
from sweep.cli import add_sweep_options, task_of
from sweep.store import tracking_uri

if TYPE_CHECKING:
    from objectives.certify import Certificate
    from sweep.tracking import Ledger, SweepRecord

EXIT_NOTHING_MAY_SHIP = 3
FINALISTS = 3  # certified together: each is held to a third of the error level
_WHY = {
    "quality": "the highest balanced quality",
    "knee": "the best trade of quality against KL (the knee)",
    "low-kl": "the lowest KL",
}


def main() -> int:
    args = _parse()
    problems = output_folder_problems("--out", args.out, empty=True)
    if args.register is not None and (not args.register or set(args.register) & set("/:")):
        problems.append(f"--register must be a name without '/' and ':', got {args.register!r}")
    raise_if_any(problems)
    from sweep.tracking import Ledger  # mlflow takes seconds to import

    ledger = Ledger(tracking_uri(args.tracking_uri))
    sweep = ledger.find(args.name)
    task_dir = task_of(sweep, args.task)
    max_harm = float(sweep.facts["max_harm"])
    candidates = ledger.candidates(sweep)
    finalists = ranked(candidates, prefer=args.prefer, max_harm=max_harm)[:FINALISTS]
    if not finalists:
        closest = nearest(candidates, max_harm=max_harm)
        why = f"none of the {len(candidates)} candidates of sweep {sweep.name} meets the release rule"
        return _say_no_pick(sweep.name, closest, why, certificate=None, as_json=args.json)
    say(
        f"certifying {len(finalists)} finalists of sweep {sweep.name} on prompts the search has not seen, some ten "
        "seconds each"
    )
    certificates = _certify(ledger, sweep, finalists, task_dir, max_harm=max_harm)
    passed = [pair for pair in zip(finalists, certificates, strict=True) if pair[1].certified]
    if not passed:
        why = f"none of the {len(finalists)} finalists of sweep {sweep.name} could be certified"
        return _say_no_pick(sweep.name, finalists[0], why, certificate=certificates[0], as_json=args.json)
    picked, certificate = passed[0]
    size = len(front(candidates, max_harm=max_harm))
    why = (
        f"{_WHY[args.prefer]} of the certified finalists ({len(passed)} of {len(finalists)}); "
        f"{size} of {len(candidates)} candidates are on the front"
    )
    document: dict[str, Any] = {
        "sweep": sweep.name,
        "picked": _document(picked),
        "why": why,
        "certificate": certificate.to_json(),
    }
    if args.out:
        ledger.download(picked, args.out)
    if args.register:
        document["registered"] = {"model": args.register, "version": ledger.register(picked, args.register)}
    if args.out:
        write_whole(args.out / "pick.json", json.dumps(document, indent=2) + "\n")
    ledger.note_pick(sweep, picked, document)
    print(json.dumps(document, indent=2) if args.json else _describe(sweep.name, picked, why, certificate))
    if args.out:
        say(f"wrote the checkpoint to {args.out}")
    if args.register:
        say(f"registered as {args.register} version {document['registered']['version']}")
    return 0


def _certify(
    ledger: "Ledger", sweep: "SweepRecord", finalists: list[Candidate], task_dir: Path, *, max_harm: float
) -> list["Certificate"]:
    """Certify frozen finalists. Raises `InputError` if the files of one cannot be read."""
    from sweep.workload import open_certifier  # torch takes seconds to import

    certify = open_certifier(sweep.facts["workload"], task_dir)
    certificates = []
    for finalist in finalists:
        with tempfile.TemporaryDirectory() as folder:
            ledger.download(finalist, Path(folder))
            certificates.append(
                certify(Path(folder), selection_gain=finalist.gain, n_finalists=len(finalists), max_harm=max_harm)
            )
    return certificates


def _say_no_pick(
    name: str, closest: Candidate | None, why: str, *, certificate: "Certificate | None", as_json: bool
) -> int:
    if as_json:
        document = {
            "sweep": name,
            "picked": None,
            "why": why,
            "nearest": _document(closest) if closest else None,
            "certificate": certificate.to_json() if certificate else None,
        }
        print(json.dumps(document, indent=2))
    else:
        print(f"No pick: {why}.")
        if closest:
            print(_describe(name, closest, "the nearest; it may not ship", certificate))
    return EXIT_NOTHING_MAY_SHIP


def _document(candidate: Candidate) -> dict[str, Any]:
    return {
        "trial": candidate.trial,
        "step": candidate.step,
        "model_id": candidate.model_id,
        "params": dict(candidate.params),
        "metrics": dict(sorted(candidate.metrics.items())),
    }


def _describe(name: str, candidate: Candidate, why: str, certificate: "Certificate | None") -> str:
    """Lay a candidate out for a terminal: its certificate if there is one, else the scores the search saw."""
    lines = [f"{name}: trial {candidate.trial}, step {candidate.step}", why, ""]
    lines += [f"  {key:<16}{value}" for key, value in candidate.params.items()]
    lines += [f"  {'KL':<16}{candidate.kl:.2f} nats a sequence", ""]
    if certificate:
        from objectives.certify import format_certificate  # torch takes seconds to import

        return "\n".join([*lines, format_certificate(certificate)])
    metrics = candidate.metrics
    families = [key.removeprefix("gain/") for key in metrics if key.startswith("gain/") and not key.endswith("_se")]
    lines.append(f"  {'family':<16}{'quality':>8}{'gain':>9}")
    lines += [f"  {f:<16}{metrics[f'quality/{f}']:>8.3f}{metrics[f'gain/{f}']:>+9.3f}" for f in sorted(families)]
    lines.append(f"  {'balanced':<16}{candidate.quality:>8.3f}{candidate.gain:>+9.3f}")
    return "\n".join(lines)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sweep.pick", description="Pick a certified checkpoint.")
    add_sweep_options(parser)
    parser.add_argument(
        "--prefer", choices=PREFERENCES, default="quality", help="rank finalists by this (default: quality)"
    )
    parser.add_argument("--out", type=Path, help="new or empty folder for the checkpoint")
    parser.add_argument("--register", metavar="MODEL", help="register it in the MLflow model registry under this name")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
