"""Reading and writing a model folder: `config.json` beside one safetensors file. No pickle is ever read."""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from rlhf.errors import InputError, collected, raise_if_any
from rlhf.files import write_whole
from rlhf.json_values import read_json_object
from rlhf.transformer import ModelConfig
from rlhf.vocab import Vocab

CONFIG_FILE = "config.json"
_SURELY_FITS = 10_000_000  # weights; a wrong configuration that asks for more must not be tried
Model = TypeVar("Model", bound=nn.Module)


def load_model(make: Callable[[ModelConfig], Model], folder: Path, weights_name: str, vocab: Vocab) -> Model:
    """Make a model from `folder` and fill in its weights.

    Raises `InputError` naming every key and tensor that is missing, unknown, or of the wrong shape.
    """
    path = folder / weights_name
    problems: list[str] = []
    with collected(problems):
        config = read_config(folder / CONFIG_FILE, vocab)
    with collected(problems):
        tensors, _ = read_tensors(path)
    raise_if_any(problems)
    held = sum(tensor.numel() for tensor in tensors.values())
    if config.least_weights > max(held, _SURELY_FITS):
        raise InputError(f"{path}: holds {held:,} weights, but {CONFIG_FILE} asks for {config.least_weights:,} or more")
    model = make(config)
    expected = model.state_dict()
    problems = [f"{path}: tensor {name} is missing" for name in expected if name not in tensors]
    problems += [f"{path}: tensor {name} is not part of the model" for name in tensors if name not in expected]
    for name in expected.keys() & tensors.keys():
        want, got = tuple(expected[name].shape), tuple(tensors[name].shape)
        if want != got:
            problems.append(f"{path}: tensor {name} has shape {got}, but {CONFIG_FILE} asks for {want}")
        elif not tensors[name].is_floating_point():
            problems.append(f"{path}: tensor {name} holds {tensors[name].dtype}, weights are floating-point numbers")
        elif not torch.isfinite(tensors[name].float()).all():
            problems.append(f"{path}: tensor {name} holds values that are NaN or infinite in single precision")
    raise_if_any(sorted(problems))
    model.load_state_dict(tensors)
    return model


def save_model(model: nn.Module, config: ModelConfig, folder: Path, weights_name: str) -> None:
    write_tensors(model.state_dict(), folder / weights_name)
    write_whole(folder / CONFIG_FILE, json.dumps(config.to_json(), indent=1) + "\n")


def read_config(path: Path, vocab: Vocab) -> ModelConfig:
    """Read a model's `config.json` and check it against the task's vocabulary."""
    document = read_json_object(path)
    derived = {"vocab_size": vocab.size, "seq_len": vocab.seq_len, "prompt_len": vocab.prompt_len}
    derived["resp_len"] = vocab.resp_len
    names = [field.name for field in fields(ModelConfig)]
    problems = [f"{path}: key {name} is missing" for name in names if name not in document and name not in derived]
    problems += [
        f"{path}: {name} is {document[name]!r}, but the task's vocabulary asks for {size}"
        for name, size in derived.items()
        if document.get(name, size) != size
    ]
    raise_if_any(problems)
    try:
        values: dict[str, Any] = {name: document.get(name, derived.get(name)) for name in names}
        return ModelConfig(**values)
    except InputError as error:
        raise InputError([f"{path}: {problem}" for problem in error.problems]) from error


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, *, metadata: dict[str, str] | None = None) -> None:
    """Write tensors to `path` in one step."""
    write_whole(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata=metadata))


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read tensors and metadata. Raises `InputError` if the file is missing or damaged."""
    if not path.is_file():
        raise InputError(f"{path}: cannot be read as safetensors (no such file)")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read as safetensors ({error})") from error
