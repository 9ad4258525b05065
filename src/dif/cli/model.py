"""Commands about the user's own model, which a Python file describes."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import StrEnum
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from warnings import catch_warnings, simplefilter

import typer

from dif.cli.output import fail, print_certificate, print_report, print_verdict, report_errors

if TYPE_CHECKING:
    from dif.estimators.directional import DirectionalInfluence
    from dif.estimators.influence import Influence
    from dif.problem.perturbation import Perturbation
    from dif.report.description import Description
    from dif.report.report import Report

# Arguments and options that several commands share
File = Annotated[
    Path, typer.Argument(help="Python file that defines `solution` and `targets`; `dif init` writes an example.")
]
OutDir = Annotated[Path, typer.Option("--out", help="Folder for the results; it is created if missing.")]
Target = Annotated[str | None, typer.Option(help="Name of one of the file's targets; default: the first.")]
Accuracy = Annotated[
    float | None,
    typer.Option(
        help="Wanted relative error. Where the first-order score is less accurate, a Newton step or path following "
        "replaces it.",
        min=0.0,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]


class Estimator(StrEnum):
    """The methods that predict the effect of a removal."""

    dif = "dif"
    derivative = "derivative"
    switching = "switching"
    newton = "newton"
    classical = "classical"


def init(file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("model.py")) -> None:
    """Write an example of the file that describes a model. The example runs as it is.

    Example: dif init model.py && dif check model.py && dif score model.py
    """
    with report_errors():
        from dif.report.description import TEMPLATE

        if file.exists():
            fail(f"{str(file)!r} already exists and is not overwritten. Choose another file name.")
        try:
            file.write_text(TEMPLATE, encoding="utf-8")
        except OSError as error:
            fail(f"Cannot write {str(file)!r} ({error.strerror}). Choose a file in an existing folder.", cause=error)
    typer.echo(f"Wrote {file}. Next: dif check {file}")


def check(file: File, as_json: AsJson = False, quiet: Quiet = False) -> None:
    """Check whether predictions for this model can be trusted, and say what to do if not.

    Prints a verdict, then the certificate: whether the parameters are a solution, and the margin of each constraint.
    Nothing is retrained: the error of the predictions is estimated by two further Newton steps for the removals with
    the largest effect and for some random ones. The exit code is 2 if predictions cannot be trusted.

    Example: dif check model.py
    """
    with report_errors():
        from dif.analyses.verdict import Verdict
        from dif.optimality.certificate import Certificate
        from dif.report.description import Description

        description = Description.read(file, need_targets=False)
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
            margins, assessment, unanswered, kinks = _assess(description)
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


def _assess(description: Description) -> tuple[Any, dict[str, Any], tuple[int, str] | None, str]:
    """Return the constraint margins, the error estimate of the scores, the unanswered removals and the kinks."""
    import dif
    from dif.optimality.targets import Targets

    predictor, (removals, _) = dif.DirectionalInfluence(description.solution), _removals(description)
    targets = list(description.targets.values())
    with _ignore_first_order_warning():
        scores = predictor.scores(targets, removals, show_progress=False)
    kinks = Targets(targets, description.solution).kinks(description.solution.theta)
    assessment = scores.diagnostics["assessment"]
    return predictor.margins(removals), assessment, scores.unanswered, "; ".join(map(str, kinks))


@contextmanager
def _ignore_first_order_warning() -> Iterator[None]:
    """Suppress FirstOrderWarning: the printed verdict says the same."""
    from dif.errors import FirstOrderWarning

    with catch_warnings():
        simplefilter("ignore", FirstOrderWarning)
        yield


def score(
    file: File,
    target: Target = None,
    top: Annotated[int, typer.Option(help="How many samples to print.", min=1)] = 20,
    out: OutDir = Path("results"),
    estimator: Annotated[
        Estimator,
        typer.Option(
            help="How the change is predicted. dif: constraints within reach of a removal may become active or "
            "inactive. derivative: the paper's directional derivative. switching: any constraint may become active "
            "or inactive. newton: one Newton step per removal. classical: ignores the constraints."
        ),
    ] = Estimator.dif,
    accuracy: Accuracy = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Predict how the target would change without each training sample.

    Prints a verdict on how far the predictions can be trusted, then the most influential samples. Writes scores.npz
    (read it with dif.Influence.load), report.json and report.html into --out.

    Example: dif score model.py --target gap --top 20 --out results
    """
    with report_errors():
        from dif.report.description import Description

        _make_folder(out)
        result = _score(Description.read(file), target, top, out, estimator, accuracy, quiet or as_json)
    print_report(result, top, out, as_json, quiet)


