"""Options that the commands about a recorded sweep share."""

import argparse

from sweep.store import TRACKING_VARIABLE


def add_sweep_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help="name of the sweep (default: the latest)")
    add_tracking_option(parser)


def add_tracking_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tracking-uri", help=f"MLflow store (default: ${TRACKING_VARIABLE}, then mlruns/mlflow.db)")
