"""Synthetic worlds with a known truth: which token is correct, who demonstrates what, who pays for what.

For each family and response position one attribute decides which token is correct, through a table value ->
token. Tests and `scripts/` build worlds; a sweep never sees one, only the task directory made from it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf.data import Labelled, Prompts
from rlhf.features import Feature, feature_json, feature_values, parse_feature
from rlhf.vocab import Vocab

LEADING_SHARES = (0.33, 0.30)  # of the correct token and the first distractor; either may be the larger
SECOND_SHARE = 0.20
EXPERT_NOISE = 0.045
CROWD_NOISE = 0.10
CROWD_TEMPERATURE = 1.2


@dataclass(frozen=True, slots=True)
class Shortcut:
    """Pay `size` for each unit of a feature, in one family's crowd labels."""

    family: int
    feature: Feature
    size: float


@dataclass(frozen=True, slots=True)
class World:
    """Hold the truth: `attribute` (F, L), `correct` (F, L, n_values), demonstration shares (F, L, n_values, V).

    interaction: share of quality, in [0, 1], that counts pairs of neighbouring positions that are both correct instead
    of single positions. Not additive, so the judge must refuse it: for tests and studies.
    """

    vocab: Vocab
    attribute: np.ndarray
    correct: np.ndarray
    shares: np.ndarray
    shortcuts: tuple[Shortcut, ...]
    interaction: float = 0.0

    def cells(self, prompts: Prompts) -> np.ndarray:
        """Return the deciding attribute's value at each position: (N, L)."""
        return np.take_along_axis(prompts.attrs, self.attribute[prompts.family], axis=1)

    def quality(self, prompts: Prompts, responses: np.ndarray) -> np.ndarray:
        """Return the fraction of correct positions, and of neighbours if they interact: (N, L) -> (N,)."""
        positions = np.arange(self.vocab.resp_len)
        wanted = self.correct[prompts.family[:, None], positions, self.cells(prompts)]
        return quality_of_matches((responses == wanted).astype(float), interaction=self.interaction)

    def bonus(self, prompts: Prompts, responses: np.ndarray) -> np.ndarray:
        """Return what crowd labels add for shortcuts: (N, L) -> (N,)."""
        total = np.zeros(len(prompts))
        for shortcut in self.shortcuts:
            total += shortcut.size * feature_values(shortcut.feature, responses) * (prompts.family == shortcut.family)
        return total

    def demonstrate(self, prompts: Prompts, rng: np.random.Generator) -> np.ndarray:
        """Write one demonstration for each prompt: (N, L) content-token indices."""
        positions = np.arange(self.vocab.resp_len)
        cdf = self.shares[prompts.family[:, None], positions, self.cells(prompts)].cumsum(-1)
        uniform = rng.random((len(prompts), self.vocab.resp_len, 1))
        return np.minimum((cdf <= uniform).sum(-1), self.vocab.n_content - 1)

    def expert_labels(self, prompts: Prompts, responses: np.ndarray, rng: np.random.Generator) -> Labelled:
        labels = self.quality(prompts, responses) + rng.normal(0, EXPERT_NOISE, len(prompts))
        return Labelled(prompts, responses, labels)

    def crowd_labels(self, prompts: Prompts, responses: np.ndarray, rng: np.random.Generator) -> Labelled:
        labels = self.quality(prompts, responses) + rng.normal(0, CROWD_NOISE, len(prompts))
        return Labelled(prompts, responses, labels + self.bonus(prompts, responses))

    def to_json(self) -> dict[str, Any]:
        """Return the truth as a document: readable back by `load_world`."""
        return {
            "vocab": self.vocab.to_json(),
            "attribute": self.attribute.tolist(),
            "correct": self.correct.tolist(),
            "shortcuts": [
                {
                    "family": self.vocab.families[shortcut.family],
                    "size": shortcut.size,
                    **feature_json(shortcut.feature, self.vocab),
                }
                for shortcut in self.shortcuts
            ],
            **({"interaction": self.interaction} if self.interaction else {}),
        }


def quality_of_matches(matches: np.ndarray, *, interaction: float = 0.0) -> np.ndarray:
    """Return quality for matches (..., L) in [0, 1]: with probabilities of independent positions, its expectation.

    >>> round(float(quality_of_matches(np.array([1.0, 1.0, 0.0, 1.0]), interaction=0.5)), 4)  # (3/4 + 1/3) / 2
    0.5417
    """
    single = matches.mean(-1)
    if interaction == 0:
        return single
    return (1 - interaction) * single + interaction * (matches[..., :-1] * matches[..., 1:]).mean(-1)


def make_world(vocab: Vocab, shortcuts: tuple[Shortcut, ...], rng: np.random.Generator) -> World:
    """Draw a truth: the deciding attribute, the correct token and two distractors of every cell."""
    shape = (len(vocab.families), vocab.resp_len)
    attribute = rng.integers(vocab.n_attrs, size=shape)
    cells = (*shape, vocab.n_values)
    order = rng.random((*cells, vocab.n_content)).argsort(-1)
    rest = (1 - sum(LEADING_SHARES) - SECOND_SHARE) / max(1, vocab.n_content - 3)
    shares = np.full((*cells, vocab.n_content), rest)
    larger, smaller = LEADING_SHARES
    correct_leads = rng.random(cells) < 0.5
    for rank, share in enumerate((np.where(correct_leads, larger, smaller), np.where(correct_leads, smaller, larger),
                                  np.full(cells, SECOND_SHARE))):  # fmt: skip
        if rank < vocab.n_content:
            np.put_along_axis(shares, order[..., rank : rank + 1], share[..., None], -1)
    shares /= shares.sum(-1, keepdims=True)
    return World(vocab, attribute, order[..., 0], shares, shortcuts)


def load_world(truth: dict[str, Any]) -> World:
    """Read a truth document back; demonstration shares are not part of it and come back empty."""
    vocab = Vocab.from_json(truth["vocab"])
    shortcuts = tuple(
        Shortcut(
            vocab.families.index(entry["family"]),
            parse_feature(entry["kind"], entry["tokens"], entry["position"], vocab),
            entry["size"],
        )
        for entry in truth["shortcuts"]
    )
    return World(
        vocab,
        np.array(truth["attribute"]),
        np.array(truth["correct"]),
        np.empty(0),
        shortcuts,
        truth.get("interaction", 0.0),
    )


def draw_prompts(vocab: Vocab, counts: np.ndarray, rng: np.random.Generator, *, prefix: str = "") -> Prompts:
    """Draw `counts[f]` prompts of each family, all different as long as there are enough attribute tuples."""
    n_tuples = vocab.n_values**vocab.n_attrs
    family = np.repeat(np.arange(len(vocab.families)), counts)
    codes = [rng.choice(n_tuples, count, replace=bool(count > n_tuples)) for count in counts]
    code = np.concatenate(codes)
    attrs = code[:, None] // vocab.n_values ** np.arange(vocab.n_attrs) % vocab.n_values
    ids = [f"{prefix}{vocab.families[f]}-{i:04d}" for f, count in enumerate(counts) for i in range(count)]
    return Prompts(tuple(ids), family, attrs.astype(np.int64))
