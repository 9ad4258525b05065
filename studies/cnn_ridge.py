"""The ridge of the paper's network, chosen by the error on training images that are held back.

Nothing but mini-batches in single precision is needed for this, and neither the test images nor any influence is
looked at.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from studies import results
from studies.cnn import Setting, build_task, to_single, train
from studies.cnn_fit import State
from studies.data import mnist
from studies.network import preprocess
from studies.options import Data, Device, Side

HELD = 10_000  # training images after the first n, on which the error is measured
MARGIN = 0.01  # how much larger than the least error that of the chosen ridge may be


def measure_errors(
    setting: Setting, ridges: list[float], out: Path, *, data: str | None, device: str = "cpu", seeds: int = 1,
    show_progress: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Train with each ridge, from one start per seed, and return the error on the held-back images.

    The errors are rows of numbers, one row per ridge, one number per seed. `chosen` is the largest ridge whose mean
    error is within `MARGIN` of the least: the larger the ridge, the better the curvature of the solution. The trained
    models are written to `out`; a fit with the same setting may start there.
    """
    digits = mnist(setting.n + HELD, 1_000, data=data)
    held = preprocess(digits.train[setting.n :], setting.side, device, torch.float32)
    labels = digits.train_labels[setting.n :].to(device)
    errors: list[list[float]] = []
    for l2 in ridges:
        errors.append([])
        for seed in range(setting.seed, setting.seed + seeds):
            one = replace(setting, l2=l2, seed=seed)
            run = train(to_single(build_task(one, data, device), one), one, show_progress)
            State(run.point.theta.double(), run.point.lam.double()).save(out / f"trained-{l2:g}-{seed}.npz")
            wrong = count_errors(run.params, held, labels)
            errors[-1].append(wrong / len(labels))
            typer.echo(f"L2 {l2:g}, seed {seed}: {errors[-1][-1]:.2%} of the held-back images are misclassified")
    means = [sum(row) / seeds for row in errors]
    return {
        "setting": asdict(setting),
        "held_back": [setting.n, setting.n + HELD],
        "l2": ridges,
        "errors": errors,
        "chosen": max(l2 for l2, error in zip(ridges, means, strict=True) if error <= min(means) + MARGIN),
    }


def count_errors(model: Any, images: Tensor, labels: Tensor) -> int:
    """Return how many images the model misclassifies."""
    with torch.no_grad():
        pairs = zip(images.split(250), labels.split(250), strict=True)
        return sum(int((model(some).argmax(1) != expected).sum()) for some, expected in pairs)


def main(
    n: Annotated[int, typer.Option(help="Number of training images.", min=2)] = 10_000,
    side: Annotated[Side, typer.Option(help="Pixels per side: 28 (original) or 14.")] = Side.whole,
    channels: Annotated[int, typer.Option(help="Channels per convolution.", min=1)] = 8,
    tau: Annotated[float, typer.Option(help="How much a group's risk may exceed the mean.", min=0.0)] = 0.002,
    l2: Annotated[list[float] | None, typer.Option(help="A weight of the ridge; repeat the option.")] = None,
    epochs: Annotated[int, typer.Option(help="Mini-batch epochs for each ridge.", min=1)] = 15,
    seed: Annotated[int, typer.Option(help="Random seed of the start, the groups and the batches.", min=0)] = 0,
    seeds: Annotated[int, typer.Option(help="How many seeds, from --seed on.", min=1)] = 1,
    device: Device = "cpu",
    data: Data = None,
    out: Annotated[Path, typer.Option(help="Folder for ridge.json.")] = Path("results/cnn-ridge"),
) -> None:
    """Train the paper's network with several ridges and print the error on training images that are held back."""
    setting = Setting(n=n, side=int(side.value), channels=channels, tau=tau, epochs=epochs, seed=seed)
    ridges = l2 or [0.001, 0.002, 0.003, 0.006, 0.01]
    out.mkdir(parents=True, exist_ok=True)
    found = measure_errors(setting, ridges, out, data=str(data) if data else None, device=device, seeds=seeds)
    results.write(out / "ridge.json", found)
    typer.echo(f"Chosen: L2 {found['chosen']:g}. Wrote {out.resolve() / 'ridge.json'}")


if __name__ == "__main__":
    typer.run(main)
