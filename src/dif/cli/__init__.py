"""The command-line program `dif`: its commands, which parse options and print results. It computes nothing itself."""

from __future__ import annotations

import io
import json
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

import dif
from dif.cli.analysis import Analysis, Estimator, Question
from dif.cli.description import EXAMPLES, TEMPLATE, expect_file
from dif.cli.output import fail, print_certificate, print_error, print_note, print_report, print_verdict, report_errors
from dif.cli.results_folder import ResultsFolder
from dif.optimality.judgement import BAD
from dif.report.builder import load_reports, write_html
from dif.runtime.archive import lock_folder

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

# Arguments and options that several commands share
File = Annotated[
    Path, typer.Argument(help="Python file that defines `solution` and `targets`; `dif init` writes an example.")
]
OutDir = Annotated[Path, typer.Option("--out", help="Folder for the results; it is created if missing.")]
Target = Annotated[str | None, typer.Option(help="Name of one of the file's targets; default: the first.")]
Accuracy = Annotated[
    float | None,
    typer.Option(
        help="Wanted relative error, such as 0.05. Where the quick prediction is less accurate, slower methods replace "
        "it.",
        min=0.0,
    ),
]
Method = Annotated[
    Estimator,
    typer.Option(
        help="How the change is predicted. dif: with the constraints whose limit is reached or may be reached without "
        "a sample. derivative: only with those whose limit is reached now (the paper's derivative). switching: with "
        "all constraints. newton: one step of Newton's method for each sample, slower and more accurate. classical: "
        "without the constraints."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


@app.command()
def init(file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("model.py")) -> None:
    """Write an example of the file that describes a model. The example runs as it is.

    Example: dif init model.py && dif check model.py && dif score model.py
    """
    with report_errors():
        if file.exists():
            fail(f"{str(file)!r} already exists and is not overwritten. Choose another file name.")
        file.write_text(TEMPLATE, encoding="utf-8")
    typer.echo(f"Wrote {file}. Next: dif check {shlex.quote(str(file))}")


@app.command()
def check(file: File, out: OutDir = Path("results"), as_json: AsJson = False, quiet: Quiet = False) -> None:
    """Check whether predictions for this model can be trusted, and say what to do if not.

    Prints a verdict, then what it rests on: whether training found a solution, and how far each constraint is from its
    limit. Nothing is trained again: the error of the predictions is estimated for the samples with the largest effect
    and for some random ones. The exit code is 2 if predictions cannot be trusted. The fitted model is kept in --out, so
    that the other commands need not fit it again.

    Example: dif check model.py
    """
    with _analyse(file, out, quiet, as_json) as analysis:
        certificate, verdict = analysis.check()
        if as_json:
            typer.echo(json.dumps({"verdict": verdict, **certificate}, indent=2))
        elif not quiet:
            print_verdict(verdict)
            print_certificate(certificate)
        for finding in certificate["findings"]:
            if finding["verdict"] == BAD:
                fail(f"{finding['meaning']} {finding['measured']} {finding['cure']}")
        if verdict["sign"] == BAD:
            fail(f"{verdict['words']} {verdict['cure']}")


@app.command()
def score(
    file: File,
    target: Target = None,
    top: Annotated[int, typer.Option(help="How many samples to print.", min=1)] = 20,
    out: OutDir = Path("results"),
    estimator: Method = Estimator.dif,
    accuracy: Accuracy = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Predict how the target would change without each training sample.

    Prints a verdict on whether the predictions can be trusted, then the most influential samples. A score of +0.02
    means that the target would be about 0.02 higher without that sample. The target is added to report.html and
    report.json in --out. The scores of all samples go into the folder scores in --out (read them with
    dif.Influence.load). What `dif retrain` found stays in the report.

    Example: dif score model.py --target gap --top 20 --out results
    """
    with _analyse(file, out, quiet, as_json) as analysis:
        result = analysis.score(Question(target, estimator, accuracy), top)
    print_report(result, top, analysis.folder, as_json, quiet)


@app.command()
def retrain(
    file: File,
    target: Target = None,
    top: Annotated[
        int, typer.Option(help="How many of the most influential samples to remove, one at a time.", min=1)
    ] = 20,
    out: OutDir = Path("results"),
    jobs: Annotated[int, typer.Option(help="How many processes train at the same time; -1: one per core.")] = 1,
    estimator: Method = Estimator.dif,
    accuracy: Accuracy = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train the model again without each of the most influential samples, and compare with the scores.

    Scores the samples first if --out has no scores of this model, target and estimator. The verdict states how far the
    predictions were off. Each finished training is saved in --out; after an interruption, run the same command again
    to continue.

    Example: dif retrain model.py --top 20 --out results --jobs 2
    """
    with _analyse(file, out, quiet, as_json) as analysis:
        result = analysis.retrain(Question(target, estimator, accuracy), top, jobs)
    print_report(result, top, analysis.folder, as_json, quiet)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A folder that `dif score` or `dif retrain` wrote.")] = Path("results"),
    quiet: Quiet = False,
) -> None:
    """Write report.html again from the numbers in a folder. It is one file and works offline.

    Example: dif report results
    """
    with report_errors():
        if not (folder / "report.json").is_file():
            command = f"dif score FILE --out {shlex.quote(str(folder))}"
            fail(f"There is no report.json in {str(folder)!r}. Run `{command}` first.")
        with lock_folder(folder):
            write_html(folder / "report.html", load_reports(folder / "report.json"))
    if not quiet:
        typer.echo(f"Report: {(folder / 'report.html').resolve()}")


@app.command()
def demo(out: OutDir = Path("demo")) -> None:
    """Audit a model that comes with dif: a fair credit score, trained on 700 loans of a German bank.

    The risk of customers of 25 or younger must not exceed the mean risk by more than 0.02. The demo predicts how the
    test loss of the young would change without each loan, trains again without the 20 most influential loans to
    verify the predictions, and writes a report. Takes less than a minute.

    Example: dif demo --out demo
    """
    with _analyse(EXAMPLES / "credit.py", out, quiet=False, as_json=False) as analysis:
        result = analysis.retrain(Question(None), top=20)
    print_report(result, 10, analysis.folder, as_json=False, quiet=False)
    typer.echo(f"\nThe demo is complete. Open its report in a browser: {analysis.folder.page.resolve()}")
    typer.echo("To audit a model of your own: dif init model.py")


@contextmanager
def _analyse(file: Path, out: Path, quiet: bool, as_json: bool) -> Iterator[Analysis]:
    """Open the folder for the results on a model file, and turn errors and interruptions into one line."""
    folder = ResultsFolder(out, file)
    analysis = Analysis(file, folder, silent=quiet or as_json)
    with report_errors(analysis.describe_interruption, warnings=not quiet):
        expect_file(file)
        with folder.use():
            if folder.shared and not quiet:
                print_note(f"Another run of dif is using {str(out)!r}. The answers of both are kept.")
            yield analysis
        if folder.fits.reused and not analysis.silent:
            print_note("The kept fit was used: neither the model file nor its data have changed.")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(dif.__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print the full traceback of an error.")] = False,
) -> None:
    """Accept the options that stand before a command."""


def main() -> None:
    """Run the program `dif`."""
    run_program(app, "dif")


def run_program(program: typer.Typer, name: str) -> None:
    """Run a command-line program; --debug may stand anywhere, and errors in the usage are printed on one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character the terminal cannot show becomes a question mark
    arguments = [word for word in sys.argv[1:] if word != "--debug"]
    try:
        code = program(args=arguments, prog_name=name, standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        print_error("Interrupted.")
        code = 130
    except Exception as error:
        format_usage_error = getattr(error, "format_message", None)  # only click's usage errors have it
        if format_usage_error is None or "--debug" in sys.argv:
            raise
        context = getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
        else:
            print_error(f"{format_usage_error()} See: {context.command_path if context else name} --help")
        code = 2
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the work is done: Ctrl-C while Python ends changes nothing
    sys.exit(code or 0)
