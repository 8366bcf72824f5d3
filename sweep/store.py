"""Where a sweep's record is kept: the default tracking store, and which store a command talks to."""

import os
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
TRACKING_VARIABLE = "MLFLOW_TRACKING_URI"


def project_folder() -> Path:
    """Return the checkout this code runs from; for an installed copy, the current folder."""
    return _ROOT if is_checkout() else Path.cwd()


def is_checkout() -> bool:
    """Say whether this code runs from a checkout of the project rather than an installed copy."""
    return (_ROOT / "pyproject.toml").exists()


def runs_folder() -> Path:
    return project_folder() / "mlruns"


def tracking_uri(given: str | None) -> str:
    """Return the store to use: the option, then `MLFLOW_TRACKING_URI`, then `mlruns/mlflow.db` of the project.

    A SQLite path is made absolute, so that no process opens another database from another folder.
    """
    uri = given or os.environ.get(TRACKING_VARIABLE)
    if not uri:
        return f"sqlite:///{runs_folder() / 'mlflow.db'}"
    path = sqlite_path(uri)
    return f"sqlite:///{path.absolute()}" if path else uri


def sqlite_path(uri: str) -> Path | None:
    """Return the database file of a SQLite URI, None for any other."""
    prefix = "sqlite:///"
    return Path(uri.removeprefix(prefix)) if uri.startswith(prefix) else None
