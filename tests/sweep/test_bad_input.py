"""Everything a user can get wrong: one clear message with its place, exit status 2, nothing written."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

import sweep.launch
import sweep.pick
import sweep.status
import sweep.ui
from rlhf.errors import run_command


@pytest.fixture
def refuse(monkeypatch, capsys, tmp_path, tiny_task):
    """Run a command's `main`, expect exit status 2, and return what it said."""
    monkeypatch.setenv("TASK", str(tiny_task))
    monkeypatch.chdir(tmp_path)

    def run(module, *args: str) -> str:
        uri = f"sqlite:///{tmp_path / 'store' / 'mlflow.db'}"
        given = args if "--tracking-uri" in args else (*args, "--tracking-uri", uri)
        monkeypatch.setattr("sys.argv", [module.__name__, *given])
        with pytest.raises(SystemExit) as stopped:
            run_command(module.main)
        said = capsys.readouterr().err
        assert stopped.value.code == 2, said
        assert not (tmp_path / "store").exists(), "nothing may be written"
        return said

    return run


@pytest.fixture
def broken_task(tiny_task, tmp_path):
    folder = tmp_path / "task"
    shutil.copytree(tiny_task, folder)
    return folder


def test_unknown_space(refuse) -> None:
    said = refuse(sweep.launch, "--space", "no_such_space")
    assert "--space must be one of kl_mix, smoke, or a Python file; got 'no_such_space'" in said


def test_missing_task(refuse) -> None:
    assert "/nowhere: no such task directory; give one with --task DIR or TASK" in refuse(
        sweep.launch, "--space", "smoke", "--task", "/nowhere"
    )


def test_all_problems_of_all_files_at_once(refuse, broken_task) -> None:
    gold = broken_task / "data/gold_calib.jsonl"
    lines = gold.read_text().splitlines()
    lines[2] = lines[2][:-5]
    lines[4] = json.dumps({**json.loads(lines[4]), "label": float("nan")})
    gold.write_text("\n".join(lines))
    weights = broken_task / "policy/policy.safetensors"
    save_file({**load_file(weights), "head.weight": load_file(weights)["head.weight"][:5].contiguous()}, weights)
    said = refuse(sweep.launch, "--space", "smoke", "--task", str(broken_task))
    assert "gold_calib.jsonl:3: not a JSON object" in said
    assert "gold_calib.jsonl:5: label must be a finite number, got nan" in said
    assert "tensor head.weight has shape (5, 64), but config.json asks for (40, 64)" in said


def test_family_without_expert_labels(refuse, broken_task) -> None:
    gold = broken_task / "data/gold_calib.jsonl"
    gold.write_text("".join(line + "\n" for line in gold.read_text().splitlines() if '"dune"' not in line))
    said = refuse(sweep.launch, "--space", "smoke", "--task", str(broken_task))
    assert "gold_calib.jsonl: family dune has no expert label" in said


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return rewards[:-1]", r"must return a list of 8 rewards, got 7 rewards"),
        ("return [float('nan')] * len(rewards)", "must return finite numbers, got nan at row 0"),
        ("return 1 / 0", "transform raised ZeroDivisionError"),
        ("raise SystemExit(0)", "transform raised SystemExit"),
    ],
)
def test_wrapper_that_returns_nonsense(refuse, tmp_path, body, message) -> None:
    (tmp_path / "wrapper.py").write_text(f"\ndef transform(records, response_tokens, rewards):\n    {body}\n")
    space = tmp_path / "space.py"
    space.write_text(
        "from optuna.distributions import FloatDistribution\n"
        "from search_spaces.space import SearchSpace\n"
        "SPACE = SearchSpace(name='mine', distributions={'kl_coef': FloatDistribution(0.1, 0.2)},\n"
        "                    fixed={'reward_wrapper': 'wrapper.py'})\n"
    )
    said = refuse(sweep.launch, "--space", str(space))
    assert f"{tmp_path}/wrapper.py:2: " in said
    assert message in said


@pytest.mark.parametrize(
    ("distributions", "message"),
    [
        ("{'kl_coef': FloatDistribution(0.2, 0.1)}", "low <= high"),
        ("{'kl_coef': FloatDistribution(0.1, 0.1)}", "kl_coef has only one value to choose,"),
        ("{}", "distributions is empty"),
        ("{'kl_coef': CategoricalDistribution(())}", "choices"),
    ],
)
def test_space_with_an_empty_or_reversed_range(refuse, tmp_path, distributions, message) -> None:
    space = tmp_path / "space.py"
    space.write_text(
        "from optuna.distributions import CategoricalDistribution, FloatDistribution\n"
        "from search_spaces.space import SearchSpace\n"
        f"SPACE = SearchSpace(name='mine', distributions={distributions})\n"
    )
    said = refuse(sweep.launch, "--space", str(space))
    assert "space.py:3: " in said
    assert message in said


