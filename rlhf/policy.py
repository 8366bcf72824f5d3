"""The policy: a causal transformer over a task's vocabulary that writes content tokens only.

Each prompt runs once for its whole group of responses. Where no gradient is asked for, `rlhf.fast_policy` computes.
Responses are content-token indices, not vocabulary ids.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from rlhf.fast_policy import Folded, Rollout, fold
from rlhf.transformer import ModelConfig, Trunk
from rlhf.vocab import Vocab
from rlhf.weights import load_model, save_model

POLICY_WEIGHTS = "policy.safetensors"
DEFAULT_SIZE = {"d_model": 64, "n_layers": 2, "n_heads": 4, "d_ff": 128}
MASKED_LOGIT = -1e9
_RESPONSES_AT_ONCE = 256


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

    @torch.no_grad()
    def folded(self, *, temperature: float = 1.0) -> Folded:
        """Return the weights as a `Rollout` reads them; its head's outputs are the content logits over temperature."""
        first = self.vocab.first_content_id
        return fold(self, self.head.weight[first:] / temperature, first_content_id=first)

    def rollout(self, *, n_prompts: int, group: int, keep: bool = True) -> Rollout:
        """Make the buffers of a fast pass over `n_prompts` prompts with `group` responses each."""
        return Rollout(self.config, n_prompts=n_prompts, group=group, n_content=self.vocab.n_content, keep=keep)

    def response_logp(
        self, prompts: torch.Tensor, responses: torch.Tensor, *, temperature: float = 1.0
    ) -> torch.Tensor:
        """Return log probabilities (N * G, resp_len, n_content) at every prefix of the given responses.

        prompts: ids (N, prompt_len). responses: (N * G, resp_len), the G of each prompt side by side.
        """
        if torch.is_grad_enabled() and self.head.weight.requires_grad:
            return self._differentiable_logp(prompts, responses, temperature)
        folded = self.folded(temperature=temperature)
        logps = []
        for rollout, some_prompts, some_responses in self._chunks(prompts, responses, keep=False):
            columns = rollout.score(folded, some_prompts, rollout.to_columns(some_responses))
            logps.append(rollout.from_columns(columns))
        return torch.cat(logps)

    @torch.no_grad()
    def sample(
        self, prompts: torch.Tensor, uniforms: torch.Tensor, *, temperature: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample responses by inverting the cumulative distribution at the given uniforms.

        prompts: ids (N, prompt_len). uniforms: (N * G, resp_len) in [0, 1); the same uniforms give two
        policies common random numbers. Returns responses (N * G, resp_len) and the log probabilities
        (N * G, resp_len, n_content) they were drawn from.
        """
        folded = self.folded(temperature=temperature)
        responses, logps = [], []
        for rollout, some_prompts, some_uniforms in self._chunks(prompts, uniforms, keep=True):
            responses.append(rollout.sample(folded, some_prompts, some_uniforms))
            logps.append(rollout.from_columns(rollout.logp))
        return torch.cat(responses), torch.cat(logps)

    def _chunks(
        self, prompts: torch.Tensor, rows: torch.Tensor, *, keep: bool
    ) -> Iterator[tuple[Rollout, torch.Tensor, torch.Tensor]]:
        """Yield prompts (N, P) and what belongs to their responses (N * G, ...) in parts that fit the caches."""
        group = rows.shape[0] // prompts.shape[0]
        size, rollout = max(1, _RESPONSES_AT_ONCE // group), None
        for some_prompts, some_rows in zip(prompts.split(size), rows.split(size * group), strict=True):
            if rollout is None or rollout.n_prompts != len(some_prompts):
                rollout = self.rollout(n_prompts=len(some_prompts), group=group, keep=keep)
            yield rollout, some_prompts, some_rows

    def _differentiable_logp(self, prompts: torch.Tensor, responses: torch.Tensor, temperature: float) -> torch.Tensor:
        """Do what `response_logp` does under autograd, as training a reference needs."""
        group = responses.shape[0] // prompts.shape[0]
        prompt_hidden, prompt_cache = self.hidden(prompts, causal=True)
        past = [layer.repeat(group) for layer in prompt_cache]
        inputs = responses[:, :-1] + self.vocab.first_content_id
        first = prompt_hidden[:, -1:].repeat_interleave(group, 0)
        if inputs.shape[1]:
            rest, _ = self.hidden(inputs, causal=True, past=past)
            first = torch.cat([first, rest], 1)
        return torch.log_softmax(self.content_logits(first) / temperature, -1)


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
    return load_model(lambda config: Policy(config, vocab), folder, POLICY_WEIGHTS, vocab)


def save_policy(policy: Policy, folder: Path) -> None:
    save_model(policy, policy.config, folder, POLICY_WEIGHTS)
