"""`shardyard explore`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from reports.commands._common import job_options
from reports.terminal import echo

FIRST = {"model": "llama-3.1-8b", "cluster": "dgx-h100", "nodes": 2}  # the job where none is given


@click.command("explore", epilog="Example: shardyard explore --model llama-3.1-8b --cluster dgx-h100 --nodes 2")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@job_options
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=8057,
    show_default=True,
    help="Port on 127.0.0.1, which only this machine reaches.",
)
@click.option("--folder", metavar="FOLDER", default=".", show_default=True, help="The page may name files of this folder only.")
@click.option("--open/--no-open", "browser", default=True, show_default=True, help="Open the page in a browser.")
def command(job: str | None, port: int, folder: str, browser: bool, **given: Any) -> None:
    """A local page of a job: change it on the left, see the answer on the right. Nothing leaves this machine."""
    import socket

    import uvicorn

    from reports.explorer.app import application
    from reports.explorer.session import Session
    from topologies.reading import UserError

    if not Path(folder).is_dir():
        raise UserError(f"--folder {folder}: is no folder")
    if job is None and not any(given[name] for name in given if name in FIRST or name.startswith("from_")):
        given |= FIRST
    session = Session(job, given, Path(folder))
    session.find_plan()  # a mistake is told before anything is served
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(f"--port {port}: {error.strerror}; try another") from None
        address = f"http://127.0.0.1:{port}/"
        echo(f"{address}   (Ctrl-C ends it)")
        if browser and sys.stdout.isatty():
            import webbrowser

            webbrowser.open(address)
        server = uvicorn.Server(uvicorn.Config(application(session, port), log_level="warning", lifespan="off"))
        server.run(sockets=[listener])
