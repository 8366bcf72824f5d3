"""The RLHF workload: REINFORCE runs over a task directory, judged by label-inferred quality.

The task directory and a user's wrapper files travel to the workers as one archive, and are unpacked once a
process. Task, judge and training prompts are kept there from trial to trial.
"""

import atexit
import functools
import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from objectives.prompt_mix import prompt_mixes
from objectives.quality_cache import load_quality, remember_quality
from objectives.quality_model import QualityModel
from objectives.release import MAX_WORST_FAMILY_HARM
from objectives.score import Judge
from objectives.split import PARTS, split_prompts
from objectives.task_screen import TaskScreen, screen_task
from rlhf.config import RunConfig, run_config
from rlhf.data import Prompts
from rlhf.errors import collected, raise_if_any
from rlhf.policy import load_policy, save_policy
from rlhf.run import ReinforceRun, prompt_weights
from rlhf.taskdir import Task, load_task, resolve_path, task_files
from rlhf.wrappers import RewardWrapper, load_wrapper, wrapper_names
from search_spaces.space import SearchSpace
from sweep.workload import MODEL_FOLDER, STATE_FOLDER, TrialRun

if TYPE_CHECKING:
    from objectives.certify import Certificate

PROMPT_MIX = "prompt_mix"
_WRAPPER = "reward_wrapper"
_WEIGHTS = "family_weights"
# Fixed by the task and the sweep: the judge knows one reference, and training prompts are the train part.
_NOT_FOR_SPACES = ("policy_init", "policy_ref", "reward_model", "prompt_file", "save_every")
_SETTINGS = [field.name for field in fields(RunConfig) if field.name not in _NOT_FOR_SPACES] + [PROMPT_MIX]
_USER_WRAPPERS = "user_wrappers"  # folder in the archive for wrappers that are files of the user
_CHECKED_ROWS = 8


def read_task(task_dir: Path) -> Task:
    """Read a task and check that every part of its prompts can be used. Raises `InputError`."""
    task = load_task(task_dir)
    for part in PARTS:
        split_prompts(task, part)  # raises if a part lacks a family
    return task


@dataclass(frozen=True, slots=True, eq=False)
class RlhfWorkload:
    """Carry a task to the workers. Plain data; what it opens lives in each worker's process.

    `wrapper_files` gives, for a wrapper named by path in the space, the file it was read from.
    """

    archive: bytes
    quality: QualityModel
    screen: TaskScreen
    mixes: Mapping[str, Mapping[str, float]]
    wrapper_files: Mapping[str, str]
    digest: str

    @classmethod
    def open(cls, task_dir: Path, space: SearchSpace) -> "RlhfWorkload":
        """Read and check a task and pack it, with the space's wrapper files. Raises `InputError`."""
        task = read_task(task_dir)
        quality = load_quality(task.root)
        judge = Judge(task, quality)
        reference = judge.score_sampled(judge.reference)
        wrappers = _user_wrappers(space, task)
        screen = screen_task(task)
        return cls(
            _pack(task, wrappers), quality, screen, prompt_mixes(task, reference.quality, flagged=screen.flagged),
            {name: str(path) for name, path in wrappers.items()}, task.digest,
        )  # fmt: skip

    def check(self, space: SearchSpace) -> None:
        """Try every setting of the space; raises `InputError` with all that fail."""
        given = {**dict.fromkeys(space.distributions), **space.fixed}
        problems = [
            f"unknown setting {name!r}; known: {', '.join(_SETTINGS)}" for name in given if name not in _SETTINGS
        ]
        if PROMPT_MIX in given and _WEIGHTS in given:
            problems.append(f"give {PROMPT_MIX} or {_WEIGHTS}, not both: a mix is a set of weights")
        problems += [
            f"{PROMPT_MIX} must be one of {', '.join(self.mixes)}, got {name!r}"
            for name in space.choices(PROMPT_MIX)
            if name not in self.mixes
        ]
        found = [f"space {space.name}: {problem}" for problem in problems]
        for name in space.choices(_WRAPPER):
            with collected(found):
                self._try_wrapper(name)
        if not problems:
            for params in space.corners():
                with collected(found):
                    self._try_config(params, space.name)
        raise_if_any(found)

    def warnings(self) -> tuple[str, ...]:
        return (*(f"nothing can be certified: {refusal}" for refusal in self.quality.refusals), *self.screen.warnings)

    def documents(self) -> Mapping[str, bytes]:
        return {"screen.json": json.dumps(self.screen.details, indent=2).encode(), "screen.png": self.screen.picture}

    def config(self, params: Mapping[str, Any], *, seed: int) -> dict[str, Any]:
        return {**self._run_config(params, seed=seed, source="trial").to_json(), PROMPT_MIX: params.get(PROMPT_MIX)}

    def start(self, config: Mapping[str, Any]) -> TrialRun:
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        opened = _opened(self)
        values = {name: value for name, value in config.items() if name != PROMPT_MIX}
        return _RlhfTrial(run_config(values, source="trial"), opened, self._load_wrapper(values[_WRAPPER]))

    def _run_config(self, params: Mapping[str, Any], *, seed: int, source: str) -> RunConfig:
        values = {name: value for name, value in params.items() if name != PROMPT_MIX}
        if PROMPT_MIX in params:
            values[_WEIGHTS] = self.mixes[params[PROMPT_MIX]]
        return run_config({"seed": seed, **values}, source=source)

    def _try_config(self, params: Mapping[str, Any], space: str) -> None:
        config = self._run_config(params, seed=0, source=f"space {space}")
        prompt_weights(_opened(self).train_prompts, _opened(self).task.vocab.families, config)

    def _try_wrapper(self, name: str | None) -> None:
        """Run a wrapper on a few reference responses, as a trial would."""
        task = _opened(self).task
        wrapper = self._load_wrapper(name)
        wrapper.prepare(task.root, RunConfig())
        rows = task.expert.records(task.vocab)[:_CHECKED_ROWS]
        wrapper(rows, [row["response"] for row in rows], [0.5] * len(rows))

    def _load_wrapper(self, name: str | None) -> RewardWrapper:
        root = _opened(self).task.root
        if name is None or name not in self.wrapper_files:
            return load_wrapper(name, root)
        packed = root / _USER_WRAPPERS / _archive_name(name)
        return load_wrapper(str(packed), root, shown=self.wrapper_files[name])


