"""Writing answers: checked before the work begins, and written whole or not at all."""

import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file and its folders in one step: whatever happens, it holds the old content or the new.

    A device or pipe is written to as it is. Text is UTF-8. Raises `OSError` that names `path`.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if _is_stream(path):
            path.write_bytes(data)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path.resolve()  # a link stays one
        temporary = target.with_name(f".{uuid.uuid4().hex}")
        try:
            temporary.write_bytes(data)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def output_problems(outputs: Mapping[str, Path | None], *, inputs: Iterable[Path] = ()) -> list[str]:
    """Say what is wrong with the files that options name for output; None was not given.

    Each must be a file in a folder that can be written to, no input, and named once.
    """
    problems = []
    owners = {path.resolve(): f"the input {path}" for path in inputs}
    for option, path in outputs.items():
        try:
            problems += [] if path is None or _is_stream(path) else _file_problems(option, path, owners)
        except (OSError, RuntimeError) as error:  # a name too long, a loop of links
            problems.append(f"{option} {path}: no such place ({error}); give another place")
    return problems


def output_folder_problems(option: str, path: Path | None, *, empty: bool = False) -> list[str]:
    """Say what is wrong with the folder that an option names for output: it must be possible to make and write to.

    empty: it must hold nothing yet.
    """
    if path is None:
        return []
    if empty and path.is_dir() and any(path.iterdir()):
        return [f"{option} {path}: already holds files; give a new or empty folder"]
    return _place_problems(option, path, path.absolute())


def _file_problems(option: str, path: Path, owners: dict[Path, str]) -> list[str]:
    """Check one file, and add it to the `owners` of places."""
    target = path.resolve()
    if path.is_dir():
        return [f"{option} must name a file, got the folder {path}; add a file name"]
    if target in owners:
        return [f"{option} {path} is the same file as {owners[target]}; give another place"]
    problems = _place_problems(option, path, path.absolute().parent)
    for place, owner in owners.items():
        if not problems and (place in target.parents or target in place.parents):
            problems = [f"{option} {path} and {owner} cannot both be files: one lies in the other; give another place"]
    owners[target] = option
    return problems


def _place_problems(option: str, path: Path, folder: Path) -> list[str]:
    above = next(place for place in (folder, *folder.parents) if place.exists())
    if above.is_dir() and os.access(above, os.W_OK):
        return []
    return [f"{option} {path}: {above} is not a folder that can be written to; give another place"]


def _is_stream(path: Path) -> bool:
    """Say whether a path is a device, a pipe, or somebody's open file: nothing to replace by another file."""
    ours = not path.exists() or path.is_file() or path.is_dir()
    return not ours or path.absolute().parts[1:2] in (("dev",), ("proc",))
