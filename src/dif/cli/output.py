"""Terminal output of the commands: one-line error messages, tables, verdicts and reports."""

from __future__ import annotations

import json
import os
import re
import sys
import warnings as python_warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn
from warnings import catch_warnings, simplefilter

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dif.cli.results_folder import ResultsFolder
from dif.errors import NotConvergedWarning
from dif.report.builder import Report

_PIPE_WIDTH = 160  # characters per line where the output is not a terminal
_SIGNS = {"good": "[green]✓[/]", "note": "[yellow]![/]", "bad": "[red]✗[/]"}  # symbol of each verdict
_COLOURS = {"good": "green", "note": "yellow", "bad": "red"}  # colour of each verdict


@contextmanager
def report_errors(
    describe: Callable[[], str] = lambda: "Interrupted. Nothing was kept.", *, warnings: bool = True
) -> Iterator[None]:
    """Turn an exception into one line on stderr and exit code 2; Ctrl-C into exit code 130.

    Args:
        describe: Says what was interrupted and what of it is kept.
        warnings: Whether to print warnings, too, each on one line.
    """
    try:
        with catch_warnings():
            python_warnings.showwarning = lambda message, *_, **__: print_note(str(message)) if warnings else None
            simplefilter("always", NotConvergedWarning)
            yield
    except KeyboardInterrupt as error:
        fail(describe(), 130, error)
    except ImportError as error:
        missing = f"{error.name} is not installed. Install it with: pip install 'directional-influence[studies]'"
        fail(missing if error.name else str(error), 2, error)
    except OSError as error:
        words = f"Cannot use {str(error.filename)!r} ({error.strerror}). Choose another path."
        fail(words if error.strerror and error.filename else str(error), 2, error)
    except ValueError as error:
        sentences = re.split(r"(?<=\.) ", str(error))  # the command line has no option strict=False
        fail(" ".join(sentence for sentence in sentences if "strict=False" not in sentence), 2, error)
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        fail(f"{type(error).__name__}: {error} (add --debug to see the traceback)", 2, error)


def fail(message: str, code: int = 2, cause: BaseException | None = None) -> NoReturn:
    """Print a message on stderr and exit; with --debug, raise the cause instead."""
    if "--debug" in sys.argv and cause is not None:
        raise cause
    print_error(message)
    raise typer.Exit(code) from cause


def print_error(message: str) -> None:
    """Print a message as one line on stderr."""
    typer.echo(f"dif: {replace_control_characters(' '.join(message.split()))}", err=True)


def print_note(message: str) -> None:
    """Print a warning, or what else is worth knowing, as one line on stderr."""
    print_error(f"Note: {message}")


def escape_text(text: object) -> str:
    """Return user data as text for a rich table, without markup and control characters."""
    return escape(replace_control_characters(str(text)))


def replace_control_characters(text: str) -> str:
    """Return the text with every unprintable character replaced, so that it cannot control the terminal."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def make_console() -> Console:
    """Return a console: coloured and as wide as the terminal, or plain and wide in a pipe."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_PIPE_WIDTH)


def make_table(title: str, *headings: str, left: int = 1) -> Table:
    """Return an empty table whose first `left` columns are left-aligned (text) and the others right-aligned."""
    table = Table(title=title)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < left else "right")
    return table


def print_verdict(verdict: dict[str, str]) -> None:
    """Print the verdict, coloured, with what to do about it."""
    sign = verdict["sign"]
    text = f"{_SIGNS[sign]} [bold {_COLOURS[sign]}]{escape_text(verdict['words'])}[/]"
    cure = f" [italic]{escape_text(verdict['cure'])}[/]" if verdict["cure"] else ""
    make_console().print(text + cure, soft_wrap=True)


