from collections.abc import Callable

import pytest
import torch

from rlhf.errors import InputError
from rlhf.policy import Policy
from rlhf.transformer import ModelConfig
from rlhf.vocab import Vocab

SIZES = {
    "vocab_size": 9, "d_model": 8, "n_layers": 1, "n_heads": 2, "d_ff": 8, "seq_len": 5, "prompt_len": 3, "resp_len": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_model": 0}, "d_model must be a whole number from 1 to 1000000, got 0"),
        ({"n_layers": 1.5}, "n_layers must be a whole number from 1 to 1000, got 1.5"),
        ({"d_ff": "8"}, "d_ff must be a whole number from 1 to 1000000, got '8'"),
        ({"n_heads": True}, "n_heads must be a whole number from 1 to 1000000, got True"),
        ({"n_heads": 3}, "n_heads must divide d_model, got 3 and 8"),
        ({"seq_len": 6}, r"seq_len must be prompt_len \+ resp_len, got 6, 3, 2"),
    ],
)
def test_bad_sizes_are_refused(change: dict[str, object], message: str) -> None:
    assert ModelConfig(**SIZES).to_json() == SIZES
    with pytest.raises(InputError, match=message):
        ModelConfig(**{**SIZES, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("split", [1, 2, 4, 6])
def test_hidden_states_do_not_depend_on_where_the_cache_is_cut(
    make_policy: Callable[..., Policy], middling_vocab: Vocab, split: int
) -> None:
    policy = make_policy(middling_vocab)
    ids = torch.tensor([[2, 4, 5, 1, 8, 9, 10], [3, 7, 7, 1, 13, 8, 8]])
    whole, _ = policy.hidden(ids, causal=True)
    start, past = policy.hidden(ids[:, :split], causal=True)
    rest, caches = policy.hidden(ids[:, split:], causal=True, past=past)
    torch.testing.assert_close(torch.cat([start, rest], 1), whole, atol=1e-5, rtol=0)
    assert all(cache.keys.shape[2] == ids.shape[1] for cache in caches)


def test_the_least_number_of_weights_is_close_below_the_number(
    make_policy: Callable[..., Policy], middling_vocab: Vocab
) -> None:
    policy = make_policy(middling_vocab)
    number = sum(tensor.numel() for tensor in policy.state_dict().values())
    assert 0.5 * number < policy.config.least_weights < number
