"""Evaluation on the digits: DIF, classical influence, TracIn and random scores, by the tests of `dif.evaluation`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import dif
from dif.derivatives.program import Targets
from dif.evaluation import DatamodellingScore, LabelErrors, LeaveOneOut, RemovalCurve, Table
from studies import pictures, results
from studies.digits import Task, build_task, trace_training

STRICT = -0.03  # τ: the risk of group 0 must be lower than the mean risk by 0.03
SUBSETS = 50  # random halves of the data
TESTS = 100  # test samples in the linear datamodelling score
COUNTS = (12, 24, 60, 120)  # samples removed at once: 1 %, 2 %, 5 % and 10 %
ORDERS = 10  # random orders of removal
REMOVED = 30  # strongest samples of each method, and random ones, that are removed one at a time
FLIPPED = 0.1  # share of the labels that are made wrong


def make_methods(task: Task, solution: dif.Solution, targets: int = 1) -> dict[str, Any]:
    """Return the methods that are compared; random scores are independent for each target."""
    generator = torch.Generator().manual_seed(0)
    return {
        "DIF": dif.DirectionalInfluence(solution),
        "classical IF": dif.ClassicalInfluence(solution),
        "TracIn": trace_training(task, solution),
        "random": torch.randn(len(task.train), targets, generator=generator, dtype=torch.float64),
    }


def rank_halves(task: Task, retraining: dif.Retraining, show_progress: bool) -> DatamodellingScore:
    """Compute the linear datamodelling score over random halves of the data."""
    methods, test = make_methods(task, retraining.solution, TESTS), task.test.take(torch.arange(TESTS))
    return dif.evaluation.linear_datamodelling_score(
        methods, retraining, test, task.train, subsets=SUBSETS, seed=2, show_progress=show_progress
    )


def remove_top(task: Task, retraining: dif.Retraining, lower: bool, show_progress: bool) -> RemovalCurve:
    """Remove the samples whose removal should raise the test loss most, or lower it."""
    methods = make_methods(task, retraining.solution)
    del methods["random"]  # the curve draws random orders of its own
    return dif.evaluation.removal_curve(
        methods, retraining, task.test.mean(), task.train, COUNTS, lower=lower, random=ORDERS,
        show_progress=show_progress,
    )  # fmt: skip


def remove_singles(task: Task, retraining: dif.Retraining, show_progress: bool) -> LeaveOneOut:
    """Compare predicted and actual changes of the test loss without single samples."""
    methods = make_methods(task, retraining.solution)
    del methods["random"]  # in no unit
    return dif.evaluation.leave_one_out_agreement(
        methods, retraining, task.test.mean(), task.train, strongest=REMOVED, random=REMOVED,
        show_progress=show_progress,
    )  # fmt: skip


def find_flipped(n: int, show_progress: bool) -> LabelErrors:
    """Rank samples by self-influence, and by their loss, where a tenth of the labels are wrong."""
    task = build_task(n=n, tau=STRICT, bound=1, flipped=FLIPPED)
    solution = task.fit()
    methods = make_methods(task, solution) | {"the loss itself": Targets(task.train, solution).values(solution.theta)}
    return dif.evaluation.label_error_auc(methods, task.flipped, task.train, show_progress=show_progress)


def reproduce(out: Path, n: int = 1200, show_progress: bool = True) -> list[Table]:
    """Run all four tests, write figures and numbers, and return the tables; finished retrainings are kept in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    task = build_task(n=n, tau=STRICT, bound=1)
    retraining = dif.Retraining(task.fit(), keep=out / "evaluation-retrainings")
    halves = rank_halves(task, retraining, show_progress)
    curves = [remove_top(task, retraining, lower, show_progress) for lower in (False, True)]
    singles, labels = remove_singles(task, retraining, show_progress), find_flipped(n, show_progress)
    _draw(out, halves, curves, singles, labels)
    tables = [halves.table(), *(curve.table() for curve in curves), singles.table(), labels.table()]
    numbers = {"study": "evaluation", "version": dif.__version__, "tables": [asdict(table) for table in tables]}
    results.write(out / "evaluation.json", numbers)
    return tables


def _draw(
    out: Path, halves: DatamodellingScore, curves: list[RemovalCurve], singles: LeaveOneOut, labels: LabelErrors
) -> None:
    """Draw evaluation.png with one panel per result, and evaluation-single.png with one panel per method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    first, *middle, last = figure.subplots(2, 2).flat
    pictures.draw_correlations(halves, first)
    for ax, curve in zip(middle, curves, strict=True):
        pictures.draw_curve(curve, ax)
    pictures.draw_label_errors(labels, last)
    figure.savefig(out / "evaluation.png", dpi=120)
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    pictures.draw_singles(singles, figure.subplots(1, len(singles.predicted)))
    figure.savefig(out / "evaluation-single.png", dpi=120)
