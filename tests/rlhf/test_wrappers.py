import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlhf.config import RunConfig
from rlhf.data import read_prompts
from rlhf.errors import InputError
from rlhf.policy import load_policy
from rlhf.reward_model import load_reward_model
from rlhf.vocab import Vocab
from rlhf.wrappers import RewardWrapper, load_wrapper, wrapper_names
from rlhf.wrappers.clip import QUANTILE

RECORDS = [{"id": "p-1", "family": "p", "attrs": [0, 1]}, {"id": "q-1", "family": "q", "attrs": [2, 3]}]
TOKENS = [["a", "b", "c"], ["d", "d", "d"]]


@pytest.fixture
def write_wrapper(tmp_path: Path) -> Callable[..., RewardWrapper]:
    def write(source: str, name: str = "mine.py") -> RewardWrapper:
        (tmp_path / name).write_text(source)
        return load_wrapper(name, tmp_path)

    return write


def test_the_built_in_names_are_found_by_their_entry_points() -> None:
    assert wrapper_names() == ["clip", "debias", "label_quality", "raw"]


@pytest.mark.parametrize("name", [None, "raw"])
def test_raw_returns_the_scores(tmp_path: Path, name: str | None) -> None:
    assert load_wrapper(name, tmp_path)(RECORDS, TOKENS, [0.25, -1.0]) == [0.25, -1.0]


def test_clip_caps_each_family_at_a_quantile_of_the_references_own_scores(small_task: Path) -> None:
    wrapper = load_wrapper("clip", small_task)
    wrapper.prepare(small_task, RunConfig(seed=3))
    ceilings = wrapper(RECORDS, TOKENS, [1e6, 1e6])
    assert wrapper(RECORDS, TOKENS, [ceilings[0] - 0.5, -1e6]) == [ceilings[0] - 0.5, -1e6]
    vocab = Vocab(("p", "q"), n_attrs=2, n_values=4, content_tokens=tuple("abcdef"), resp_len=3)
    prompts = read_prompts(small_task / "data/prompts_train.jsonl", vocab)
    reference = load_policy(small_task / "policy", vocab)
    reward_model = load_reward_model(small_task / "reward_model", vocab)
    for family, ceiling in enumerate(ceilings):
        tokens = prompts[prompts.family == family].tokens(vocab)
        uniforms = torch.rand(800 * len(tokens), 3, generator=torch.Generator().manual_seed(11))
        scores = reward_model.score(tokens, reference.sample(tokens, uniforms)[0])
        below = (scores < ceiling - 1e-5).double().mean().item(), (scores <= ceiling + 1e-5).double().mean().item()
        assert below[0] - 0.06 < QUANTILE < below[1] + 0.06  # four standard errors of 512 samples


def test_clip_has_the_same_ceilings_in_every_run_of_a_task(small_task: Path) -> None:
    def ceilings(seed: int) -> list[float]:
        wrapper = load_wrapper("clip", small_task)
        wrapper.prepare(small_task, RunConfig(seed=seed))
        return wrapper(RECORDS, TOKENS, [1e6, 1e6])

    assert ceilings(1) == ceilings(2)


def test_a_users_file_sees_records_tokens_and_scores(write_wrapper: Callable[..., RewardWrapper]) -> None:
    wrapper = write_wrapper(
        "def transform(records, response_tokens, rewards):\n"
        "    assert [type(part) for part in (records, response_tokens, rewards)] == [list] * 3\n"
        "    return [len(r['attrs']) + t.count('d') + s for r, t, s in zip(records, response_tokens, rewards)]\n"
    )
    wrapper.prepare(Path(), RunConfig())  # a file without `prepare` needs none
    assert wrapper(RECORDS, TOKENS, [0.5, 0.25]) == [2.5, 5.25]
    assert wrapper.uses_rewards


def test_prepare_gets_the_task_and_the_configuration(write_wrapper: Callable[..., RewardWrapper]) -> None:
    wrapper = write_wrapper(
        "USES_REWARDS = False\n"
        "def prepare(task_dir, config):\n"
        "    global value\n"
        "    value = config['kl_coef'] if task_dir.name == 'here' else None\n"
        "def transform(records, response_tokens, rewards):\n"
        "    return [value for _ in records]\n"
    )
    wrapper.prepare(Path("here"), RunConfig(kl_coef=0.75))
    assert wrapper(RECORDS, TOKENS, [0.0, 0.0]) == [0.75, 0.75]
    assert not wrapper.uses_rewards


