"""The policy: a causal transformer over a task's vocabulary that writes content tokens only.

Sampling keeps a key/value cache and runs each prompt once for its whole group of responses; scoring given
responses shares the prompt in the same way. Responses are content-token indices, not vocabulary ids.
"""

from pathlib import Path

import torch
from torch import nn

from rlhf.transformer import ModelConfig, Trunk
from rlhf.vocab import Vocab
from rlhf.weights import load_model, save_model

DEFAULT_SIZE = {"d_model": 64, "n_layers": 2, "n_heads": 4, "d_ff": 128}
MASKED_LOGIT = -1e9


class Policy(Trunk):
    """Give the distribution of the next content token at every response position."""

    def __init__(self, config: ModelConfig, vocab: Vocab) -> None:
        super().__init__(config)
        self.vocab = vocab
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return next-token logits (B, T, vocab_size), non-content tokens masked: the plain definition."""
        logits = self.head(self.hidden(ids, causal=True)[0])
        masked = torch.full_like(logits, MASKED_LOGIT)
        masked[..., self.vocab.first_content_id :] = logits[..., self.vocab.first_content_id :]
        return masked

    def content_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project hidden states (..., d_model) to content tokens only (..., n_content)."""
        return hidden @ self.head.weight[self.vocab.first_content_id :].T

    def response_logp(
        self, prompts: torch.Tensor, responses: torch.Tensor, *, temperature: float = 1.0
    ) -> torch.Tensor:
        """Return log probabilities (N * G, resp_len, n_content) at every prefix of the given responses.

        prompts: ids (N, prompt_len). responses: (N * G, resp_len), the G of each prompt side by side.
        """
        group = responses.shape[0] // prompts.shape[0]
        prompt_hidden, prompt_cache = self.hidden(prompts, causal=True)
        past = [layer.repeat(group) for layer in prompt_cache]
        inputs = responses[:, :-1] + self.vocab.first_content_id
        first = prompt_hidden[:, -1:].repeat_interleave(group, 0)
        if inputs.shape[1]:
            rest, _ = self.hidden(inputs, causal=True, past=past)
            first = torch.cat([first, rest], 1)
        return torch.log_softmax(self.content_logits(first) / temperature, -1)

    @torch.no_grad()
    def sample(
        self, prompts: torch.Tensor, uniforms: torch.Tensor, *, temperature: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample responses by inverting the cumulative distribution at the given uniforms.

        prompts: ids (N, prompt_len). uniforms: (N * G, resp_len) in [0, 1); the same uniforms give two
        policies common random numbers. Returns responses (N * G, resp_len) and the log probabilities
        (N * G, resp_len, n_content) they were drawn from.
        """
        group = uniforms.shape[0] // prompts.shape[0]
        hidden, cache = self.hidden(prompts, causal=True)
        past = [layer.repeat(group) for layer in cache]
        last = hidden[:, -1].repeat_interleave(group, 0)
        tokens, logps = [], []
        for t in range(uniforms.shape[1]):
            logp = torch.log_softmax(self.content_logits(last) / temperature, -1)
            token = _invert_cdf(logp.exp(), uniforms[:, t])
            tokens.append(token)
            logps.append(logp)
            if t + 1 < uniforms.shape[1]:
                hidden, past = self.hidden(token[:, None] + self.vocab.first_content_id, causal=True, past=past)
                last = hidden[:, -1]
        return torch.stack(tokens, 1), torch.stack(logps, 1)


def _invert_cdf(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the index at which each row's cumulative sum passes its uniform: (B, V), (B,) -> (B,)."""
    cdf = probabilities.cumsum(-1)
    return (cdf <= uniforms[:, None] * cdf[:, -1:]).sum(-1).clamp_(max=probabilities.shape[-1] - 1)


def policy_config(vocab: Vocab, size: dict[str, int] | None = None) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab.size,
        seq_len=vocab.seq_len,
        prompt_len=vocab.prompt_len,
        resp_len=vocab.resp_len,
        **(size or DEFAULT_SIZE),
    )


def init_policy(vocab: Vocab, *, seed: int, size: dict[str, int] | None = None) -> Policy:
    """Make an untrained policy, its weights decided by `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Policy(policy_config(vocab, size), vocab)


def load_policy(folder: Path, vocab: Vocab) -> Policy:
    """Read `policy.safetensors` and `config.json`. Raises `InputError` if either does not fit."""
    return load_model(lambda config: Policy(config, vocab), folder, "policy.safetensors", vocab)


def save_policy(policy: Policy, folder: Path) -> None:
    save_model(policy, policy.config, folder, "policy.safetensors")
