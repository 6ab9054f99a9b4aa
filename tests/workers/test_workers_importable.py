"""Live classes and functions reach a worker process by their import path, or are rejected."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from dragoman import plugins
from dragoman.core.errors import ModelFailed
from dragoman.core.spec import ModelSpec
from dragoman.workers.process import ProcessPool, importable
from workers.worker_models import Echo
from workers.workers_harness import MODELS, call, first_value


def test_importable_replaces_live_objects_by_their_import_path() -> None:
    assert importable(ModelSpec(name="m", uri="a:b")).uri == "a:b"
    live = importable(ModelSpec(name="m", target=Echo))
    assert live.target is None
    assert (live.runtime, live.uri) == ("python", "workers.worker_models:Echo")
    assert plugins.resolve(live.uri) is Echo
    from_file = importable(ModelSpec(name="m", target=plugins.resolve(f"{MODELS}:Echo")))
    assert from_file.uri == f"{MODELS}:Echo"
    for target in (Echo(live), lambda: 0, len):
        with pytest.raises(ModelFailed, match="placement 'process' needs 'module:object'"):
            importable(ModelSpec(name="m", target=target))


def test_an_object_that_another_has_replaced_under_its_name_is_rejected() -> None:
    other = type("Echo", (Echo,), {"__module__": Echo.__module__, "__qualname__": "Echo"})
    with pytest.raises(ModelFailed, match=r"got <class 'workers\.worker_models\.Echo'>"):
        importable(ModelSpec(name="m", target=other))


def test_objects_of_the_main_module(monkeypatch: pytest.MonkeyPatch) -> None:
    main: Any = ModuleType("__main__")
    main.Local = type("Local", (Echo,), {"__module__": "__main__"})
    monkeypatch.setitem(sys.modules, "__main__", main)
    for file, spec, uri in (
        ("/folder/script.py", None, "/folder/script.py:Local"),
        ("/folder/script.py", ModuleSpec("package.script", None), "package.script:Local"),  # python -m
        ("<stdin>", None, ""),
    ):
        main.__file__, main.__spec__ = file, spec
        target = ModelSpec(name="m", target=main.Local)
        if uri:
            assert importable(target).uri == uri
        else:
            with pytest.raises(ModelFailed, match="at the top level of a module or script"):
                importable(target)


async def test_a_live_class_runs_in_a_worker_process() -> None:
    pool = ProcessPool(ModelSpec(name="m", target=Echo), lambda: None)
    try:
        await pool.start()
        assert first_value(await call(pool, 5)) == 5
    finally:
        await pool.close()
