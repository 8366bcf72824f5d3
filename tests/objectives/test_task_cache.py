from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from objectives import task_cache
from objectives.task_cache import Arrays, cache_path, cached_arrays


@pytest.fixture
def counted(empty_cache: Path) -> Callable[[], Arrays]:
    """Give a function that counts its calls in what it returns."""
    calls: list[int] = []

    def compute() -> Arrays:
        calls.append(1)
        return {"calls": np.array(len(calls)), "words": np.array(["a", "bc"])}

    return compute


def test_what_was_computed_is_found_again(counted: Callable[[], Arrays], empty_cache: Path) -> None:
    first, second = (cached_arrays("name", "digest", counted) for _ in range(2))
    assert first["calls"] == second["calls"] == 1
    assert second["words"].tolist() == ["a", "bc"]
    assert len(list(empty_cache.iterdir())) == 1  # no half-written file is left


@pytest.mark.parametrize(("name", "digest"), [("other", "digest"), ("name", "other")])
def test_another_name_or_task_is_another_entry(counted: Callable[[], Arrays], name: str, digest: str) -> None:
    cached_arrays("name", "digest", counted)
    assert cached_arrays(name, digest, counted)["calls"] == 2


@pytest.mark.parametrize("content", [b"", b"PK not an archive", bytes(1000)])
def test_what_was_never_kept_is_computed_again_and_mended(counted: Callable[[], Arrays], content: bytes) -> None:
    path = cache_path("name", "digest")
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert [int(cached_arrays("name", "digest", counted)["calls"]) for _ in range(2)] == [1, 1]


def test_any_damage_is_computed_again(counted: Callable[[], Arrays]) -> None:
    cached_arrays("name", "digest", counted)
    path = cache_path("name", "digest")
    whole = path.read_bytes()
    for n, place in enumerate(np.linspace(0, len(whole) - 1, 20, dtype=int)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert cached_arrays("name", "digest", counted)["calls"] == n + 2
    path.write_bytes(whole[:-100])
    assert cached_arrays("name", "digest", counted)["calls"] == 22


def test_changed_sources_are_another_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []
    for number, source in enumerate(("prior = 1\n", "prior = 2\n", "prior = 1\n")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "fit.py").write_text(source)
        monkeypatch.setattr(task_cache, "_SOURCES", (folder,))
        paths.append(cache_path("name", "digest"))
    assert paths[0] == paths[2] != paths[1]
