"""Command line: look at the trials in the MLflow UI.

python -m sweep.ui [--port 5000] [--host 127.0.0.1] [--tracking-uri URI]
"""

import argparse
import os
import socket
import sys

from rlhf.cli import say
from rlhf.errors import InputError, run_command
from sweep.cli import add_tracking_option
from sweep.store import sqlite_path, tracking_uri


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sweep.ui", description="Serve the MLflow UI.")
    parser.add_argument("--port", type=int, default=5000)
    parser.add_argument("--host", default="127.0.0.1", help="127.0.0.1 keeps it on this machine")
    add_tracking_option(parser)
    args = parser.parse_args()
    uri = tracking_uri(args.tracking_uri)
    if uri.startswith(("http://", "https://")):
        print(f"The record is on a server of its own: open {uri}")
        return
    path = sqlite_path(uri)
    if path and not path.exists():
        raise InputError(f"{path}: no record yet; run a sweep first: python -m sweep.launch --space kl_mix")
    _require_free_port(args.host, args.port)
    say(f"Starting; in some 15 seconds open {_page(uri, args.host, args.port)} - Ctrl-C ends it.")
    say("Each sweep is a parent run with its trials under it; its artifacts hold front.html and screen.png.")
    artifacts = ["--default-artifact-root", (path.parent / "artifacts").as_uri()] if path else []
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, *artifacts,
               "--host", args.host, "--port", str(args.port), "--workers", "1"]  # fmt: skip
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # deprecations inside the server are not the user's business
    os.execv(sys.executable, command)


def _page(uri: str, host: str, port: int) -> str:
    """Return the address of the latest sweep's runs: the start page shows another kind of project."""
    from sweep.tracking import Ledger  # mlflow takes seconds to import

    sweeps = Ledger(uri).sweeps()
    return f"http://{host}:{port}/" + (f"#/experiments/{sweeps[0].experiment_id}/runs" if sweeps else "")


def _require_free_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise InputError(f"--port {port} on {host} cannot be used ({error}); give another --port") from error


if __name__ == "__main__":
    run_command(main)
