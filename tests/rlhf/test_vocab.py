import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.errors import InputError
from rlhf.vocab import DEFAULT_VOCAB, VOCAB_FILE, Vocab, load_vocab

NAMES = st.lists(st.text("abcdef", min_size=1, max_size=3), min_size=1, max_size=6, unique=True).map(tuple)
COUNTS = st.integers(1, 9)
VOCABS = st.builds(Vocab, NAMES, n_attrs=COUNTS, n_values=COUNTS, content_tokens=NAMES, resp_len=COUNTS)


def test_default_vocabulary_has_the_ids_of_the_task_layout() -> None:
    words = [
        "<pad>",
        "<sep>",
        "<anvil>",
        "<birch>",
        "<cobalt>",
        "<dune>",
        "<ember>",
        "<fjord>",
        "v0",
        "v1",
        "v2",
        "v3",
        "v4",
        "v5",
        "v6",
        "v7",
    ]
    words += [
        "ba",
        "da",
        "fa",
        "ga",
        "ha",
        "ja",
        "ka",
        "la",
        "ma",
        "na",
        "pa",
        "ra",
        "sa",
        "ta",
        "va",
        "wa",
        "za",
        "be",
        "de",
        "fe",
        "ge",
        "he",
        "je",
        "ke",
    ]
    vocab = DEFAULT_VOCAB
    assert vocab.sep_id == words.index("<sep>")
    assert [vocab.family_id(f) for f in range(6)] == [words.index(f"<{name}>") for name in vocab.families]
    assert vocab.first_value_id == words.index("v0")
    assert vocab.first_content_id == words.index("ba")
    assert list(vocab.content_tokens) == words[vocab.first_content_id :]
    assert (vocab.size, vocab.prompt_len, vocab.resp_len, vocab.seq_len) == (len(words), 6, 8, 14)


@given(VOCABS)
def test_ids_are_dense_and_disjoint(vocab: Vocab) -> None:
    families = [vocab.family_id(f) for f in range(len(vocab.families))]
    values = range(vocab.first_value_id, vocab.first_value_id + vocab.n_values)
    content = range(vocab.first_content_id, vocab.first_content_id + vocab.n_content)
    assert [0, vocab.sep_id, *families, *values, *content] == list(range(vocab.size))


@given(VOCABS)
def test_json_round_trip(tmp_path_factory: pytest.TempPathFactory, vocab: Vocab) -> None:
    root = tmp_path_factory.mktemp("vocab")
    (root / VOCAB_FILE).write_text(json.dumps(vocab.to_json()))
    assert load_vocab(root) == vocab


def test_without_a_file_the_default_vocabulary_is_used(tmp_path: Path) -> None:
    assert load_vocab(tmp_path) == DEFAULT_VOCAB


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"families": []}, "families must be a non-empty list"),
        ({"families": "anvil"}, "families must be a .*list of .*strings, got 'anvil'"),
        ({"families": ["a", 3]}, "families must be a non-empty list of printable strings"),
        ({"families": ["a", "a"]}, "families must not repeat a name"),
        ({"content_tokens": ["x", ""]}, "content_tokens must be a non-empty list of printable strings"),
        ({"content_tokens": ["x", "y", "x"]}, "content_tokens must not repeat a name"),
        ({"families": 5}, "families must be .* got 5"),
        ({"content_tokens": ["x", "\ud800"]}, "content_tokens must be a non-empty list of printable strings"),
        ({"n_attrs": 0}, "n_attrs must be a whole number of at least 1, got 0"),
        ({"n_values": 2.5}, "n_values must be a whole number of at least 1, got 2.5"),
        ({"resp_len": True}, "resp_len must be a whole number of at least 1, got True"),
        ({"resp_len": None}, "resp_len must be a whole number of at least 1, got None"),
        ({"colour": 1}, "exactly the keys"),
    ],
)
def test_bad_vocabulary_names_file_and_key(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / VOCAB_FILE
    path.write_text(json.dumps({**DEFAULT_VOCAB.to_json(), **change}))
    with pytest.raises(InputError, match=message) as caught:
        load_vocab(tmp_path)
    assert all(problem.startswith(str(path)) for problem in caught.value.problems)


def test_missing_vocabulary_key(tmp_path: Path) -> None:
    document = DEFAULT_VOCAB.to_json()
    del document["resp_len"]
    (tmp_path / VOCAB_FILE).write_text(json.dumps(document))
    with pytest.raises(InputError, match="exactly the keys"):
        load_vocab(tmp_path)


@pytest.mark.parametrize(("text", "message"), [("{", "cannot be read as JSON"), ("[1]", "found list")])
def test_vocabulary_file_must_be_a_json_object(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / VOCAB_FILE).write_text(text)
    with pytest.raises(InputError, match=message):
        load_vocab(tmp_path)


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(InputError) as caught:
        Vocab((), n_attrs=0, n_values=-1, content_tokens=("a", "a"), resp_len=0)
    assert len(caught.value.problems) == 5
