import os
import socket
import subprocess
from pathlib import Path

from sweep import store


def test_default_is_an_absolute_database_in_the_project(monkeypatch) -> None:
    monkeypatch.delenv(store.TRACKING_VARIABLE, raising=False)
    assert store.tracking_uri(None) == f"sqlite:///{Path(store.__file__).resolve().parents[1]}/mlruns/mlflow.db"


def test_option_before_variable(monkeypatch) -> None:
    monkeypatch.setenv(store.TRACKING_VARIABLE, "http://from-variable")
    assert store.tracking_uri("http://from-option") == "http://from-option"
    assert store.tracking_uri(None) == "http://from-variable"


def test_a_relative_database_is_made_absolute(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    assert store.tracking_uri("sqlite:///runs.db") == f"sqlite:///{tmp_path}/runs.db"


def test_a_driver_is_gone_once_its_process_is() -> None:
    assert not store.is_gone(store.driver_id())
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert store.is_gone(f"{socket.gethostname()}:{ended.pid}")
    assert not store.is_gone(f"another-machine:{os.getpid()}")
