"""The command line; it computes nothing."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from dif.cli import model
from dif.cli.saying import debugging, say, show_tracebacks
from dif.cli.studies import Out, paper_studies, reproduce

app = typer.Typer(
    help="How each training sample shaped a model that was trained under constraints.\n\n"
    "Describe your model in a file (dif init), ask whether it is a solution (dif check), score every sample (dif "
    "score), verify the top ones by retraining (dif retrain). Exit codes: 0 done, 2 refused with one line that says "
    "why, 130 interrupted.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
)
app.add_typer(reproduce, name="reproduce")
for command in (model.init, model.check, model.score, model.retrain, model.report):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        import dif

        typer.echo(dif.__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of what goes wrong.")] = False,
) -> None:
    if debug:
        show_tracebacks()


@app.command()
def demo(out: Out = Path("demo")) -> None:
    """Everything on embedded data: the paper's studies, and a fairness example with its report.

    Example: dif demo --out demo
    """
    paper_studies(out)
    page = model.example(out / "credit")
    typer.echo(f"\nFigures and numbers: {out.resolve()}\nReport: {page.resolve()}")


def main() -> None:
    """The program `dif`: --debug may stand anywhere, and what is wrong with a command is said in one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without our letters gets question marks, not an error
    arguments = [word for word in sys.argv[1:] if word != "--debug"]
    if len(arguments) < len(sys.argv) - 1:
        show_tracebacks()
    try:
        code = app(args=arguments, prog_name="dif", standalone_mode=False)
    except typer.Abort:
        code = 130
    except Exception as error:
        usage = getattr(error, "format_message", None)  # an option or a command that does not exist
        if usage is None or debugging():
            raise
        context = getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
        else:
            say(f"{usage()} ({context.command_path if context else 'dif'} --help says more)")
        code = 2
    sys.exit(code or 0)
