"""The command line; it computes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    help="How each training sample shaped a model that was trained under constraints.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_show_locals=False,
)
reproduce = typer.Typer(
    help="Rerun the paper's experiments: figures as PNG, every number as JSON.", no_args_is_help=True
)
app.add_typer(reproduce, name="reproduce")

Out = Annotated[Path, typer.Option(help="Folder for the figures and the JSON files; made if missing.")]


class Bounds(StrEnum):
    """Right-hand sides of the regression's inequalities."""

    paper = "paper"
    binding = "binding"


def _version(wanted: bool) -> None:
    if wanted:
        import dif

        typer.echo(dif.__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    pass


@app.command()
def demo(out: Out = Path("demo")) -> None:
    """Both studies of the paper on embedded data, and a table of what they show."""
    _toy(out)
    _regression(out, seed=3, removals=100, bounds=Bounds.paper)
    typer.echo(f"\nFigures and numbers: {out.resolve()}")


@reproduce.command("toy")
def reproduce_toy(out: Out = Path("results")) -> None:
    """Least squares with ‖θ‖₁ ≤ 1: two one-sided derivatives at the kink (paper, figure 1).

    Example: dif reproduce toy --out results
    """
    _toy(out)
    typer.echo(f"\nWritten: {out.resolve() / 'toy.png'}, toy.json")


@reproduce.command("regression")
def reproduce_regression(
    seed: Annotated[int, typer.Option(help="Seed of the data and of the choice of removals.", min=0)] = 0,
    removals: Annotated[int, typer.Option(help="How many samples are removed, one at a time.", min=2, max=1000)] = 100,
    bounds: Annotated[
        Bounds, typer.Option(help="The paper's, or chosen so that both inequalities bind.")
    ] = Bounds.paper,
    out: Out = Path("results"),
) -> None:
    """Constrained linear regression, leave-one-out: every estimator against CVXPY's retraining (paper, figure 3).

    Example: dif reproduce regression --seed 2 --removals 100 --out results
    """
    _regression(out, seed, removals, bounds)
    typer.echo(f"\nWritten: {out.resolve() / 'regression.png'}, regression.json")


@contextmanager
def _one_line() -> Iterator[None]:
    """What went wrong in one line on stderr and exit code 2, no traceback."""
    try:
        yield
    except ImportError as error:
        missing = f"{error.name} is not installed: pip install 'dif[studies]'"
        typer.echo(f"dif: {missing if error.name in ('cvxpy', 'matplotlib') else error}", err=True)
        raise typer.Exit(2) from error
    except (ValueError, OSError) as error:
        typer.echo(f"dif: {error}", err=True)
        raise typer.Exit(2) from error


def _toy(out: Path) -> None:
    with _one_line():
        from dif.studies import toy

        result = toy.reproduce(out)
    table = Table(title="Toy: what removing z₂ does to θ = (½, ½); weak constraint: " + ", ".join(result["weak"]))
    for heading in ("estimator", "removal, paper's ε", "opposite direction", "removal, renormalised"):
        table.add_column(heading)
    paper, renormalised = result["changes"]["paper"], result["changes"]["renormalised"]
    for name in paper["removal"]:
        table.add_row(
            name, *(_pair(part[name]) for part in (paper["removal"], paper["opposite"], renormalised["removal"]))
        )
    Console().print(table)


def _regression(out: Path, seed: int, removals: int, bounds: Bounds) -> None:
    with _one_line():
        from dif.studies import regression

        result = regression.reproduce(out, seed, removals, bounds.value)
    held = ", ".join(result["binding"])
    for convention, words in (("paper", "1/n kept (paper's ε)"), ("renormalised", "mean over the samples left")):
        table = Table(title=f"Regression, seed {seed}, {removals} removals against CVXPY\n{words}; binding: {held}")
        table.add_column("estimator")
        for heading in ("Pearson r", "Spearman", "slope", "relative error", "same sign"):
            table.add_column(heading, justify="right")
        for name, row in result["agreement"][convention].items():
            table.add_row(
                name,
                f"{row['pearson']:.6f}",
                f"{row['spearman']:.6f}",
                f"{row['slope']:.4f}",
                f"{row['relative_error']:.2e}",
                f"{row['sign']:.1%}",
            )
        Console().print(table)


def _pair(entry: dict[str, Any]) -> str:
    return "(" + ", ".join(f"{x + 0.0:.4f}" for x in entry["theta"]) + ")"
