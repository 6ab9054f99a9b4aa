"""`dragoman serve --help`: the settings most used, a search, and all settings."""

import re

import pytest

from dragoman.cli import main
from dragoman.settings import GROUPS, SETTINGS

SHOWN = [option for option in SETTINGS.values() if not option.secret]


def print_help(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exited:
        main(["serve", *arguments])
    assert exited.value.code == 0
    return capsys.readouterr().out


def flags(text: str) -> set[str]:
    """Return the flags that begin a line."""
    return {line.split()[0] for line in text.splitlines() if line.startswith("  --") and "=" not in line.split()[0]}


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ("models/", "--help")])
def test_short_help_has_the_common_settings_and_the_groups(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = print_help(capsys, *arguments)
    assert flags(text) == {flag(option.name) for option in SHOWN if option.common} | {"--json", "--check"}
    assert {"--http-port", "--allow-pickle", "--api-keys"} <= flags(text)
    assert len(text.splitlines()) < 60
    for group in GROUPS:
        count = sum(option.group == group and not option.common for option in SHOWN)
        assert re.search(rf"--help=\S+ +{count} more: {re.escape(group)}\n", text)


def test_each_group_named_by_the_short_help_lists_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    words = re.findall(r"--help=(\w+) +\d+ more: (.*)", print_help(capsys, "--help"))
    assert [group for _, group in words] == list(GROUPS)
    for word, group in words:
        assert flags(print_help(capsys, f"--help={word}")) >= {flag(o.name) for o in SHOWN if o.group == group}


def test_all_settings(capsys: pytest.CaptureFixture[str]) -> None:
    text = print_help(capsys, "--help=all")
    assert flags(text) == {flag(option.name) for option in SHOWN}
    assert "--worker-secret " not in text
    names = (
        "oip_rest,oip_generate,umbridge,lmi,tgi,openai,anthropic,ollama,kserve_v1,oip_grpc,metrics,usage,batches,"
        "message_batches)"
    )
    assert names in text  # unbroken


@pytest.mark.parametrize("word", ["timeout", "TIMEOUT", "DRAGOMAN_TIMEOUT", "--timeout"])
def test_search(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = print_help(capsys, f"--help={word}")
    assert "--timeout-s S" in text
    assert "deadline in seconds for requests that set none" in text
    assert "--http-port " not in text.partition("Each flag")[0]


def test_search_without_result(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["serve", "--help=timout"])
    assert exited.value.code == 2
    assert "no setting contains 'timout'; did you mean 'timeout'?" in capsys.readouterr().err


def test_help_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "serve models over HTTP and gRPC" in capsys.readouterr().err
