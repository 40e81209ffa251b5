"""What commands share: the options that make a job, the folder of a report, printing."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from reports.terminal import echo, terminal, throttled

SEARCHABLE = "plan: what --set does not say has its default; --plan auto beside it searches the rest"
TOTAL = click.option("--total", is_flag=True, help="Also what all ranks send together, beside what one does.")
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON with stable keys.")


def figure_option(name: str, about: str, moves: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The file that a figure is drawn into, refused before any work is done when it is neither PNG nor SVG, nor (moves) GIF, or
    cannot be written.
    """
    ends = (".png", ".svg", ".gif") if moves else (".png", ".svg")

    def check(_: click.Context, __: click.Parameter, path: str | None) -> str | None:
        from topologies.documents.writing import check_writable
        from topologies.reading import UserError

        if path is not None and Path(path).suffix not in ends:
            raise UserError(f"{name} {path}: must end in {', '.join(ends[:-1])} or {ends[-1]}")
        if path is not None:
            check_writable(name, Path(path))
        return path

    return click.option(name, metavar="FILE", help=about, callback=check)


def framework_names() -> list[str]:
    """The frameworks whose settings are read and written, without importing them."""
    return sorted(path.parent.name for path in (Path(__file__).parents[2] / "strategies/frameworks").glob("*/settings.py"))


def picture_options(about: str) -> Callable[[Any], Any]:
    """A figure, and a page, of what is compared."""

    def options(command: Any) -> Any:
        page = click.option("--report", metavar="FOLDER", help="Also write an HTML page of the best, with the others beside it.")
        return figure_option("--plot", f"Draw {about} (PNG or SVG).")(page(command))

    return options


def headroom_option(command: Any) -> Any:
    """How much memory a recommended plan keeps free."""
    return click.option(
        "--headroom",
        type=click.FloatRange(0, 1, max_open=True),
        default=0.05,
        show_default=True,
        metavar="PART",
        help="Part of a GPU's memory that a recommended plan keeps free.",
    )(command)


