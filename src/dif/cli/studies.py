"""The paper's studies."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dif.cli.saying import console, one_line, refuse, table

reproduce = typer.Typer(
    help="Rerun the paper's experiments: figures as PNG, every number as JSON.", no_args_is_help=True
)

Out = Annotated[Path, typer.Option(help="Folder for the figures and the JSON files; made if missing.")]


class Bounds(StrEnum):
    """Right-hand sides of the regression's inequalities."""

    paper = "paper"
    binding = "binding"


class Model(StrEnum):
    """Networks of the fairness study."""

    paper = "paper"
    small = "small"


class Side(StrEnum):
    """Pixels of an image along each side."""

    whole = "28"
    halved = "14"


def paper_studies(out: Path) -> None:
    """All three on embedded data, the network in a small version, and tables of what they show."""
    _toy(out)
    _regression(out, seed=3, removals=100, bounds=Bounds.paper)
    _credit(out)
    _cnn(out / "cnn", None, resume=True, paper_epsilon=False)


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


@reproduce.command("credit")
def reproduce_credit(out: Out = Path("results")) -> None:
    """A fair credit score on real data: every estimator against retraining without each of 700 credits.

    Example: dif reproduce credit --out results
    """
    _credit(out)
    typer.echo(f"\nWritten: {out.resolve() / 'credit.png'}, credit.json")


@reproduce.command("cnn")
def reproduce_cnn(
    n: Annotated[
        int, typer.Option(help="Training images; more than 6000 are read from --data or downloaded.", min=2)
    ] = 6000,
    groups: Annotated[int, typer.Option(help="Groups of samples, each with a constraint on its risk.", min=2)] = 3,
    alpha: Annotated[float, typer.Option(help="Share dealt to the groups at random.", min=0.0, max=1.0)] = 0.5,
    tau: Annotated[float, typer.Option(help="How far a group's risk may exceed the mean.", min=0.0)] = 0.002,
    l2: Annotated[float, typer.Option(help="Weight of the ridge, ½·L2·‖θ‖².", min=0.0)] = 0.006,
    model: Annotated[Model, typer.Option(help="Seven convolutions, or four.")] = Model.paper,
    side: Annotated[Side, typer.Option(help="Pixels per side: as they are, or means over 2 × 2.")] = Side.halved,
    channels: Annotated[int, typer.Option(help="Channels of each convolution.", min=1)] = 4,
    removals: Annotated[int, typer.Option(help="So many of the most influential are retrained.", min=2)] = 100,
    plain: Annotated[int, typer.Option(help="So many also by a plain optimiser, as a check.", min=0)] = 0,
    paper_epsilon: Annotated[bool, typer.Option(help="Also retrain with 1/Nⱼ kept, the paper's removal.")] = True,
    epochs: Annotated[int, typer.Option(help="Of mini-batches, before the polish.", min=0)] = 100,
    seed: Annotated[int, typer.Option(help="Of the start, the groups and the mini-batches.", min=0)] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    data: Annotated[Path | None, typer.Option(help="Folder with the four files of MNIST (idx, gzip).")] = None,
    jobs: Annotated[int, typer.Option(help="Processes that share the retrainings.")] = 1,
    resume: Annotated[
        bool, typer.Option(help="Go on with the study in --out; finished stages are not repeated.")
    ] = False,
    out: Out = Path("results/cnn"),
) -> None:
    """A fairness-constrained network on MNIST: every estimator against retraining (paper, section 5.2).

    The first misclassified test image is followed: every training sample is scored with DIF, the most influential are
    removed one by one and the network is trained again to a certified solution each time. All stages are kept in --out.

    The defaults are those of docs/studies.md: minutes on a GPU, an hour or two on two cores. In two minutes there:

    Example: dif reproduce cnn --model small --n 2000 --l2 0.01 --tau 0.01 --epochs 200 --removals 40
    """
    _check_device(device)
    if jobs == 0:
        refuse("--jobs 0: no process would do the work; leave it out for one, or say -1 for as many as there are cores")
    options = {"resume": resume, "data": data and str(data), "device": device, "jobs": jobs, "plain": plain}
    setting = {
        "n": n, "groups": groups, "alpha": alpha, "tau": tau, "l2": l2, "model": model.value, "side": int(side.value),
        "channels": channels, "seed": seed, "epochs": epochs, "removals": removals,
    }  # fmt: skip
    _cnn(out, setting, paper_epsilon=paper_epsilon, **options)
    typer.echo(f"\nWritten: {out.resolve() / 'cnn.png'}, cnn-images.png, cnn.json")


