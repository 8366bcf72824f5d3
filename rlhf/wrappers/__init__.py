"""Reward wrappers: how a raw reward-model score becomes the reward of a run.

A wrapper is a Python file with

    transform(records, response_tokens, rewards) -> rewards     lists in, a list of the same length out
    prepare(task_dir, config)                                   optional, called once before training
    USES_REWARDS = False                                        optional: the scores passed in are not looked at

`records` are prompt records, one for each response; `response_tokens` are lists of token strings. A wrapper is
named by its entry point in the group `rlhf.reward_wrappers`, or by a path to a file. Every run gets a module of
its own, so what `prepare` keeps in globals belongs to that run.
"""

import importlib.metadata
import importlib.util
import itertools
import sys
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from types import ModuleType

from rlhf.config import RunConfig
from rlhf.data import Record
from rlhf.errors import InputError
from rlhf.taskdir import resolve_path

ENTRY_POINT_GROUP = "rlhf.reward_wrappers"
DEFAULT_WRAPPER = "raw"
_MAX_REWARD = 1e30  # rewards become float32
_numbers = itertools.count()


class RewardWrapper:
    """Call a wrapper module and check what it returns."""

    def __init__(self, name: str, module: ModuleType, *, file: str) -> None:
        self.name = name
        self._module = module
        self._file = file
        self.uses_rewards: bool = getattr(module, "USES_REWARDS", True)

    @property
    def place(self) -> str:
        """Say file and line of `transform`."""
        return f"{self._file}:{self._module.transform.__code__.co_firstlineno}"

    def prepare(self, task_dir: Path, config: RunConfig) -> None:
        if not hasattr(self._module, "prepare"):
            return
        try:
            self._module.prepare(task_dir, config.to_json())
        except InputError:
            raise
        except Exception as error:  # a user's code may raise anything
            raise InputError(f"{self._file}: prepare raised {type(error).__name__}: {error}") from error

    def __call__(
        self, records: Sequence[Record], response_tokens: Sequence[Sequence[str]], rewards: Sequence[float]
    ) -> list[float]:
        """Return one finite reward for each response. Raises `InputError` naming file and line otherwise."""
        try:
            shaped = self._module.transform(records, response_tokens, rewards)
        except Exception as error:  # a user's code may raise anything
            raise InputError(f"{self.place}: transform raised {type(error).__name__}: {error}") from error
        if not isinstance(shaped, list | tuple) or len(shaped) != len(records):
            found = f"{len(shaped)} rewards" if isinstance(shaped, list | tuple) else type(shaped).__name__
            raise InputError(f"{self.place}: transform must return a list of {len(records)} rewards, got {found}")
        for row, reward in enumerate(shaped):
            if isinstance(reward, bool) or not isinstance(reward, Real) or not abs(float(reward)) <= _MAX_REWARD:
                raise InputError(f"{self.place}: transform must return finite numbers, got {reward!r} at row {row}")
        return [float(reward) for reward in shaped]


def wrapper_names() -> list[str]:
    return sorted(entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))


def load_wrapper(name: str | None, task_dir: Path, *, shown: str | None = None) -> RewardWrapper:
    """Load a wrapper by entry-point name or path; messages call its file `shown`, where it was copied from there.

    Raises `InputError` if there is none, or it is malformed.
    """
    name = name or DEFAULT_WRAPPER
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name):
        return RewardWrapper(name, _fresh_module(entry.module, entry.module), file=entry.module)
    path = resolve_path(name, task_dir)
    if not path.is_file():
        raise InputError(
            f"reward_wrapper must be one of {', '.join(wrapper_names())}, or a path to a Python file; got {name!r}"
        )
    file = shown or str(path)
    return RewardWrapper(name, _fresh_module(path, file), file=file)


def _fresh_module(source: str | Path, file: str) -> ModuleType:
    if isinstance(source, Path):
        spec = importlib.util.spec_from_file_location(f"reward_wrapper_{next(_numbers)}_{source.stem}", source)
    else:
        spec = importlib.util.find_spec(source)
    if spec is None or spec.loader is None:
        raise InputError(f"{file}: cannot be imported; a reward wrapper is a .py file")
    module = importlib.util.module_from_spec(spec)
    if isinstance(source, Path):
        sys.modules[spec.name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # importing runs a user's code
        raise InputError(f"{file}: importing it raised {type(error).__name__}: {error}") from error
    if not hasattr(getattr(module, "transform", None), "__code__"):
        raise InputError(f"{file}: a reward wrapper must define transform(records, response_tokens, rewards)")
    return module
