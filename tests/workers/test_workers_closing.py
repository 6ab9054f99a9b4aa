"""What a model has taken is given back, whatever came in between its loading and its end."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from workers_harness import spec_of, until

from dragoman import plugins
from dragoman.core.errors import ModelFailed
from dragoman.workers.pool import Pool


def pool_for(place: str, model: str, folder: Path, **options: Any) -> Pool:
    files = {name: str(folder / name) for name in ("loaded", "mended", "begun", "go", "closed")}
    pool: Pool = plugins.find("pools", place)(spec_of(model, parameters=files, **options), lambda: None)
    return pool


@pytest.mark.parametrize("model", ["ClosesLate", "AsyncClosesLate"])
@pytest.mark.parametrize("place", ["inline", "thread"])
async def test_a_model_that_nobody_waits_for_is_closed_when_it_is_loaded(
    place: str, model: str, tmp_path: Path
) -> None:
    pool = pool_for(place, model, tmp_path)
    starting = asyncio.create_task(pool.start())
    await until((tmp_path / "begun").exists)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(starting, 5)
    await pool.close()
    assert not (tmp_path / "closed").exists()
    (tmp_path / "go").touch()
    await until((tmp_path / "closed").exists)


async def test_a_replica_whose_neighbour_cannot_be_loaded_is_closed(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    pool = pool_for("thread", "ClosesLate", tmp_path, replicas=2)
    with pytest.raises(ModelFailed, match="the weights are gone"):
        await pool.start()
    await pool.close()
    assert (tmp_path / "closed").exists()
