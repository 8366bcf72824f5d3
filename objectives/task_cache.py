"""Arrays worked out from a task, kept in this machine's cache folder between runs.

They are found again by what they are, the digest of the task, and a hash of our own sources, so that changed code
never reads what older code left. The folder may be lost, damaged or unwritable at any time: that costs the work,
never the answer.
"""

import functools
import hashlib
import io
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from rlhf.files import write_whole

_ROOT = Path(__file__).parents[1]
_SOURCES = (_ROOT / "objectives", _ROOT / "rlhf")

Arrays = Mapping[str, np.ndarray]


def cached_arrays(name: str, digest: str, compute: Callable[[], Arrays]) -> Arrays:
    """Return the named arrays of the task with this digest: from the cache, or computed now and kept."""
    content = _read(cache_path(name, digest))
    if content is not None:
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            return dict(stored)
    arrays = compute()
    keep_arrays(name, digest, arrays)
    return arrays


def keep_arrays(name: str, digest: str, arrays: Arrays) -> None:
    """Write arrays in one atomic step, so that a reader never sees half of them; warn where that is impossible."""
    path = cache_path(name, digest)
    try:
        file = io.BytesIO()
        np.savez(file, **arrays)  # type: ignore[arg-type]  # an option of numpy's shares the keywords
        content = file.getvalue()
        write_whole(path, hashlib.sha256(content).digest() + content)
    except OSError as error:
        warnings.warn(f"{path}: cannot be kept ({error}); it will be worked out again next time", stacklevel=3)


def _read(path: Path) -> bytes | None:
    """Read what was kept, its hash before it; None if there is nothing, or not what was written."""
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    digest, content = kept[: hashlib.sha256().digest_size], kept[hashlib.sha256().digest_size :]
    return content if hashlib.sha256(content).digest() == digest else None


def cache_folder() -> Path:
    """Return this machine's folder for what can be worked out again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf-sweep"


def cache_path(name: str, digest: str) -> Path:
    return cache_folder() / f"{name}-{_source_digest(_SOURCES)[:16]}-{digest}.cache"


@functools.cache
def _source_digest(folders: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
