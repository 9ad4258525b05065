"""Commands about the user's own model, which a Python file describes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dif.cli.analysis import Analysis, Estimator, Question, assess
from dif.cli.output import fail, print_certificate, print_note, print_report, print_verdict, report_errors

if TYPE_CHECKING:
    from dif.cli.results_folder import ResultsFolder

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


def init(file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("model.py")) -> None:
    """Write an example of the file that describes a model. The example runs as it is.

    Example: dif init model.py && dif check model.py && dif score model.py
    """
    with report_errors():
        from dif.cli.description import TEMPLATE

        if file.exists():
            fail(f"{str(file)!r} already exists and is not overwritten. Choose another file name.")
        try:
            file.write_text(TEMPLATE, encoding="utf-8")
        except OSError as error:
            fail(f"Cannot write {str(file)!r} ({error.strerror}). Choose a file in an existing folder.", cause=error)
    typer.echo(f"Wrote {file}. Next: dif check {shlex.quote(str(file))}")


def check(file: File, out: OutDir = Path("results"), as_json: AsJson = False, quiet: Quiet = False) -> None:
    """Check whether predictions for this model can be trusted, and say what to do if not.

    Prints a verdict, then what it rests on: whether training found a solution, and how far each constraint is from its
    limit. Nothing is trained again: the error of the predictions is estimated for the samples with the largest effect
    and for some random ones. The exit code is 2 if predictions cannot be trusted. The fitted model is kept in --out, so
    that the other commands need not fit it again.

    Example: dif check model.py
    """
    with _analyse(file, out, quiet, as_json) as (analysis, folder):
        from dif.optimality.judgement import Certificate
        from dif.report.words import Verdict

        description = analysis.read(folder, need_targets=False)
        analysis.stage = "checking"
        certificate = Certificate.of(description.solution)
        verdict = Verdict.of(certificate.to_dict(), None, None)
        missing = ""
        if not description.targets:
            missing = "`targets`"
        elif not description.train_is_known:
            missing = "`train`, and there are several Samples"
        if certificate.holds and missing:
            verdict = Verdict("note", f"This is a solution. No prediction was checked: the file names no {missing}.")
        elif certificate.holds:
            margins, assessment, unanswered, kinks = assess(description)
            certificate = Certificate.of(description.solution, margins)
            verdict = Verdict.of(certificate.to_dict(), assessment, None, unanswered, kinks)
        if as_json:
            typer.echo(json.dumps({"verdict": asdict(verdict), **certificate.to_dict()}, indent=2))
        elif not quiet:
            print_verdict(asdict(verdict))
            print_certificate(certificate)
        bad = [finding for finding in certificate.findings if finding.verdict == "bad"]
        if bad:
            fail(f"{bad[0].meaning} {bad[0].measured} {bad[0].cure}")
        if verdict.sign == "bad":
            fail(f"{verdict.words} {verdict.cure}")


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
    with _analyse(file, out, quiet, as_json) as (analysis, folder):
        result = analysis.score(analysis.read(folder), Question(target, estimator, accuracy), top)
    print_report(result, top, folder.page, folder.scores_path(result), as_json, quiet)


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
    with _analyse(file, out, quiet, as_json) as (analysis, folder):
        result = analysis.retrain(analysis.read(folder), Question(target, estimator, accuracy), top, jobs)
    print_report(result, top, folder.page, folder.scores_path(result), as_json, quiet)


def report(
    folder: Annotated[Path, typer.Argument(help="A folder that `dif score` or `dif retrain` wrote.")] = Path("results"),
    quiet: Quiet = False,
) -> None:
    """Write report.html again from the numbers in a folder. It is one file and works offline.

    Example: dif report results
    """
    with report_errors():
        from dif.report.builder import load_reports, write_html
        from dif.runtime.archive import lock_folder

        if not (folder / "report.json").is_file():
            command = f"dif score FILE --out {shlex.quote(str(folder))}"
            fail(f"There is no report.json in {str(folder)!r}. Run `{command}` first.")
        with lock_folder(folder):
            write_html(folder / "report.html", load_reports(folder / "report.json"))
    if not quiet:
        typer.echo(f"Report: {(folder / 'report.html').resolve()}")


def run_example(out: Path) -> Path:
    """Score and retrain the fairness example that comes with dif; return the path of its HTML report."""
    with (
        as_file(files("dif") / "examples" / "credit.py") as file,
        _analyse(file, out, quiet=False, as_json=False) as (analysis, folder),
    ):
        result = analysis.retrain(analysis.read(folder), Question(None), 20, 1)
    print_report(result, 10, folder.page, folder.scores_path(result), as_json=False, quiet=False)
    return folder.page


@contextmanager
def _analyse(file: Path, out: Path, quiet: bool, as_json: bool) -> Iterator[tuple[Analysis, ResultsFolder]]:
    """Open the folder for the results on a model file, and turn errors and interruptions into one line."""
    analysis = Analysis(file, silent=quiet or as_json)
    with report_errors(analysis.describe_interruption, warnings=not quiet):
        from dif.cli.description import expect_file
        from dif.cli.results_folder import ResultsFolder

        expect_file(file)
        with ResultsFolder.open(out, file) as folder:
            if folder.shared and not quiet:
                print_note(f"Another run of dif is using {str(out)!r}. The answers of both are kept.")
            yield analysis, folder
        if folder.fits.reused and not analysis.silent:
            print_note("The kept fit was used: neither the model file nor its data have changed.")