def retrain(
    file: File,
    target: Target = None,
    top: Annotated[
        int, typer.Option(help="How many of the most influential samples to remove, one at a time.", min=1)
    ] = 20,
    out: OutDir = Path("results"),
    jobs: Annotated[int, typer.Option(help="Number of processes that retrain in parallel; −1: one per core.")] = 1,
    accuracy: Accuracy = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Verify the most influential samples: retrain the model without each of them and compare with the scores.

    Scores the samples first if --out has no scores of this model and target. The verdict compares the expected error
    with the actual one. Each finished retraining is saved in --out; after an interruption, run the same command again
    to continue.

    Example: dif retrain model.py --top 20 --out results --jobs 2
    """
    with report_errors():
        _make_folder(out)
        result = _retrain(file, target, top, out, jobs, accuracy, quiet or as_json)
    print_report(result, top, out, as_json, quiet)


def report(
    folder: Annotated[Path, typer.Argument(help="A folder that `dif score` or `dif retrain` wrote.")] = Path("results"),
    quiet: Quiet = False,
) -> None:
    """Write report.html again from the numbers in a folder. It is one file and works offline.

    Example: dif report results
    """
    with report_errors():
        from dif.report.report import Report

        if not (folder / "report.json").is_file():
            fail(f"There is no report.json in {str(folder)!r}. Run `dif score FILE --out {folder}` first.")
        Report.load(folder / "report.json").write_html(folder / "report.html")
    if not quiet:
        typer.echo(f"Report: {(folder / 'report.html').resolve()}")


def run_example(out: Path) -> Path:
    """Score and retrain the fairness example that comes with dif; return the path of its HTML report."""
    with report_errors(), as_file(files("dif") / "examples" / "credit.py") as file:
        _make_folder(out)
        result = _retrain(file, None, 20, out, 1, None, False)
    print_report(result, 10, out, as_json=False, quiet=False)
    return out / "report.html"


def _removals(description: Description) -> tuple[Perturbation, dict[int, str]]:
    """Return the removal of each sample that can be removed, and for the others the term that needs them."""
    from dif.evaluation.weight_change import find_indispensable

    needed = find_indispensable(description.solution.program, description.train)
    removable = [i for i in range(len(description.train)) if i not in needed]
    if not removable:
        fail(
            "No sample can be removed: each is the only sample in a term of the problem, which would be undefined "
            "without it."
        )
    return description.train.remove_each(removable if needed else None), needed


def _predict(
    description: Description, target: Any, removals: Perturbation, estimator: Estimator, accuracy: float | None,
    silent: bool,
) -> tuple[Influence, DirectionalInfluence | None]:  # fmt: skip
    """Return the scores, and the estimator if it can split them by term."""
    import dif

    solution = description.solution
    if accuracy is not None:
        if estimator is not Estimator.dif:
            fail(f"--accuracy selects the estimator itself, so leave out --estimator {estimator.value}.")
        adaptive = dif.AdaptiveInfluence(solution, accuracy=accuracy, strict=False)
        return adaptive.scores(target, removals, show_progress=not silent), None
    if estimator is Estimator.newton:
        return dif.NewtonInfluence(solution).scores(target, removals, show_progress=not silent), None
    if estimator is Estimator.classical:
        return dif.ClassicalInfluence(solution).scores(target, removals, show_progress=not silent), None
    switching: Any = {Estimator.dif: "auto", Estimator.derivative: False, Estimator.switching: True}[estimator]
    predictor = dif.DirectionalInfluence(solution, switching=switching)
    return predictor.scores(target, removals, show_progress=not silent), predictor


def _score(
    description: Description, target: str | None, top: int, out: Path, estimator: Estimator, accuracy: float | None,
    silent: bool,
) -> Report:  # fmt: skip
    """Score every sample and write scores.npz and the report into `out`."""
    import torch

    import dif
    from dif.report.report import Report, select_samples

    name, term = description.target(target)
    removals, needed = _removals(description)
    with _ignore_first_order_warning():
        scores, predictor = _predict(description, term, removals, estimator, accuracy, silent)
    margins = (predictor or dif.DirectionalInfluence(description.solution)).margins(removals)
    if needed:
        scores = _add_unanswered(scores, description.train.remove_each(), needed)
    scores = replace(scores, targets=(name,))
    listed = select_samples(scores, top)
    answered = description.train.remove_each([i for i in listed if i not in needed])
    if predictor is not None:
        parts = predictor.by_term(term, answered)
    else:
        parts = dif.Influence(torch.zeros(len(answered), 0), answered, (), scores.estimator)
    scores.save(out / "scores.npz")
    result = Report.of(description, name, scores, parts, listed, _command(), margins)
    _write_report(result, out)
    return result


def _add_unanswered(scores: Influence, removals: Perturbation, needed: dict[int, str]) -> Influence:
    """Return scores of all samples: NaN and a reason for those that cannot be removed."""
    import torch

    values = torch.full((len(removals), 1), float("nan"), dtype=scores.values.dtype)
    removable = [i for i in range(len(removals)) if i not in needed]
    values[removable] = scores.values
    assessment = dict(scores.diagnostics["assessment"])
    assessment["rows"] = [removable[row] for row in assessment["rows"]]
    reasons = {
        removals[i].labels[0]: f"It is the only sample in {term}, which would be undefined without it."
        for i, term in needed.items()
    }
    unanswered = scores.diagnostics.get("unanswered", {}) | reasons
    diagnostics = scores.diagnostics | {"unanswered": unanswered, "assessment": assessment}
    return replace(scores, stored=values, carried_out=removals, diagnostics=diagnostics)


def _retrain(
    file: Path, target: str | None, top: int, out: Path, jobs: int, accuracy: float | None, silent: bool
) -> Report:
    """Retrain without each of the `top` most influential samples and add the results to the report."""
    import dif
    from dif.report.description import Description
    from dif.report.report import Report, fingerprint

    description = Description.read(file)
    name, term = description.target(target)
    known = Report.load(out / "report.json") if (out / "report.json").is_file() else None
    stale = known is None or known.mark != fingerprint(description, name) or len(known.samples) < min(top, known.total)
    if known is None or stale or accuracy is not None:  # another model, another target or too few samples
        known = _score(description, target, top, out, Estimator.dif, accuracy, silent)
    listed = [sample["index"] for sample in known.samples[:top] if sample["score"] is not None]
    retraining = dif.Retraining(description.solution, keep=out / "retrained", strict=False)
    removals = description.train.remove_each(listed)
    actual = retraining.scores(term, removals, jobs=jobs, show_progress=not silent)
    result = known.with_actual(listed, actual, command=_command())
    _write_report(result, out)
    return result


def _make_folder(out: Path) -> None:
    """Create the folder for the results and check, before any work is done, that it can be written to."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".dif").touch()
        (out / ".dif").unlink()
    except OSError as error:
        fail(f"Cannot write into {str(out)!r} ({error.strerror}). Choose another folder with --out.", cause=error)


def _write_report(result: Report, out: Path) -> None:
    result.save(out / "report.json")
    result.write_html(out / "report.html")


def _command() -> str:
    return shlex.join(["dif", *sys.argv[1:]])
