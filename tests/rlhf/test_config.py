import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.config import RunConfig, read_run_config, run_config
from rlhf.errors import InputError

NAN = float("nan")


def test_defaults_are_the_documented_ones() -> None:
    assert RunConfig().to_json() == {
        "policy_init": None, "policy_ref": "policy", "reward_model": "reward_model",
        "prompt_file": "data/prompts_train.jsonl", "family_weights": None, "kl_coef": 0.1, "steps": 800,
        "batch_prompts": 16, "samples_per_prompt": 8, "lr": 3e-4, "temperature": 1.0, "seed": 0, "log_every": 20,
        "save_every": 0, "reward_wrapper": None, "max_grad_norm": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in ("steps", "batch_prompts", "log_every") for value in (0, -1, 1.0, "8", None, True)),
        *(("samples_per_prompt", value) for value in (1, 2.0, None)),
        *((key, value) for key in ("save_every", "seed") for value in (-1, 0.5, "0", False)),
        *(
            (key, value)
            for key in ("kl_coef", "lr", "temperature", "max_grad_norm")
            for value in (-0.1, NAN, float("inf"), "0.1", None, True)
        ),
        *((key, 0) for key in ("lr", "temperature", "max_grad_norm")),
        *((key, 3) for key in ("policy_init", "policy_ref", "reward_model", "prompt_file", "reward_wrapper")),
        *((key, None) for key in ("policy_ref", "reward_model", "prompt_file")),
        *(("family_weights", value) for value in ([1, 2], "equal", {}, {"dune": 0})),
    ],
)
def test_a_bad_value_names_its_key_and_source(key: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        run_config({key: value}, source="run.json")
    (problem,) = caught.value.problems
    assert problem.startswith(f"run.json: {key} must ")
    assert repr(value) in problem


@pytest.mark.parametrize("weight", [NAN, -1, "1", None, True, float("inf")])
def test_a_bad_family_weight_names_key_and_family(weight: object) -> None:
    with pytest.raises(InputError, match=r"run.json: family_weights: the weight of dune must be a number"):
        run_config({"family_weights": {"anvil": 1, "dune": weight}}, source="run.json")


def test_every_unknown_key_is_named_with_the_known_ones() -> None:
    with pytest.raises(InputError) as caught:
        run_config({"kl": 0.1, "steps": 0, "beta": 1}, source="run.json")
    assert [problem.split(";")[0] for problem in caught.value.problems] == [
        "run.json: unknown config key 'kl'",
        "run.json: unknown config key 'beta'",
        "run.json: steps must be a whole number from 1 to 2147483647, got 0",
    ]
    assert all(field.name in caught.value.problems[0] for field in fields(RunConfig))


def test_all_bad_values_are_reported_together() -> None:
    with pytest.raises(InputError) as caught:
        RunConfig(steps=0, lr=NAN, kl_coef=-1, policy_ref=3, family_weights={"dune": -1})  # type: ignore[arg-type]
    named = [problem.split()[0].rstrip(":") for problem in caught.value.problems]
    assert sorted(named) == ["family_weights", "kl_coef", "lr", "policy_ref", "steps"]


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "kl_coef": st.floats(0, 10),
            "steps": st.integers(1, 10**6),
            "seed": st.integers(0, 2**31),
            "family_weights": st.none()
            | st.dictionaries(st.sampled_from(["dune", "ember"]), st.floats(0.1, 9), min_size=1),
            "reward_wrapper": st.none() | st.text(),
        },
    )
)
def test_values_survive_a_file(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("config") / "run.json"
    path.write_text(json.dumps(values))
    config = read_run_config(path)
    assert {key: getattr(config, key) for key in values} == values
    path.write_text(json.dumps(config.to_json()))
    assert read_run_config(path) == config


def test_overrides_replace_keys_and_the_last_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"kl_coef": 0.1, "steps": 5}')
    overrides = ["kl_coef=0.3", 'reward_wrapper="a=b.py"', "seed=1", "seed=2", "family_weights=null"]
    config = read_run_config(path, overrides)
    assert (config.kl_coef, config.steps, config.reward_wrapper, config.seed) == (0.3, 5, "a=b.py", 2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "--override must look like key=json, got 'steps'"),
        ("reward_wrapper=clip", """'clip' is not JSON .*; to give text, .* --override 'reward_wrapper="clip"'"""),
        ("kl=0.1", "run.json with its overrides: unknown config key 'kl'"),
        ("lr=NaN", "run.json with its overrides: lr must be a number above 0, got nan"),
    ],
)  # fmt: skip
def test_bad_overrides_say_what_to_do(tmp_path: Path, override: str, message: str) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(InputError, match=message):
        read_run_config(tmp_path / "run.json", [override])


@pytest.mark.parametrize(
    ("text", "message"), [("{", "cannot be read as JSON"), ("[1]", "must hold a JSON object, found list")]
)
def test_a_config_file_must_be_a_json_object(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(InputError, match=f"run.json: {message}"):
        read_run_config(tmp_path / "run.json")
    with pytest.raises(InputError, match=r"none\.json: cannot be read"):
        read_run_config(tmp_path / "none.json")


def test_a_number_too_large_for_a_float_is_bad_input() -> None:
    with pytest.raises(InputError, match="kl_coef must be a number"):
        RunConfig(kl_coef=10**400)


def test_a_seed_too_large_for_the_streams_is_bad_input() -> None:
    with pytest.raises(InputError, match="seed must be"):
        RunConfig(seed=2**63)
