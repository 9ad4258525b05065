"""Influence through training: a network is pretrained, then fine-tuned under constraints on the risk of three groups.

Predicted changes of up to six targets are compared with the same fine-tuning without the samples. DIF and the classical
influence function are evaluated at the same end point, which is no solution, with the damping that suits them best.
Every stage is saved, so that an interrupted study continues.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dif
from dif.report import plots
from dif.runtime.archive import open_atomically
from dif.runtime.work import progress
from studies import results
from studies.data import mnist
from studies.network import (
    PAPER,
    SMALL,
    AllConvolutional,
    RowTransformer,
    assign_groups,
    bound_group_risks,
    check_removals,
    cross_entropy,
    preprocess,
)

DAMPINGS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # δ in H + δI, tried for DIF and the classical IF
GROUPS = 3  # groups of samples, each with a constraint on its risk
SINGLE = "single"  # kind of removals: one sample each
FIGURES = ("finetune.png", "finetune-history.png")  # files that the study draws
_PEERS = (dif.DirectionalInfluence, dif.ClassicalInfluence)
_HEADS = 4  # attention heads of the transformer


@dataclass(frozen=True)
class Setting:
    """All settings on which the results of the study depend."""

    n: int = 6_000
    model: str = "paper"  # or "small" (four convolutions), or "transformer"
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


STUDIES = {  # the study of each model, and a version for two cores
    "paper": Setting(),
    "transformer": Setting(
        model="transformer", channels=160, pretraining=6, pretraining_lr=0.001, lr=0.0001, eps_root=1e-5, dual=0.3,
        tau=0.0, alpha=0.3, l2=0.0, removals=30, groups=16, dampings=(),
    ),
    "quick": Setting(
        n=2_000, model="small", channels=5, side=14, pretraining=80, removals=30, groups=16,
        dampings=(0.03, 0.1, 0.3, 1.0, 3.0),
    ),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Task:
    """The problem of a setting, with its data on a device."""

    train: dif.Samples
    problem: dif.Problem
    model: nn.Module  # pretrained
    targets: dict[str, dif.Term]
    error: float  # of the pretrained model on the test images


def build_task(setting: Setting, out: Path, data: str | None, device: str, show_progress: bool) -> Task:
    """State min R̄ + ridge s.t. Rᵢ ≤ R̄ + τ with the targets; the pretrained network is the start."""
    dtype = torch.float64 if device == "cpu" else torch.float32
    digits = mnist(setting.n, 1_000, data=data)
    images, test = (preprocess(part, setting.side, device, dtype) for part in (digits.train, digits.test))
    labels, test_labels = digits.train_labels.to(device), digits.test_labels.to(device)
    model = load_or_pretrain(setting, images, labels, out / "pretrained.npz", show_progress)
    with torch.no_grad():
        wrong = torch.nonzero(model(test).argmax(1) != test_labels).reshape(-1).tolist()
    train = dif.Samples(cross_entropy, (images, labels), name="train")
    tests = dif.Samples(cross_entropy, (test, test_labels), name="test")
    group = assign_groups(digits.train_labels, GROUPS, setting.alpha, setting.seed)
    risks, mean, constraints = bound_group_risks(train, group, GROUPS, setting.tau)
    targets: dict[str, dif.Term] = {"test loss": tests.mean(), "gap of groups 0 and 1": risks[0] - risks[1]}
    targets |= {f"loss of test image {i}": tests.weighted(torch.eye(len(test))[i]) for i in wrong[:4]}
    return Task(train, dif.Problem(mean + dif.ridge(setting.l2), constraints), model, targets, len(wrong) / len(test))


def load_or_pretrain(setting: Setting, images: Tensor, labels: Tensor, file: Path, show_progress: bool) -> nn.Module:
    """Return the pretrained network saved in a file; if there is none, pretrain it and save it."""
    state = torch.get_rng_state()
    torch.manual_seed(setting.seed)
    if setting.model == "transformer":
        model: nn.Module = RowTransformer(setting.side, setting.channels, depth=4, heads=_HEADS).to(images)
    else:
        model = AllConvolutional(PAPER if setting.model == "paper" else SMALL, setting.channels).to(images)
    if file.exists():
        with np.load(file, allow_pickle=False) as saved:
            nn.utils.vector_to_parameters(torch.as_tensor(saved["theta"]).to(images), model.parameters())
    else:
        pretrain(model, setting, images, labels, show_progress)
        theta = nn.utils.parameters_to_vector(model.parameters()).detach().cpu().numpy()
        with open_atomically(file) as handle:
            np.savez(handle, theta=theta)
    torch.set_rng_state(state)
    return model.eval()


def pretrain(model: nn.Module, setting: Setting, images: Tensor, labels: Tensor, show_progress: bool) -> None:
    """Train the network without constraints by momentum SGD, whose learning rate falls along a cosine.

    It ends at the learning rate of the fine-tuning: SGD settles where the curvature is small enough for its steps, and
    a fine-tuning with larger steps than that would be unstable.
    """
    if setting.model == "transformer":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), setting.pretraining_lr)
    else:
        optimizer = torch.optim.SGD(
            model.parameters(), setting.pretraining_lr, momentum=setting.momentum, weight_decay=setting.l2
        )
    steps = setting.pretraining * -(-len(images) // setting.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps), eta_min=setting.lr)
    with progress("pretraining", setting.pretraining, show_progress) as report:
        for epoch in range(setting.pretraining):
            for index in torch.randperm(len(images)).to(images.device).split(setting.batch_size):
                optimizer.zero_grad()
                cross_entropy(model, (images[index], labels[index])).mean().backward()
                optimizer.step()
                schedule.step()
            report(epoch + 1)


def build_training(task: Task, setting: Setting) -> dif.Training:
    """Return the fine-tuning of a task."""
    sgd = dif.SGD(setting.lr, momentum=setting.momentum)
    return dif.Training(
        task.problem,
        task.model,
        dif.AdamW(setting.lr, eps_root=setting.eps_root) if setting.model == "transformer" else sgd,
        dif.Ascent(setting.dual),
        batch_size=setting.batch_size,
        epochs=setting.epochs,
        seed=setting.seed,
        schedule="cosine",
    )


# The stages, each saved to disk


def run(
    setting: Setting, out: Path, *, data: str | None = None, device: str = "cpu", show_progress: bool = True
) -> dict[str, Any]:
    """Pretrain, fine-tune, predict removals, carry them out and compare; return the numbers.

    Args:
        setting: The settings of the study.
        out: Folder in which every stage is saved; a later call with the same folder continues from there.
        data: Folder with the four MNIST files; None: the images that come with dif, or a download.
        device: torch device. On the CPU numbers have double precision, elsewhere single precision.
        show_progress: Show progress bars on a terminal.
    """
    study = Study.open(out, setting, device)
    study.save()  # marks the folder as used by this setting
    task = build_task(setting, out, data, device, show_progress)
    targets, training, found = list(task.targets.values()), build_training(task, setting), study.found
    finetuned = study.time("training", lambda: training.run(keep=out / "run", show_progress=show_progress))
    draw_history(out / FIGURES[1], finetuned)
    estimator = dif.UnrolledInfluence(finetuned)

    def predict(removals: dif.Perturbation) -> dif.Influence:
        """Predict the changes; a finished sweep over the run is not repeated, whatever is removed."""
        return estimator.scores(targets, removals, show_progress=show_progress, probe=0)

    scores = study.time("sweep", lambda: predict(task.train.remove_each()))
    end = finetuned.end
    found |= {
        "parameters": end.theta.numel(),
        "steps": len(finetuned.history.steps),
        "test_error_pretrained": task.error,
        "gradient": end.kkt.gradient_norm,
        "constraints": list(end.program.names),
        "multipliers": end.lam.tolist(),
        "targets": list(task.targets),
        "adjoint_growth": scores.diagnostics["adjoint_growth"],
        "removed": find_strongest(scores.values, setting.removals),
    }
    removals = choose_removals(task.train, setting, found["removed"])
    for kind in [kind for kind in removals if kind not in found["r"]]:
        predicted = predict(removals[kind]).values
        retraining = dif.Retraining(finetuned, keep=out / "retrained")
        score = partial(retraining.scores, targets, removals[kind], show_progress=show_progress)
        actual = study.time(f"retraining {kind}", score).values
        found["actual"][kind], found["predicted"][kind] = actual.tolist(), {estimator.name: predicted.tolist()}
        found["r"][kind] = {estimator.name: correlate(predicted, actual)}
        study.save()
    compare_peers(study, end, targets, removals, show_progress)
    return found


def find_strongest(scores: Tensor, count: int) -> list[int]:
    """Return the samples with the largest scores, (n, T), over all targets, each in its own unit."""
    strength = (scores.abs() / scores.abs().max(0).values).sum(1)
    return strength.argsort(descending=True)[:count].tolist()


def choose_removals(train: dif.Samples, setting: Setting, strongest: list[int]) -> dict[str, dif.Perturbation]:
    """Return the strongest single removals, and random groups of each size."""
    generator, chosen = torch.Generator().manual_seed(setting.seed), {SINGLE: train.remove_each(strongest)}
    for share in setting.shares:
        size = max(1, round(share * setting.n))
        groups = [torch.randperm(setting.n, generator=generator)[:size].tolist() for _ in range(setting.groups)]
        chosen[f"{share:.0%}"] = train.remove_groups(groups)
    return chosen


def correlate(predicted: Tensor, actual: Tensor) -> list[float]:
    """Return Pearson's r of each target; predicted and actual are (P, T)."""
    pairs = zip(predicted.T, actual.T, strict=True)
    return [float(torch.corrcoef(torch.stack([p.double(), a.double()]))[0, 1]) for p, a in pairs]


