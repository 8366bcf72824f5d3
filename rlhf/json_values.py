"""Reading JSON that somebody else wrote, and checking the values in it."""

import json
import math
import sys
from pathlib import Path
from typing import Any

from rlhf.errors import InputError


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object. Raises `InputError` otherwise."""
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(document, dict):
        raise InputError(f"{path}: must hold a JSON object, found {type(document).__name__}")
    return document


def is_number(value: Any) -> bool:
    """Say whether a value is a finite number that fits a float; true and false are none.

    >>> [is_number(value) for value in (1, 0.5, True, "1", float("nan"), 10**400)]
    [True, True, False, False, False, False]
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def finite_or_none(value: float) -> float | None:
    """Return a number as JSON can hold it: NaN and infinities become null.

    >>> finite_or_none(0.5), finite_or_none(float("nan"))
    (0.5, None)
    """
    return float(value) if math.isfinite(value) else None
