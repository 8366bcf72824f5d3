"""Prompts and labelled responses: reading, checking, and turning them into arrays.

A record is one JSON object a line: `{"id", "family", "attrs"}`, labelled rows add `"response"` and `"label"`.
Extra keys are ignored. Every bad line of a file is reported, with its number.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf.errors import InputError, raise_if_any, why
from rlhf.files import write_whole
from rlhf.json_values import finite_json, is_number
from rlhf.vocab import Vocab

_SHOWN_CHARACTERS = 200

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Hold N prompts as arrays: ids, `family` (N,) indices, `attrs` (N, n_attrs) values."""

    ids: tuple[str, ...]
    family: np.ndarray
    attrs: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: np.ndarray) -> "Prompts":
        """Take the rows of an index array or a boolean mask."""
        rows = np.flatnonzero(index) if index.dtype == bool else index
        return Prompts(tuple(self.ids[i] for i in rows), self.family[rows], self.attrs[rows])

    def tokens(self, vocab: Vocab) -> torch.Tensor:
        """Return token ids (N, prompt_len)."""
        n = len(self)
        ids = np.empty((n, vocab.prompt_len), dtype=np.int64)
        ids[:, 0] = vocab.family_id(0) + self.family
        ids[:, 1:-1] = vocab.first_value_id + self.attrs
        ids[:, -1] = vocab.sep_id
        return torch.from_numpy(ids)

    def records(self, vocab: Vocab) -> list[Record]:
        return [
            {"id": id_, "family": vocab.families[family], "attrs": attrs}
            for id_, family, attrs in zip(self.ids, self.family, self.attrs.tolist(), strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Labelled:
    """Hold N labelled responses: `responses` (N, resp_len) content-token indices, `labels` (N,)."""

    prompts: Prompts
    responses: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: np.ndarray) -> "Labelled":
        return Labelled(self.prompts[index], self.responses[index], self.labels[index])

    def records(self, vocab: Vocab) -> list[Record]:
        words = decode(self.responses, vocab)
        rows = zip(self.prompts.records(vocab), words, self.labels.tolist(), strict=True)
        return [{**record, "response": response, "label": label} for record, response, label in rows]


def concat_prompts(parts: Sequence[Prompts]) -> Prompts:
    return Prompts(
        ids=tuple(id_ for part in parts for id_ in part.ids),
        family=np.concatenate([part.family for part in parts]),
        attrs=np.concatenate([part.attrs for part in parts]),
    )


def decode(responses: np.ndarray | torch.Tensor, vocab: Vocab) -> list[list[str]]:
    """Turn content-token indices (N, resp_len) into lists of token strings."""
    words = vocab.content_tokens
    return [[words[token] for token in row] for row in responses.tolist()]


def read_prompts(path: Path, vocab: Vocab) -> Prompts:
    """Read and check a prompt file. Raises `InputError` with every bad line."""
    return _prompts(_read_rows(path, vocab, response=False, label=False), vocab)


def read_demonstrations(path: Path, vocab: Vocab) -> tuple[Prompts, np.ndarray]:
    """Read prompts and responses (N, resp_len) without labels. Raises `InputError` with every bad line."""
    rows = _read_rows(path, vocab, response=True, label=False)
    return _prompts(rows, vocab), _responses(rows, vocab)


def read_labelled(path: Path, vocab: Vocab) -> Labelled:
    """Read and check a file of labelled responses. Raises `InputError` with every bad line."""
    rows = _read_rows(path, vocab, response=True, label=True)
    labels = np.array([row["label"] for row in rows], dtype=np.float64)
    return Labelled(_prompts(rows, vocab), _responses(rows, vocab), labels)


def write_jsonl(path: Path, rows: Iterable[Record]) -> None:
    write_whole(path, "".join(json.dumps(finite_json(row)) + "\n" for row in rows))


def _prompts(rows: list[Record], vocab: Vocab) -> Prompts:
    index = {family: i for i, family in enumerate(vocab.families)}
    return Prompts(
        ids=tuple(row["id"] for row in rows),
        family=np.array([index[row["family"]] for row in rows], dtype=np.int64),
        attrs=np.array([row["attrs"] for row in rows], dtype=np.int64).reshape(len(rows), vocab.n_attrs),
    )


def _responses(rows: list[Record], vocab: Vocab) -> np.ndarray:
    index = {token: i for i, token in enumerate(vocab.content_tokens)}
    return np.array([[index[token] for token in row["response"]] for row in rows], dtype=np.int64)


def _read_rows(path: Path, vocab: Vocab, *, response: bool, label: bool) -> list[Record]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({why(error)})") from error
    rows: list[Record] = []
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            problems.append(f"{path}:{number}: not a JSON object ({error}); fix or remove the line")
            continue
        found = [f"{path}:{number}: {rule}" for rule in _row_problems(row, vocab, response=response, label=label)]
        problems.extend(found)
        if not found:
            rows.append(row)
    if not rows and not problems:
        problems.append(f"{path}: holds no record; at least one line is needed")
    raise_if_any(problems)
    return rows


def _row_problems(row: Any, vocab: Vocab, *, response: bool, label: bool) -> Iterator[str]:
    if not isinstance(row, dict):
        yield f"a line must be a JSON object, got {type(row).__name__}"
        return
    if not isinstance(row.get("id"), str):
        yield f"id must be a string, got {_short(row.get('id'))}"
    if row.get("family") not in vocab.families:
        yield f"family must be one of {', '.join(vocab.families)}, got {_short(row.get('family'))}"
    if not _are_indices(row.get("attrs"), count=vocab.n_attrs, below=vocab.n_values):
        got = _short(row.get("attrs"))
        yield f"attrs must be {vocab.n_attrs} whole numbers from 0 to {vocab.n_values - 1}, got {got}"
    if response:
        yield from _response_problems(row.get("response"), vocab)
    if label and not is_number(row.get("label")):
        yield f"label must be a finite number, got {_short(row.get('label'))}"


def _response_problems(response: Any, vocab: Vocab) -> Iterator[str]:
    if not isinstance(response, list) or len(response) != vocab.resp_len:
        yield f"response must be a list of {vocab.resp_len} tokens, got {_short(response)}"
        return
    unknown = [token for token in response if token not in vocab.content_tokens]
    if unknown:
        yield f"response holds unknown tokens {_short(unknown)}; known: {' '.join(vocab.content_tokens)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _are_indices(value: Any, *, count: int, below: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == count
        and all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < below for v in value)
    )
