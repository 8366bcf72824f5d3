import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from objectives.screen_features import MAX_PAIRED_TOKENS, feature_matrix, make_catalogue
from rlhf.features import all_features, feature_values
from rlhf.vocab import DEFAULT_VOCAB, Vocab

SMALL = Vocab(("ash",), 2, 3, tuple("abcde"), 4)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), min_size=4, max_size=4), min_size=1, max_size=6))
def test_every_column_is_the_definition_of_its_feature(rows: list[list[int]]) -> None:
    responses = np.array(rows)
    catalogue = make_catalogue(SMALL, np.ones(5))
    matrix = feature_matrix(catalogue, responses, 5)
    for column, feature in enumerate(catalogue.features):
        np.testing.assert_array_equal(matrix[:, column], feature_values(feature, responses), err_msg=str(feature))


def test_a_vocabulary_of_usual_size_is_looked_at_whole() -> None:
    catalogue = make_catalogue(DEFAULT_VOCAB, np.ones(24))
    assert set(catalogue.features) == set(all_features(DEFAULT_VOCAB))
    assert catalogue.left_out == ""


def test_a_large_vocabulary_says_what_was_left_out() -> None:
    vocab = Vocab(("ash",), 1, 2, tuple(f"t{i}" for i in range(50)), 3)
    frequency = np.arange(50)
    catalogue = make_catalogue(vocab, frequency)
    assert len(catalogue.paired_tokens) == MAX_PAIRED_TOKENS
    assert catalogue.paired_tokens.min() == 10
    assert "not for the other 10" in catalogue.left_out
    assert sum(feature.kind == "token" for feature in catalogue.features) == 50


def test_a_response_of_one_token_has_no_pairs() -> None:
    vocab = Vocab(("ash",), 1, 2, ("a", "b"), 1)
    matrix = feature_matrix(make_catalogue(vocab, np.ones(2)), np.array([[0], [1]]), 2)
    assert matrix.sum() == 4  # token and position, once in each row
