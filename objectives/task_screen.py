"""The shortcut screen of a task's own reward model: worked out once a task and machine, with its picture."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from objectives.task_cache import Arrays, cached_arrays
from rlhf.taskdir import Task


@dataclass(frozen=True, slots=True)
class TaskScreen:
    """Hold what `python -m objectives.diagnose` writes to `--details`, and its `--plot` as PNG."""

    details: dict[str, Any]
    picture: bytes

    @property
    def flagged(self) -> frozenset[str]:
        """Families that optimising the reward model would hack."""
        return frozenset(name for name, family in self.details["families"].items() if family["flag"])

    @property
    def warnings(self) -> list[str]:
        """Say in words why each flagged family is."""
        flagged = [self.details["families"][name] for name in sorted(self.flagged)]
        return [
            f"optimising the reward model would hack {reason}" if entry["findings"] else reason
            for entry in flagged
            for reason in entry["reasons"]
        ]


def screen_task(task: Task) -> TaskScreen:
    """Screen a task's reward model with its own QA sample, reference and dev prompts."""
    stored = cached_arrays("screen", task.digest, lambda: _screen(task))
    return TaskScreen(json.loads(str(stored["details"])), stored["picture"].tobytes())


def _screen(task: Task) -> Arrays:
    from objectives.screen import screen  # importing all three takes seconds, once a task
    from objectives.screen_plot import draw_screen
    from objectives.screen_report import details_json

    result = screen(task.reward_model, task.crowd, task.reference, task.dev_prompts, task.vocab)
    picture = np.frombuffer(draw_screen(result), np.uint8)
    return {"details": np.array(json.dumps(details_json(result))), "picture": picture}