def _inline(context: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    """Fields that stand in braces, or the name of a file."""
    from topologies.reading import parse_value

    return parse_value(value, "--plan") if value is not None and value.lstrip().startswith("{") else value


def _alike(_context: click.Context, _option: click.Parameter, given: bool) -> float | None:
    return 0.0 if given else None


def job_options(command: Any) -> Any:
    """What makes a job."""
    settings = [
        click.option(f"--from-{name}", metavar="FILE", help=f"Plan from {name}'s settings; keys not used are printed.")
        for name in framework_names()
    ]
    for option in reversed(
        (
            click.option(
                "--model",
                help="Model, instead of the job's: preset, config.json, YAML, or FILE.py:NAME, a module (the file is run).",
            ),
            click.option("--input", metavar="SIZES", help="Sizes of one sample of a module's input: 3x224x224, 2048:int64."),
            click.option(
                "--parallelize", metavar="FILE.py:NAME", help="Function that cuts the module over tp ranks (it is run)."
            ),
            click.option("--cluster", help="Cluster, instead of the job's: a name from the catalogue or YAML."),
            click.option("--nodes", type=int, help="Number of nodes."),
            click.option(
                "--plan",
                callback=_inline,
                help="Plan instead of the job's: a YAML file, or its fields, '{tp: 8, pp: 2}'; auto (the default): what a short "
                "search finds.",
            ),
            click.option("--profile", help="Profile of prices; by default the one of the cluster's GPU."),
            click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Change a field, e.g. plan.tp=4."),
            click.option("--ideal", "variability", is_flag=True, callback=_alike, help="GPUs of one kind are all alike."),
            click.option(
                "--effect",
                "effects",
                multiple=True,
                metavar="TEXT",
                help="What differs, e.g. 'gpu 37: speed 0.9'; instead of the job's own.",
            ),
            *settings,
        )
    ):
        command = option(command)
    return command


def show(renderable: Any) -> None:
    """To the terminal; lines are not broken when it is not one. A table that is too wide is not cut: no number is shortened."""
    console = terminal()
    if console.is_terminal:
        own = console.width
        for part in _parts(renderable):
            console.width = max(own, _widest(console, part))
            console.print(part, crop=False)
        return
    console.width = 1000
    with console.capture() as caught:
        console.print(renderable)
    echo("\n".join(line.rstrip() for line in caught.get().splitlines()))


def _parts(renderable: Any) -> Iterator[Any]:
    from rich.console import Group

    if isinstance(renderable, Group):
        for part in renderable.renderables:
            yield from _parts(part)
    else:
        yield renderable


def _widest(console: Any, part: Any) -> int:
    """Columns that a table needs whose cells are not to be wrapped; 0 for everything else."""
    from rich.measure import Measurement
    from rich.table import Table

    if not isinstance(part, Table) or not all(column.no_wrap for column in part.columns):
        return 0
    return Measurement.get(console, console.options.update(width=1000), part).maximum


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """What is being done: all of it on a terminal, elsewhere a line now and then."""
    from rich.text import Text

    console = terminal(stderr=True)
    if not console.is_terminal:
        yield throttled(lambda text: echo(text, err=True))
        return
    with console.status("reading") as status:
        yield lambda text: status.update(Text(text))


def write_json(path: str, data: Any) -> None:
    """Whole or not at all."""
    from topologies.documents.writing import write_whole

    write_whole(Path(path), json.dumps(data, indent=2) + "\n")


def check_files(**files: str | None) -> None:
    """Refuse, by the option's name, files that cannot be written."""
    from topologies.documents.writing import check_writable

    for option, path in files.items():
        if path is not None:
            check_writable(f"--{option}", Path(path))


def report_folder(report: str | None, option: str = "--report") -> Path | None:
    """The folder of a report, refused before any work is done."""
    if report is None:
        return None
    from topologies.reading import UserError

    if not report or (Path(report).exists() and not Path(report).is_dir()):
        raise UserError(f"{option} {report!r}: must name a folder, and no file")
    return Path(report)


def timeout_option(command: Any) -> Any:
    """How long ranks wait for each other, for all that the command launches."""
    from calibration.launch.place import PATIENT, patience

    @functools.wraps(command)
    def waiting(timeout: float, **given: Any) -> Any:
        with patience(timeout):
            return command(**given)

    about = "Ranks wait so long for one that does not go on, then all are ended."
    return click.option(
        "--timeout", type=click.FloatRange(1, 1e6), default=PATIENT, show_default=True, metavar="SECONDS", help=about
    )(waiting)


def engine_options(command: Any) -> Any:
    """Where simulations run."""
    for option in reversed(
        (
            click.option("--workers", type=int, help="Processes on this machine; by default one per CPU."),
            click.option("--dask", metavar="ADDRESS", help="Run on a Dask scheduler, such as tcp://10.0.0.1:8786."),
            click.option("--ray", metavar="ADDRESS", help="Run on a Ray cluster, such as auto."),
        )
    ):
        command = option(command)
    return command


def _number(_: Any, option: click.Parameter, text: str | None) -> float | None:
    """What an option says, as `15T`."""
    from topologies.documents.units import count

    return quantity(f"--{option.name}", text, count)


def money_options(command: Any) -> Any:
    """What the whole training is, and what it costs."""
    for option in reversed(
        (
            click.option(
                "--tokens", callback=_number, help="Tokens of the whole training, such as 15T or 15e12. [default: 10¹²]"
            ),
            click.option("--price", type=float, help="Dollars per GPU-hour; by default a listed price, named with its date."),
        )
    ):
        command = option(command)
    return command


def tokens_of(tokens: float | None) -> float | None:
    """Tokens of a training, checked."""
    check_positive(tokens=tokens)
    return tokens


def check_positive(**values: float | None) -> None:
    """Refuse, by the option's name, what is not greater than 0."""
    from topologies.reading import UserError

    for option, value in values.items():
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{option.replace('_', '-')}={value:g}: must be greater than 0")


def only_set(job: str | None, overrides: tuple[str, ...], given: dict[str, Any]) -> bool:
    """Whether the plan is only what `--set` says of it, which `--plan auto` would keep."""
    settings = any(given[f"from_{name}"] for name in framework_names())
    return job is None and given["plan"] is None and not settings and any(text.startswith("plan.") for text in overrides)


def changing(job: str | None, overrides: tuple[str, ...], given: dict[str, Any], find: bool = True) -> Any:
    """A function that reads the job with other fields, and with `--set` texts. A plan that is to be found is found once, for the
    job as it is, and stays where fields change; find=False: what is not said of it has its default.
    """
    from strategies.planner.arguments import settings, stated_otherwise
    from strategies.read_job import read_job, stated_job

    @functools.cache
    def asked() -> Any:
        return (read_job if find else stated_job)(job, overrides, **given)

    def read(changes: dict[str, Any], texts: Iterable[str] = (), name: str | None = None) -> Any:
        if not changes and not texts and name is None:
            return asked()
        found = settings(stated_otherwise(asked(), {})) if find and asked().auto else []
        return stated_job(job, [*overrides, *found, *texts, *settings(changes)], **given | ({"name": name} if name else {}))

    return read


def job_with_found_plan(job: str | None, *overrides: Any, **given: Any) -> Any:
    """The job; for commands that print no notes, which plan was found is said on stderr."""
    from strategies.read_job import read_job

    asked = read_job(job, *overrides, **given)
    tell_found(asked)
    return asked


def tell_found(job: Any) -> None:
    """On stderr, which plan was found and why, where none was said."""
    if job.auto:
        from strategies.job import FOUND

        echo(next(remark for remark in job.remarks if remark.startswith(FOUND)), err=True)


def quantity(option: str, text: str | None, parse: Any) -> float | None:
    """A quantity with its unit."""
    from topologies.reading import UserError

    try:
        return None if text is None else float(parse(text))
    except ValueError as error:
        raise UserError(f"{option} {text}: {error}") from None
