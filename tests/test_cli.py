"""What the command line tells before it loads anything."""

import pytest

from rlite import __version__
from rlite.cli import main
from rlite.cli.commands import COMMANDS


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    assert all(f"\n  {name} " in shown for name in ("fit", "validate", "test", "generate", *COMMANDS))


def test_no_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    assert "usage: rlite COMMAND" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"rlite {__version__}\n"
