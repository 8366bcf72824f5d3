import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data import Prompts, concat_prompts, decode, read_demonstrations, read_labelled, read_prompts, write_jsonl
from rlhf.errors import InputError
from rlhf.vocab import DEFAULT_VOCAB, Vocab

GOOD = {
    "id": "anvil-0007", "family": "anvil", "attrs": [3, 0, 7, 1],
    "response": ["ba", "da", "fa", "ga", "ha", "ja", "ka", "ke"], "label": 0.37,
}  # fmt: skip


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_record_becomes_ids_in_vocabulary_order(tmp_path: Path) -> None:
    labelled = read_labelled(write_lines(tmp_path / "rows.jsonl", GOOD), DEFAULT_VOCAB)
    words = ["<pad>", "<sep>", *(f"<{name}>" for name in DEFAULT_VOCAB.families)]
    words += [*(f"v{value}" for value in range(8)), *DEFAULT_VOCAB.content_tokens]
    prompt = labelled.prompts.tokens(DEFAULT_VOCAB)[0]
    assert [words[i] for i in prompt] == ["<anvil>", "v3", "v0", "v7", "v1", "<sep>"]
    assert labelled.responses.tolist() == [[0, 1, 2, 3, 4, 5, 6, 23]]
    assert labelled.labels.tolist() == [0.37]
    assert labelled.records(DEFAULT_VOCAB) == [GOOD]