@reproduce.command("ablation")
def reproduce_ablation(out: Out = Path("results/ablation")) -> None:
    """The small network study with one thing changed at a time: why influence is called fragile, and what cures it.

    Ridge, number of samples, bounds of the constraints, damping, stopping early: correlation and slope of predicted
    against retrained changes for each. Finished parts are kept in --out and not repeated (a quarter of an hour).
    """
    with one_line():
        from dif.studies import ablation

        rows = ablation.reproduce(out)
    made = table("Network study, small: one thing changed at a time", "", "KKT residual", "tangent curvature",
                 "binding", "damping", "DIF r", "slope", "Newton r", "classical IF r")  # fmt: skip
    for row in rows:
        words = f"{row['varied']} {row['value']:g}"
        figures = (f"{row['residual']:.1e}", f"{row['tangent_curvature']:.1e}", str(row["binding"]),
                   f"{row['damping']:g}")  # fmt: skip
        shown = (("DIF", "pearson"), ("DIF", "slope"), ("Newton", "pearson"), ("classical IF", "pearson"))
        agreement = (row.get(name, {}).get(key) for name, key in shown)
        made.add_row(words, *figures, *("—" if x is None else f"{x:.3f}" for x in agreement))
    console().print(made)
    typer.echo(f"\nWritten: {out.resolve() / 'ablation.json'}")


@reproduce.command("groups")
def reproduce_groups(out: Out = Path("results")) -> None:
    """Groups of digits removed at once, and a bound that moves: DIF, Newton and the path against training from scratch.

    Logistic regression under bounds on the risk of two groups. About eight minutes on two cores, most of them for
    training from scratch. Needs scikit-learn, for its digits.
    """
    with one_line():
        from dif.studies import groups

        result = groups.reproduce(out)
    made = table("Groups of digits: relative error of Δθ against training from scratch", "removed", "DIF", "Newton",
                 "path")  # fmt: skip
    kinds = dict.fromkeys((group["kind"], group["share"]) for group in result["groups"])
    for kind, share in kinds:
        mine = [i for i, g in enumerate(result["groups"]) if (g["kind"], g["share"]) == (kind, share)]
        worst = (max(result["errors"][name][i] for i in mine) for name in ("DIF", "Newton", "path"))
        made.add_row(f"{share:.0%}, {kind}", *(f"{error:.1e}" for error in worst))
    console().print(made)
    seconds, warning, curve = result["seconds"], result["warning"], result["curve"]
    for name in ("DIF", "path", "Newton", "warm retraining"):
        typer.echo(f"{name}: {seconds['from scratch'] / seconds[name]:.0f} times less time than training from scratch")
    each = result["seconds_each"]
    ratios = sorted(a / b for a, b in zip(each["from scratch"], each["path"], strict=True))
    typer.echo(
        f"path, group by group: {ratios[0]:.1f} to {ratios[-1]:.0f} times less, median {ratios[len(ratios) // 2]:.0f}"
    )
    fired, quiet = (f"{warning[key]:.1%}" for key in ("fired beyond 10 %", "fired below 1 %"))
    typer.echo(f"warning fired in {fired} of {warning['beyond 10 %']} answers off by more than 10 %, in {quiet} "
               f"of {warning['below 1 %']} within 1 %")  # fmt: skip
    faster = curve["seconds_from_scratch"] / curve["seconds"]
    typer.echo(f"curve of {len(curve['bounds'])} bounds: differs from solving each by at most "
               f"{curve['largest_difference']:.1e}, {faster:.0f} times less time")  # fmt: skip
    for kink in curve["kinks"]:
        told = "confirmed by solving 1e-6 to either side" if kink["confirmed"] else "NOT confirmed"
        typer.echo(f"kink at {kink['bound']:.6g}: {kink['name']} binds {kink['binds']} ({told})")
    errors = ", ".join(f"{name} {row['relative_error']:.1e}" for name, row in result["unconstrained"].items())
    typer.echo(f"without constraints, groups of 5 %, relative error: {errors}")
    typer.echo(f"\nWritten: {out.resolve() / 'groups.png'}, groups.json")


