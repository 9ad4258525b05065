"""The program `python -m studies`: it runs a study, prints its tables and says where its files are."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dif.cli import run_program
from dif.cli.output import fail, make_console, make_table, report_errors
from studies.finetune_command import reproduce_finetune, run_finetune
from studies.options import Data, Device, Out, Side, check_device, say_saved

app = typer.Typer(
    help="Rerun the studies: the paper's experiments and some more. Figures are PNG files, numbers JSON files.\n\n"
    "`demo` runs those that take minutes. The help of each command says what it compares and how long it takes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
)


class Bounds(StrEnum):
    """Choices of the right-hand sides of the regression's inequalities."""

    paper = "paper"
    binding = "binding"


class Model(StrEnum):
    """Network architectures of the fairness study."""

    paper = "paper"
    small = "small"


@app.command()
def demo(out: Out = Path("results")) -> None:
    """Run the toy, the regression, the credit score and two small network studies, with the data of the repository.

    Takes about three minutes on two cores. What is finished is read from --out the second time.

    Example: python -m studies demo --out results
    """
    _run_toy(out)
    _run_regression(out, seed=3, removals=100, bounds=Bounds.paper)
    _run_credit(out)
    _run_cnn(out / "cnn", None, resume=True, paper_epsilon=False)
    run_finetune(out / "finetune", "quick", {})
    typer.echo(f"\nFigures and numbers: {out.resolve()}")


def _add_study(name: str, run: Callable[[Path], None], text: str) -> None:
    """Add the command of a study whose only option is the folder for its figure and its numbers."""

    @app.command(name, help=text)
    def command(out: Out = Path("results")) -> None:
        run(out)
        typer.echo(f"\nWrote {out.resolve() / name}.png, {name}.json")


_add_study(
    "toy",
    lambda out: _run_toy(out),
    "Least squares with ‖θ‖₁ ≤ 1: the two one-sided derivatives at the kink (paper, figure 1).\n\n"
    "Example: python -m studies toy --out results",
)


@app.command("regression")
def reproduce_regression(
    seed: Annotated[int, typer.Option(help="Random seed of the data and of the choice of removals.", min=0)] = 0,
    removals: Annotated[int, typer.Option(help="How many samples to remove, one at a time.", min=2, max=1000)] = 100,
    bounds: Annotated[
        Bounds, typer.Option(help="paper: the paper's bounds. binding: bounds at which both inequalities bind.")
    ] = Bounds.paper,
    out: Out = Path("results"),
) -> None:
    """Constrained linear regression, leave-one-out: compare all estimators with retraining by CVXPY (paper, figure 3).

    Example: python -m studies regression --seed 2 --removals 100 --out results
    """
    _run_regression(out, seed, removals, bounds)
    typer.echo(f"\nWrote {out.resolve() / 'regression.png'}, regression.json")


_add_study(
    "credit",
    lambda out: _run_credit(out),
    "A fair credit score on real data: compare all estimators with retraining without each of 700 credits.\n\n"
    "Example: python -m studies credit --out results",
)


