"""The server under attack: a fresh process for each attack, with the default settings."""

import contextlib
import http.client
import io
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.attack.attack import Attack, Target
from benchmarks.processes import RESULTS, ROOT, dragoman, free_port, run_process

HERE = Path(__file__).parent
FOLDER = RESULTS / "attack"
LLAMA = FOLDER / "tiny-llama"
MLFLOW = FOLDER / "mlflow"
# Models by the names that clients use.
MODELS: Mapping[str, str] = {
    "doubled": f"{HERE / 'models.py'}:doubled",
    "Rows": f"{HERE / 'models.py'}:Rows",
    "Texts": f"{HERE / 'models.py'}:Texts",
    "Large": f"{HERE / 'models.py'}:Large",
    "Pictures": f"{HERE / 'models.py'}:Pictures",
    "Total": f"{HERE / 'models.py'}:Total",
    "vector": f"{HERE / 'models.py'}:vector",
    "tiny-llama": str(LLAMA),
    "mlflow": str(MLFLOW),
}


@contextmanager
def run_server(attack: Attack) -> Iterator[Target]:
    """Run the server of an attack. Its log is in `benchmarks/results/attack/server.log`."""
    if "tiny-llama" in attack.models and not (LLAMA / "config.json").exists():
        _make_llama(LLAMA)
    if "mlflow" in attack.models and not (MLFLOW / "MLmodel").exists():
        _make_mlflow(MLFLOW)
    port, grpc = free_port(), free_port() if attack.front != "asgi" else 0
    arguments = [*attack.prepare(FOLDER), *attack.options]
    command = dragoman([MODELS[name] for name in attack.models], port, grpc, *arguments)
    if attack.front == "asgi":
        uvicorn = ["-m", "uvicorn", "benchmarks.attack.asgi_server:application", "--log-level", "warning"]
        command = [sys.executable, *uvicorn, "--port", str(port)]
    if attack.max_files:
        command = ["bash", "-c", 'ulimit -n "$0" && exec "$@"', str(attack.max_files), *command]
    with run_process(command, FOLDER / "server.log") as process:
        process.wait_until(lambda: all(_is_ready(port, name) for name in attack.models), 120)
        if attack.front in ("server", "asgi"):
            yield Target(port, grpc, process, arguments=arguments)
        else:
            with _run_proxy(attack.front, port) as entry:
                yield Target(entry, grpc, process, arguments=arguments)


def _is_ready(port: int, model: str = "doubled") -> bool:
    """Return whether a model is ready; further ones of an attack may be what it is about."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", f"/v2/models/{model}/ready")
        return connection.getresponse().status == 200
    finally:
        connection.close()


_NGINX = """\
daemon off; pid {folder}/nginx.pid; error_log stderr; worker_processes 1;
events {{ worker_connections 1024; }}
http {{
    access_log off; client_body_temp_path {folder}/bodies; proxy_temp_path {folder}/answers;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    upstream models {{ server 127.0.0.1:{server}; keepalive 2; }}
    server {{
        listen 127.0.0.1:{port};
        client_max_body_size 64m; underscores_in_headers on; ignore_invalid_headers off;
        location / {{ proxy_pass http://models; proxy_http_version 1.1; proxy_set_header Connection ""; }}
    }}
}}
"""
_HAPROXY = """\
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    http-reuse always
frontend clients
    bind 127.0.0.1:{port}
    default_backend models
backend models
    server one 127.0.0.1:{server} pool-max-conn 2
"""
_PROXIES: Mapping[str, tuple[str, Sequence[str]]] = {
    "nginx": (_NGINX, ("nginx", "-e", "stderr", "-c")),
    "haproxy": (_HAPROXY, ("haproxy", "-f")),
}


@contextmanager
def _run_proxy(name: str, server: int) -> Iterator[int]:
    """Run a proxy whose connections to the server all clients share, and yield its port."""
    text, command = _PROXIES[name]
    port, file = free_port(), FOLDER / f"{name}.conf"
    file.write_text(text.format(folder=FOLDER, port=port, server=server))
    try:
        with run_process([*command, str(file)], FOLDER / f"{name}.log") as process:
            process.wait_until(lambda: _is_ready(port), 30)
            yield port
    except FileNotFoundError as error:
        raise RuntimeError(f"the attack needs {name}, as by `apt install {name}`") from error


def _make_llama(folder: Path) -> None:
    """Save a small Llama with random weights."""
    sys.path.insert(0, str(ROOT / "examples" / "text"))
    from transformers.utils import logging

    from dragoman.plugins import import_file

    logging.set_verbosity_error()
    train = import_file(ROOT / "examples" / "text" / "train_models.py")
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        train.train(folder, "llama", train.TINY, 1)


def _make_mlflow(folder: Path) -> None:
    """Save a regression of one column."""
    import mlflow.sklearn
    from sklearn.linear_model import LinearRegression

    model = LinearRegression().fit([[0.0], [1.0]], [0.0, 2.0])
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        mlflow.sklearn.save_model(model, str(folder), serialization_format="pickle", pip_requirements=[])
