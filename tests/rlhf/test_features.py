from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.errors import InputError
from rlhf.features import KINDS, Feature, all_features, feature_json, feature_values, parse_feature
from rlhf.vocab import DEFAULT_VOCAB, Vocab

N_TOKENS, MAX_LEN = 4, 6
TOKEN = st.integers(0, N_TOKENS - 1)
RESPONSES = st.integers(1, MAX_LEN).flatmap(
    lambda length: st.lists(st.lists(TOKEN, min_size=length, max_size=length), min_size=1, max_size=8)
)


def naive_value(feature: Feature, response: list[int]) -> float:
    """Follow the words of `KINDS`, one token at a time."""
    value = 0
    match feature.kind:
        case "token":
            for token in response:
                value += token == feature.tokens[0]
        case "pair":
            for i, one in enumerate(response):
                for j, other in enumerate(response):
                    if i != j and (one, other) == feature.tokens:
                        value = 1
        case "adjacent":
            for i in range(1, len(response)):
                value += (response[i - 1], response[i]) == feature.tokens
        case "position":
            value = int(response[feature.position or 0] == feature.tokens[0])
        case "repetition":
            for i, token in enumerate(response):
                value += token in response[:i]
    return float(value)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), rows=RESPONSES)
def test_each_kind_equals_a_naive_loop(kind: str, data: st.DataObject, rows: list[list[int]]) -> None:
    count = {"token": 1, "pair": 2, "adjacent": 2, "position": 1, "repetition": 0}[kind]
    tokens = tuple(data.draw(st.lists(TOKEN, min_size=count, max_size=count)))
    position = data.draw(st.integers(0, len(rows[0]) - 1)) if kind == "position" else None
    feature = Feature(kind, tokens, position)
    values = feature_values(feature, np.array(rows))
    assert values.shape == (len(rows),)
    assert values.tolist() == [naive_value(feature, row) for row in rows]


@given(RESPONSES, TOKEN, TOKEN)
def test_a_pair_does_not_care_for_order(rows: list[list[int]], first: int, second: int) -> None:
    one = feature_values(Feature("pair", (first, second)), np.array(rows))
    other = feature_values(Feature("pair", (second, first)), np.array(rows))
    assert one.tolist() == other.tolist()


def test_features_do_not_change_the_responses() -> None:
    responses = np.array([[3, 1, 2, 1]])
    for feature in (Feature("repetition"), Feature("adjacent", (1, 2))):
        feature_values(feature, responses)
    assert responses.tolist() == [[3, 1, 2, 1]]


def test_all_features_are_listed_once() -> None:
    vocab = Vocab(("f",), n_attrs=1, n_values=1, content_tokens=tuple("abcd"), resp_len=3)
    features = all_features(vocab)
    assert Counter(feature.kind for feature in features) == {
        "repetition": 1, "token": 4, "pair": 6, "adjacent": 16, "position": 12,
    }  # fmt: skip
    assert len(set(features)) == len(features)


def test_words_and_json_round_trip() -> None:
    for feature in all_features(Vocab(("f",), n_attrs=1, n_values=1, content_tokens=tuple("abc"), resp_len=2)):
        vocab = Vocab(("f",), n_attrs=1, n_values=1, content_tokens=tuple("abc"), resp_len=2)
        document = feature_json(feature, vocab)
        assert parse_feature(document["kind"], document["tokens"], document["position"], vocab) == feature


@pytest.mark.parametrize(
    ("feature", "label"),
    [
        (Feature("token", (10,)), "pa"),
        (Feature("pair", (10, 21)), "pa with he"),
        (Feature("adjacent", (0, 1)), "ba then da"),
        (Feature("position", (0,), 0), "ba at position 1"),
        (Feature("repetition"), "repeated token"),
    ],
)
def test_labels_say_the_feature_in_words(feature: Feature, label: str) -> None:
    assert feature.label(DEFAULT_VOCAB) == label


@pytest.mark.parametrize(
    ("kind", "tokens", "position", "message"),
    [
        ("rhyme", ["pa"], None, "kind must be one of token, .*, got 'rhyme'"),
        ("token", [], None, "names 1 tokens, got"),
        ("pair", ["pa"], None, "names 2 tokens"),
        ("repetition", ["pa"], None, "names 0 tokens"),
        ("token", ["qu"], None, "unknown token 'qu'"),
        ("token", ["pa"], 2, "position must be 1 to 8 for kind position, and absent otherwise, got 3"),
        ("position", ["pa"], None, "position must be 1 to 8"),
        ("position", ["pa"], 8, "position must be 1 to 8"),
        ("position", ["pa"], -1, "position must be 1 to 8"),
    ],
)
def test_bad_features_are_refused(kind: str, tokens: list[str], position: int | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_feature(kind, tokens, position, DEFAULT_VOCAB)


def test_all_problems_of_a_feature_are_reported() -> None:
    with pytest.raises(InputError) as caught:
        parse_feature("rhyme", ["qu", "xu"], 3, DEFAULT_VOCAB)
    assert len(caught.value.problems) == 4
