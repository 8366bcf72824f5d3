"""What the reward model gives the reference's own samples, by family: worked out once a task and process."""

import functools

import torch

from rlhf.taskdir import Task

_SAMPLES_PER_FAMILY = 512


@functools.lru_cache(maxsize=2)
def reference_scores(task: Task) -> dict[str, torch.Tensor]:
    """Sample the reference on training prompts, always with the same random numbers; return scores (512,) by family."""
    generator = torch.Generator().manual_seed(0)
    scores = {}
    for index, family in enumerate(task.vocab.families):
        rows = torch.from_numpy((task.train_prompts.family == index).nonzero()[0])
        chosen = rows[torch.randint(len(rows), (_SAMPLES_PER_FAMILY,), generator=generator)]
        prompts = task.train_prompts[chosen.numpy()].tokens(task.vocab)
        uniforms = torch.rand(_SAMPLES_PER_FAMILY, task.vocab.resp_len, generator=generator)
        responses, _ = task.reference.sample(prompts, uniforms)
        scores[family] = task.reward_model.score(prompts, responses)
    return scores
