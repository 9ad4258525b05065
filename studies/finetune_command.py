"""The command of the fine-tuning study: run it, print its table, say where its files are."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from dif.cli.output import fail, make_console, make_table, report_errors
from studies.options import Data, Device, Out, Side, check_device, say_saved


class Network(StrEnum):
    """Networks that can be fine-tuned."""

    paper = "paper"
    small = "small"
    transformer = "transformer"


def reproduce_finetune(
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version: 2000 images of 14 × 14 pixels, four convolutions.")
    ] = False,
    model: Annotated[
        Network | None,
        typer.Option(help="paper (default): seven convolutions. small: four. transformer: reads the rows."),
    ] = None,
    n: Annotated[
        int | None,
        typer.Option(help="Training images (6000). More than 6000 are read from --data, or downloaded.", min=100),
    ] = None,
    channels: Annotated[
        int | None, typer.Option(help="Channels of each convolution (8); width of the transformer (160).", min=1)
    ] = None,
    side: Annotated[
        Side | None, typer.Option(help="Pixels per side: 28 (original) or 14 (means over 2 × 2 pixels).")
    ] = None,
    pretraining: Annotated[
        int | None, typer.Option(help="Epochs of pretraining without constraints (40; transformer 6).", min=0)
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs of fine-tuning (5).", min=1)] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            help="Learning rate of fine-tuning, at which pretraining ends (0.02; transformer 0.0001).", min=1e-6
        ),
    ] = None,
    tau: Annotated[
        float | None,
        typer.Option(help="How much a group's risk may exceed the mean of the groups (0.002; transformer 0).", min=0.0),
    ] = None,
    removals: Annotated[
        int | None, typer.Option(help="Strongest single samples to train again without (100; transformer 30).", min=2)
    ] = None,
    groups: Annotated[
        int | None,
        typer.Option(help="Random groups of 1 % and of 5 % to train again without (32 each; transformer 16).", min=2),
    ] = None,
    peers: Annotated[bool, typer.Option(help="Also evaluate DIF and classical influence at the end point.")] = True,
    seed: Annotated[
        int | None, typer.Option(help="Random seed of initial weights, groups and mini-batches (0).", min=0)
    ] = None,
    device: Device = "cpu",
    data: Data = None,
    out: Out = Path("results/finetune"),
) -> None:
    """Fine-tune a network under constraints: compare influence through training with training again.

    The paper's network is pretrained on MNIST, then fine-tuned on mini-batches under constraints on the risk of three
    groups. The end is no solution, so the derivative is taken through the steps of the training. The strongest single
    samples and random groups are removed, and the fine-tuning is repeated without them. DIF and classical influence
    are evaluated at the end point, with the damping that suits them best.

    The defaults are those of docs/studies.md: minutes on a GPU, hours on two cores. All stages are saved in --out; the
    same command continues an interrupted study. This takes about two minutes on two cores:

    Example: python -m studies finetune --quick --out results/finetune
    """
    check_device(device)
    if quick and model not in (None, Network.small):
        fail(f"--quick is a version of --model small, not of {model}. Leave out --quick or --model.")
    base = "quick" if quick else "transformer" if model is Network.transformer else "paper"
    given = {
        "model": model and model.value, "n": n, "channels": channels, "side": side and int(side.value),
        "pretraining": pretraining, "epochs": epochs, "lr": lr, "tau": tau, "removals": removals, "groups": groups,
        "dampings": None if peers else (), "seed": seed,
    }  # fmt: skip
    run_finetune(out, base, {key: value for key, value in given.items() if value is not None}, device, data)
    typer.echo(f"\nWrote {out.resolve() / 'finetune.png'}, finetune-history.png, finetune.json")


def run_finetune(out: Path, base: str, changes: dict[str, Any], device: str = "cpu", data: Path | None = None) -> None:
    """Run a version of the study with some settings changed, and print its table."""
    with report_errors(say_saved(out)):
        from studies import finetune

        setting = replace(finetune.STUDIES[base], **changes)
        result = finetune.reproduce(setting, out, data=data and str(data), device=device)
    names = list(result["r"]["single"])
    table = make_table("Fine-tuning: r of predicted and actual changes", "removed", *names)
    for kind, rows in result["r"].items():
        cells = (f"{min(rows[name]):.3f} … {max(rows[name]):.3f}" for name in names)
        table.add_row(finetune.describe_kind(result, kind), *cells)
    make_console().print(table)
    typer.echo(f"smallest … largest r of the targets: {', '.join(result['targets'])}")
    if len(names) > 1:
        typer.echo("DIF and classical IF: at the end point, for each target with the damping that suits it best")
    prices = zip(result["constraints"], result["multipliers"], strict=True)
    typer.echo(
        f"{result['parameters']} parameters, {setting.n} images, {result['steps']} steps; at the end |∇L| = "
        f"{result['gradient']:.2g}, λ = {', '.join(f'{price:.3g} ({name})' for name, price in prices)}; test error "
        f"before fine-tuning {result['test_error_pretrained']:.1%}"
    )
    seconds = result["seconds"]
    if {"training", "sweep"} <= set(seconds):
        typer.echo(
            f"seconds: training {seconds['training']:.1f}; sweep for all samples and targets {seconds['sweep']:.1f}"
        )