def test_two_runs_with_the_same_file_do_not_share_state(tmp_path: Path) -> None:
    (tmp_path / "counter.py").write_text(
        "calls = []\n"
        "def transform(records, tokens, rewards):\n    calls.append(1)\n    return [len(calls)] * len(records)\n"
    )
    one, other = load_wrapper("counter.py", tmp_path), load_wrapper("counter.py", tmp_path)
    assert [one(RECORDS, TOKENS, [0, 0]), one(RECORDS, TOKENS, [0, 0])] == [[1, 1], [2, 2]]
    assert other(RECORDS, TOKENS, [0, 0]) == [1, 1]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return rewards[:1]", "transform must return a list of 2 rewards, got 1 rewards"),
        ("return rewards + [0.0]", "transform must return a list of 2 rewards, got 3 rewards"),
        ("return None", "transform must return a list of 2 rewards, got NoneType"),
        ("return sum(rewards)", "transform must return a list of 2 rewards, got float"),
        ("return [0.0, float('nan')]", "transform must return finite numbers, got nan at row 1"),
        ("return [float('-inf'), 0.0]", "transform must return finite numbers, got -inf at row 0"),
        ("return [0.0, '1']", "transform must return finite numbers, got '1' at row 1"),
        ("return [None, 0.0]", "transform must return finite numbers, got None at row 0"),
        ("return [True, 0.0]", "transform must return finite numbers, got True at row 0"),
        ("raise ValueError('no such family')", "transform raised ValueError: no such family"),
        ("return records[0]['colour']", "transform raised KeyError: 'colour'"),
    ],
)
def test_a_bad_transform_is_reported_with_file_and_line(
    write_wrapper: Callable[..., RewardWrapper], tmp_path: Path, body: str, message: str
) -> None:
    wrapper = write_wrapper(f"import math\n\ndef transform(records, response_tokens, rewards):\n    {body}\n")
    with pytest.raises(InputError, match=f"^{re.escape(f'{tmp_path}/mine.py:3: {message}')}"):
        wrapper(RECORDS, TOKENS, [0.5, 0.25])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "a reward wrapper must define transform"),
        ("transform = 3\n", "a reward wrapper must define transform"),
        ("def transform(r, t, s)\n", r"importing it raised SyntaxError: .*mine.py, line 1"),
        ("import no_such_package_anywhere\n", "importing it raised ModuleNotFoundError"),
        ("1 / 0\n", "importing it raised ZeroDivisionError"),
    ],
)
def test_a_malformed_file_is_reported_by_its_path(
    write_wrapper: Callable[..., RewardWrapper], tmp_path: Path, source: str, message: str
) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(str(tmp_path / 'mine.py'))}: {message}"):
        write_wrapper(source)


def test_a_file_that_is_not_python_is_refused(write_wrapper: Callable[..., RewardWrapper]) -> None:
    with pytest.raises(InputError, match=r"a reward wrapper is a \.py file"):
        write_wrapper("transform", "mine.txt")


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"must be one of clip, debias, label_quality, raw, or a path.*got 'cliip'"):
        load_wrapper("cliip", tmp_path)


def test_a_file_may_define_dataclasses_with_postponed_annotations(write_wrapper: Callable[..., RewardWrapper]) -> None:
    wrapper = write_wrapper(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
        "@dataclass\nclass Settings:\n    scale: float = 2.0\n\n"
        "def transform(records, tokens, rewards):\n    return [Settings().scale * reward for reward in rewards]\n"
    )
    assert wrapper(RECORDS, TOKENS, [1.0, 2.0]) == [2.0, 4.0]


def test_a_prepare_that_raises_is_bad_input(write_wrapper: Callable[..., RewardWrapper]) -> None:
    wrapper = write_wrapper("def prepare(d, c):\n    raise KeyError('x')\ndef transform(r, t, s):\n    return s\n")
    with pytest.raises(InputError, match=r"mine\.py:.*prepare raised KeyError"):
        wrapper.prepare(Path(), RunConfig())


def test_a_reward_too_large_for_the_training_precision_is_refused(write_wrapper: Callable[..., RewardWrapper]) -> None:
    wrapper = write_wrapper("def transform(r, t, s):\n    return [1e300] * len(r)\n")
    with pytest.raises(InputError, match="must return finite numbers"):
        wrapper(RECORDS, TOKENS, [0.0, 0.0])