@reproduce.command("attribution")
def reproduce_attribution(out: Out = Path("results")) -> None:
    """Half the data left out, labels that are wrong, sets to remove: DIF and the path against classical IF and TracIn.

    The digits under a bound on the risk of one group. About ten minutes on two cores; finished parts are kept in
    --out. Needs scikit-learn, for its digits.
    """
    with one_line():
        from dif.studies import attribution

        result = attribution.reproduce(out)
    made = table("Linear datamodeling score: 50 random halves, mean over 100 test samples", "estimator", "LDS")
    for name, value in result["linear datamodeling score"].items():
        made.add_row(name, f"{value:.4f}")
    console().print(made)
    made = table("A tenth of the labels flipped: area under the ROC curve", "ranked by", "AUC")
    for name, value in result["wrong labels"].items():
        made.add_row(name, f"{value:.4f}")
    console().print(made)
    rows = result["choices"]
    made = table("30 samples removed to lower the held-out loss, retrained", "seed", "before", "greedy", "ranking")
    for row in rows:
        made.add_row(str(row["seed"]), *(f"{row[key]:.5f}" for key in ("before", "greedy", "ranking")))
    console().print(made)
    typer.echo(
        f"greedy beats the ranking in {sum(row['greedy'] < row['ranking'] for row in rows)} of {len(rows)} seeds"
    )
    flip, gap = result["sets"]["flip"], result["sets"]["gap"]
    typer.echo(f"a prediction flips without {len(flip['removed'])} samples (margin {flip['margin']:.3f} → "
               f"{flip['after']:.3f}); the gap is {gap['before']:.4f} → {gap['after']:.4f} without "
               f"{len(gap['removed'])}")  # fmt: skip
    typer.echo(f"\nWritten: {out.resolve() / 'attribution.json'}")


@reproduce.command("calibration")
def reproduce_calibration(out: Out = Path("results")) -> None:
    """Is the error that dif expects of its predictions the error that happens? 47 models, 20 removals each retrained.

    Linear, logistic, Poisson and tanh-network models of many sizes, ridges and bounds. About twenty minutes on two
    cores; finished models are kept in --out.
    """
    with one_line():
        from dif.studies import calibration

        result = calibration.reproduce(out)
    made = table("Relative error of the 20 strongest removals", "model", "parameters", "expected", "actual", "trusted")
    for row in result["rows"]:
        errors = ("—" if row[key] is None else f"{row[key]:.1%}" for key in ("expected", "actual"))
        verdict = "refused" if row["trusted"] is None else "yes" if row["trusted"] else "no"
        made.add_row(row["name"], str(row["parameters"]), *errors, verdict)
    console().print(made)
    for key in ("models", "refused", "off by more than 50 %", "of these not trusted", "off by less than 10 %",
                "of these trusted"):  # fmt: skip
        typer.echo(f"{key}: {result[key]}")
    typer.echo(f"\nWritten: {out.resolve() / 'calibration.json'}")