@given(st.data())
def test_labelled_rows_survive_a_round_trip(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    vocab = Vocab(("left", "right"), n_attrs=1, n_values=3, content_tokens=tuple("abc"), resp_len=2)
    row = st.fixed_dictionaries({
        "id": st.text(),
        "family": st.sampled_from(vocab.families),
        "attrs": st.lists(st.integers(0, 2), min_size=1, max_size=1),
        "response": st.lists(st.sampled_from(vocab.content_tokens), min_size=2, max_size=2),
        "label": st.floats(allow_nan=False, allow_infinity=False),
    })  # fmt: skip
    rows = data.draw(st.lists(row, min_size=1, max_size=5))
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write_jsonl(path, rows)
    assert read_labelled(path, vocab).records(vocab) == rows


def test_extra_keys_and_blank_lines_are_ignored(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", {**GOOD, "note": "x"}, "", GOOD)
    assert len(read_labelled(path, DEFAULT_VOCAB)) == 2
    assert read_prompts(path, DEFAULT_VOCAB).ids == ("anvil-0007", "anvil-0007")


def test_labels_may_lie_outside_the_unit_interval(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", {**GOOD, "label": -0.2}, {**GOOD, "label": 3})
    assert read_labelled(path, DEFAULT_VOCAB).labels.tolist() == [-0.2, 3.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": 7}, "id must be a string, got 7"),
        ({"family": "granite"}, "family must be one of anvil, .*, got 'granite'"),
        ({"family": ["anvil"]}, "family must be one of"),
        ({"attrs": [3, 0, 7]}, "attrs must be 4 whole numbers from 0 to 7"),
        ({"attrs": [3, 0, 7, 8]}, "attrs must be 4 whole numbers from 0 to 7"),
        ({"attrs": [3, 0, 7, -1]}, "attrs must be 4 whole numbers from 0 to 7"),
        ({"attrs": [3, 0, 7, 1.0]}, "attrs must be 4 whole numbers from 0 to 7"),
        ({"attrs": [3, 0, 7, True]}, "attrs must be 4 whole numbers from 0 to 7"),
        ({"attrs": "3071"}, "attrs must be 4 whole numbers from 0 to 7"),
        ({"response": GOOD["response"][:7]}, "response must be a list of 8 tokens"),  # type: ignore[index]
        ({"response": "ba da fa"}, "response must be a list of 8 tokens"),
        ({"response": ["ba"] * 7 + ["qu"]}, r"unknown tokens \['qu'\]"),
        ({"response": ["ba"] * 7 + [3]}, r"unknown tokens \[3\]"),
        ({"label": float("nan")}, "label must be a finite number, got nan"),
        ({"label": float("inf")}, "label must be a finite number, got inf"),
        ({"label": "0.4"}, "label must be a finite number, got '0.4'"),
        ({"label": None}, "label must be a finite number, got None"),
        ({"label": True}, "label must be a finite number, got True"),
    ],
)
def test_a_bad_value_is_reported_with_file_and_line(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = write_lines(tmp_path / "rows.jsonl", GOOD, {**GOOD, **change})
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}:2: .*{message}"):
        read_labelled(path, DEFAULT_VOCAB)


@pytest.mark.parametrize("key", sorted(GOOD))
def test_a_missing_key_is_reported_by_name(tmp_path: Path, key: str) -> None:
    path = write_lines(tmp_path / "rows.jsonl", {k: v for k, v in GOOD.items() if k != key})
    with pytest.raises(InputError, match=f"{re.escape(str(path))}:1: {key} must be .*, got None"):
        read_labelled(path, DEFAULT_VOCAB)


def test_every_bad_line_is_reported_at_once(tmp_path: Path) -> None:
    bad = {**GOOD, "family": "granite", "label": None}
    path = write_lines(tmp_path / "rows.jsonl", "{not json", GOOD, "[1, 2]", "", bad, '"text"')
    with pytest.raises(InputError) as caught:
        read_labelled(path, DEFAULT_VOCAB)
    places = [problem.removeprefix(f"{path}:").split(":")[0] for problem in caught.value.problems]
    assert places == ["1", "3", "5", "5", "6"]


def test_a_value_of_any_length_is_cut_in_its_message(tmp_path: Path) -> None:
    long: dict[str, object] = {"id": [0] * 9999, "family": "x" * 9999, "attrs": [1] * 9999, "label": "9" * 9999}
    path = write_lines(
        tmp_path / "rows.jsonl", {**long, "response": ["ba"] * 9999}, {**GOOD, "response": ["qu" * 9999] * 8}
    )
    with pytest.raises(InputError) as caught:
        read_labelled(path, DEFAULT_VOCAB)
    assert len(caught.value.problems) == 6
    assert max(map(len, caught.value.problems)) < len(str(path)) + 400


def test_prompts_need_neither_response_nor_label_and_demonstrations_no_label(tmp_path: Path) -> None:
    prompt = {key: GOOD[key] for key in ("id", "family", "attrs")}
    path = write_lines(tmp_path / "prompts.jsonl", prompt)
    assert read_prompts(path, DEFAULT_VOCAB).records(DEFAULT_VOCAB) == [prompt]
    with pytest.raises(InputError, match=":1: response must be"):
        read_demonstrations(path, DEFAULT_VOCAB)
    demonstration = {**prompt, "response": GOOD["response"]}
    prompts, responses = read_demonstrations(write_lines(path, demonstration), DEFAULT_VOCAB)
    assert decode(responses, DEFAULT_VOCAB) == [GOOD["response"]]
    assert prompts.ids == ("anvil-0007",)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(InputError, match="holds no record"):
        read_prompts(tmp_path / "rows.jsonl", DEFAULT_VOCAB)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.jsonl: cannot be read"):
        read_prompts(tmp_path / "none.jsonl", DEFAULT_VOCAB)
    (tmp_path / "latin.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"latin\.jsonl: cannot be read"):
        read_prompts(tmp_path / "latin.jsonl", DEFAULT_VOCAB)


def test_masks_and_index_arrays_take_the_same_rows(some_prompts: Callable[..., Prompts], middling_vocab: Vocab) -> None:
    prompts = some_prompts(middling_vocab, 3)
    mask = np.array([True, False, False, True, False, True])
    taken, picked = prompts[mask], prompts[np.array([0, 3, 5])]
    assert taken.records(middling_vocab) == picked.records(middling_vocab)
    assert taken.ids == (prompts.ids[0], prompts.ids[3], prompts.ids[5])
    joined = concat_prompts([prompts[mask], prompts[~mask]])
    assert sorted(joined.ids) == sorted(prompts.ids)
    assert len(joined) == 6


def test_a_line_separator_inside_a_string_does_not_end_the_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**GOOD, "id": "a\u2028b"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_labelled(path, DEFAULT_VOCAB).prompts.ids == ("a\u2028b",)


def test_a_label_too_large_for_a_float_is_bad_input(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", {**GOOD, "label": 10**400})
    with pytest.raises(InputError, match=":1: label must be a finite number"):
        read_labelled(path, DEFAULT_VOCAB)
