"""Influence through training: the paper's network at full size, pretrained, then fine-tuned under group constraints.

Predicted changes of six targets against the same fine-tuning without the samples. DIF and the classical influence
function are evaluated at the same end point, which is no solution, with the damping that suits them best.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dif
from dif.data import mnist
from dif.estimators.rerun import rerun
from dif.optimality.targets import Targets
from dif.runtime.atomic_file import open_atomically
from dif.studies.network import (
    PAPER,
    AllConvolutional,
    RowTransformer,
    assign_groups,
    bound_group_risks,
    cross_entropy,
    preprocess,
)

DAMPINGS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # δ in H + δI, tried for DIF and the classical IF


@dataclass(frozen=True)
class Setting:
    """All settings on which the results of the study depend."""

    n: int = 6_000
    model: str = "paper"  # or "transformer"
    channels: int = 8  # of each convolution; width of the transformer
    side: int = 28  # pixels along each side of an image: 28, or 14 by averaging 2 × 2 pixels
    pretraining: int = 40  # epochs without constraints
    pretraining_lr: float = 0.1  # at their beginning
    epochs: int = 5  # of fine-tuning
    batch_size: int = 250
    lr: float = 0.02
    momentum: float = 0.9
    eps_root: float = 1e-8  # of AdamW, for the transformer
    dual: float = 0.5  # rate of the multipliers
    tau: float = 0.002  # how much the risk of a group may exceed the mean of the groups
    l2: float = 0.001  # weight of the ridge
    alpha: float = 0.5  # share of the samples assigned to groups at random; the others by label
    seed: int = 0
    removals: int = 100  # strongest single removals
    groups: int = 32  # random groups of each size
    shares: tuple[float, ...] = (0.01, 0.05)  # of the samples in a group
    dampings: tuple[float, ...] = DAMPINGS  # none: DIF and the classical IF are left out


@dataclass(frozen=True, eq=False)
class Task:
    """The problem of a setting, with its data on a device."""

    train: dif.Samples
    problem: dif.Problem
    model: nn.Module  # pretrained
    targets: list[dif.Term]
    error: float  # of the pretrained model on the test images


def build_task(setting: Setting, data: str | None, device: str, dtype: torch.dtype) -> Task:
    """Pretrain the network, and state min R̄ + ridge s.t. Rᵢ ≤ R̄ + τ and the six targets."""
    digits = mnist(setting.n, 1_000, data=data)
    images, test = (preprocess(part, setting.side, device, dtype) for part in (digits.train, digits.test))
    labels, test_labels = digits.train_labels.to(device), digits.test_labels.to(device)
    model = pretrain(setting, images, labels)
    with torch.no_grad():
        wrong = torch.nonzero(model(test).argmax(1) != test_labels).reshape(-1).tolist()
    train = dif.Samples(cross_entropy, (images, labels), name="train")
    tests = dif.Samples(cross_entropy, (test, test_labels), name="test")
    group = assign_groups(digits.train_labels, 3, setting.alpha, setting.seed)
    risks, mean, constraints = bound_group_risks(train, group, 3, setting.tau)
    targets = [tests.weighted(torch.eye(len(test))[i]) for i in wrong[:4]] + [tests.mean(), risks[0] - risks[1]]
    problem = dif.Problem(mean + dif.ridge(setting.l2), constraints)
    return Task(train, problem, model, targets, len(wrong) / len(test))


def pretrain(setting: Setting, images: Tensor, labels: Tensor) -> nn.Module:
    """Train the network without constraints by momentum SGD, whose learning rate falls along a cosine.

    It ends at the learning rate of the fine-tuning: SGD settles where the curvature is small enough for its steps, and
    a fine-tuning with larger steps than that would be unstable.
    """
    state = torch.get_rng_state()
    torch.manual_seed(setting.seed)
    if setting.model == "transformer":
        model: nn.Module = RowTransformer(setting.side, setting.channels, 4).to(images)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), setting.pretraining_lr)
    else:
        model = AllConvolutional(PAPER, setting.channels).to(images)
        optimizer = torch.optim.SGD(
            model.parameters(), setting.pretraining_lr, momentum=setting.momentum, weight_decay=setting.l2
        )
    steps = setting.pretraining * -(-len(images) // setting.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps), eta_min=setting.lr)
    for _ in range(setting.pretraining):
        for index in torch.randperm(len(images)).split(setting.batch_size):
            optimizer.zero_grad()
            cross_entropy(model, (images[index.to(images.device)], labels[index.to(images.device)])).mean().backward()
            optimizer.step()
            schedule.step()
    torch.set_rng_state(state)
    return model.eval()


def training_of(task: Task, setting: Setting) -> dif.Training:
    """Return the fine-tuning of a task."""
    sgd = dif.SGD(setting.lr, momentum=setting.momentum)
    optimizer = dif.AdamW(setting.lr, eps_root=setting.eps_root) if setting.model == "transformer" else sgd
    dual = dif.Ascent(setting.dual)
    return dif.Training(
        task.problem, task.model, optimizer, dual, setting.batch_size, setting.epochs, setting.seed, "cosine"
    )


def choose_removals(task: Task, setting: Setting, scores: Tensor) -> dict[str, dif.Perturbation]:
    """Return the strongest single removals over all targets, and random groups."""
    strength = (scores.abs() / scores.abs().max(0).values).sum(1)
    strongest = strength.argsort(descending=True)[: setting.removals].tolist()
    generator, chosen = torch.Generator().manual_seed(setting.seed), {"single": task.train.remove_each(strongest)}
    for share in setting.shares:
        size = round(share * setting.n)
        groups = [torch.randperm(setting.n, generator=generator)[:size].tolist() for _ in range(setting.groups)]
        chosen[f"{share:.0%}"] = task.train.remove_groups(groups)
    return chosen


def correlations(predicted: Tensor, actual: Tensor) -> list[float]:
    """Return Pearson's r of each target."""
    pairs = zip(predicted.T, actual.T, strict=True)
    return [float(torch.corrcoef(torch.stack([p.double(), a.double()]))[0, 1]) for p, a in pairs]


