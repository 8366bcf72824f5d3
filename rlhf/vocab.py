"""The token vocabulary of a task: special tokens, family tokens, attribute values, content tokens.

Ids run in this order: `<pad>`, `<sep>`, the families, the values, the content tokens. A prompt is
`<family> v v v v <sep>`; a response is `resp_len` content tokens. Nothing else in the project may assume
how many there are of each.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.errors import InputError, raise_if_any
from rlhf.json_values import read_json_object

VOCAB_FILE = "vocab.json"
TASK_VARIABLE = "TASK"
_CONTENT_TOKENS = "ba da fa ga ha ja ka la ma na pa ra sa ta va wa za be de fe ge he je ke"
_FAMILY_NAME = re.compile(r"\w[\w.\- ]*")  # families are part of metric names
_SPECIAL = ("<pad>", "<sep>")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and value.isprintable()


@dataclass(frozen=True, slots=True)
class Vocab:
    """Name the families, attributes and content tokens; derive ids and lengths.

    >>> DEFAULT_VOCAB.size, DEFAULT_VOCAB.prompt_len, DEFAULT_VOCAB.seq_len
    (40, 6, 14)
    """

    families: tuple[str, ...]
    n_attrs: int
    n_values: int
    content_tokens: tuple[str, ...]
    resp_len: int

    def __post_init__(self) -> None:
        problems = []
        for name in ("families", "content_tokens"):
            entries = getattr(self, name)
            if not isinstance(entries, tuple) or not all(map(_is_name, entries or [0])):
                problems.append(f"vocabulary: {name} must be a non-empty list of printable strings, got {entries!r}")
            elif len(set(entries)) != len(entries):
                problems.append(f"vocabulary: {name} must not repeat a name, got {entries!r}")
        problems += [
            f"vocabulary: a family name must be letters, digits, '_', '-', '.' or spaces, got {family!r}"
            for family in (self.families if isinstance(self.families, tuple) else ())
            if _is_name(family) and not _FAMILY_NAME.fullmatch(family)
        ]
        for name in ("n_attrs", "n_values", "resp_len"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                problems.append(f"vocabulary: {name} must be a whole number of at least 1, got {count!r}")
        raise_if_any(problems)

    @property
    def sep_id(self) -> int:
        return _SPECIAL.index("<sep>")

    @property
    def first_value_id(self) -> int:
        return len(_SPECIAL) + len(self.families)

    @property
    def first_content_id(self) -> int:
        return self.first_value_id + self.n_values

    @property
    def n_content(self) -> int:
        return len(self.content_tokens)

    @property
    def size(self) -> int:
        return self.first_content_id + self.n_content

    @property
    def prompt_len(self) -> int:
        return self.n_attrs + 2

    @property
    def seq_len(self) -> int:
        return self.prompt_len + self.resp_len

    def family_id(self, family_index: int) -> int:
        return len(_SPECIAL) + family_index

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "Vocab":
        """Make a vocabulary from what `to_json` gives. Raises `InputError` for a bad value."""
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in document.items()}
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        return {
            "families": list(self.families),
            "n_attrs": self.n_attrs,
            "n_values": self.n_values,
            "content_tokens": list(self.content_tokens),
            "resp_len": self.resp_len,
        }


DEFAULT_VOCAB = Vocab(
    families=("anvil", "birch", "cobalt", "dune", "ember", "fjord"),
    n_attrs=4,
    n_values=8,
    content_tokens=tuple(_CONTENT_TOKENS.split()),
    resp_len=8,
)


def load_vocab(root: Path) -> Vocab:
    """Read `vocab.json` in the task directory `root`; without one, the default vocabulary.

    Raises `InputError` if there is no such directory.
    """
    if not root.is_dir():
        raise InputError(f"{root}: no such task directory; give one with --task DIR or {TASK_VARIABLE}")
    path = root / VOCAB_FILE
    return read_vocab(path) if path.exists() else DEFAULT_VOCAB


def read_vocab(path: Path) -> Vocab:
    """Read a vocabulary file. Raises `InputError` if a key is missing, unknown, or has a bad value."""
    document = read_json_object(path)
    expected = set(DEFAULT_VOCAB.to_json())
    if set(document) != expected:
        raise InputError(f"{path}: must have exactly the keys {sorted(expected)}, found {sorted(document)}")
    try:
        return Vocab.from_json(document)
    except InputError as error:
        raise InputError([f"{path}: {problem}" for problem in error.problems]) from error