def compare_peers(
    study: Study, end: dif.Solution, targets: list[dif.Term], removals: dict[str, dif.Perturbation], show_progress: bool
) -> None:
    """Find the predictions of DIF and of the classical IF at the end point, each target with its best damping."""
    found = study.found
    tasks = [(peer, damping) for peer in _PEERS for damping in study.setting.dampings]
    with progress("DIF and classical IF", len(tasks), show_progress) as report:
        for number, (peer, damping) in enumerate(tasks):
            if damping not in found["tried"].setdefault(peer.name, []):
                try:
                    estimator = peer(end, damping=damping, strict=False)
                    scored = {
                        kind: estimator.scores(targets, some, show_progress=False, assess=0).values
                        for kind, some in removals.items()
                    }
                except dif.DifError:
                    scored = {}  # not positive definite with this damping
                for kind, values in scored.items():
                    _keep_better(found, kind, peer.name, damping, values)
                found["tried"][peer.name].append(damping)
                study.save()
            report(number + 1)


def _keep_better(found: dict[str, Any], kind: str, name: str, damping: float, predicted: Tensor) -> None:
    """Record the predictions of those targets that this damping suits better than those tried before."""
    r = correlate(predicted, torch.tensor(found["actual"][kind]))
    best = found["r"][kind].setdefault(name, [float("-inf")] * len(r))
    dampings = found["damping"].setdefault(kind, {}).setdefault(name, [damping] * len(r))
    columns = torch.tensor(found["predicted"][kind].setdefault(name, predicted.tolist()))
    for target, value in enumerate(r):
        if value > best[target]:
            best[target], dampings[target], columns[:, target] = value, damping, predicted[:, target]
    found["predicted"][kind][name] = columns.tolist()


