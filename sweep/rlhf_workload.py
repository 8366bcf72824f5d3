"""The RLHF workload: REINFORCE runs over a task directory, judged by label-inferred quality.

The task directory and a user's wrapper files travel to the workers as one archive, and are unpacked once a
process. What does not change between trials (models, prompts, judge) is kept there too.
"""

import functools
import io
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from objectives.prompt_mix import prompt_mixes
from objectives.quality_cache import load_quality, remember_quality
from objectives.quality_model import QualityModel
from objectives.score import Judge
from objectives.split import PARTS, split_prompts
from rlhf.config import RunConfig, run_config
from rlhf.errors import InputError, raise_if_any
from rlhf.policy import save_policy
from rlhf.run import ReinforceRun
from rlhf.taskdir import RUNS, Task, load_task, resolve_path
from rlhf.wrappers import load_wrapper, wrapper_names
from search_spaces.space import SearchSpace
from sweep.workload import MODEL_FOLDER, STATE_FOLDER, TrialRun

PROMPT_MIX = "prompt_mix"
_WRAPPER = "reward_wrapper"
_USER_WRAPPERS = "user_wrappers"  # folder in the archive for wrappers that are files of the user
_CHECKED_ROWS = 8


@dataclass(frozen=True, slots=True)
class RlhfWorkload:
    """Carry a task to the workers. Plain data; what it opens lives in each worker's process."""

    archive: bytes
    quality: QualityModel
    mixes: Mapping[str, Mapping[str, float]]
    digest: str

    @classmethod
    def open(cls, task_dir: Path, space: SearchSpace) -> "RlhfWorkload":
        """Read and check a task and pack it, with the space's wrapper files. Raises `InputError`."""
        task = load_task(task_dir)
        for part in PARTS:
            split_prompts(task, part)  # raises if a part lacks a family
        quality = load_quality(task.root)
        reference = Judge(task, quality).score(task.reference)
        mixes = prompt_mixes(task, reference.quality)
        return cls(_pack(task, _user_wrappers(space, task)), quality, mixes, task.digest)

    def check(self, space: SearchSpace) -> None:
        """Try every setting of the space that can be named; raises `InputError` with all that fail."""
        known = [field.name for field in fields(RunConfig)] + [PROMPT_MIX]
        given = {**dict.fromkeys(space.distributions), **space.fixed}
        problems = [
            f"space {space.name}: unknown setting {name!r}; known: {', '.join(known)}"
            for name in given
            if name not in known
        ]
        for name in _choices(space, PROMPT_MIX):
            if name not in self.mixes:
                problems.append(f"space {space.name}: prompt_mix must be one of {', '.join(self.mixes)}, got {name!r}")
        for name in _choices(space, _WRAPPER):
            try:
                self._try_wrapper(name)
            except InputError as error:
                problems += error.problems
        if not problems:
            for params in _extremes(space):
                try:
                    self.config(params, seed=0)
                except InputError as error:
                    problems += [p for p in error.problems if p not in problems]
        raise_if_any(problems)

    def config(self, params: Mapping[str, Any], *, seed: int) -> dict[str, Any]:
        values = {name: value for name, value in params.items() if name != PROMPT_MIX}
        if PROMPT_MIX in params:
            values["family_weights"] = self.mixes[params[PROMPT_MIX]]
        resolved = run_config({"seed": seed, **values}, source="trial").to_json()
        return {**resolved, PROMPT_MIX: params.get(PROMPT_MIX)}

    def start(self, config: Mapping[str, Any]) -> TrialRun:
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        task, judge = _opened(self.digest, self)
        values = {name: value for name, value in config.items() if name != PROMPT_MIX}
        values[_WRAPPER] = _packed_name(values.get(_WRAPPER), task.root)
        return _RlhfTrial(run_config(values, source="trial"), task, judge)

    def _try_wrapper(self, name: str | None) -> None:
        """Run a wrapper on a few reference responses, as a trial would."""
        task, _ = _opened(self.digest, self)
        wrapper = load_wrapper(_packed_name(name, task.root), task.root)
        wrapper.prepare(task.root, RunConfig())
        rows = task.expert.records(task.vocab)[:_CHECKED_ROWS]
        wrapper(rows, [row["response"] for row in rows], [0.5] * len(rows))

    def __hash__(self) -> int:
        return hash(self.digest)


class _RlhfTrial:
    """One REINFORCE run and the judge of its checkpoints."""

    def __init__(self, config: RunConfig, task: Task, judge: Judge) -> None:
        self._run = ReinforceRun(config, task.root, prompts=split_prompts(task, "train"))
        self._judge = judge

    @property
    def step(self) -> int:
        return self._run.step

    def advance(self, until_step: int) -> list[dict[str, float]]:
        length = self._run.vocab.resp_len
        return [{**row, "kl_per_token": row["kl"] / length} for row in self._run.advance(until_step)]

    def judge(self) -> dict[str, float]:
        return self._judge.score(self._run.policy).metrics()

    def save(self, folder: Path) -> None:
        save_policy(self._run.policy, folder / MODEL_FOLDER)
        self._run.save_state(folder / STATE_FOLDER)

    def load(self, folder: Path) -> None:
        self._run.load_state(folder / STATE_FOLDER)


@functools.lru_cache(maxsize=1)
def _opened(digest: str, workload: RlhfWorkload) -> tuple[Task, Judge]:
    """Unpack, read and prepare a workload once in this process."""
    root = Path(tempfile.mkdtemp(prefix="rlhf-sweep-task-"))
    with tarfile.open(fileobj=io.BytesIO(workload.archive)) as archive:
        archive.extractall(root, filter="data")
    remember_quality(workload.quality, digest)
    task = load_task(root)
    return task, Judge(task, workload.quality)


def _pack(task: Task, wrappers: Mapping[str, Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(task.root.rglob("*")):
            name = path.relative_to(task.root)
            if path.is_file() and name.parts[0] not in (RUNS, _USER_WRAPPERS):
                archive.add(path, name.as_posix())
        for wrapper, path in wrappers.items():
            archive.add(path, f"{_USER_WRAPPERS}/{wrapper}")
    return buffer.getvalue()


def _user_wrappers(space: SearchSpace, task: Task) -> dict[str, Path]:
    """Return the space's wrapper files by the name they get in the archive. Raises `InputError` if one is missing."""
    found = {}
    for name in _choices(space, _WRAPPER):
        if name is not None and name not in wrapper_names():
            path = resolve_path(name, task.root)
            if not path.is_file():
                load_wrapper(name, task.root)  # raises, saying which names are known
            found[_archive_name(name)] = path
    return found


def _archive_name(wrapper: str) -> str:
    return wrapper.strip("/").replace("/", "__")


def _packed_name(wrapper: str | None, root: Path) -> str | None:
    if wrapper is None or wrapper in wrapper_names():
        return wrapper
    return str(root / _USER_WRAPPERS / _archive_name(wrapper))


def _choices(space: SearchSpace, name: str) -> list[Any]:
    """Return every value a named setting can take: its choices, or the one it is fixed at."""
    if name in space.fixed:
        return [space.fixed[name]]
    return list(getattr(space.distributions.get(name), "choices", ()))


def _extremes(space: SearchSpace) -> list[dict[str, Any]]:
    """Return the space's two corners, so that a value no run would accept is found before the first trial."""
    corners = []
    for end in ("low", "high"):
        corner = dict(space.fixed)
        for name, distribution in space.distributions.items():
            choices = getattr(distribution, "choices", None)
            corner[name] = choices[0 if end == "low" else -1] if choices else getattr(distribution, end)
        corners.append(corner)
    return corners
