import socket
import subprocess
import time
import urllib.request

import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_ui_serves_the_sweep_on_this_machine_only(first_sweep) -> None:
    port = free_port()
    server = subprocess.Popen(
        first_sweep.command("sweep.ui", "--port", str(port)), cwd=first_sweep.folder, env=first_sweep.environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        page = _get(f"http://127.0.0.1:{port}/", timeout_s=90)
        assert "MLflow" in page
    finally:
        subprocess.run(["pkill", "-TERM", "-g", str(server.pid)], check=False)
        server.wait(timeout=30)


def test_a_taken_port_is_refused(first_sweep) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = first_sweep.run("sweep.ui", "--port", str(port))
    assert done.returncode == 2
    assert f"--port {port} on 127.0.0.1 cannot be used" in done.stderr


def _get(url: str, *, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return str(response.read().decode())
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