@app.command("cnn")
def reproduce_cnn(
    n: Annotated[
        int, typer.Option(help="Number of training images. More than 6000 are read from --data, or downloaded.", min=2)
    ] = 6000,
    groups: Annotated[int, typer.Option(help="Number of groups; each has a constraint on its risk.", min=2)] = 3,
    alpha: Annotated[
        float,
        typer.Option(help="Share of the samples assigned to groups at random; the others by label.", min=0.0, max=1.0),
    ] = 0.5,
    tau: Annotated[
        float, typer.Option(help="How much a group's risk may exceed the mean of the groups.", min=0.0)
    ] = 0.002,
    l2: Annotated[float, typer.Option(help="Weight of the ridge penalty ½·L2·‖θ‖².", min=0.0)] = 0.006,
    model: Annotated[Model, typer.Option(help="paper: seven convolutions. small: four.")] = Model.paper,
    side: Annotated[
        Side, typer.Option(help="Pixels per side: 28 (original) or 14 (means over 2 × 2 pixels).")
    ] = Side.halved,
    channels: Annotated[int, typer.Option(help="Channels per convolution.", min=1)] = 4,
    removals: Annotated[
        int, typer.Option(help="How many of the most influential samples to retrain without.", min=2)
    ] = 100,
    plain: Annotated[
        int,
        typer.Option(help="How many of these to retrain also with SciPy's L-BFGS-B, as an independent check.", min=0),
    ] = 0,
    paper_epsilon: Annotated[
        bool, typer.Option(help="Also retrain with the weights 1/Nⱼ unchanged, as the paper defines a removal.")
    ] = True,
    unconstrained: Annotated[
        bool, typer.Option(help="Also fit the network without constraints, for its error on the test images.")
    ] = False,
    epochs: Annotated[int, typer.Option(help="Mini-batch epochs before the exact solver.", min=0)] = 100,
    image: Annotated[
        int, typer.Option(help="Which misclassified test image is the target: 0 is the first.", min=0)
    ] = 0,
    seed: Annotated[int, typer.Option(help="Random seed of initial weights, groups and mini-batches.", min=0)] = 0,
    device: Device = "cpu",
    data: Data = None,
    jobs: Annotated[int, typer.Option(help="How many processes train at the same time; -1: one per core.")] = 1,
    resume: Annotated[
        bool, typer.Option(help="Continue the study in --out; finished stages are not repeated.")
    ] = False,
    out: Out = Path("results/cnn"),
) -> None:
    """A fairness-constrained network on MNIST: compare all estimators with retraining (paper, section 5.2).

    The target is the loss of a misclassified test image (--image). Every training sample is scored with DIF; then the
    most influential ones are removed, one at a time, and the network is retrained to a certified solution. All stages
    are saved in --out.

    The defaults are those of docs/studies.md: minutes on a GPU, an hour or two on two cores. This takes two minutes:

    Example: python -m studies cnn --model small --n 2000 --l2 0.01 --tau 0.01 --epochs 200 --removals 40
    """
    check_device(device)
    if jobs == 0:
        fail("--jobs is 0, so no process would retrain. Leave it out for one process, or use -1 for one per core.")
    options = {"resume": resume, "data": data and str(data), "device": device, "jobs": jobs, "plain": plain}
    setting = {
        "n": n, "groups": groups, "alpha": alpha, "tau": tau, "l2": l2, "model": model.value, "side": int(side.value),
        "channels": channels, "seed": seed, "epochs": epochs, "removals": removals,
        "image": image,
    }  # fmt: skip
    _run_cnn(out, setting, paper_epsilon=paper_epsilon, unconstrained=unconstrained, **options)
    typer.echo(f"\nWrote {out.resolve() / 'cnn.png'}, cnn-images.png, cnn.json")


app.command("finetune")(reproduce_finetune)


@app.command("ablation")
def reproduce_ablation(out: Out = Path("results/ablation")) -> None:
    """The small network study with one setting changed at a time: what makes influence estimates fragile.

    Varies the ridge, the number of samples, the bounds of the constraints, damping and early stopping, and prints
    correlation and slope of predicted against retrained changes for each. Takes a quarter of an hour; finished parts
    are saved in --out and not repeated.
    """
    with report_errors(say_saved(out)):
        from studies import ablation

        rows = ablation.reproduce(out)
    headings = ("changed", "KKT residual", "tangent curvature", "binding", "damping", "DIF r", "slope", "Newton r",
                "classical IF r")  # fmt: skip
    table = make_table("Small network study: one setting changed at a time", *headings)
    for row in rows:
        label = f"{row['varied']} {row['value']:g}"
        numbers = (f"{row['residual']:.1e}", f"{row['tangent_curvature']:.1e}", str(row["binding"]),
                   f"{row['damping']:g}")  # fmt: skip
        shown = (("DIF", "pearson"), ("DIF", "slope"), ("Newton", "pearson"), ("classical IF", "pearson"))
        agreement = (row.get(name, {}).get(key) for name, key in shown)
        table.add_row(label, *numbers, *("—" if x is None else f"{x:.3f}" for x in agreement))
    make_console().print(table)
    typer.echo(f"\nWrote {out.resolve() / 'ablation.json'}")


