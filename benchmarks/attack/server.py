"""The server under attack: a fresh process for each attack, with the default settings."""

import contextlib
import io
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.attack.attack import Target
from benchmarks.processes import RESULTS, ROOT, dragoman, free_port, http_ready, run_process

HERE = Path(__file__).parent
LLAMA = RESULTS / "attack" / "tiny-llama"
MLFLOW = RESULTS / "attack" / "mlflow"
# Models by the names that clients use.
MODELS: Mapping[str, str] = {
    "doubled": f"{HERE / 'models.py'}:doubled",
    "Rows": f"{HERE / 'models.py'}:Rows",
    "Texts": f"{HERE / 'models.py'}:Texts",
    "Large": f"{HERE / 'models.py'}:Large",
    "vector": f"{HERE / 'models.py'}:vector",
    "tiny-llama": str(LLAMA),
    "mlflow": str(MLFLOW),
}


@contextmanager
def run_server(models: Sequence[str], options: Sequence[str] = (), max_files: int = 0) -> Iterator[Target]:
    """Run a server of some of `MODELS`, with at most `max_files` open files if that is not 0.

    Its log is in `benchmarks/results/attack/server.log`.
    """
    if "tiny-llama" in models and not (LLAMA / "config.json").exists():
        _make_llama(LLAMA)
    if "mlflow" in models and not (MLFLOW / "MLmodel").exists():
        _make_mlflow(MLFLOW)
    http, grpc = free_port(), free_port()
    command = dragoman([MODELS[name] for name in models], http, grpc, *options)
    if max_files:
        command = ["bash", "-c", 'ulimit -n "$0" && exec "$@"', str(max_files), *command]
    with run_process(command, RESULTS / "attack" / "server.log") as process:
        process.wait_until(lambda: http_ready(http), 120)
        yield Target(http, grpc, process)


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
