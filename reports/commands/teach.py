"""`shardyard teach`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from reports.commands._common import AS_JSON, figure_option, show
from reports.terminal import echo

USUAL = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
MOST = 5_000  # passes that are drawn


@click.command("teach", epilog="Example: shardyard teach gpipe 1f1b zb-v --plot schedules.gif")
@click.argument("names", nargs=-1, metavar="[SCHEDULE | ALGORITHM]…")
@click.option("--pp", type=click.IntRange(1, 64), default=4, show_default=True, help="Pipeline ranks.")
@click.option("--microbatches", type=click.IntRange(1, 1000), default=8, show_default=True, help="Microbatches in a step.")
@click.option("--chunks", type=click.IntRange(1, 16), help="Virtual stages of each rank, of schedules that take any number.")
@click.option("--backward", type=click.FloatRange(0.1, 10), default=2.0, show_default=True, help="Length of a backward pass.")
@click.option("--ranks", type=click.IntRange(2, 16), default=4, show_default=True, help="Ranks of an all-reduce.")
@figure_option("--plot", "Draw them under each other (PNG or SVG), or let time pass (GIF).", moves=True)
@AS_JSON
def command(
    names: tuple[str, ...],
    pp: int,
    microbatches: int,
    chunks: int | None,
    backward: float,
    ranks: int,
    plot: str | None,
    as_json: bool,
) -> None:
    """Pipeline schedules beside each other: passes of a unit's length, no network; bubble, and microbatches that ranks hold.

    Or all-reduces (all_reduce/ring all_reduce/tree reduce/flat+broadcast/flat): who sends to whom, round by round.
    """
    if any("/" in name for name in names):
        _all_reduces(names, ranks, plot, as_json)
        return
    from strategies.schedules import schedules
    from strategies.schedules.unit_play import unit_play
    from topologies.reading import UserError

    if pp * microbatches * max(1, len(names)) > MOST:
        raise UserError(f"pp·microbatches·schedules = {pp}·{microbatches}·{len(names)}: more than {MOST:,} are not drawn")
    chosen = [schedules.named(name) for name in names or USUAL]
    plays = [unit_play(name, pp, microbatches, chunks if schedules[name].chunks is None else None, backward) for name in chosen]
    if plot:
        from reports.figures.schedules import schedules as draw

        draw(plays, Path(plot))
        echo(f"wrote {plot}", err=as_json)
    if as_json:
        keys = "name", "ranks", "microbatches", "chunks", "length", "bubble", "gaps", "overhead"
        data = [{key: getattr(play, key) for key in keys} | {"held": [play.held(r) for r in range(pp)]} for play in plays]
        echo(json.dumps(data, indent=2))
        return
    from reports.tables.schedules import overview

    show(overview(plays))


def _all_reduces(names: tuple[str, ...], ranks: int, plot: str | None, as_json: bool) -> None:
    from sim.analysis.collective_rounds import collective_rounds

    plays = [collective_rounds(name, ranks) for name in names]
    if plot:
        from reports.figures.rounds import rounds as draw

        draw(plays, Path(plot))
        echo(f"wrote {plot}", err=as_json)
    if as_json:
        echo(json.dumps([play.to_dict() for play in plays], indent=2))
        return
    from reports.tables.schedules import all_reduces

    show(all_reduces(plays))