@dataclass(frozen=True, slots=True)
class RlhfCertifier:
    """Certify policies of one task."""

    task: Task
    quality: QualityModel

    @classmethod
    def open(cls, task_dir: Path) -> "RlhfCertifier":
        task = load_task(task_dir)
        return cls(task, load_quality(task.root))

    def __call__(self, files: Path, *, selection_gain: float, n_finalists: int, max_harm: float) -> "Certificate":
        from objectives.certify import certify  # a second to import, which workers need not pay

        return certify(
            load_policy(files, self.task.vocab), self.task, self.quality,
            selection_gain=selection_gain, n_finalists=n_finalists, max_harm=min(max_harm, MAX_WORST_FAMILY_HARM),
        )  # fmt: skip


class _RlhfTrial:
    """One REINFORCE run and the judge of its checkpoints."""

    def __init__(self, config: RunConfig, opened: "_Opened", wrapper: RewardWrapper) -> None:
        self._run = ReinforceRun(config, opened.task.root, prompts=opened.train_prompts, wrapper=wrapper)
        self._judge = opened.judge

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


@dataclass(frozen=True, slots=True)
class _Opened:
    """What a process keeps of a workload: its unpacked task, the judge, the training prompts."""

    task: Task
    judge: Judge
    train_prompts: Prompts


@functools.lru_cache(maxsize=1)
def _opened(workload: RlhfWorkload) -> _Opened:
    """Unpack, read and prepare a workload once in this process."""
    folder = tempfile.mkdtemp(prefix="rlhf-sweep-task-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(workload.archive)) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and later
        archive.extractall(folder)
    remember_quality(workload.quality, workload.digest)
    task = load_task(Path(folder))
    return _Opened(task, Judge(task, workload.quality), split_prompts(task, "train"))


def _pack(task: Task, wrappers: Mapping[str, Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as archive:
        for path in task_files(task.root):
            archive.add(path, path.relative_to(task.root).as_posix())
        for name, path in wrappers.items():
            archive.add(path, f"{_USER_WRAPPERS}/{_archive_name(name)}")
    return buffer.getvalue()


def _user_wrappers(space: SearchSpace, task: Task) -> dict[str, Path]:
    """Return the space's wrapper files by their name in the space; `check` reports those that are missing."""
    named = {name: resolve_path(name, task.root) for name in space.choices(_WRAPPER) if isinstance(name, str)}
    return {name: path for name, path in named.items() if name not in wrapper_names() and path.is_file()}


def _archive_name(wrapper: str) -> str:
    return wrapper.strip("/").replace("/", "__")
