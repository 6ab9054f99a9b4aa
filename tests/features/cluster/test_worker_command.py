"""The command `dragoman worker`, beside the connection that it makes."""

import pytest

from dragoman.cli import main


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_has_the_flags_of_the_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert [flag for flag in ("time-limit-s", "cache-gib", "plaintext") if flag not in script] == []


def test_an_address_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["worker"])
    assert exited.value.code == 2
    assert capsys.readouterr().err.endswith("the following arguments are required: --join\n")
