"""The workload as the workers see it: pickled, opened in a folder of its own, stopped and resumed elsewhere."""

import pickle

import pytest
import torch

from rlhf.errors import InputError
from search_spaces.space import SearchSpace
from sweep import rlhf_workload
from sweep.rlhf_workload import RlhfWorkload


@pytest.fixture
def space(tmp_path) -> SearchSpace:
    from optuna.distributions import FloatDistribution

    (tmp_path / "halve.py").write_text(
        "def transform(records, response_tokens, rewards):\n    return [reward / 2 for reward in rewards]\n"
    )
    return SearchSpace(
        name="s",
        distributions={"kl_coef": FloatDistribution(0.01, 0.5)},
        fixed={"reward_wrapper": str(tmp_path / "halve.py"), "batch_prompts": 2, "prompt_mix": "pilot"},
        max_steps=4,
    )


@pytest.fixture
def workload(tiny_task, space) -> RlhfWorkload:
    return RlhfWorkload.open(tiny_task, space)


def elsewhere(workload: RlhfWorkload) -> RlhfWorkload:
    """Return the workload as another process gets it: a copy, opened in another folder."""
    rlhf_workload._opened.cache_clear()
    return pickle.loads(pickle.dumps(workload))


def test_a_trial_stopped_here_goes_on_elsewhere_to_the_same_bits(workload, space, tmp_path) -> None:
    config = workload.config({"kl_coef": 0.1, "steps": 4, **space.fixed}, seed=3)
    whole = workload.start(config)
    whole.advance(4)
    first = workload.start(config)
    first.advance(2)
    first.save(tmp_path / "saved")
    second = elsewhere(workload).start(config)
    second.load(tmp_path / "saved")
    second.advance(4)
    assert second.step == whole.step == 4
    mine, theirs = second._run.policy.state_dict(), whole._run.policy.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert second.judge() == whole.judge()


def test_config_records_the_users_name_and_the_mix(workload, space, tmp_path) -> None:
    config = workload.config({"kl_coef": 0.1, "steps": 4, **space.fixed}, seed=3)
    assert config["reward_wrapper"] == str(tmp_path / "halve.py")
    assert config["prompt_mix"] == "pilot"
    assert set(config["family_weights"]) == {"anvil", "birch", "cobalt", "dune", "ember", "fjord"}


def test_opening_a_folder_with_other_things_in_it_packs_only_the_task(tiny_task, space, tmp_path, workload) -> None:
    assert len(workload.archive) < 8_000_000
    opened = rlhf_workload._opened(workload)
    names = {path.name for path in opened.task.root.iterdir()}
    assert names == {"policy", "reward_model", "data", "user_wrappers"}


def test_training_prompts_are_never_judged_on(workload) -> None:
    opened = rlhf_workload._opened(workload)
    train = set(zip(opened.train_prompts.family.tolist(), map(tuple, opened.train_prompts.attrs.tolist()), strict=True))
    judged = opened.judge.prompts
    assert not train & set(zip(judged.family.tolist(), map(tuple, judged.attrs.tolist()), strict=True))


def test_a_missing_task_is_refused(space, tmp_path) -> None:
    with pytest.raises(InputError, match="no such task directory"):
        RlhfWorkload.open(tmp_path / "none", space)
