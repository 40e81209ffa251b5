"""The command line: a command is one file of this folder that defines `command`; its name is the file's."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click

from reports.inputs import VERSION
from reports.terminal import echo

FOLDER = Path(__file__).parent
AS_IS = "\b\n"  # before a paragraph that click does not wrap


def end_interrupted(error: KeyboardInterrupt, kept: str = "") -> NoReturn:
    """One line about what is kept, and the exit code of the signal: 130 for Ctrl-C, 143 for SIGTERM."""
    number = signal.Signals(error.args[0] if error.args else signal.SIGINT)
    how = "" if number == signal.SIGINT else f" by {number.name}"
    echo(f"interrupted{how}{f': {kept}' if kept else ''}", err=True)
    sys.exit(128 + number)


@contextmanager
def said_when_interrupted() -> Iterator[None]:
    """Ends with 128 + the signal's number, as shells do, and says so."""
    try:
        yield
    except KeyboardInterrupt as error:
        end_interrupted(error)


class Commands(click.Group):
    """Finds commands in this folder. A user's mistake is one line on stderr and exit code 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the files, sorted."""
        return sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported when it is asked for. Its example is not wrapped, so that it can be pasted."""
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = import_module(f"{__name__}.{cmd_name}").command
        if command.epilog and not command.epilog.startswith(AS_IS):
            command.epilog = AS_IS + command.epilog
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Each command with what it does, in whole sentences on as many lines as they need."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(limit=200)) for name, command in commands if command])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does; an unknown command is answered with the nearest known name."""
        from topologies.documents.errors import UserError, nearest

        name = args[0]
        if not name.startswith("-") and name not in self.list_commands(ctx):
            raise UserError(f"unknown command '{name}'{nearest(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """As click does; a wrong option is one line."""
        from reports.commands._usage import on_one_line

        with said_when_interrupted(), on_one_line():  # or click says "Aborted!"
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """As click does; a wrong option is one line, and a signal, too."""
        from reports.commands._usage import on_one_line

        with said_when_interrupted(), on_one_line():
            return super().invoke(ctx)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line."""
        from reports.commands._signals import ended_cleanly
        from topologies.documents.errors import UserError
        from topologies.documents.extras import EXTRAS, ExtraMissingError, how_to_install

        with said_when_interrupted(), ended_cleanly():
            try:
                return super().main(*args, **kwargs)
            except (UserError, ExtraMissingError) as error:
                echo(f"error: {error}", err=True)
            except ModuleNotFoundError as error:
                if error.name not in EXTRAS:
                    raise
                echo(f"error: {how_to_install(error.name)}", err=True)
            except OSError as error:  # a full disk, a closed pipe
                echo(f"error: {error.filename or 'output'}: {error.strerror or error}", err=True)
            sys.exit(2)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=AS_IS + "Begin with: shardyard simulate --model llama-3.1-8b --cluster dgx-h100\n"
    "Or look:    shardyard explore --model llama-3.1-8b --cluster dgx-h100",
)
@click.version_option(VERSION, prog_name="shardyard")
def main() -> None:
    """Simulate distributed training: step time, memory and communication of any plan on any cluster."""
