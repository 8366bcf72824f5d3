from collections.abc import Callable
from pathlib import Path

import torch

from rlhf.data import Prompts
from rlhf.reward_model import RewardModel, load_reward_model, save_reward_model
from rlhf.vocab import Vocab

MakeRewardModel = Callable[..., RewardModel]


def some_pairs(vocab: Vocab, prompts: Prompts, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    responses = torch.arange(len(prompts) * group)[:, None] + 2 * torch.arange(vocab.resp_len)
    return prompts.tokens(vocab), responses % vocab.n_content


def test_score_equals_one_forward_for_each_sequence(
    odd_vocab: Vocab, make_reward_model: MakeRewardModel, some_prompts: Callable[..., Prompts]
) -> None:
    model = make_reward_model(odd_vocab)
    for group in (1, 3):
        prompts, responses = some_pairs(odd_vocab, some_prompts(odd_vocab, 1), group)
        plain = [
            model(torch.cat([prompts[row // group], response + odd_vocab.first_content_id])[None]).item()
            for row, response in enumerate(responses)
        ]
        torch.testing.assert_close(model.score(prompts, responses), torch.tensor(plain), atol=1e-5, rtol=0)
    assert len(set(plain)) > 1


def test_the_batch_size_does_not_matter(
    make_reward_model: MakeRewardModel, some_prompts: Callable[..., Prompts], middling_vocab: Vocab
) -> None:
    model = make_reward_model(middling_vocab)
    prompts, responses = some_pairs(middling_vocab, some_prompts(middling_vocab), 2)
    torch.testing.assert_close(
        model.score(prompts, responses), model.score(prompts, responses, batch=3), atol=1e-6, rtol=0
    )


def test_every_position_can_see_every_other(make_reward_model: MakeRewardModel, middling_vocab: Vocab) -> None:
    model = make_reward_model(middling_vocab)
    ids = torch.tensor([[2, 4, 5, 1, 8, 9, 10]])
    hidden = model.hidden(ids, causal=False)[0]
    ids[0, -1] = 11
    moved = (model.hidden(ids, causal=False)[0] - hidden).abs().amax(-1)
    assert (moved > 1e-4).all()


def test_a_zeroed_head_scores_its_bias(make_reward_model: MakeRewardModel, middling_vocab: Vocab) -> None:
    model = make_reward_model(middling_vocab)
    torch.nn.init.zeros_(model.head[2].weight)
    torch.nn.init.constant_(model.head[2].bias, 0.25)
    scores = model.score(torch.tensor([[2, 4, 5, 1]]), torch.tensor([[0, 1, 2], [3, 4, 5]]))
    assert scores.tolist() == [0.25, 0.25]


def test_a_folder_round_trips(tmp_path: Path, make_reward_model: MakeRewardModel, odd_vocab: Vocab) -> None:
    model = make_reward_model(odd_vocab)
    save_reward_model(model, tmp_path / "rm")
    loaded = load_reward_model(tmp_path / "rm", odd_vocab)
    assert loaded.config == model.config
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
