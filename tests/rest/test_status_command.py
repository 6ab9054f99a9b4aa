"""`dragoman status`: errors in one sentence, keys, and models without worker processes."""

import asyncio
import json
from pathlib import Path

import pytest

from access.access_models import Doubler, KeyFile
from dragoman.cli import main
from rest.rest_server import serving


async def run(*arguments: str) -> int:
    """Run the command, in a thread, because the server runs in this event loop."""
    return await asyncio.to_thread(main, ["status", *arguments])


async def test_models_and_their_states(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(Doubler) as server:
        assert await run(server.dragoman.http_url + "/") == 0
        assert capsys.readouterr().out == (
            "model    version  state  in flight  workers  reason\nDoubler  -        READY  0          -\n\nready\n"
        )
        assert await run(server.dragoman.http_url.removeprefix("http://"), "--json") == 0
        assert json.loads(capsys.readouterr().out) == {
            "ready": True,
            "models": [{"name": "Doubler", "version": "", "state": "READY", "reason": "", "calls": 0, "workers": []}],
            "problems": [],
        }


async def test_a_server_with_keys_needs_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = KeyFile(tmp_path / "keys.toml")
    key = keys.add("operator", ["read"])
    infers = keys.add("app", ["infer"])
    async with serving(Doubler, api_keys=str(keys.path)) as server:
        url = server.dragoman.http_url
        assert await run(url) == 2
        assert f"dragoman: {url} responds with 401: " in capsys.readouterr().err
        file = tmp_path / "key"
        file.write_text(infers)
        assert await run(url, "--key-file", str(file)) == 2
        assert "does not have the role 'read'" in capsys.readouterr().err
        file.write_text(f"{key}\n")
        assert await run(url, "--key-file", str(file)) == 0
        monkeypatch.setenv("DRAGOMAN_API_KEY", key)
        assert await run(url) == 0