@app.command("groups")
def reproduce_groups(out: Out = Path("results")) -> None:
    """Remove groups of samples at once, and move a bound: compare DIF, Newton and the path with fitting from scratch.

    Logistic regression on scikit-learn's digits with bounds on the risk of two groups. Takes about eight minutes on two
    cores, most of them for fitting from scratch. Needs scikit-learn.
    """
    with report_errors():
        from studies import groups

        result = groups.reproduce(out)
    title = "Groups of digits: largest relative error of Δθ against fitting from scratch"
    table = make_table(title, "removed", "DIF", "Newton", "path")
    kinds = dict.fromkeys((group["kind"], group["share"]) for group in result["groups"])
    for kind, share in kinds:
        members = [i for i, g in enumerate(result["groups"]) if (g["kind"], g["share"]) == (kind, share)]
        worst = (max(result["errors"][name][i] for i in members) for name in ("DIF", "Newton", "path"))
        table.add_row(f"{share:.0%}, {kind}", *(f"{error:.1e}" for error in worst))
    make_console().print(table)
    seconds, warning, curve = result["seconds"], result["warning"], result["curve"]
    for name in ("DIF", "path", "Newton", "warm retraining"):
        typer.echo(f"{name}: {seconds['from scratch'] / seconds[name]:.0f} times faster than fitting from scratch")
    each = result["seconds_each"]
    ratios = sorted(a / b for a, b in zip(each["from scratch"], each["path"], strict=True))
    typer.echo(
        f"path, per group: {ratios[0]:.1f} to {ratios[-1]:.0f} times faster, median {ratios[len(ratios) // 2]:.0f}"
    )
    fired, quiet = (f"{warning[key]:.1%}" for key in ("fired beyond 10 %", "fired below 1 %"))
    typer.echo(f"warnings: at {fired} of the {warning['beyond 10 %']} predictions off by more than 10 %, at {quiet} "
               f"of the {warning['below 1 %']} off by less than 1 %")  # fmt: skip
    faster = curve["seconds_from_scratch"] / curve["seconds"]
    typer.echo(f"curve over {len(curve['bounds'])} bounds: differs from fitting at each by at most "
               f"{curve['largest_difference']:.1e}, {faster:.0f} times faster")  # fmt: skip
    for kink in curve["kinks"]:
        confirmation = "confirmed by fitting 1e-6 on either side" if kink["confirmed"] else "NOT confirmed"
        typer.echo(f"kink at {kink['bound']:.6g}: {kink['name']} binds {kink['binds']} ({confirmation})")
    errors = ", ".join(f"{name} {row['relative_error']:.1e}" for name, row in result["unconstrained"].items())
    typer.echo(f"without constraints, groups of 5 %, relative error: {errors}")
    typer.echo(f"\nWrote {out.resolve() / 'groups.png'}, groups.json")


@app.command("attribution")
def reproduce_attribution(out: Out = Path("results")) -> None:
    """Standard data-attribution tests: compare DIF and the path with classical influence and TracIn.

    Linear datamodeling score (random halves of the data removed), detection of wrong labels, and sets of samples to
    remove, on scikit-learn's digits with a bound on the risk of one group. Takes about ten minutes on two cores;
    finished parts are saved in --out. Needs scikit-learn.
    """
    with report_errors(say_saved(out)):
        from studies import attribution

        result = attribution.reproduce(out)
    table = make_table("Linear datamodeling score: 50 random halves, mean over 100 test samples", "estimator", "LDS")
    for name, value in result["linear datamodeling score"].items():
        table.add_row(name, f"{value:.4f}")
    make_console().print(table)
    table = make_table("A tenth of the labels flipped: area under the ROC curve", "ranked by", "AUC")
    for name, value in result["wrong labels"].items():
        table.add_row(name, f"{value:.4f}")
    make_console().print(table)
    rows = result["choices"]
    table = make_table("Held-out loss after removing 30 samples and retraining", "seed", "before", "greedy", "ranking")
    for row in rows:
        table.add_row(str(row["seed"]), *(f"{row[key]:.5f}" for key in ("before", "greedy", "ranking")))
    make_console().print(table)
    better = sum(row["greedy"] < row["ranking"] for row in rows)
    typer.echo(f"the greedy choice beats the ranking for {better} of {len(rows)} seeds")
    flip, gap = result["sets"]["flip"], result["sets"]["gap"]
    typer.echo(f"removing {len(flip['removed'])} samples flips a prediction (margin {flip['margin']:.3f} → "
               f"{flip['after']:.3f}); removing {len(gap['removed'])} changes the gap from {gap['before']:.4f} "
               f"to {gap['after']:.4f}")  # fmt: skip
    typer.echo(f"\nWrote {out.resolve() / 'attribution.json'}")


