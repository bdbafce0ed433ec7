"""The command line: one call into the library per command.

Results go to stdout, progress and errors to stderr. Exit codes: 0 everything is where it should be; 1 an error, told in
one line; 2 the command line is wrong; 3 some runs could not be brought over whole; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from runmirror.cli import doctor, follow, health, imports, push, show, sinks, verify

app = typer.Typer(
    name="runmirror",
    help="Write the log of an RL run once, and see it in every tracker.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)


def _version(said: bool) -> None:
    if said:
        typer.echo(f"runmirror {metadata.version('runmirror')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


app.command("import")(imports.import_)
app.command()(follow.mirror)
app.command()(show.show)
app.command()(verify.verify)
app.command()(health.health)
app.command()(sinks.sinks)
app.command()(doctor.doctor)
app.command()(push.push)
app.command()(imports.demo)


def main() -> None:
    """Entry point of the ``runmirror`` command."""
    app()
