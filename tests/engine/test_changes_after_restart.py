"""Changes that clients make end with the server, and the log says so when they are made."""

from pathlib import Path

import pytest

from dragoman.core.calls import Index, Load, Request, ScaleModel, Unload
from dragoman.engine.engine import Engine
from dragoman.engine_setup import open_engine

MODEL = """
import dragoman

@dragoman.model(placement="thread")
def model(x: float) -> float:
    return x
"""


async def states(engine: Engine) -> dict[str, tuple[str, int]]:
    """Return the state and the number of replicas of each model."""
    index = (await engine.call(Request(Index()))).answer
    replicas = {d.spec.name: d.spec.replicas for d in engine.registry.all()}
    return {entry.name: (entry.state, replicas.get(entry.name, 0)) for entry in index}


async def test_changes_end_with_the_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("models/few", "models/gone", "others/more"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "model.py").write_text(MODEL)

    def serve() -> Engine:
        return open_engine(tmp_path / "models", control_open=True, model_folders=str(tmp_path / "others"))

    caplog.set_level("INFO", "dragoman.engine")
    async with serve() as engine:
        started = await states(engine)
        await engine.call(Request(ScaleModel("", 2), "few"))
        await engine.call(Request(Unload(), "gone"))
        await engine.call(Request(Load(url=str(tmp_path / "others" / "more")), "more"))
        assert await states(engine) == {"few": ("READY", 2), "gone": ("UNAVAILABLE", 0), "more": ("READY", 1)}
        for line in (
            "model 'few': 2 replicas until the server ends; to keep that, set replicas in its dragoman.toml",
            "model 'gone': unloaded until the server ends; to keep that, take it out of the served folders",
            "model 'more': registered until the server ends; to keep that, put it into a served folder",
        ):
            assert line in caplog.text
        caplog.clear()
        await engine.call(Request(Unload(), "more"))
        await engine.call(Request(ScaleModel("", 2), "few"))  # which changes nothing
        assert "until the server ends" not in caplog.text
    async with serve() as engine:
        assert await states(engine) == started == {"few": ("READY", 1), "gone": ("READY", 1)}
