"""A client in C++, compiled here: numbers are exact, over one persistent connection."""

import shutil
import subprocess
from pathlib import Path

import pytest

from e2e.server_process import ServerProcess

SOURCE = Path(__file__).with_name("client.cpp")


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here")
def test_a_cpp_client_calls_every_operation(simulators: ServerProcess, tmp_path: Path) -> None:
    client = tmp_path / "client"
    subprocess.run(["g++", "-std=c++17", "-Wall", "-Werror", "-o", str(client), str(SOURCE)], check=True)
    done = subprocess.run([str(client), str(simulators.http_port)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    output = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert output["Info"] == ["200", "1"]
    assert output["InputSizes"] == ["200", "2", "3"]
    assert output["OutputSizes"] == ["200", "2", "1"]
    expected = {
        "Evaluate": [0.1 * 0.1, 4.0, 3.0**2 + 4.0**2 + 5.0**2 + (0.1 + 2.0)],
        "Gradient": [2 * 0.1, 40.0],
        "ApplyJacobian": [24.0],
        "ApplyHessian": [4.0, 8.0, 12.0],
        "Infinity": [float("inf"), float("-inf")],
    }
    for verb, numbers in expected.items():
        assert output[verb][0] == "200"
        assert [float(n) for n in output[verb][1:]] == numbers, verb
    assert output["Fault"] == ["400", '{"error":{"type":"InvalidInput"']