def run_study(
    setting: Setting, out: Path, data: str | None, device: str, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Run the study and write its results to `out`, after each kind of removal."""
    file = out / f"finetune-{setting.model}-{setting.n}-{setting.channels}.json"
    found: dict[str, Any] = {"setting": asdict(setting), "device": device, "r": {}, "seconds": {}}

    def save() -> None:
        with open_atomically(file) as handle:
            handle.write(json.dumps(found, indent=1).encode())

    task = build_task(setting, data, device, torch.float32)
    training = training_of(task, setting)
    _ = training.loop
    run, found["seconds"]["training"] = _timed(device, lambda: training.run(show_progress=False))
    estimator = dif.UnrolledInfluence(run)
    every = task.train.remove_each()
    _, found["seconds"]["sweep, one target"] = _timed(
        device, lambda: estimator.scores(task.targets[4], every, show_progress=False, probe=0)
    )
    scores, found["seconds"]["sweep, six targets"] = _timed(
        device, lambda: estimator.scores(task.targets, every, show_progress=False, probe=0)
    )
    end = run.end
    found["parameters"], found["steps"] = end.theta.numel(), run.loop.length
    found["test_error_pretrained"] = task.error
    found["gradient"], found["multipliers"] = end.kkt.gradient_norm, end.lam.tolist()
    found["adjoint_growth"] = scores.diagnostics["adjoint_growth"]
    say(f"{found['parameters']} parameters, {found['steps']} steps, test error {task.error:.3f} before fine-tuning")
    say(f"|∇L| {found['gradient']:.3g}, λ {found['multipliers']}, adjoint grew {found['adjoint_growth']:.3g} times")
    say(f"seconds {found['seconds']}")
    targets = Targets(task.targets, end)
    before = targets.values(end.theta)
    chosen, actual = choose_removals(task, setting, scores.values), {}
    for kind, removals in chosen.items():
        began = time.perf_counter()
        ends = [theta for thetas, _ in rerun(run, removals) for theta in thetas]
        actual[kind] = torch.stack([targets.values(theta) - before for theta in ends]).double().cpu()
        found["seconds"][f"retraining {kind}"] = time.perf_counter() - began
        predicted = estimator.scores(task.targets, removals, show_progress=False, probe=0).values
        found["r"][kind] = {"unrolled": correlations(predicted, actual[kind])}
        say(f"{kind}: r {min(found['r'][kind]['unrolled']):.4f} … {max(found['r'][kind]['unrolled']):.4f}")
        save()
    for name, kind, r in _peers(end, task, setting.dampings, chosen, actual):
        found["r"][kind][name] = r
        say(f"{kind}: {name} at its best damping r {min(r):.3f} … {max(r):.3f}")
        save()
    return found


def _peers(
    end: dif.Solution, task: Task, dampings: tuple[float, ...], chosen: dict[str, dif.Perturbation],
    actual: dict[str, Tensor],
) -> Iterator[tuple[str, str, list[float]]]:  # fmt: skip
    """Yield the best r of DIF and of the classical IF at the end point over the dampings, target by target."""
    for estimator in (dif.DirectionalInfluence, dif.ClassicalInfluence):
        best = {kind: [float("-inf")] * len(task.targets) for kind in chosen}
        for damping in dampings:
            try:
                prepared = estimator(end, damping=damping, strict=False)
                for kind, removals in chosen.items():
                    found = prepared.scores(task.targets, removals, show_progress=False, assess=0)
                    r = correlations(found.values, actual[kind])
                    best[kind] = [max(old, new) for old, new in zip(best[kind], r, strict=True)]
            except dif.DifError:
                continue  # not positive definite with this damping
        yield from ((estimator.name, kind, r) for kind, r in best.items() if r[0] > float("-inf"))


def _timed(device: str, work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of some work and the seconds that it took."""
    began = time.perf_counter()
    result = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - began
