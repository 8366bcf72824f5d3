"""The vendor's reward model: the policy's blocks without the causal mask, mean-pooled, with a scalar head."""

from pathlib import Path

import torch
from torch import nn

from rlhf.fast_reward import FastReward
from rlhf.transformer import ModelConfig, Trunk
from rlhf.vocab import Vocab
from rlhf.weights import load_model, save_model

RM_WEIGHTS = "rm.safetensors"
DEFAULT_SIZE = {"d_model": 96, "n_layers": 2, "n_heads": 4, "d_ff": 192}


class RewardModel(Trunk):
    """Score whole sequences: ids (B, seq_len) -> (B,)."""

    def __init__(self, config: ModelConfig, vocab: Vocab) -> None:
        super().__init__(config)
        self.vocab = vocab
        self.head = nn.Sequential(nn.Linear(config.d_model, config.d_model), nn.GELU(), nn.Linear(config.d_model, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        pooled = self.hidden(ids, causal=False)[0].mean(1)
        scores: torch.Tensor = self.head(pooled).squeeze(-1)
        return scores

    def scorer(self, *, batch: int = 128) -> FastReward:
        """Return the fast pass over the weights as they are now."""
        return FastReward(self, self.head, first_content_id=self.vocab.first_content_id, batch=batch)

    def score(self, prompts: torch.Tensor, responses: torch.Tensor, *, batch: int = 128) -> torch.Tensor:
        """Score responses (N * G, resp_len) of content-token indices against prompts (N, prompt_len)."""
        return self.scorer(batch=batch).score(prompts, responses)


def init_reward_model(vocab: Vocab, *, seed: int, size: dict[str, int] | None = None) -> RewardModel:
    """Make an untrained reward model, its weights decided by `seed`."""
    config = ModelConfig(
        vocab_size=vocab.size,
        seq_len=vocab.seq_len,
        prompt_len=vocab.prompt_len,
        resp_len=vocab.resp_len,
        **(size or DEFAULT_SIZE),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return RewardModel(config, vocab)


def load_reward_model(folder: Path, vocab: Vocab) -> RewardModel:
    """Read `rm.safetensors` and `config.json`. Raises `InputError` if either does not fit."""
    return load_model(lambda config: RewardModel(config, vocab), folder, RM_WEIGHTS, vocab)


def save_reward_model(model: RewardModel, folder: Path) -> None:
    save_model(model, model.config, folder, RM_WEIGHTS)
