"""Writing answers: checked before the work begins, and written whole or not at all."""

import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

_NUMBERS = {"stdout": 1, "stderr": 2}
_DESCRIPTOR = re.compile(r"/dev/(stdout|stderr|fd/(\d+))")


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file and its folders in one step: whatever happens, it holds the old content or the new.

    A device or pipe is written to as it is, `/dev/stdout` where it stands. Text is UTF-8. Raises `OSError` that names
    `path`.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        descriptor = _DESCRIPTOR.fullmatch(str(path))
        if descriptor:
            sys.stdout.flush()
            with os.fdopen(os.dup(_NUMBERS.get(descriptor[1]) or int(descriptor[2])), "wb") as file:
                file.write(data)
        elif _is_stream(path):
            path.write_bytes(data)
        else:
            _replace(path.resolve(), data)  # a link stays one
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _replace(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{uuid.uuid4().hex}")
    try:
        temporary.write_bytes(data)
        if target.exists():
            shutil.copymode(target, temporary)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def output_problems(outputs: Mapping[str, Path | None], *, inputs: Iterable[Path] = ()) -> list[str]:
    """Say what is wrong with the files that options name for output; None was not given.

    Each must be a file in a folder that can be written to, no input, and named once.
    """
    problems = []
    owners = {_resolved(path): f"the input {path}" for path in inputs}
    for option, path in outputs.items():
        try:
            problems += [] if path is None or _is_stream(path) else _file_problems(option, path, owners)
        except (OSError, RuntimeError) as error:  # a name too long, a loop of links
            problems.append(f"{option} {path}: no such place ({error}); give another place")
    return problems


def output_folder_problems(
    option: str, path: Path | None, *, empty: bool = False, new: Iterable[str] = ()
) -> list[str]:
    """Say what is wrong with the folder that an option names for output: it must be possible to make and write to.

    empty: it must hold nothing yet. new: names of what will be written, and must not be there yet.
    """
    if path is None:
        return []
    if path.is_symlink() and not path.exists():
        return [f"{option} {path}: is a link to nothing; give another place"]
    if empty and path.is_dir() and any(path.iterdir()):
        return [f"{option} {path}: already holds files; give a new or empty folder"]
    there = [name for name in new if (path / name).exists()]
    if there:
        return [f"{option} {path}: already holds {', '.join(there)}; give another folder"]
    return _place_problems(option, path, path.absolute())


def _file_problems(option: str, path: Path, owners: dict[Path, str]) -> list[str]:
    """Check one file, and add it to the `owners` of places."""
    target = path.resolve()
    if path.is_dir():
        return [f"{option} must name a file, got the folder {path}; add a file name"]
    if target in owners:
        return [f"{option} {path} is the same file as {owners[target]}; give another place"]
    problems = _place_problems(option, path, target.parent)
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
    return bool(_DESCRIPTOR.fullmatch(str(path))) or (path.exists() and not path.is_file() and not path.is_dir())


def _resolved(path: Path) -> Path:
    """Follow links, as far as they lead anywhere."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path.absolute()
