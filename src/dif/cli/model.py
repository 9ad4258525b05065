"""Commands about the user's own model, described in a file."""

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

from dif.cli.saying import console, one_line, plain, printable, refuse, say, table

if TYPE_CHECKING:
    from dif.estimators.directional import DirectionalInfluence
    from dif.estimators.influence import Influence
    from dif.problem.perturbation import Perturbation
    from dif.report.description import Description
    from dif.report.report import Report

File = Annotated[Path, typer.Argument(help="A file that defines `solution` and `targets`; `dif init` writes one.")]
OutDir = Annotated[Path, typer.Option("--out", help="Folder for the results; made if missing.")]
Target = Annotated[str | None, typer.Option(help="Which of the file's targets; the first when left out.")]
Accuracy = Annotated[
    float | None,
    typer.Option(
        help="Relative error wanted: where the first order is not good enough, Newton's step or the path answers.",
        min=0.0,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but what goes wrong.")]
_SIGNS = {"good": "[green]✓[/]", "note": "[yellow]![/]", "bad": "[red]✗[/]"}


class Estimator(StrEnum):
    """What predicts."""

    dif = "dif"
    derivative = "derivative"
    switching = "switching"
    newton = "newton"
    classical = "classical"


def init(file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("model.py")) -> None:
    """Write an example of the file that describes a model; it runs as it is.

    Example: dif init model.py && dif check model.py && dif score model.py
    """
    with one_line():
        from dif.report.description import TEMPLATE

        if file.exists():
            refuse(f"{str(file)!r} is there already and is not overwritten: name another file")
        try:
            file.write_text(TEMPLATE, encoding="utf-8")
        except OSError as error:
            refuse(f"cannot write {str(file)!r} ({error.strerror}): name a file in a folder that exists", cause=error)
    typer.echo(f"Written: {file}. Next: dif check {file}")


def check(file: File, as_json: AsJson = False, quiet: Quiet = False) -> None:
    """Can predictions for this model be trusted? The verdict and the certificate in plain words, with what to do.

    Nothing is retrained: for the strongest removals and for random ones, two further Newton steps show how far the
    predictions of the file's targets are off. Exit code 2 where they cannot be trusted.

    Example: dif check model.py
    """
    with one_line():
        from dif.analyses.verdict import Verdict
        from dif.optimality.certificate import Certificate
        from dif.report.description import Description

        told = Description.read(file, aimed=False)
        found = Certificate.of(told.solution)
        verdict = Verdict.of(found.to_dict(), None, None)
        missing = "`targets`" if not told.targets else "" if told.chosen else "`train`, and there are several Samples"
        if found.holds and missing:
            verdict = Verdict("note", f"This is a solution. No prediction was checked: the file names no {missing}.")
        elif found.holds:
            margins, assessment, unanswered, kinked = _assessed(told)
            found = Certificate.of(told.solution, margins)
            verdict = Verdict.of(found.to_dict(), assessment, None, unanswered, kinked)
        if as_json:
            typer.echo(json.dumps({"verdict": asdict(verdict), **found.to_dict()}, indent=2))
        elif not quiet:
            _judged(asdict(verdict))
            _certificate(found)
        bad = [one for one in found.findings if one.verdict == "bad"]
        if bad:
            refuse(f"{bad[0].what} {bad[0].meaning} Measured: {bad[0].measured}. {bad[0].cure}")
        if verdict.sign == "bad":
            refuse(f"{verdict.words} {verdict.cure}")


def _assessed(told: Description) -> tuple[Any, dict[str, Any], tuple[int, str] | None, str]:
    """What removals move the constraints by, the error to be expected of the targets, and what has no answer."""
    import dif
    from dif.optimality.targets import Targets

    predictor, (everyone, _) = dif.DirectionalInfluence(told.solution), _removals(told)
    wanted = list(told.targets.values())
    with _unsaid():
        scores = predictor.scores(wanted, everyone, show_progress=False)
    kinks = Targets(wanted, told.solution).kinks(told.solution.theta)
    assessment = scores.diagnostics["assessment"]
    return predictor.margins(everyone), assessment, scores.unanswered, "; ".join(map(str, kinks))


@contextmanager
def _unsaid() -> Iterator[None]:
    """The verdict says what this warning would."""
    from dif.errors import FirstOrderWarning

    with catch_warnings():
        simplefilter("ignore", FirstOrderWarning)
        yield


def _judged(verdict: dict[str, str]) -> None:
    """The verdict, before anything else."""
    colour = {"good": "green", "note": "yellow", "bad": "red"}[verdict["sign"]]
    words = f"{_SIGNS[verdict['sign']]} [bold {colour}]{plain(verdict['words'])}[/]"
    console().print(words + (f" [italic]{plain(verdict['cure'])}[/]" if verdict["cure"] else ""), soft_wrap=True)


def _certificate(found: Any) -> None:
    made = table(f"{found.parameters} parameters, objective {found.objective:.6g}", "", "", "measured", left=3)
    for one in found.findings:
        words = f"[bold]{plain(one.what)}[/] {plain(one.meaning)}" + (
            f" [italic]{plain(one.cure)}[/]" if one.cure else ""
        )
        made.add_row(_SIGNS[one.verdict], words, plain(one.measured))
    console().print(made)
    if found.constraints:
        headings = ("constraint", "state", "slack", "multiplier λ", "one removal moves it by", "in the median")
        rows = table("Constraints", *headings, left=2)
        for one in found.constraints:
            state = one.state + (" (uncertain)" if one.uncertain else "")
            moves = ("—" if size is None else f"{size:.2g}" for size in (one.largest, one.median))
            rows.add_row(plain(one.name), state, f"{one.slack:.3g}", f"{one.multiplier:.4g}", *moves)
        console().print(rows)


def score(
    file: File,
    target: Target = None,
    top: Annotated[int, typer.Option(help="How many to print.", min=1)] = 20,
    out: OutDir = Path("results"),
    estimator: Annotated[Estimator, typer.Option(help="What predicts.")] = Estimator.dif,
    accuracy: Accuracy = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """How would the target change without each training sample? Scores, the most influential samples, a report.

    The verdict comes first: how far the predictions can be trusted. Writes scores.npz (dif.Influence.load), report.json
    and report.html into --out.

    Example: dif score model.py --target gap --top 20 --out results
    """
    with one_line():
        from dif.report.description import Description

        _made(out)
        found = _scored(Description.read(file), target, top, out, estimator, accuracy, quiet or as_json)
    _shown(found, top, out, as_json, quiet)


def retrain(
    file: File,
    target: Target = None,
    top: Annotated[int, typer.Option(help="How many of the most influential to retrain without.", min=1)] = 20,
    out: OutDir = Path("results"),
    jobs: Annotated[int, typer.Option(help="Processes that share the work; −1 for all cores.")] = 1,
    accuracy: Accuracy = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Verify the most influential samples by training again without each of them.

    Scores first where --out has none. The verdict compares what was to be expected with what happened. Each finished
    retraining is kept in --out: interrupted, the same command goes on.

    Example: dif retrain model.py --top 20 --out results --jobs 2
    """
    with one_line():
        _made(out)
        found = _retrained(file, target, top, out, jobs, accuracy, quiet or as_json)
    _shown(found, top, out, as_json, quiet)


def report(
    folder: Annotated[Path, typer.Argument(help="A folder that `dif score` wrote.")] = Path("results"),
    quiet: Quiet = False,
) -> None:
    """Write report.html anew from the numbers in a folder: one file that works offline.

    Example: dif report results
    """
    with one_line():
        from dif.report.report import Report

        if not (folder / "report.json").is_file():
            refuse(f"no report.json in {str(folder)!r}: run `dif score FILE --out {folder}` first")
        Report.load(folder / "report.json").write_html(folder / "report.html")
    if not quiet:
        typer.echo(f"Report: {(folder / 'report.html').resolve()}")


def example(out: Path) -> Path:
    """The fairness example that comes with dif, scored and verified; where its report is."""
    with one_line(), as_file(files("dif") / "examples" / "credit.py") as file:
        _made(out)
        found = _retrained(file, None, 20, out, 1, None, False)
    _shown(found, 10, out, as_json=False, quiet=False)
    return out / "report.html"


def _removals(told: Description) -> tuple[Perturbation, dict[int, str]]:
    """Everyone who can be removed, and who cannot, with the reason."""
    from dif.evaluation.weight_change import indispensable

    needed = indispensable(told.solution.program, told.train)
    left = [i for i in range(len(told.train)) if i not in needed]
    if not left:
        refuse(
            "no sample can be removed: each is alone in a term of the problem, which would not be defined without it"
        )
    return told.train.remove_each(left if needed else None), needed


def _predicted(
    told: Description, wanted: Any, everyone: Perturbation, estimator: Estimator, accuracy: float | None, silent: bool
) -> tuple[Influence, DirectionalInfluence | None]:
    """The scores, and what knows their parts by term."""
    import dif

    solution = told.solution
    if accuracy is not None:
        if estimator is not Estimator.dif:
            refuse(f"--accuracy chooses the estimator itself: leave out --estimator {estimator.value}")
        adaptive = dif.AdaptiveInfluence(solution, accuracy=accuracy, strict=False, show_progress=not silent)
        return adaptive.scores(wanted, everyone), None
    if estimator is Estimator.newton:
        return dif.NewtonInfluence(solution, show_progress=not silent).scores(wanted, everyone), None
    if estimator is Estimator.classical:
        return dif.ClassicalInfluence(solution).scores(wanted, everyone, show_progress=not silent), None
    how: Any = {Estimator.dif: "auto", Estimator.derivative: False, Estimator.switching: True}[estimator]
    predictor = dif.DirectionalInfluence(solution, switching=how)
    return predictor.scores(wanted, everyone, show_progress=not silent), predictor


def _scored(
    told: Description, target: str | None, top: int, out: Path, estimator: Estimator, accuracy: float | None,
    silent: bool,
) -> Report:  # fmt: skip
    """Score everyone, and keep it."""
    import torch

    import dif
    from dif.report.report import Report, shown

    name, wanted = told.target(target)
    everyone, needed = _removals(told)
    with _unsaid():
        scores, predictor = _predicted(told, wanted, everyone, estimator, accuracy, silent)
    margins = (predictor or dif.DirectionalInfluence(told.solution)).margins(everyone)
    if needed:
        scores = _with_the_rest(scores, told.train.remove_each(), needed)
    scores = replace(scores, targets=(name,))
    listed = shown(scores, top)
    some = told.train.remove_each([i for i in listed if i not in needed])
    if predictor is not None:
        parts = predictor.by_term(wanted, some)
    else:
        parts = dif.Influence(torch.zeros(len(some), 0), some, (), scores.estimator)
    scores.save(out / "scores.npz")
    made = Report.of(told, name, scores, parts, listed, _command(), margins)
    _written(made, out)
    return made


def _with_the_rest(scores: Influence, everyone: Perturbation, needed: dict[int, str]) -> Influence:
    """The scores, and no answer where a sample cannot be removed."""
    import torch

    values = torch.full((len(everyone), 1), float("nan"), dtype=scores.values.dtype)
    left = [i for i in range(len(everyone)) if i not in needed]
    values[left] = scores.values
    assessment = dict(scores.diagnostics["assessment"])
    assessment["rows"] = [left[row] for row in assessment["rows"]]
    why = {
        everyone[i].labels[0]: f"It is alone in {words}, which would not be defined without it."
        for i, words in needed.items()
    }
    unanswered = scores.diagnostics.get("unanswered", {}) | why
    diagnostics = scores.diagnostics | {"unanswered": unanswered, "assessment": assessment}
    return replace(scores, stored=values, carried_out=everyone, diagnostics=diagnostics)


def _retrained(
    file: Path, target: str | None, top: int, out: Path, jobs: int, accuracy: float | None, silent: bool
) -> Report:
    """Retrain without the most influential ones, and keep it."""
    import dif
    from dif.report.description import Description
    from dif.report.report import Report, fingerprint

    told = Description.read(file)
    name, wanted = told.target(target)
    known = Report.load(out / "report.json") if (out / "report.json").is_file() else None
    stale = known is None or known.mark != fingerprint(told, name) or len(known.samples) < min(top, known.total)
    if known is None or stale or accuracy is not None:
        known = _scored(told, target, top, out, Estimator.dif, accuracy, silent)  # another model or question since
    listed = [one["index"] for one in known.samples[:top] if one["score"] is not None]
    retraining = dif.Retraining(
        told.solution, keep=out / "retrained", jobs=jobs, strict=False, show_progress=not silent
    )
    actual = retraining.scores(wanted, told.train.remove_each(listed))
    made = known.with_actual(listed, actual, command=_command())
    _written(made, out)
    return made


def _made(out: Path) -> None:
    """The folder for the results, before any work is done for it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".dif").touch()
        (out / ".dif").unlink()
    except OSError as error:
        refuse(f"cannot write into {str(out)!r} ({error.strerror}): name another folder with --out", cause=error)


def _written(made: Report, out: Path) -> None:
    made.save(out / "report.json")
    made.write_html(out / "report.html")


def _command() -> str:
    return shlex.join(["dif", *sys.argv[1:]])


def _shown(found: Report, top: int, out: Path, as_json: bool, quiet: bool) -> None:
    """The verdict and the top of the ranking, as a table or as JSON."""
    bad = found.verdict["sign"] == "bad"
    if as_json:
        rows = [
            {key: one.get(key) for key in ("index", "name", "group", "score", "actual")} for one in found.samples[:top]
        ]
        said = {"verdict": found.verdict, "target": found.target, "value": found.value}
        said |= {"estimator": found.estimator, "samples": rows}
        said |= {"agreement": found.agreement, "remarks": found.remarks}
        typer.echo(json.dumps(said | {"report": str((out / "report.html").resolve())}))
    if bad and (as_json or quiet):
        say(f"{found.verdict['words']} {found.verdict['cure']}")  # on stderr
    if as_json or quiet:
        return
    _judged(found.verdict)
    retrained = any(one.get("actual") is not None for one in found.samples)
    headings = [
        "sample",
        "group",
        "score",
        *(["retrained"] if retrained else []),
        *(["mostly through"] if found.terms else []),
    ]
    made = table(
        f"{plain(found.target)} = {found.value:.6g}: its change without each sample ({found.estimator})",
        *headings,
        left=2,
    )
    for one in found.samples[:top]:
        cells = [_signed(one["score"]), *([_signed(one.get("actual"))] if retrained else [])]
        if found.terms:
            sizes = [abs(x or 0.0) for x in one["parts"]]
            cells.append(plain(found.terms[sizes.index(max(sizes))]) if any(sizes) else "—")
        made.add_row(plain(one["name"]), plain(one["group"] or ""), *cells)
    console().print(made)
    for words in found.remarks:
        typer.echo(printable(words))
    if found.agreement is not None:
        named = {"pearson": "r = {:.4f}", "slope": "slope {:.3f}", "relative_error": "relative error {:.1%}"}
        known = {key: shape for key, shape in named.items() if found.agreement[key] is not None}
        words = ", ".join(shape.format(found.agreement[key]) for key, shape in known.items()) or "not defined"
        typer.echo(f"Against retraining ({found.agreement['n']} removals): {words}")
    typer.echo(f"Report: {(out / 'report.html').resolve()}")


def _signed(x: float | None) -> str:
    return "—" if x is None else f"{x:+.4g}"