def print_certificate(certificate: Mapping[str, Any]) -> None:
    """Print the findings about a solution, and a table of its constraints."""
    title = f"{certificate['parameters']} parameters, objective {certificate['objective']:.6g}"
    findings = make_table(title, "", "", "measured", left=3)
    for finding in certificate["findings"]:
        what, meaning, cure, measured = (escape_text(finding[k]) for k in ("what", "meaning", "cure", "measured"))
        findings.add_row(_SIGNS[finding["verdict"]], f"[bold]{what}[/] {meaning} [italic]{cure}[/]", measured)
    make_console().print(findings)
    if not certificate["constraints"]:
        return
    headings = ("constraint", "state", "slack", "multiplier λ", "largest change by one removal", "median change")
    table = make_table("Constraints", *headings, left=2)
    table.caption = (
        "binding: the limit is reached and shapes the model; slack: the distance to the limit; multiplier λ: how much "
        "the objective falls per unit by which the limit is loosened; change: by one removal, of λ where the "
        "constraint binds, of the slack elsewhere"
    )
    for row in certificate["constraints"]:
        state = row["state"] + (" (uncertain)" if row["uncertain"] else "")
        changes = ("—" if row[key] is None else f"{row[key]:.2g}" for key in ("largest", "median"))
        table.add_row(escape_text(row["name"]), state, f"{row['slack']:.3g}", f"{row['multiplier']:.4g}", *changes)
    make_console().print(table)


def print_report(result: Report, top: int, folder: ResultsFolder, as_json: bool, quiet: bool) -> None:
    """Print the verdict and the `top` most influential samples, as a table or as JSON."""
    samples, page, scores = result.samples[:top], folder.page.resolve(), folder.scores_path(result).resolve()
    if as_json:
        rows = [{key: sample.get(key) for key in ("index", "name", "group", "score", "actual")} for sample in samples]
        keys = ("verdict", "target", "value", "estimator", "agreement", "remarks")
        content = {key: getattr(result, key) for key in keys} | {"samples": rows}
        typer.echo(json.dumps(content | {"report": str(page), "scores": str(scores)}))
    if as_json or quiet:
        if result.verdict["sign"] == "bad":
            print_error(f"{result.verdict['words']} {result.verdict['cure']}")
        return
    print_verdict(result.verdict)
    _print_samples(result, samples)
    for remark in result.remarks:
        typer.echo(replace_control_characters(remark))
    if result.agreement is not None:
        formats = {"pearson": "r = {:.4f}", "slope": "slope {:.3f}", "relative_error": "relative error {:.1%}"}
        numbers = [text.format(result.agreement[k]) for k, text in formats.items() if result.agreement[k] is not None]
        text = ", ".join(numbers) or "not defined"
        typer.echo(f"Predicted against retrained change, {result.agreement['n']} samples: {text}")
    typer.echo(f"Scores of all samples: {scores}\nReport: {page}")


def _print_samples(result: Report, samples: list[dict[str, Any]]) -> None:
    """Print a table of samples: their scores, what retraining gave, and through which term each acts most."""
    doubtful = [sample["score"] is not None and sample["doubtful"] for sample in samples]
    columns = {
        "sample": [sample["name"] for sample in samples],
        "group": [sample["group"] or "" for sample in samples],
        "score": [
            _format_signed(s["score"]) + (" ?" if doubt else "") for s, doubt in zip(samples, doubtful, strict=True)
        ],
    }
    captions = ["?: a prediction that cannot be trusted"] if any(doubtful) else []
    if any(sample.get("actual") is not None for sample in result.samples):
        columns["retrained"] = [_format_signed(sample.get("actual")) for sample in samples]
    if result.terms:
        columns["mostly through"] = [_find_largest(result.terms, sample["parts"]) for sample in samples]
        captions.append("mostly through: the objective or the constraint that contributes most to the score")
    title = f"Change of {escape_text(result.target)}, now {result.value:.6g}, without each sample ({result.estimator})"
    table = make_table(title, *columns, left=2)
    table.caption = "; ".join(captions)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(escape_text, cells))
    make_console().print(table)


def _find_largest(terms: list[str], parts: list[float | None]) -> str:
    """Return the term with the largest part of a score."""
    sizes = [abs(part or 0.0) for part in parts]
    return terms[sizes.index(max(sizes))] if any(sizes) else "—"


def _format_signed(x: float | None) -> str:
    return "—" if x is None else f"{x:+.4g}"
