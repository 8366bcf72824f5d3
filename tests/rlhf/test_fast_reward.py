from collections.abc import Callable

import pytest
import torch

from rlhf.data import Prompts
from rlhf.reward_model import RewardModel, init_reward_model
from rlhf.vocab import Vocab

LONG = Vocab(("p", "q"), n_attrs=3, n_values=2, content_tokens=tuple("abc"), resp_len=20)  # longer than one padding
SIZE = {"d_model": 12, "n_layers": 3, "n_heads": 3, "d_ff": 20}


def shaken(model: RewardModel) -> RewardModel:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("batch", [1, 4, 128])
def test_scores_equal_the_plain_forward(batch: int, some_prompts: Callable[..., Prompts]) -> None:
    model = shaken(init_reward_model(LONG, seed=0, size=SIZE))
    prompts = some_prompts(LONG, 3).tokens(LONG)
    responses = torch.randint(3, (2 * len(prompts), 20), generator=torch.Generator().manual_seed(2))
    ids = torch.cat([prompts.repeat_interleave(2, 0), responses + LONG.first_content_id], 1)
    scorer = model.scorer(batch=batch)
    for _ in range(2):  # buffers are used again
        torch.testing.assert_close(scorer.score(prompts, responses), model(ids).detach(), atol=1e-5, rtol=1e-5)


def test_score_sees_weights_as_they_are_now(some_prompts: Callable[..., Prompts]) -> None:
    model = shaken(init_reward_model(LONG, seed=0, size=SIZE))
    prompts, responses = some_prompts(LONG, 1).tokens(LONG), torch.zeros(2, 20, dtype=torch.long)
    before = model.score(prompts, responses)
    with torch.no_grad():
        model.tok.weight.mul_(-1)
    assert not torch.allclose(model.score(prompts, responses), before)