@dataclass(frozen=True, eq=False)
class Study:
    """The numbers found so far, and the file that holds them."""

    file: Path
    setting: Setting
    device: str
    resumed: bool
    found: dict[str, Any]

    @classmethod
    def open(cls, out: Path, setting: Setting, device: str) -> Study:
        """Begin a study in a folder, or continue it there."""
        out.mkdir(parents=True, exist_ok=True)
        file, chosen = out / "finetune.json", {**asdict(setting), "device": device}
        chosen = json.loads(json.dumps(chosen))  # tuples as lists
        found = json.loads(file.read_text()) if file.exists() else {}
        changed = results.list_changes(found.get("setting", chosen), chosen)
        if changed:
            raise dif.InvalidInputError(
                f"Folder {str(out)!r} already contains a study with {changed}. Choose another folder with --out."
            )
        resumed = bool(found)
        if found.get("version") != dif.__version__:
            parts = ("seconds", "predicted", "actual", "r", "damping", "tried")
            found = {"study": "finetune", "version": dif.__version__, "setting": chosen, **{part: {} for part in parts}}
        return cls(file, setting, device, resumed, found)

    def save(self) -> None:
        """Write the numbers to the file."""
        results.write(self.file, self.found)

    def time(self, stage: str, work: Callable[[], Any]) -> Any:
        """Return the result of a stage; record its seconds, unless an earlier run may have done a part of it."""
        began = time.perf_counter()
        result = work()
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        if not self.resumed:
            self.found["seconds"][stage] = time.perf_counter() - began
        return result


