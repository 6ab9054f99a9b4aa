"""A system without any folder for temporary files: the server serves, and says what to mount for the rest."""

import logging
import os
import sys
import tempfile

import pytest

from dragoman.core.errors import ModelFailed
from dragoman.core.spec import ModelSpec
from dragoman.engine.counters import METRICS_FOLDER
from dragoman.engine.sent_models import _new_folder
from dragoman.server import _prometheus_folder
from dragoman.settings import Settings
from dragoman.workers.launcher import LocalLauncher

HINT = "mount a writable one at /tmp, such as a tmpfs or an emptyDir, or name one with TMPDIR"


@pytest.fixture(autouse=True)
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder can be written, also not by root."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc"])
    monkeypatch.delenv(METRICS_FOLDER, raising=False)


def test_the_server_serves_without_metrics_of_prometheus_client(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "prometheus_client", raising=False)
    with caplog.at_level(logging.WARNING), _prometheus_folder(Settings()):
        assert METRICS_FOLDER not in os.environ
    assert HINT in caplog.text


async def test_a_worker_with_a_folder_of_its_own_says_what_to_mount() -> None:
    spec = ModelSpec(name="m", uri="m.py", working_directory="own")
    with pytest.raises(ModelFailed, match=f"working_directory 'own': .*{HINT}"):
        await LocalLauncher(spec).launch()


def test_files_that_a_client_sends_cannot_be_stored() -> None:
    with pytest.raises(ModelFailed, match=HINT):
        _new_folder()
