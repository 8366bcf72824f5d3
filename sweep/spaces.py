"""Find a search space: by name among `search_spaces`, or from a user's Python file that sets `SPACE`."""

import importlib
import importlib.util
import pkgutil
import traceback
from pathlib import Path

import search_spaces
from rlhf.errors import InputError
from search_spaces.space import SearchSpace


def space_names() -> list[str]:
    names = (module.name for module in pkgutil.iter_modules(search_spaces.__path__))
    return sorted(name for name in names if name != "space")


def load_space(name: str, *, max_steps: int | None = None) -> SearchSpace:
    """Load a space by name or path, with no trial longer than `max_steps` (default: the space's own).

    Raises `InputError` if it is missing, malformed (with file and line), or leaves nothing to vary.
    """
    space = _read_space(name)
    try:
        return space.capped(max_steps or space.max_steps)
    except ValueError as error:
        raise InputError(f"space {space.name} with at most {max_steps or space.max_steps} steps: {error}") from error


def _read_space(name: str) -> SearchSpace:
    if name in space_names():
        space = importlib.import_module(f"search_spaces.{name}").SPACE
        assert isinstance(space, SearchSpace)
        return space
    path = Path(name).expanduser()
    if not path.is_file():
        raise InputError(f"--space must be one of {', '.join(space_names())}, or a Python file; got {name!r}")
    spec = importlib.util.spec_from_file_location(f"search_space_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path}: a search space is a .py file that sets SPACE")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # importing runs a user's code
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = getattr(error, "lineno", None) or (lines[-1] if lines else 1)
        raise InputError(f"{path}:{line}: {error}") from error
    space = getattr(module, "SPACE", None)
    if not isinstance(space, SearchSpace):
        raise InputError(f"{path}: must set SPACE to a search_spaces.space.SearchSpace, found {type(space).__name__}")
    return space