@app.command("evaluation")
def reproduce_evaluation(out: Out = Path("results")) -> None:
    """Evaluate DIF, classical influence, TracIn and random scores by the tests of dif.evaluation.

    Linear datamodelling score, removal curves, leave-one-out agreement and detection of wrong labels, on scikit-learn's
    digits with a bound on the risk of one group. Takes about half a minute on two cores; finished retrainings are kept
    in --out. Needs scikit-learn.

    Example: python -m studies evaluation --out results
    """
    with report_errors():
        from studies import evaluation

        tables = evaluation.reproduce(out)
    for table in tables:
        shown = make_table(table.title, *table.headings)
        for cells in table.format_rows():
            shown.add_row(*cells)
        make_console().print(shown)
    typer.echo(f"\nWrote {out.resolve() / 'evaluation.png'}, evaluation-single.png, evaluation.json")


@app.command("calibration")
def reproduce_calibration(out: Out = Path("results")) -> None:
    """Compare the error that dif expects of its predictions with the actual error, for 47 models.

    Linear, logistic, Poisson and tanh-network models of many sizes, ridges and bounds; for each, 20 removals are
    retrained. Takes about twenty minutes on two cores; finished models are saved in --out.
    """
    with report_errors(say_saved(out)):
        from studies import calibration

        result = calibration.reproduce(out)
    table = make_table(
        "Relative error for the 20 most influential removals", "model", "parameters", "expected", "actual", "trusted"
    )
    for row in result["rows"]:
        errors = ("—" if row[key] is None else f"{row[key]:.1%}" for key in ("expected", "actual"))
        verdict = "refused" if row["trusted"] is None else "yes" if row["trusted"] else "no"
        table.add_row(row["name"], str(row["parameters"]), *errors, verdict)
    make_console().print(table)
    for key in ("models", "refused", "off by more than 50 %", "of these not trusted", "off by less than 10 %",
                "of these trusted"):  # fmt: skip
        typer.echo(f"{key}: {result[key]}")
    typer.echo(f"\nWrote {out.resolve() / 'calibration.json'}")


@app.command("runs")
def reproduce_runs(out: Out = Path("results")) -> None:
    """Compare the verdict on predictions through training with all removals trained again, for 60 runs.

    Small networks (tanh, GELU, ReLU), logistic regressions with a bounded minority, batches of 4 to 64, three targets
    each. Takes about two minutes on one core; finished runs are saved in --out.
    """
    with report_errors(say_saved(out)):
        from studies import runs

        result = runs.reproduce(out)
    headings = ("runs", "number", *runs.MEDIANS, "targets trusted")
    shown = make_table("Predictions through training against all removals trained again: medians", *headings)
    for cells in runs.format_families(result["families"]):
        shown.add_row(*cells)
    make_console().print(shown)
    for key in runs.COUNTS:
        typer.echo(f"{key}: {result[key]}")
    typer.echo(f"\nWrote {out.resolve() / 'runs.json'}")


def _run_toy(out: Path) -> None:
    with report_errors():
        from studies import toy

        result = toy.reproduce(out)
    title = "Toy: change of θ = (½, ½) when z₂ is removed; weakly active: " + ", ".join(result["weak"])
    table = make_table(title, "estimator", "removal (paper)", "opposite direction", "removal (renormalised)", left=4)
    paper, renormalised = result["changes"]["paper"], result["changes"]["renormalised"]
    for name in paper["removal"]:
        table.add_row(
            name,
            *(_format_theta(part[name]) for part in (paper["removal"], paper["opposite"], renormalised["removal"])),
        )
    make_console().print(table)


