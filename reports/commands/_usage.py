"""Wrong words on the command line: one line as for every other mistake, in place of click's four."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from topologies.documents.errors import UserError, nearest

HELP = getattr(click.exceptions, "NoArgsIsHelpError", ())  # since click 8.2: help that is printed because nothing was said


@contextmanager
def on_one_line() -> Iterator[None]:
    """Raises UserError for what click refuses; its help stays help."""
    try:
        yield
    except HELP:
        raise
    except click.UsageError as error:
        raise UserError(sentence(error)) from None


def sentence(error: click.UsageError) -> str:
    """Which option, what is wrong with it, and where all of them are listed."""
    context = error.ctx
    lists = f" (`{context.command_path} --help` lists all)" if context else ""
    match error:
        case click.MissingParameter(param=click.Parameter() as parameter):
            return f"{_name(parameter)}: is missing{lists}"
        case click.BadParameter(param=click.Parameter() as parameter):
            return f"{_name(parameter)}: {error.message.rstrip('.')}"
        case click.NoSuchOption():
            known = [name for each in context.command.get_params(context) for name in each.opts] if context else []
            near = nearest(error.option_name, [name for name in known if name.startswith("--")], cutoff=0.75)
            return f"no option {error.option_name}{near if 'did you mean' in near else lists}"
        case click.BadOptionUsage():
            return f"{error.option_name}: {error.message.removeprefix(f'Option {error.option_name!r} ').rstrip('.')}"
    message = error.format_message().rstrip(".")
    return f"{message[:1].lower()}{message[1:]}{lists}"


def _name(parameter: click.Parameter) -> str:
    return parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
