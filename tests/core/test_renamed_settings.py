"""Old names of settings: flags, variables, keys of files and arguments are accepted with a warning, for one release."""

import argparse
import logging
from pathlib import Path

import pytest

from dragoman.cli import CommandParser, serve, serving
from dragoman.core import options
from dragoman.core.errors import InvalidInput
from dragoman.engine.model_files import model_settings
from dragoman.engine_setup import settings_for
from dragoman.settings import SETTINGS, Settings, from_environment, parse_settings

OLD = {"queue_length": "max_queue", "keys_file": "api_keys", "copies": "replicas"}
WARNING = "setting 'queue_length' is called 'max_queue' now; the next release rejects the old name"


@pytest.fixture(autouse=True)
def _renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    for old, new in OLD.items():
        monkeypatch.setitem(options.RENAMED, old, new)


def test_an_old_name_sets_the_new_setting_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "dragoman.toml").write_text("[server]\nqueue_length = 5\n")
    with pytest.warns(FutureWarning, match=WARNING):
        assert settings_for([str(tmp_path)]).max_queue == 5
    with pytest.warns(FutureWarning, match=WARNING):
        assert settings_for([str(tmp_path)], from_environment({"DRAGOMAN_QUEUE_LENGTH": "6"})).max_queue == 6
    with pytest.warns(FutureWarning, match=WARNING):
        assert parse_settings({"max_queue": 1}, {"queue_length": 7}).max_queue == 7  # the later layer counts


def test_both_names_in_one_place_are_rejected() -> None:
    with pytest.raises(InvalidInput, match="setting 'queue_length': expected only 'max_queue', its new name, got both"):
        parse_settings({"queue_length": 1, "max_queue": 2})


def test_an_old_name_does_not_open_what_a_file_beside_models_may_not_set(tmp_path: Path) -> None:
    (tmp_path / "dragoman.toml").write_text('[server]\nkeys_file = "keys.toml"\n')
    with pytest.raises(InvalidInput, match="setting 'api_keys' cannot be set in a file beside models"):
        settings_for([str(tmp_path)])


def test_old_names_in_a_models_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "dragoman.toml").write_text("[model]\ncopies = 2\n")
    with caplog.at_level(logging.WARNING):
        found = model_settings(tmp_path)
    assert found is not None
    assert found["replicas"] == 2
    assert "'copies' is called 'replicas' now" in caplog.text


def test_an_old_flag_is_accepted_logged_once_and_not_in_the_help(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    parser = CommandParser(prog="dragoman serve")
    serve.add_arguments(parser)
    assert parser.search is not None
    assert "queue-length" not in parser.search("all")
    made: list[Settings] = []
    monkeypatch.setattr(serving, "run", lambda server, _on_start: made.append(server.settings))
    monkeypatch.setattr("dragoman.system.logs.set_up", lambda *_: None)
    model = tmp_path / "model.py"
    model.write_text("def model(x: float) -> float:\n    return x\n")
    arguments: argparse.Namespace = parser.parse_args([f"{model}:model", "--queue-length", "9"])
    with caplog.at_level(logging.WARNING):
        assert serve._serve(arguments) == 0
    assert made[0].max_queue == 9
    assert [record.message for record in caplog.records if "queue_length" in record.message] == [WARNING]


def test_the_table_names_settings() -> None:
    """A new name exists, and an old one is not that of another setting."""
    for old in OLD:
        del options.RENAMED[old]
    assert {*options.RENAMED.values()} <= {*SETTINGS}
    assert not options.RENAMED.keys() & SETTINGS.keys()
