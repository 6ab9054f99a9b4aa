"""Wrong input of every command is one sentence and an exit status, without a traceback."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

# Commands by name: arguments, exit status, and the end of what is printed to standard error. {taken}: a port in use;
# port 80 is one that the system refuses.
CASES: Mapping[str, tuple[str, int, str]] = {
    "missing path": ("serve nowhere", 2, "dragoman: 'nowhere' not found: expected a model file, a folder"),
    "misspelled path": ("serve modles", 2, "dragoman: 'modles' not found; did you mean 'models'?"),
    "misspelled file": ("serve models/line.jblib", 2, "not found; did you mean 'line.joblib'?"),
    "no model file": ("serve notes.rst", 2, "'notes.rst' is not served: no runtime is known for files of this kind"),
    "function in a file": (
        "serve fahrenheit.py --http-port 0 --grpc-port 0",
        1,
        "; did you mean 'fahrenheit.py:celsius'?",
    ),
    "misspelled function": (
        "serve fahrenheit.py:celsus --http-port 0 --grpc-port 0",
        1,
        "'fahrenheit.py' has no 'celsus'; did you mean 'celsius'?",
    ),
    "port in use": (
        "serve fahrenheit.py:celsius --grpc-port 0 --http-port {taken}",
        1,
        "dragoman: port {taken} of 127.0.0.1 is in use: stop the other server, or choose a port with --http-port",
    ),
    "gRPC port in use": ("serve fahrenheit.py:celsius --http-port 0 --grpc-port {taken}", 1, "with --grpc-port"),
    "port without permission": (
        "serve fahrenheit.py:celsius --grpc-port 0 --http-port 80",
        1,
        "dragoman: no permission to listen on port 80: choose a port from 1024 on with --http-port",
    ),
    "address of another machine": ("serve fahrenheit.py:celsius --host 192.0.2.1", 1, "of this machine with --host"),
    "unknown host": ("serve fahrenheit.py:celsius --host ::zz", 1, "of this machine with --host"),
    "misspelled setting": ("serve models --http-prot 1", 2, "did you mean '--http-port'?"),
    "misspelled command": ("serv models", 2, "did you mean 'serve'?"),
    "missing file of a setting": ("serve fahrenheit.py:celsius --api-keys no.toml", 2, "No such file or directory"),
    "no server": ("models http://127.0.0.1:1", 2, "dragoman: cannot reach http://127.0.0.1:1: Connection refused; is"),
    "wrong URL": ("infer nowhere:x m 1", 2, "dragoman: expected a URL such as http://HOST:PORT, got 'nowhere:x'"),
    "missing key file": ("keys list --file no.toml", 2, "dragoman: key file 'no.toml' cannot be read: No such file"),
    "missing graph": ("graph nowhere", 2, "dragoman: 'nowhere' not found: expected a graph file"),
    "no server to measure": ("bench http://127.0.0.1:1 m", 2, "answers at http://127.0.0.1:1: Connection refused"),
    "no gRPC server": (
        "infer grpc://127.0.0.1:1 m 1",
        2,
        "dragoman: cannot reach grpc://127.0.0.1:1: Connection refused",
    ),
    "missing folder": ("doctor nowhere", 2, "dragoman: 'nowhere' is not a folder"),
}

RUN = """
import contextlib, errno, io, json, os, socket, sys
from dragoman.cli import main

bind = socket.socket.bind

def without_privilege(sock, address):
    if address[1] == 80:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    bind(sock, address)

socket.socket.bind = without_privilege
sys.modules["grpc"] = None
results = {}
for name, arguments in json.load(sys.stdin).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
    results[name] = [status, out.getvalue(), err.getvalue()]
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        yield bound.getsockname()[1]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, taken: int) -> Any:
    """Run all commands in one process, which imports everything once."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "fahrenheit.py").write_text("def celsius(x: float) -> float:\n    return (x - 32) / 1.8\n")
    (folder / "notes.rst").touch()
    (folder / "models").mkdir()
    (folder / "models" / "line.joblib").touch()
    commands = {name: case[0].format(taken=taken).split() for name, case in CASES.items()}
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=folder,
        env={k: v for k, v in os.environ.items() if not k.startswith("DRAGOMAN_")},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_sentence(results: Any, name: str, taken: int) -> None:
    _, expected_status, message = CASES[name]
    status, out, err = results[name]
    assert (status, out) == (expected_status, ""), err
    assert message.format(taken=taken) in err
    assert "Traceback" not in err
    sentences = [line for line in err.splitlines() if re.match(r"dragoman( \w+)?: ", line)]
    assert len(sentences) == (name not in ("function in a file", "misspelled function"))
