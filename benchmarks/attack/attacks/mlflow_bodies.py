"""Bodies of MLflow's scoring protocol, which MLflow and pandas parse."""

from collections.abc import Callable
from functools import partial

from benchmarks.attack.attack import Attack, Target
from benchmarks.attack.attacks.json_bodies import fill, keys
from benchmarks.attack.http import post

_MIB = 1 << 20
_SIZE = 60 * _MIB


def _sparse(rows: int) -> bytes:
    """Return records each of which has a column of its own."""
    return b'{"dataframe_records":[' + b",".join(b'{"%d":1}' % n for n in range(rows)) + b"]}"


def _attack(
    name: str, about: str, body: Callable[[], bytes], size: int = _SIZE, content_type: str = "application/json"
) -> Attack:
    def run(target: Target) -> str:
        return post(target, "/models/mlflow/invocations", body(), compressed=True, content_type=content_type)

    return Attack(
        name=f"mlflow-{name}",
        about=about,
        run=run,
        body_bytes=size,
        models=("doubled", "mlflow"),
        options=("--allow-pickle",),
    )


ATTACKS = (
    _attack(
        "records",
        '60 MiB of `{"a":1},...` as dataframe_records',
        partial(fill, b'{"dataframe_records":', b'{"a":1}', b"}", _SIZE),
    ),
    _attack(
        "split",
        "60 MiB of `[1],...` as dataframe_split",
        partial(fill, b'{"dataframe_split":{"data":', b"[1]", b"}}", _SIZE),
    ),
    _attack("instances", "60 MiB of `[1],...` as instances", partial(fill, b'{"instances":', b"[1]", b"}", _SIZE)),
    _attack("texts", "60 MiB of texts as instances", partial(fill, b'{"instances":', b'"ab"', b"}", _SIZE)),
    _attack("keys", "60 MiB of columns", lambda: b'{"inputs":' + keys(_SIZE) + b"}"),
    _attack("params", "60 MiB of params", lambda: b'{"instances":[[1]],"params":' + keys(_SIZE) + b"}"),
    _attack("sparse", "40,000 records with a column each", partial(_sparse, 40_000), 1 << 19),
    _attack("nested", "60 MiB of `[`", lambda: b'{"instances":' + b"[" * _SIZE + b"}"),
    _attack("csv", "60 MiB of CSV, a number a line", lambda: b"a\n" + b"1\n" * 30 * _MIB, content_type="text/csv"),
    _attack("csv-columns", "60 MiB of CSV in a line", lambda: b"1," * 30 * _MIB, content_type="text/csv"),
)
