"""One training run with a lifetime: made, advanced step by step, saved at any step, resumed exactly.

A run that is stopped and resumed ends with the same bits as one that was not: policy, Adam moments, both
random streams and the half-filled log row are all part of the saved state, one safetensors file.
"""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf.config import RunConfig
from rlhf.data import Prompts, decode, read_prompts
from rlhf.errors import InputError, TrainingError, collected, raise_if_any
from rlhf.fast_grad import Backward, logit_gradient
from rlhf.policy import load_policy
from rlhf.reinforce import group_advantage, mean_entropy, policy_loss, sequence_kl
from rlhf.reward_model import load_reward_model
from rlhf.taskdir import resolve_path
from rlhf.vocab import load_vocab
from rlhf.weights import read_tensors, write_tensors
from rlhf.wrappers import RewardWrapper, load_wrapper

STATE_FILE = "state.safetensors"
_COUNTERS = "counters"
_ADAM_SLOTS = {"step", "exp_avg", "exp_avg_sq"}
LogRow = dict[str, float]


class ReinforceRun:
    """Train one policy with REINFORCE and a group-mean baseline against a fixed reference.

    `prompts` replaces the config's prompt file, so that a sweep can hold prompts back for judging; `wrapper` replaces
    loading the config's, where its file lies elsewhere.
    """

    def __init__(
        self, config: RunConfig, task_dir: Path, *, prompts: Prompts | None = None, wrapper: RewardWrapper | None = None
    ) -> None:
        self.config = config
        self.step = 0
        self.vocab = load_vocab(task_dir)
        problems: list[str] = []
        with collected(problems):
            self.reference = load_policy(resolve_path(config.policy_ref, task_dir), self.vocab).requires_grad_(False)
        with collected(problems):
            self.policy = load_policy(resolve_path(config.policy_init or config.policy_ref, task_dir), self.vocab)
        with collected(problems):
            self.reward_model = load_reward_model(resolve_path(config.reward_model, task_dir), self.vocab)
        with collected(problems):
            self.wrapper = wrapper or load_wrapper(config.reward_wrapper, task_dir)
        with collected(problems):
            self._pool = prompts or read_prompts(resolve_path(config.prompt_file, task_dir), self.vocab)
        raise_if_any(problems)
        self.wrapper.prepare(task_dir, config)
        self._pool_tokens = self._pool.tokens(self.vocab)
        self._pool_records = self._pool.records(self.vocab)
        self._prompt_weights = prompt_weights(self._pool, self.vocab.families, config)
        self._prompt_stream = torch.Generator().manual_seed(2 * config.seed)
        self._sample_stream = torch.Generator().manual_seed(2 * config.seed + 1)
        N, G = config.batch_prompts, config.samples_per_prompt
        self._rollout = self.policy.rollout(n_prompts=N, group=G)
        self._backward = Backward(self.policy, self._rollout)
        self._reference_rollout = self.reference.rollout(n_prompts=N, group=G, keep=False)
        self._folded_reference = self.reference.folded(temperature=config.temperature)
        self._scorer = self.reward_model.scorer()
        self._adam = torch.optim.Adam([self._backward.parameter], lr=config.lr, fused=True)
        self._sums: LogRow = {}
        self._elapsed_s = 0.0

    def advance(self, until_step: int) -> Iterator[LogRow]:
        """Train up to `until_step`, yielding a row of means every `log_every` steps and at the run's last."""
        while self.step < min(until_step, self.config.steps):
            started = time.perf_counter()
            self._train_step()
            self._elapsed_s += time.perf_counter() - started
            if self.step % self.config.log_every == 0 or self.step == self.config.steps:
                yield self._close_log_row()

    def save_state(self, folder: Path) -> None:
        """Write everything `load_state` needs, in one file and one step: a kill leaves the old state or the new."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"policy.{name}": tensor for name, tensor in self.policy.state_dict().items()}
        for index, slots in self._adam.state_dict()["state"].items():
            tensors |= {f"adam.{index}.{name}": tensor for name, tensor in slots.items()}
        tensors["stream.prompt"] = self._prompt_stream.get_state()
        tensors["stream.sample"] = self._sample_stream.get_state()
        counters = {
            "step": self.step,
            "elapsed_s": self._elapsed_s,
            "sums": self._sums,
            "config": self.config.to_json(),
        }
        write_tensors(tensors, folder / STATE_FILE, metadata={_COUNTERS: json.dumps(counters)})

    def load_state(self, folder: Path) -> None:
        """Go on from a saved state.

        Raises `InputError` if it cannot be read, was saved under another configuration, or is already past `steps`.
        """
        path = folder / STATE_FILE
        tensors, metadata = read_tensors(path)
        try:
            self._take_state(path, tensors, json.loads(metadata[_COUNTERS]))
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise InputError(f"{path}: is not the whole saved state of a run ({error!r}); start afresh") from error

    def _take_state(self, path: Path, tensors: dict[str, torch.Tensor], counters: dict[str, Any]) -> None:
        mine = self.config.to_json()
        problems = [
            f"{path}: saved with {key} = {value!r}, cannot go on with {mine[key]!r}"
            for key, value in counters["config"].items()
            if key != "steps" and mine[key] != value
        ]
        if counters["step"] > self.config.steps:
            problems.append(f"{path}: saved at step {counters['step']}, cannot go on to steps = {self.config.steps}")
        raise_if_any(problems)
        weights = {name.removeprefix("policy."): t for name, t in tensors.items() if name.startswith("policy.")}
        self.policy.load_state_dict(weights)
        slots: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("adam."):
                _, index, slot = name.split(".")
                slots.setdefault(int(index), {})[slot] = tensor
        if any(slot.keys() != _ADAM_SLOTS for slot in slots.values()):
            raise KeyError("adam")
        self._adam.load_state_dict({**self._adam.state_dict(), "state": slots})
        self._prompt_stream.set_state(tensors["stream.prompt"])
        self._sample_stream.set_state(tensors["stream.sample"])
        self.step, self._elapsed_s, self._sums = counters["step"], counters["elapsed_s"], counters["sums"]

    @torch.inference_mode()
    def _train_step(self) -> None:
        config, group = self.config, self.config.samples_per_prompt
        chosen = torch.multinomial(
            self._prompt_weights, config.batch_prompts, replacement=True, generator=self._prompt_stream
        )
        prompts = self._pool_tokens[chosen]
        uniforms = torch.rand(len(chosen) * group, self.vocab.resp_len, generator=self._sample_stream)
        rollout, folded = self._rollout, self.policy.folded(temperature=config.temperature)
        responses = rollout.sample(folded, prompts, uniforms)
        ref_logp = self._reference_rollout.score(self._folded_reference, prompts, rollout.tokens)
        taken, ref_taken = (
            rollout.from_columns(logp.gather(1, rollout.tokens[:, None]).squeeze(1))
            for logp in (rollout.logp, ref_logp)
        )
        kl = sequence_kl(taken, ref_taken)
        shaped = self._rewards(chosen.tolist(), prompts, responses) - config.kl_coef * kl
        advantage = group_advantage(shaped, group=group)
        self._backward(folded, logit_gradient(rollout, advantage), temperature=config.temperature)
        grad_norm = self._backward.clip(config.max_grad_norm)
        if not math.isfinite(grad_norm):
            raise TrainingError(f"step {self.step + 1}: gradient norm {grad_norm}; lower lr ({config.lr})")
        self._adam.step()
        self.step += 1
        self._add(
            shaped_reward=shaped.mean().item(), kl=kl.mean().item(), loss=policy_loss(advantage, taken).item(),
            grad_norm=grad_norm, entropy=mean_entropy(rollout.logp.transpose(1, 2)).item(),
        )  # fmt: skip

    def _rewards(self, chosen: list[int], prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Score responses (N * G, L) and wrap the scores; a wrapper that ignores them is scored only for the log."""
        group = self.config.samples_per_prompt
        scores = torch.zeros(len(responses))
        step = self.step + 1
        if self.wrapper.uses_rewards or step % self.config.log_every == 0 or step == self.config.steps:
            scores = self._scorer.score(prompts, responses)
            self._add(proxy_reward=scores.mean().item())
        records = [self._pool_records[row] for row in chosen for _ in range(group)]
        return torch.tensor(self.wrapper(records, decode(responses, self.vocab), scores.tolist()))

    def _add(self, **values: float) -> None:
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._sums[f"{name}/n"] = self._sums.get(f"{name}/n", 0.0) + 1

    def _close_log_row(self) -> LogRow:
        sums, self._sums = self._sums, {}
        means = {name: total / sums[f"{name}/n"] for name, total in sums.items() if not name.endswith("/n")}
        return {"step": self.step, **means, "elapsed_s": round(self._elapsed_s, 3)}


def prompt_weights(pool: Prompts, families: tuple[str, ...], config: RunConfig) -> torch.Tensor:
    """Return each prompt's chance of being drawn (N,), so that families come up by their weights.

    Raises `InputError` for weights of unknown families, or of families without prompts.
    """
    weights: dict[str, Any] = dict(config.family_weights or dict.fromkeys(families, 1.0))
    counts = np.bincount(pool.family, minlength=len(families))
    problems = [
        f"family_weights: unknown family {family!r}; known: {', '.join(families)}"
        for family in weights
        if family not in families
    ]
    problems += [
        f"family_weights: {family} has weight {weights[family]}, but the prompt file holds none of its prompts"
        for family, count in zip(families, counts, strict=True)
        if count == 0 and weights.get(family, 0) > 0
    ]
    raise_if_any(problems)
    share = np.array([weights.get(family, 0.0) for family in families]) / np.maximum(counts, 1)
    return torch.from_numpy(share[pool.family])
