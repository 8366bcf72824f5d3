"""Who may import whom (DESIGN, section 2), read from the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
MAY_IMPORT = {
    "search_spaces": set(),
    "rlhf": set(),
    "objectives": {"rlhf"},
    "sweep": {"search_spaces", "rlhf", "objectives"},
    "scripts": {"search_spaces", "rlhf", "objectives", "sweep"},
}
SWEEP_LIBRARIES = {"ray", "optuna", "mlflow"}
RAY_MODULES = {"sweep/search.py", "sweep/schedule.py", "sweep/trial.py"}
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((PROJECT / folder).rglob("*.py"))]


def imported(source: str, package: str = "") -> Iterator[str]:
    """Yield every module a source imports, at its top or inside functions, `from` names included.

    package: the dotted name of the folder the source is in, to resolve relative imports.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def is_within(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def imports_of(path: Path) -> list[str]:
    return list(imported(path.read_text(), ".".join(path.relative_to(PROJECT).parent.parts)))


def importers(name: str, *folders: str) -> set[str]:
    """Return the files that import a module or package."""
    return {
        path.relative_to(PROJECT).as_posix()
        for path in sources(*folders)
        if any(is_within(module, name) for module in imports_of(path))
    }


def test_the_walker_sees_every_form_of_import() -> None:
    source = """
import ray, os.path as p
from mlflow import client as c
from . import front
from ..rlhf import data
def f():
    from optuna.distributions import FloatDistribution
"""
    assert set(imported(source, "objectives.wrappers")) == {
        "ray", "os.path", "mlflow.client", "objectives.wrappers.front", "objectives.rlhf.data",
        "optuna.distributions.FloatDistribution",
    }  # fmt: skip
    assert is_within("ray.tune", "ray")
    assert not is_within("raytracer", "ray")


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_only_what_it_may(folder: str) -> None:
    assert sources(folder)
    ours = {*MAY_IMPORT, "tests"}
    forbidden = [
        f"{path.relative_to(PROJECT)} imports {module}"
        for path in sources(folder)
        for module in imports_of(path)
        if module.split(".")[0] in ours - MAY_IMPORT[folder] - {folder}
    ]
    assert forbidden == []


def test_nobody_imports_scripts() -> None:
    assert importers("scripts", "rlhf", "objectives", "search_spaces", "sweep", "scripts") == set()


def test_ray_optuna_and_mlflow_stay_in_sweep() -> None:
    for library in SWEEP_LIBRARIES:
        assert importers(library, "rlhf", "objectives", "scripts") == set(), library


def test_search_spaces_know_only_optunas_distributions() -> None:
    forbidden = [
        f"{path.relative_to(PROJECT)} imports {module}"
        for path in sources("search_spaces")
        for module in imports_of(path)
        if module.split(".")[0] in SWEEP_LIBRARIES and not is_within(module, "optuna.distributions")
    ]
    assert forbidden == []
    assert importers("optuna.distributions", "search_spaces")


def test_mlflow_is_imported_in_exactly_one_module() -> None:
    assert len(importers("mlflow", *MAY_IMPORT)) == 1


def test_ray_is_imported_in_few_modules() -> None:
    found = importers("ray", *MAY_IMPORT)
    assert found
    assert found <= RAY_MODULES


def test_only_scripts_build_or_read_worlds() -> None:
    assert importers("rlhf.world", "search_spaces", "rlhf", "objectives", "sweep") == set()


def test_no_module_has_a_name_that_says_nothing() -> None:
    named = [
        path for path in sources(*MAY_IMPORT) if VAGUE_NAMES & set(path.relative_to(PROJECT).with_suffix("").parts)
    ]
    assert named == []
