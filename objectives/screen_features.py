"""Every feature of many responses at once, as one matrix: what the shortcut screen looks at.

`rlhf.features` defines the features; this computes all of them together. A vocabulary too large for that is screened:
pairs and adjacent pairs of the tokens that the reference writes most often only, and `Catalogue.left_out` says so.
"""

from dataclasses import dataclass

import numpy as np

from rlhf.features import KINDS, Feature
from rlhf.vocab import Vocab

MAX_PAIRED_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Hold K features in the order of `feature_matrix`'s columns, and `kind` (K,), an index into `KINDS`."""

    features: tuple[Feature, ...]
    kind: np.ndarray
    paired_tokens: np.ndarray
    left_out: str

    def __len__(self) -> int:
        return len(self.features)


def make_catalogue(vocab: Vocab, frequency: np.ndarray) -> Catalogue:
    """List the features to look at; `frequency` (V,) says how often the reference writes each content token."""
    most = MAX_PAIRED_TOKENS if vocab.resp_len > 1 else 0
    kept = np.sort(np.argsort(-frequency, kind="stable")[:most])
    first, second = (kept[index] for index in np.triu_indices(len(kept), 1))
    features = [
        Feature("repetition"),
        *(Feature("token", (token,)) for token in range(vocab.n_content)),
        *(Feature("position", (token,), position) for position in range(vocab.resp_len)
          for token in range(vocab.n_content)),
        *(Feature("pair", (int(a), int(b))) for a, b in zip(first, second, strict=True)),
        *(Feature("adjacent", (int(a), int(b))) for a in kept for b in kept),
    ]  # fmt: skip
    names = list(KINDS)
    left_out = ""
    if 0 < len(kept) < vocab.n_content:
        left_out = (
            f"pairs and adjacent pairs were looked at for the {len(kept)} tokens that the reference writes most often, "
            f"not for the other {vocab.n_content - len(kept)}"
        )
    kinds = np.array([names.index(feature.kind) for feature in features])
    return Catalogue(tuple(features), kinds, kept, left_out)


def feature_matrix(catalogue: Catalogue, responses: np.ndarray, n_content: int) -> np.ndarray:
    """Return all features of responses (N, L) of content-token indices: (N, K), single precision."""
    one_hot = np.eye(n_content, dtype=np.float32)[responses]  # (N, L, V)
    counts = one_hot.sum(1)
    present = np.minimum(counts, 1)
    repeated = (counts - present).sum(1, keepdims=True)
    paired = one_hot[..., catalogue.paired_tokens]
    rows, columns = np.triu_indices(paired.shape[2], 1)
    seen = present[:, catalogue.paired_tokens]
    adjacent = np.matmul(paired[:, :-1].transpose(0, 2, 1), paired[:, 1:])  # (N, P, P)
    parts = [repeated, counts, one_hot.reshape(len(responses), -1), seen[:, rows] * seen[:, columns],
             adjacent.reshape(len(responses), -1)]  # fmt: skip
    return np.concatenate(parts, 1)
