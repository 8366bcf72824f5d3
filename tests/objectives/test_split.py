import hashlib
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectives.split import Part, split_part, split_prompts
from rlhf.data import Prompts
from rlhf.errors import InputError
from rlhf.taskdir import Task
from rlhf.vocab import DEFAULT_VOCAB, Vocab

PARTS: tuple[Part, ...] = ("train", "selection", "certification")
families = st.sampled_from(DEFAULT_VOCAB.families)
attributes = st.tuples(*[st.integers(0, 7)] * 4)


def keys(prompts: Prompts, vocab: Vocab) -> list[tuple[str, tuple[int, ...]]]:
    return [(vocab.families[f], tuple(a)) for f, a in zip(prompts.family, prompts.attrs.tolist(), strict=True)]


@settings(deadline=None)
@given(family=families, attrs=attributes)
def test_the_first_two_bits_of_the_hash_decide(family: str, attrs: tuple[int, ...]) -> None:
    first_digit = hashlib.sha256(f"{family}:{attrs[0]},{attrs[1]},{attrs[2]},{attrs[3]}".encode()).hexdigest()[0]
    expected = "train" if first_digit in "01234567" else "selection" if first_digit in "89ab" else "certification"
    assert split_part(family, attrs) == expected


@settings(deadline=None)
@given(family=families, attrs=attributes)
def test_number_type_does_not_matter(family: str, attrs: tuple[int, ...]) -> None:
    assert split_part(family, tuple(np.array(attrs))) == split_part(family, attrs)


def test_fractions_are_50_25_25_in_every_family() -> None:
    tuples = list(product(range(8), repeat=4))
    for family in DEFAULT_VOCAB.families:
        counts = Counter(split_part(family, attrs) for attrs in tuples)
        for part, share in zip(PARTS, (0.5, 0.25, 0.25), strict=True):
            standard_error = np.sqrt(share * (1 - share) / len(tuples))
            assert abs(counts[part] / len(tuples) - share) < 4.5 * standard_error, (family, part)


def test_families_are_split_independently() -> None:
    both = Counter((split_part("anvil", a), split_part("birch", a)) for a in product(range(8), repeat=4))
    assert both["train", "train"] / 4096 == pytest.approx(0.25, abs=0.035)
    assert both["certification", "certification"] / 4096 == pytest.approx(0.0625, abs=0.02)


def test_no_tuple_is_in_two_parts(default_world_task: Task) -> None:
    task = default_world_task
    # Every dev prompt is also a training prompt, under another id.
    train = task.train_prompts
    dev = Prompts(tuple(f"dev-{i}" for i in range(len(train))), train.family, train.attrs)
    overlapping = replace(task, dev_prompts=dev)
    parts = {part: set(keys(split_prompts(overlapping, part), task.vocab)) for part in PARTS}
    assert not parts["train"] & parts["selection"]
    assert not parts["train"] & parts["certification"]
    assert not parts["selection"] & parts["certification"]
    assert set.union(*parts.values()) == set(keys(train, task.vocab))


def test_selection_and_certification_hold_each_tuple_once(default_world_task: Task) -> None:
    task = replace(default_world_task, dev_prompts=default_world_task.train_prompts)
    for part in ("selection", "certification"):
        found = keys(split_prompts(task, part), task.vocab)
        assert len(found) == len(set(found))


def test_dev_prompts_are_judged_on_but_never_trained_on(default_world_task: Task) -> None:
    task = default_world_task
    train_ids = set(task.train_prompts.ids)
    assert set(split_prompts(task, "train").ids) <= train_ids
    for part in ("selection", "certification"):
        assert set(split_prompts(task, part).ids) - train_ids


def test_ids_and_row_order_do_not_matter(default_world_task: Task) -> None:
    task = default_world_task
    order = np.random.default_rng(0).permutation(len(task.train_prompts))
    shuffled = task.train_prompts[order]
    renamed = Prompts(tuple(f"x{i}" for i in range(len(order))), shuffled.family, shuffled.attrs)
    for part in PARTS:
        before = Counter(keys(split_prompts(task, part), task.vocab))
        after = Counter(keys(split_prompts(replace(task, train_prompts=renamed), part), task.vocab))
        assert before == after


def test_the_order_of_families_in_the_vocabulary_does_not_matter(default_world_task: Task) -> None:
    task, vocab = default_world_task, default_world_task.vocab
    turned_vocab = replace(vocab, families=vocab.families[::-1])

    def turned(prompts: Prompts) -> Prompts:
        return replace(prompts, family=len(vocab.families) - 1 - prompts.family)

    other = replace(
        task, vocab=turned_vocab, train_prompts=turned(task.train_prompts), dev_prompts=turned(task.dev_prompts)
    )
    for part in PARTS:
        assert keys(split_prompts(other, part), turned_vocab) == keys(split_prompts(task, part), vocab)


def test_every_family_without_a_prompt_in_the_part_is_named(default_world_task: Task) -> None:
    task, vocab = default_world_task, default_world_task.vocab
    kept = ["dune", "ember"]

    def without(prompts: Prompts) -> Prompts:
        lost = [
            family in kept and split_part(family, attrs) == "certification" for family, attrs in keys(prompts, vocab)
        ]
        return prompts[~np.array(lost)]

    poorer = replace(task, train_prompts=without(task.train_prompts), dev_prompts=without(task.dev_prompts))
    assert len(split_prompts(poorer, "selection"))
    with pytest.raises(InputError, match=r"prompts_train\.jsonl: family dune has 0 prompts in the certification part"):
        split_prompts(poorer, "certification")
    with pytest.raises(InputError, match="family ember"):
        split_prompts(poorer, "certification")
