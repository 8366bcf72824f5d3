import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf.errors import InputError
from rlhf.policy import Policy, load_policy, save_policy
from rlhf.vocab import Vocab

WEIGHTS, CONFIG = "policy.safetensors", "config.json"


@pytest.fixture
def folder(tmp_path: Path, make_policy: Callable[..., Policy], middling_vocab: Vocab) -> Path:
    save_policy(make_policy(middling_vocab), tmp_path / "policy")
    return tmp_path / "policy"


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def edit_config(folder: Path, **changes: object) -> None:
    document = {**json.loads((folder / CONFIG).read_text()), **changes}
    (folder / CONFIG).write_text(json.dumps({name: value for name, value in document.items() if value != "absent"}))


def problems_of(folder: Path, vocab: Vocab) -> tuple[str, ...]:
    with pytest.raises(InputError) as caught:
        load_policy(folder, vocab)
    return caught.value.problems


def test_every_tensor_that_does_not_fit_is_named(folder: Path, middling_vocab: Vocab) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["head.weight"] = torch.zeros(14, 8)
        tensors["surplus"] = torch.zeros(1)
        tensors["ln.bias"][3] = float("nan")
        tensors["ln.weight"][0] = float("inf")
        del tensors["tok.weight"]

    edit_tensors(folder, change)
    path = folder / WEIGHTS
    assert problems_of(folder, middling_vocab) == (
        f"{path}: tensor head.weight has shape (14, 8), but config.json asks for (14, 16)",
        f"{path}: tensor ln.bias holds values that are NaN or infinite in single precision",
        f"{path}: tensor ln.weight holds values that are NaN or infinite in single precision",
        f"{path}: tensor surplus is not part of the model",
        f"{path}: tensor tok.weight is missing",
    )


def test_a_config_of_another_size_names_the_shapes(folder: Path, middling_vocab: Vocab) -> None:
    edit_config(folder, d_ff=25)
    assert problems_of(folder, middling_vocab) == tuple(
        f"{folder / WEIGHTS}: tensor blocks.{n}.ff.{name} has shape {got}, but config.json asks for {want}"
        for n in range(2)
        for name, got, want in (
            ("0.bias", (24,), (25,)), ("0.weight", (24, 16), (25, 16)), ("2.weight", (16, 24), (16, 25)),
        )
    )  # fmt: skip


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(folder: Path, middling_vocab: Vocab, keep: int) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:keep])
    (problem,) = problems_of(folder, middling_vocab)
    assert problem.startswith(f"{folder / WEIGHTS}: cannot be read as safetensors")


def test_a_missing_file_is_named(folder: Path, middling_vocab: Vocab) -> None:
    (folder / WEIGHTS).unlink()
    assert f"{folder / WEIGHTS}: cannot be read as safetensors" in problems_of(folder, middling_vocab)[0]
    (folder / CONFIG).unlink()
    assert f"{folder / CONFIG}: cannot be read as JSON" in problems_of(folder, middling_vocab)[0]


class Trap:
    """Leave a mark when unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


def test_problems_of_config_and_weights_come_together(folder: Path, middling_vocab: Vocab) -> None:
    edit_config(folder, d_model="absent")
    (folder / WEIGHTS).unlink()
    config, weights = problems_of(folder, middling_vocab)
    assert "key d_model is missing" in config
    assert "cannot be read as safetensors" in weights


def test_a_size_that_fits_no_memory_is_not_tried(folder: Path, middling_vocab: Vocab) -> None:
    edit_config(folder, d_model=2**19, n_layers=500)
    (problem,) = problems_of(folder, middling_vocab)
    assert re.search(
        r"policy.safetensors: holds [\d,]+ weights, but config.json asks for 549,\d\d\d,[\d,]+ or more", problem
    )
    edit_config(folder, d_model=2**40)
    assert problems_of(folder, middling_vocab) == (
        f"{folder / CONFIG}: d_model must be a whole number from 1 to 1000000, got {2**40}",
    )


def test_a_weight_beyond_single_precision_is_refused(folder: Path, middling_vocab: Vocab) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({"head.weight": tensors["head.weight"].double() * 1e200}))
    assert problems_of(folder, middling_vocab) == (
        f"{folder / WEIGHTS}: tensor head.weight holds values that are NaN or infinite in single precision",
    )


def test_a_pickle_in_disguise_is_refused_and_never_run(folder: Path, middling_vocab: Vocab, tmp_path: Path) -> None:
    trap = pickle.dumps(Trap(tmp_path / "mark"))
    (folder / WEIGHTS).write_bytes(trap)
    assert "cannot be read as safetensors" in problems_of(folder, middling_vocab)[0]
    assert not (tmp_path / "mark").exists()
    pickle.loads(trap)
    assert (tmp_path / "mark").exists()  # the trap does work


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": "absent"}, "key d_model is missing"),
        ({"n_heads": "absent"}, "key n_heads is missing"),
        ({"vocab_size": 15}, "vocab_size is 15, but the task's vocabulary asks for 14"),
        ({"resp_len": 4}, "resp_len is 4, but the task's vocabulary asks for 3"),
        ({"n_heads": 3}, "n_heads must divide d_model, got 3 and 16"),
        ({"n_layers": 0}, "n_layers must be a whole number from 1 to 1000, got 0"),
        ({"d_ff": 2.5}, "d_ff must be a whole number from 1 to 1000000, got 2.5"),
    ],
)
def test_a_bad_config_names_file_and_key(
    folder: Path, middling_vocab: Vocab, changes: dict[str, object], message: str
) -> None:
    edit_config(folder, **changes)
    assert problems_of(folder, middling_vocab) == (f"{folder / CONFIG}: {message}",)


def test_lengths_missing_from_a_config_come_from_the_vocabulary(folder: Path, middling_vocab: Vocab) -> None:
    before = load_policy(folder, middling_vocab).config
    edit_config(folder, vocab_size="absent", seq_len="absent", prompt_len="absent", resp_len="absent")
    assert load_policy(folder, middling_vocab).config == before


@pytest.mark.parametrize(("text", "message"), [("{", "cannot be read as JSON"), ("[]", "must hold a JSON object")])
def test_a_config_must_be_a_json_object(folder: Path, middling_vocab: Vocab, text: str, message: str) -> None:
    (folder / CONFIG).write_text(text)
    assert message in problems_of(folder, middling_vocab)[0]


def test_weights_of_lower_precision_are_taken(folder: Path, middling_vocab: Vocab) -> None:
    def halve(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.half() for name, tensor in tensors.items()})

    edit_tensors(folder, halve)
    loaded = load_policy(folder, middling_vocab).state_dict()
    assert all(tensor.dtype == torch.float32 for tensor in loaded.values())
    assert torch.equal(loaded["head.weight"], load_file(folder / WEIGHTS)["head.weight"].float())
