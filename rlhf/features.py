"""Features of a response that a crowd may pay for: tokens, pairs, adjacent pairs, positions, repetition.

One definition for everything that builds, fits, screens or removes a shortcut.
"""

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from rlhf.errors import raise_if_any
from rlhf.vocab import Vocab

KINDS = {
    "token": "how many times a token occurs",
    "pair": "1 if both tokens occur anywhere, else 0",
    "adjacent": "how many times the second token follows the first",
    "position": "1 if the token stands at the position, else 0",
    "repetition": "how many positions repeat an earlier token",
}
N_TOKENS = {"token": 1, "pair": 2, "adjacent": 2, "position": 1, "repetition": 0}


@dataclass(frozen=True, slots=True)
class Feature:
    """Name one feature: `tokens` are content-token indices, `position` counts from 0 (kind `position` only)."""

    kind: str
    tokens: tuple[int, ...] = ()
    position: int | None = None

    def label(self, vocab: Vocab) -> str:
        """Say the feature in words.

        >>> from rlhf.vocab import DEFAULT_VOCAB
        >>> Feature("position", (10,), 2).label(DEFAULT_VOCAB)
        'pa at position 3'
        """
        names = [vocab.content_tokens[token] for token in self.tokens]
        return {
            "token": "{}", "pair": "{} with {}", "adjacent": "{} then {}", "repetition": "repeated token",
            "position": "{} at position " + str((self.position or 0) + 1),
        }[self.kind].format(*names)  # fmt: skip


def feature_values(feature: Feature, responses: np.ndarray) -> np.ndarray:
    """Return the feature's value for each response: (N, L) content-token indices -> (N,)."""
    if feature.kind == "repetition":
        ordered = np.sort(responses, axis=1)
        return (ordered[:, 1:] == ordered[:, :-1]).sum(1).astype(float)
    first = feature.tokens[0]
    if feature.kind == "token":
        return (responses == first).sum(1).astype(float)
    if feature.kind == "position":
        return (responses[:, feature.position] == first).astype(float)
    second = feature.tokens[1]
    if feature.kind == "adjacent":
        return ((responses[:, :-1] == first) & (responses[:, 1:] == second)).sum(1).astype(float)
    if first == second:
        return ((responses == first).sum(1) > 1).astype(float)
    return ((responses == first).any(1) & (responses == second).any(1)).astype(float)


def all_features(vocab: Vocab) -> list[Feature]:
    """List every feature of a vocabulary, kind by kind."""
    tokens = range(vocab.n_content)
    return [
        Feature("repetition"),
        *(Feature("token", (token,)) for token in tokens),
        *(Feature("pair", pair) for pair in combinations(tokens, 2)),
        *(Feature("adjacent", (first, second)) for first in tokens for second in tokens),
        *(Feature("position", (token,), position) for position in range(vocab.resp_len) for token in tokens),
    ]


def parse_feature(kind: str, tokens: list[str], position: int | None, vocab: Vocab) -> Feature:
    """Make a feature from words. Raises `InputError` for an unknown kind, token or position."""
    problems = []
    if kind not in KINDS:
        problems.append(f"shortcut kind must be one of {', '.join(KINDS)}, got {kind!r}")
    elif len(tokens) != N_TOKENS[kind]:
        problems.append(f"a {kind} shortcut names {N_TOKENS[kind]} tokens, got {tokens!r}")
    problems += [
        f"unknown token {token!r}; known: {' '.join(vocab.content_tokens)}"
        for token in tokens
        if token not in vocab.content_tokens
    ]
    if (kind == "position") != (position is not None) or (position is not None and not 0 <= position < vocab.resp_len):
        rule = f"position must be 1 to {vocab.resp_len} for kind position, and absent otherwise"
        problems.append(f"{rule}, got {position if position is None else position + 1}")
    raise_if_any(problems)
    return Feature(kind, tuple(vocab.content_tokens.index(token) for token in tokens), position)


def feature_json(feature: Feature, vocab: Vocab) -> dict[str, Any]:
    names = [vocab.content_tokens[token] for token in feature.tokens]
    return {"kind": feature.kind, "tokens": names, "position": feature.position}
