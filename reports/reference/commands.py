"""The page of commands, from their own help."""

from __future__ import annotations

from collections.abc import Iterator

import click

from reports.commands import main
from reports.reference.markdown import code, plain, sentence, table

_HEAD = """# Commands

What `shardyard COMMAND --help` says. A job is a file, or `--model`, `--cluster`, `--nodes` and `--set` in its place;
[Jobs and commands](../commands.md) has an example of each. Options of a job are the same everywhere and are told
[once](#options-of-a-job).
"""


def command_page() -> str:
    """Every command: usage, what it does, options."""
    context = click.Context(main, info_name="shardyard")
    every = [(name, command) for name in main.list_commands(context) if (command := main.get_command(context, name))]
    shared = _shared([command for _, command in every])
    parts = [_HEAD, table(("command", ""), [(f"[`{name}`](#{name})", plain(c.get_short_help_str(200))) for name, c in every])]
    parts += ["\n## Options of a job\n", table(_COLUMNS, [_row(option) for option in shared.values()])]
    for name, command in every:
        parts += _section(name, command, context, shared)
    return "\n".join(parts)


_COLUMNS = "option", "values", "default", ""


def _shared(commands: list[click.Command]) -> dict[str, click.Option]:
    """Options of `simulate` that make a job: it and `export` have them, which has few others."""
    with_job = [command for command in commands if command.name in ("simulate", "export")]
    kept = [{option.opts[0]: option for option in _options(command)} for command in with_job]
    return {name: option for name, option in kept[0].items() if name in kept[1] and name != "--json"}


def _section(name: str, command: click.Command, parent: click.Context, shared: dict[str, click.Option]) -> Iterator[str]:
    with click.Context(command, info_name=name, parent=parent) as context:
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        yield f"\n## {name}\n\n```text\n{usage}\n```\n"
        yield "\n\n".join(sentence(part) for part in (command.help or "").split("\n\n")) + "\n"
    options = _options(command)
    of_job = [option for option in options if option.opts[0] in shared and option.help == shared[option.opts[0]].help]
    own = [option for option in options if option not in of_job]
    if len(of_job) > 5:
        yield "The [options of a job](#options-of-a-job), and:\n" if own else "The [options of a job](#options-of-a-job).\n"
    else:
        own = options
    if own:
        yield table(_COLUMNS, [_row(option) for option in own])


def _options(command: click.Command) -> list[click.Option]:
    return [option for option in command.params if isinstance(option, click.Option) and not option.hidden]


def _row(option: click.Option) -> tuple[str, str, str, str]:
    with click.Context(click.Command("")) as context:
        values = "" if option.is_flag else option.make_metavar(context)
        extra = option.get_help_extra(context)
    default = str(extra.get("default", ""))
    names = ", ".join(code(name) for name in [*option.opts, *option.secondary_opts])
    return names + (" (again and again)" if option.multiple else ""), code(values), code(default), plain(option.help or "")