def test_space_with_unknown_settings_and_values(refuse, tmp_path) -> None:
    space = tmp_path / "space.py"
    space.write_text(
        "from optuna.distributions import CategoricalDistribution, FloatDistribution\n"
        "from search_spaces.space import SearchSpace\n"
        "SPACE = SearchSpace(name='mine', distributions={'kl_coeff': FloatDistribution(0.1, 0.2),\n"
        "    'prompt_mix': CategoricalDistribution(('balanced', 'hardest')),\n"
        "    'reward_wrapper': CategoricalDistribution(('raw', 'absent.py'))})\n"
    )
    said = refuse(sweep.launch, "--space", str(space))
    assert "unknown setting 'kl_coeff'; known: family_weights, kl_coef" in said
    assert "prompt_mix must be one of balanced, pilot, no_low_traffic, weakest, without_flagged, got 'hardest'" in said
    assert "absent.py" in said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{'policy_init': 'runs/fourfam-s800'}", "unknown setting 'policy_init'"),
        ("{'prompt_file': 'data/prompts_dev.jsonl'}", "unknown setting 'prompt_file'"),
        ("{'family_weights': {'nosuch': 1}}", "unknown family 'nosuch'"),
        ("{'family_weights': {'dune': 1}, 'prompt_mix': 'pilot'}", "not both"),
        ("{'steps': 'x'}", "fixed steps must be a whole number"),
        ("{'batch_prompts': 0}", "batch_prompts must be a whole number from 1"),
    ],
)
def test_space_with_fixed_settings_no_trial_could_use(refuse, tmp_path, settings, message) -> None:
    space = tmp_path / "space.py"
    space.write_text(
        "from optuna.distributions import FloatDistribution\n"
        "from search_spaces.space import SearchSpace\n"
        "KL = {'kl_coef': FloatDistribution(0.1, 0.2)}\n"
        f"SPACE = SearchSpace(name='mine', distributions=KL, fixed={settings})\n"
    )
    assert message in refuse(sweep.launch, "--space", str(space))


def test_a_bad_choice_in_the_middle(refuse, tmp_path) -> None:
    space = tmp_path / "space.py"
    space.write_text(
        "from optuna.distributions import CategoricalDistribution\n"
        "from search_spaces.space import SearchSpace\n"
        "SPACE = SearchSpace(name='mine', distributions={'batch_prompts': CategoricalDistribution((8, 'x', 16))})\n"
    )
    assert "batch_prompts must be a whole number" in refuse(sweep.launch, "--space", str(space))


def test_nothing_left_to_vary(refuse, tmp_path) -> None:
    space = tmp_path / "space.py"
    space.write_text(
        "from optuna.distributions import IntDistribution\n"
        "from search_spaces.space import SearchSpace\n"
        "SPACE = SearchSpace(name='mine', distributions={'steps': IntDistribution(200, 800)})\n"
    )
    said = refuse(sweep.launch, "--space", str(space), "--max-steps", "100")
    assert "space mine with at most 100 steps: distributions is empty" in said


def test_space_and_task_are_both_checked(refuse) -> None:
    said = refuse(sweep.launch, "--space", "no_such_space", "--task", "/nowhere", "--concurrency", "1000")
    for problem in ("--space must be one of", "/nowhere: no such task directory", "--concurrency must be at most"):
        assert problem in said


def test_space_outside_a_runs_limits(refuse, tmp_path) -> None:
    space = tmp_path / "space.py"
    space.write_text(
        "from optuna.distributions import FloatDistribution\n"
        "from search_spaces.space import SearchSpace\n"
        "SPACE = SearchSpace(name='mine', distributions={'lr': FloatDistribution(-0.1, 0.2)})\n"
    )
    assert "lr must be a number above 0, got -0.1" in refuse(sweep.launch, "--space", str(space))


def test_options_out_of_range_are_all_named(refuse) -> None:
    said = refuse(
        sweep.launch, "--space", "smoke", "--trials", "0", "--max-steps", "-3", "--max-harm", "2", "--name", "a b"
    )
    for option in ("--trials must be at least 1", "--max-steps must be at least 1", "--max-harm", "--name must be"):
        assert option in said


def test_more_cpus_than_there_are(refuse) -> None:
    assert "--concurrency must be at most" in refuse(sweep.launch, "--space", "smoke", "--concurrency", "1000")


@pytest.mark.parametrize("option", ["--storage-path", "--tracking-uri"])
def test_places_that_cannot_be_written(refuse, option) -> None:
    value = "/proc/nope" if option == "--storage-path" else "sqlite:////proc/nope/mlflow.db"
    assert "/proc/nope" in refuse(sweep.launch, "--space", "smoke", option, value)


def test_a_file_for_checkpoints_is_found_before_labels_are_fitted(refuse, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    said = refuse(sweep.launch, "--space", "nowhere.py", "--storage-path", str(tmp_path / "file"))
    assert f"--storage-path {tmp_path / 'file'}: {tmp_path / 'file'} is not a folder" in said
    assert "nowhere.py" in said


def test_unreachable_tracking_server(refuse) -> None:
    said = refuse(sweep.launch, "--space", "smoke", "--tracking-uri", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be read" in said


def test_name_that_exists(first_sweep, monkeypatch, capsys) -> None:
    for key, value in first_sweep.environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(
        "sys.argv", ["launch", "--space", "smoke", "--name", "first", "--tracking-uri", first_sweep.uri]
    )
    with pytest.raises(SystemExit) as stopped:
        run_command(sweep.launch.main)
    assert stopped.value.code == 2
    assert "--name first: a sweep of that name is recorded" in capsys.readouterr().err


def test_commands_without_a_sweep(refuse) -> None:
    assert "holds no sweep yet; run one first" in refuse(sweep.pick)
    assert "holds no sweep yet; run one first" in refuse(sweep.status, "--name", "absent")
    assert "no record yet; run a sweep first" in refuse(sweep.ui)
