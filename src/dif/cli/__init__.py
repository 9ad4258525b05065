"""The command-line program `dif`: parses options and prints results. It computes nothing itself."""

from __future__ import annotations

import io
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from dif.cli import model
from dif.cli.output import is_debugging, print_error, show_tracebacks

app = typer.Typer(
    help="Find out how each training sample shaped a model that was trained under constraints.\n\n"
    "Use the commands in this order: dif init writes a file that describes a model, for you to edit. dif check says "
    "whether predictions for the model can be trusted. dif score predicts what each sample does to it. dif retrain "
    "verifies the largest scores by training again.\n\n"
    "Exit codes: 0 success, 2 error (one line on stderr says why), 130 interrupted.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
)
for command in (model.init, model.check, model.score, model.retrain, model.report):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        import dif

        typer.echo(dif.__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print the full traceback of an error.")] = False,
) -> None:
    if debug:
        show_tracebacks()


@app.command()
def demo(out: model.OutDir = Path("demo")) -> None:
    """Audit a model that comes with dif: a fair credit score, trained on 700 loans of a German bank.

    The risk of customers of 25 or younger must not exceed the mean risk by more than 0.02. The demo predicts how the
    test loss of the young would change without each loan, trains again without the 20 most influential loans to
    verify the predictions, and writes a report. Takes less than a minute.

    Example: dif demo --out demo
    """
    page = model.run_example(out)
    typer.echo(f"\nThe demo is complete. Open its report in a browser: {page.resolve()}")
    typer.echo("To audit a model of your own: dif init model.py")


def main() -> None:
    """Run the program `dif`."""
    run_program(app, "dif")


def run_program(program: typer.Typer, name: str) -> None:
    """Run a command-line program; --debug may stand anywhere, and errors in the usage are printed on one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character the terminal cannot show becomes a question mark
    arguments = [word for word in sys.argv[1:] if word != "--debug"]
    if len(arguments) < len(sys.argv) - 1:
        show_tracebacks()
    try:
        code = program(args=arguments, prog_name=name, standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        print_error("Interrupted.")
        code = 130
    except Exception as error:
        format_usage_error = getattr(error, "format_message", None)  # only click's usage errors have it
        if format_usage_error is None or is_debugging():
            raise
        context = getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
        else:
            print_error(f"{format_usage_error()} See: {context.command_path if context else name} --help")
        code = 2
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the work is done: Ctrl-C while Python ends changes nothing
    sys.exit(code or 0)