# Results


def reproduce(setting: Setting, out: Path, **options: Any) -> dict[str, Any]:
    """Run the study, write finetune.json, finetune.png and finetune-history.png, and return the numbers."""
    check_setting(setting)
    with torch.backends.cudnn.flags(allow_tf32=False):  # TF32 rounds to three digits, differently for other batches
        found = run(setting, out, **options)
    draw_figure(out / FIGURES[0], found)
    return found


def check_setting(setting: Setting) -> None:
    """Refuse a setting that cannot be carried out."""
    check_removals(setting.removals, setting.n)
    if setting.model == "transformer" and setting.channels % _HEADS:
        raise dif.InvalidInputError(
            f"`channels` must be a multiple of {_HEADS} for the transformer, not {setting.channels}."
        )


def draw_figure(path: Path, result: dict[str, Any]) -> None:
    """Draw predicted against actual changes of the test loss: one row per estimator, one column per kind."""
    from matplotlib.figure import Figure

    kinds = list(result["actual"])
    names = list(result["r"][SINGLE])
    colours = {"unrolled": plots.ORANGE, "DIF": plots.GREEN, "classical IF": plots.BLUE}
    canvas = Figure(figsize=(4.0 * len(kinds), 3.9 * len(names)), layout="constrained")
    axes = canvas.subplots(len(names), len(kinds), squeeze=False)
    for row, name in zip(axes, names, strict=True):
        for ax, kind in zip(row, kinds, strict=True):
            predicted, actual = (
                torch.tensor(x)[:, 0] for x in (result["predicted"][kind][name], result["actual"][kind])
            )
            plots.predicted_vs_actual(predicted, actual, ax, f"r = {result['r'][kind][name][0]:.3f}", colours[name])
            damping = result["damping"].get(kind, {}).get(name)
            damped = f", damped by {damping[0]:g}" if damping else ""
            ax.set_title(f"{name}{damped}\n{describe_kind(result, kind)}")
    canvas.suptitle(
        f"{result['targets'][0]} after {result['steps']} steps of fine-tuning, {result['parameters']} parameters"
    )
    canvas.savefig(path, dpi=130)


def describe_kind(result: dict[str, Any], kind: str) -> str:
    """Return how many removals of a kind there are, in words."""
    count = len(result["actual"][kind])
    return f"{count} single samples" if kind == SINGLE else f"{count} groups of {kind.replace('%', ' %')}"


def draw_history(path: Path, finetuned: dif.Run) -> None:
    """Draw objective, violations and multipliers at every step of the fine-tuning."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(7, 7.5), layout="constrained")
    plots.history(finetuned, canvas.subplots(3, 1, sharex=True))
    canvas.savefig(path, dpi=130)
