"""Models are closed, also if loading was cancelled or failed."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dragoman import plugins
from dragoman.core.errors import ModelFailed
from dragoman.workers.pool import Pool
from workers.workers_harness import spec_of, wait_until


def pool_for(placement: str, model: str, folder: Path, **options: Any) -> Pool:
    files = {name: str(folder / name) for name in ("loaded", "repaired", "begun", "go", "closed")}
    pool: Pool = plugins.find("pools", placement)(spec_of(model, parameters=files, **options), lambda: None)
    return pool


@pytest.mark.parametrize("model", ["LoadsSlowly", "AsyncLoadsSlowly"])
@pytest.mark.parametrize("placement", ["inline", "thread"])
async def test_models_are_closed_after_a_cancelled_load(placement: str, model: str, tmp_path: Path) -> None:
    pool = pool_for(placement, model, tmp_path)
    starting = asyncio.create_task(pool.start())
    await wait_until((tmp_path / "begun").exists)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(starting, 60)
    await pool.close()
    assert not (tmp_path / "closed").exists()
    (tmp_path / "go").touch()
    await wait_until((tmp_path / "closed").exists)


async def test_loaded_replicas_are_closed_if_another_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    pool = pool_for("thread", "LoadsSlowly", tmp_path, replicas=2)
    with pytest.raises(ModelFailed, match="the weights are gone"):
        await pool.start()
    await pool.close()
    assert (tmp_path / "closed").exists()