def _check_device(device: str) -> None:
    import torch

    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        refuse(f"no device {device!r} here ({str(error).splitlines()[0]}): leave --device out", cause=error)


def _toy(out: Path) -> None:
    with one_line():
        from dif.studies import toy

        result = toy.reproduce(out)
    title = "Toy: what removing z₂ does to θ = (½, ½); weak constraint: " + ", ".join(result["weak"])
    made = table(title, "estimator", "removal, paper's ε", "opposite direction", "removal, renormalised", left=4)
    paper, renormalised = result["changes"]["paper"], result["changes"]["renormalised"]
    for name in paper["removal"]:
        made.add_row(
            name, *(_pair(part[name]) for part in (paper["removal"], paper["opposite"], renormalised["removal"]))
        )
    console().print(made)


def _regression(out: Path, seed: int, removals: int, bounds: Bounds) -> None:
    with one_line():
        from dif.studies import regression

        result = regression.reproduce(out, seed, removals, bounds.value)
    held = ", ".join(result["binding"])
    for convention, words in (("paper", "1/n kept (paper's ε)"), ("renormalised", "mean over the samples left")):
        made = _comparison(f"Regression, seed {seed}, {removals} removals against CVXPY\n{words}; binding: {held}")
        for name, row in result["agreement"][convention].items():
            made.add_row(
                name,
                f"{row['pearson']:.6f}",
                f"{row['spearman']:.6f}",
                f"{row['slope']:.4f}",
                f"{row['relative_error']:.2e}",
                f"{row['sign']:.1%}",
            )
        console().print(made)


def _credit(out: Path) -> None:
    with one_line():
        from dif.studies import credit

        result = credit.reproduce(out)
    for target, found in result["agreement"].items():
        made = _comparison(f"Credit, {target}: {result['removals']} removals; binding: {', '.join(result['binding'])}")
        for name, row in found.items():
            made.add_row(name, *_figures(row))
        console().print(made)


def _figures(row: dict[str, Any]) -> list[str]:
    """Agreement with retraining, as it stands in a table."""
    if "pearson" not in row:
        return ["—"] * 5
    numbers = [f"{row[key]:.4f}" for key in ("pearson", "spearman", "slope")]
    return [*numbers, f"{row['relative_error']:.1%}", f"{row['sign']:.1%}"]


def _comparison(title: str) -> Table:
    """An empty table of estimators against retraining."""
    return table(title, "estimator", "Pearson r", "Spearman", "slope", "relative error", "same sign")


def _cnn(out: Path, setting: dict[str, Any] | None, **options: Any) -> None:
    """The study of a setting, or the small one that comes with dif."""
    with one_line():
        from dif.studies import cnn

        chosen = cnn.SMALL_STUDY if setting is None else cnn.Setting(**setting)
        result = cnn.reproduce(chosen, out, **options)
    target, held = result["test_image"], ", ".join(result["binding"]) or "none"
    for convention, part in result["compared"].items():
        words = "mean over the samples left" if convention == "renormalised" else "1/Nⱼ kept (paper's ε)"
        made = _comparison(
            f"CNN, {result['parameters']} parameters, N = {chosen.n}: loss of test image {target['index']} "
            f"(a {target['label']} taken for a {target['taken_for']}), {chosen.removals} removals\n{words}; "
            f"binding: {held}; largest KKT residual of a retraining {max(part['residuals']):.1e}"
        )
        for name, row in part["agreement"].items():
            made.add_row(name, *_figures(row))
        console().print(made)
    for name, remark in result["remarks"].items():
        typer.echo(f"{name}: {remark}")
    if "plain" in result:
        typer.echo(f"plain optimiser: loss changes of {len(result['plain']['removed'])} removals differ by at most "
                   f"{result['plain']['largest_difference']:.2%}")  # fmt: skip


def _pair(entry: dict[str, Any]) -> str:
    return "(" + ", ".join(f"{x + 0.0:.4f}" for x in entry["theta"]) + ")"