def _run_regression(out: Path, seed: int, removals: int, bounds: Bounds) -> None:
    with report_errors():
        from studies import regression

        result = regression.reproduce(out, seed, removals, bounds.value)
    binding = ", ".join(result["binding"])
    for convention, weights in (
        ("paper", "weights 1/n unchanged (the paper's removal)"),
        ("renormalised", "mean over the remaining samples"),
    ):
        table = _make_comparison(
            f"Regression, seed {seed}, {removals} removals against CVXPY\n{weights}; binding: {binding}"
        )
        for name, row in result["agreement"][convention].items():
            table.add_row(
                name,
                f"{row['pearson']:.6f}",
                f"{row['spearman']:.6f}",
                f"{row['slope']:.4f}",
                f"{row['relative_error']:.2e}",
                f"{row['sign']:.1%}",
            )
        make_console().print(table)


def _run_credit(out: Path) -> None:
    with report_errors():
        from studies import credit

        result = credit.reproduce(out)
    for target, agreements in result["agreement"].items():
        table = _make_comparison(
            f"Credit, {target}: {result['removals']} removals; binding: {', '.join(result['binding'])}"
        )
        for name, row in agreements.items():
            table.add_row(name, *_format_agreement(row))
        make_console().print(table)


def _format_agreement(row: dict[str, Any]) -> list[str]:
    """Format the agreement with retraining as five table cells."""
    if "pearson" not in row:
        return ["—"] * 5
    numbers = [f"{row[key]:.4f}" for key in ("pearson", "spearman", "slope")]
    return [*numbers, f"{row['relative_error']:.1%}", f"{row['sign']:.1%}"]


def _make_comparison(title: str) -> Table:
    """Return an empty table that compares estimators with retraining."""
    return make_table(title, "estimator", "Pearson r", "Spearman", "slope", "relative error", "same sign")


def _run_cnn(out: Path, setting: dict[str, Any] | None, **options: Any) -> None:
    """Run the network study with a setting (None: the small study) and print its tables."""
    resuming = "" if options.get("resume") else " with --resume"
    with report_errors(say_saved(out, f"the same command{resuming} continues from there")):
        from studies import cnn

        chosen = cnn.SMALL_STUDY if setting is None else cnn.Setting(**setting)
        result = cnn.reproduce(chosen, out, **options)
    target, binding = result["test_image"], ", ".join(result["binding"]) or "none"
    for convention, part in result["compared"].items():
        renormalised = convention == "renormalised"
        weights = "mean over the remaining samples" if renormalised else "weights 1/Nⱼ unchanged (the paper's removal)"
        table = _make_comparison(
            f"CNN, {result['parameters']} parameters, N = {chosen.n}: loss of test image {target['index']} "
            f"(a {target['label']} taken for a {target['taken_for']}), {chosen.removals} removals\n{weights}; "
            f"binding: {binding}; largest KKT residual of a retraining {max(part['residuals']):.1e}"
        )
        for name, row in part["agreement"].items():
            table.add_row(name, *_format_agreement(row))
        make_console().print(table)
    for name, remark in result["remarks"].items():
        typer.echo(f"{name}: {remark}")
    if "unconstrained" in result:
        typer.echo(f"Test error {result['test_error']:.1%}; without constraints "
                   f"{result['unconstrained']['test_error']:.1%}")  # fmt: skip
    if "plain" in result:
        typer.echo(f"L-BFGS-B: the loss changes of {len(result['plain']['removed'])} removals differ by at most "
                   f"{result['plain']['largest_difference']:.2%}")  # fmt: skip


def _format_theta(entry: dict[str, Any]) -> str:
    return "(" + ", ".join(f"{x + 0.0:.4f}" for x in entry["theta"]) + ")"


if __name__ == "__main__":
    run_program(app, "python -m studies")
