"""Writing answers: checked before the work begins, and written whole or not at all."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file and its folders in one step, readable by all: whatever happens, it holds the old content or the new.

    A device or pipe is written to as it is. Text is UTF-8.
    """
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.resolve()  # a link stays one
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    temporary = path.with_name(f".{os.getpid()}.{path.name}"[:200])
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def output_problems(outputs: Mapping[str, Path | None], *, inputs: Iterable[Path] = ()) -> list[str]:
    """Say what is wrong with the files that options name for output; None was not given.

    Each must be a file in a folder that can be written to, no input, and named once.
    """
    problems = []
    owners = {path.resolve(): f"the input {path}" for path in inputs}
    for option, path in outputs.items():
        if path is None:
            continue
        owner = owners.setdefault(path.resolve(), option)
        if path.is_dir():
            problems.append(f"{option} must name a file, got the folder {path}; add a file name")
        elif owner != option:
            problems.append(f"{option} {path} is the same file as {owner}; give another place")
        else:
            problems += _place_problems(option, path, path.absolute().parent)
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


def _place_problems(option: str, path: Path, folder: Path) -> list[str]:
    above = next(place for place in (folder, *folder.parents) if place.exists())
    if above.is_dir() and os.access(above, os.W_OK):
        return []
    return [f"{option} {path}: {above} is not a folder that can be written to; give another place"]
