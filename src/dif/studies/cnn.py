"""The paper's fairness-constrained network on MNIST (section 5.2): predicted and retrained changes of a test loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dif
from dif import plots
from dif.data import mnist
from dif.runtime.atomic_file import written
from dif.studies import results
from dif.studies.network import PAPER, SMALL, AllConvolutional, cross_entropy, dealt
from dif.studies.plain import losses, retrained

DAMPINGS = (0.0, *(10.0**e * f for e in range(-4, 1) for f in (1.0, 3.0)))  # tried in turn where curvature is missing
BATCH = 256
REEVALUATED = ", re-evaluated"
_BRIGHTNESS, _CONTRAST = 0.1307, 0.3081  # mean and standard deviation of a pixel of MNIST's training images
_DRAWN = ("cnn.png", "cnn-images.png")
RENORMALISED, PAPERS = "renormalised", "paper"  # the mean over the samples left; 1/Nⱼ kept


@dataclass(frozen=True)
class Setting:
    """Everything that decides the solution, the removals and what they are compared with."""

    n: int = 6_000
    groups: int = 3
    alpha: float = 0.5  # share of the samples that is dealt to the groups at random
    tau: float = 0.002
    l2: float = 0.006
    model: str = "paper"  # or "small"
    side: int = 14  # pixels of an image along each side: 28, or their means over 2 × 2
    channels: int = 4
    seed: int = 0
    epochs: int = 100
    removals: int = 100

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """Kernel and stride of each convolution."""
        return PAPER if self.model == "paper" else SMALL


SMALL_STUDY = Setting(n=2_000, tau=0.01, l2=0.01, model="small", epochs=200, removals=40)  # two minutes on two cores


@dataclass(frozen=True, eq=False)
class Posed:
    """The problem of a setting, on a device."""

    train: dif.Samples
    problem: dif.Problem
    start: AllConvolutional
    images: tuple[Tensor, Tensor]  # of the training set as the model sees them, and their labels
    group: Tensor  # of each training sample
    test: Tensor
    test_labels: Tensor


def posed(setting: Setting, data: str | None, device: str) -> Posed:
    """Min R̄ + ridge subject to Rᵢ ≤ R̄ + τ: R̄ is the mean of the risks Rᵢ of the groups."""
    digits = mnist(setting.n, 1_000, data=data)
    images, test = (_seen(part, setting.side, device) for part in (digits.train, digits.test))
    labels = digits.train_labels.to(device)
    train = dif.Samples(cross_entropy, (images, labels), name="train")
    group = dealt(digits.train_labels, setting.groups, setting.alpha, setting.seed)
    risks = [train.mean(where=group == g) for g in range(setting.groups)]
    mean = (1 / setting.groups) * sum(risks[1:], risks[0])
    constraints = [(risk <= mean + setting.tau).named(f"group {g}") for g, risk in enumerate(risks)]
    generator_state = torch.get_rng_state()
    torch.manual_seed(setting.seed)
    start = AllConvolutional(setting.layers, setting.channels).double().to(device)
    torch.set_rng_state(generator_state)
    problem = dif.Problem(mean + dif.ridge(setting.l2), constraints)
    return Posed(train, problem, start, (images, labels), group, test, digits.test_labels.to(device))


def _seen(images: Tensor, side: int, device: str) -> Tensor:
    pixels = (images.to(device=device, dtype=torch.float64) / 255 - _BRIGHTNESS) / _CONTRAST
    step = 28 // side
    return pixels.reshape(len(pixels), side, step, side, step).mean((2, 4))


# The stages, each kept on disk


def solved(stated: Posed, setting: Setting, out: Path, show_progress: bool) -> dif.Solution:
    """The solution, fitted once: from a random start, by mini-batches, then to a certified KKT point."""
    path = out / "solution.npz"
    if path.exists():
        with np.load(path, allow_pickle=False) as file:
            theta, lam = (torch.as_tensor(file[name]) for name in ("theta", "lam"))
        model = deepcopy(stated.start)
        sizes = (sum(p.numel() for p in model.parameters()), setting.groups)
        if (theta.numel(), lam.numel()) != sizes:
            raise dif.InvalidInputError(
                f"solution kept in {str(path)!r}",
                measured=f"{theta.numel()} parameters, {lam.numel()} multipliers",
                threshold=f"{sizes[0]} and {sizes[1]}",
                meaning="It belongs to another study.",
                cure="Name another folder with --out, or take that file away.",
            )
        nn.utils.vector_to_parameters(theta.to(stated.test), model.parameters())
        return dif.Solution(stated.problem, model, lam.tolist())
    solution = fitted(stated, setting, show_progress, checkpoint=out / "fit.npz")
    solution.check()
    with written(path) as file:
        np.savez(file, theta=solution.theta.cpu().numpy(), lam=solution.lam.cpu().numpy())
    return solution


def fitted(stated: Posed, setting: Setting, show_progress: bool, **options: Any) -> dif.Solution:
    """From the random start, by mini-batches and then all samples."""
    return dif.fit(
        stated.problem, stated.start, epochs=setting.epochs, batch_size=BATCH, rate=1e-2, seed=setting.seed,
        show_progress=show_progress, **options,
    )  # fmt: skip


def target_of(stated: Posed, solution: dif.Solution) -> tuple[int, int, float, dif.Samples]:
    """The first test image that the solution gets wrong: its number, what it is taken for, the test error; its loss."""
    with torch.no_grad():
        taken = solution.params(stated.test).argmax(1)  # type: ignore[operator]
    wrong = torch.nonzero(taken != stated.test_labels).reshape(-1)
    if len(wrong) == 0:
        raise dif.InvalidInputError(
            "misclassified test images",
            measured=f"0 of {len(taken)}",
            threshold="at least 1",
            meaning="The study follows the loss of one that the model gets wrong.",
            cure="Train with more regularisation (--l2), or on fewer samples (--n).",
        )
    first = int(wrong[0])
    test = dif.Samples(cross_entropy, (stated.test[[first]], stated.test_labels[[first]]), name="test")
    return first, int(taken[first]), len(wrong) / len(taken), test


def estimators(solution: dif.Solution, test: dif.Samples, train: dif.Samples) -> tuple[dict[str, Any], dict[str, str]]:
    """All that predict, with the least damping of a grid where they need some; and what was done about it."""
    made: dict[str, Any] = {}
    remarks: dict[str, str] = {}
    kinds: dict[str, Callable[[float], Any]] = {
        "DIF": lambda damping: dif.DirectionalInfluence(solution, damping=damping, switching=False),  # the paper's
        "DIF (switching)": lambda damping: dif.DirectionalInfluence(
            solution, damping=damping, switching=True, strict=False
        ),
        "classical IF": lambda damping: dif.ClassicalInfluence(solution, damping=damping),
        "penalty IF": lambda damping: dif.PenaltyInfluence(solution, damping=damping),
    }
    least = 0.0  # penalty IF has the same curvature at θ̄ as classical IF, where only inequalities are penalised
    for name, make in kinds.items():
        found = least_damped(make, test, train, least)
        if found is None:
            remarks[name] = f"not positive definite, damped by {DAMPINGS[-1]:g} or less"
            continue
        made[name], damping = found
        if damping:
            remarks[name] = f"its curvature is not positive definite without damping; damped by {damping:g}"
        least = damping if name == "classical IF" else 0.0
    made["Newton"] = dif.NewtonInfluence(solution, strict=False, show_progress=False)
    return made, remarks


def least_damped(
    make: Callable[[float], Any], test: dif.Samples, train: dif.Samples, least: float = 0.0
) -> tuple[Any, float] | None:
    """An estimator with the smallest damping of the grid with which it exists, and that damping."""
    for damping in [d for d in DAMPINGS if d >= least]:
        try:
            estimator = make(damping)
            # negative curvature may hide till the first solve
            estimator.scores(test, train.remove_each([0]), show_progress=False, assess=0)
        except dif.DegenerateError:
            continue
        return estimator, damping
    return None


def run(
    setting: Setting, out: Path, *, data: str | None = None, device: str = "cpu", jobs: int = 1, plain: int = 0,
    paper_epsilon: bool = True, show_progress: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Fit, score every training sample, retrain without the most influential ones, compare.

    Args:
        setting: What is studied.
        out: Folder in which every stage is kept: called again with the same, it goes on from there.
        data: Folder with the four files of MNIST; None: the part that comes with dif, or a download.
        device: Where tensors live.
        jobs: Processes that share the retrainings.
        plain: So many of the removals are also retrained by a plain optimiser that knows no curvature.
        paper_epsilon: Also retrain with 1/Nⱼ kept, the paper's removal.
        show_progress: Show bars on a terminal.
    """
    if setting.removals > setting.n:
        raise dif.InvalidInputError(
            "removals",
            measured=setting.removals,
            threshold=f"at most {setting.n}, the training images",
            meaning="Each image is removed at most once.",
            cure="Ask for fewer (--removals), or for more images (--n).",
        )
    stated = posed(setting, data, device)
    results.write(out / "setting.json", asdict(setting))  # from here on the folder is taken
    solution = solved(stated, setting, out, show_progress)
    active = solution.active
    place, taken, error, test = target_of(stated, solution)
    made, remarks = estimators(solution, test, stated.train)
    everyone = stated.train.remove_each()
    scored = made["DIF"].scores(test, everyone, out=out / "scores.npy", show_progress=show_progress, assess=0)
    ranked = [one.index for one in scored.top(setting.removals)]
    retraining = dif.Retraining(solution, keep=out / "retrained", jobs=jobs, strict=False, show_progress=show_progress)
    compared: dict[str, Any] = {}
    for convention in (RENORMALISED, PAPERS) if paper_epsilon else (RENORMALISED,):
        chosen = stated.train.remove_each(ranked, renormalise=convention == RENORMALISED)
        actual = retraining.scores(test, chosen)
        predicted = {name: one.scores(test, chosen, assess=0).values for name, one in made.items()}
        predicted |= {
            name + REEVALUATED: one.reevaluated(test, chosen, show_progress=False).values
            for name, one in made.items()
            if name != "Newton"
        }
        compared[convention] = {
            "actual": actual.values[:, 0].tolist(),
            "residuals": actual.diagnostics["residuals"],
            "failed": actual.diagnostics["failed"],
            "predicted": {name: values[:, 0].tolist() for name, values in predicted.items()},
            "agreement": {name: agreement(values, actual.values) for name, values in predicted.items()},
        }
    result: dict[str, Any] = {
        "study": "cnn",
        "version": dif.__version__,
        "setting": asdict(setting),
        "device": device,
        "parameters": solution.theta.numel(),
        "kkt": asdict(solution.kkt),
        "tolerance": retraining.tol,
        "multipliers": solution.lam.tolist(),
        "binding": [active.names[j] for j in active.binding],
        "weak": [active.names[j] for j in active.weak],
        "tangent_curvature": active.curvature,
        "test_error": error,
        "test_image": {"index": place, "label": int(stated.test_labels[place]), "taken_for": taken},
        "rule": "the first test image that the solution misclassifies; the removals with the largest |DIF|",
        "remarks": remarks,
        "removed": ranked,
        "compared": compared,
        "helpful": _extremes(scored, 8),
        "harmful": _extremes(scored, -8),
    }
    if plain:
        result["plain"] = checked_plainly(stated, setting, solution, ranked[:plain], place, compared[RENORMALISED])
    return result


def checked_plainly(
    stated: Posed, setting: Setting, solution: dif.Solution, removed: list[int], place: int, fast: dict[str, Any]
) -> dict[str, Any]:
    """Some of the removals retrained from θ̄ by an optimiser that shares no code and no curvature with dif's."""
    images, labels = stated.images
    X, y = stated.test[[place]], stated.test_labels[[place]]
    before = float(losses(stated.start, solution.theta, X, y))
    found, residuals = [], []
    for i in removed:
        masks = [(stated.group == g) & (torch.arange(setting.n) != i) for g in range(setting.groups)]
        shares = torch.stack([m / m.sum() for m in masks]).to(solution.theta)

        def rows(theta: Tensor, shares: Tensor = shares) -> Tensor:
            risks = shares @ losses(stated.start, theta, images, labels)
            mean = risks.mean()
            return torch.cat([(mean + 0.5 * setting.l2 * theta @ theta)[None], risks - mean - setting.tau])

        theta, _, residual = retrained(rows, solution.theta, solution.lam)
        found.append(float(losses(stated.start, theta, X, y)) - before)
        residuals.append(residual)
    differences = [abs(a - b) / abs(b) for a, b in zip(found, fast["actual"], strict=False)]
    return {
        "removed": removed,
        "changes": found,
        "residuals": residuals,
        "largest_difference": max(differences),
    }


def agreement(predicted: Tensor, actual: Tensor) -> dict[str, Any]:
    """How well they agree where both are known, and where that is."""
    both = torch.isfinite(predicted) & torch.isfinite(actual)
    found = asdict(dif.Agreement.of(predicted[both], actual[both])) if int(both.sum()) > 1 else {}
    return {"answered": int(both.sum()), **found}


def _extremes(scored: dif.Influence, count: int) -> list[dict[str, Any]]:
    """The samples whose removal raises the loss most (count > 0: helpful), or lowers it most (harmful)."""
    order = torch.argsort(scored.values[:, 0], descending=count > 0)[: abs(count)].tolist()
    return [{"index": i, "score": float(scored.values[i, 0])} for i in order]


# What it shows


def reproduce(setting: Setting, out: Path, *, resume: bool = False, **options: Any) -> dict[str, Any]:
    """Run it, write cnn.json, cnn.png and cnn-images.png, return the numbers."""
    out.mkdir(parents=True, exist_ok=True)
    claimed, finished = out / "setting.json", out / "cnn.json"
    known = json.loads(finished.read_text()) if finished.exists() else None
    if claimed.exists() or known is not None:
        before = known["setting"] if known is not None else json.loads(claimed.read_text())
        other = {key: (before.get(key), value) for key, value in asdict(setting).items() if before.get(key) != value}
        if other or not resume:
            words = ", ".join(f"{key} {old} (now {new})" for key, (old, new) in other.items())
            raise dif.InvalidInputError(
                f"folder {str(out)!r}",
                measured=f"a study with {words}" if other else "a study with the same setting",
                threshold="an empty folder, or --resume and the same setting",
                meaning="Finished stages would be mixed up, or done again for nothing.",
                cure="Name another folder with --out." if other else "Say --resume to go on from what is there.",
            )
    conventions = 1 + bool(options.get("paper_epsilon", True))
    checks = min(options.get("plain", 0), setting.removals)
    if (
        known is None
        or known["version"] != dif.__version__
        or len(known["compared"]) < conventions
        or len(known.get("plain", {}).get("removed", ())) < checks
    ):
        known = run(setting, out, **options)
        results.write(finished, known)
        for drawn in _DRAWN:
            (out / drawn).unlink(missing_ok=True)
    if not all((out / drawn).exists() for drawn in _DRAWN):
        figure(out / _DRAWN[0], known)
        images(out / _DRAWN[1], known, options.get("data"))
    return known


def figure(path: Path, result: dict[str, Any]) -> None:
    """Actual against predicted changes with y = x, one panel per estimator."""
    from matplotlib.figure import Figure

    part = result["compared"][RENORMALISED]
    actual = torch.tensor(part["actual"])
    shown = [name for name in part["predicted"] if REEVALUATED not in name]
    canvas = Figure(figsize=(4.2 * len(shown), 4.4), layout="constrained")
    for ax, name in zip(canvas.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        agreement = part["agreement"][name]
        words = f"r = {agreement['pearson']:.3f}, slope {agreement['slope']:.2f}" if "pearson" in agreement else "none"
        colour = plots.ORANGE if name.startswith("DIF") else plots.GREEN if name == "Newton" else plots.BLUE
        plots.predicted_vs_actual(torch.tensor(part["predicted"][name]), actual, ax, words, colour)
        remark = result["remarks"].get(name, "")
        ax.set_title(name + (f"\n{remark[remark.find('damped') :]}" if "damped" in remark else ""))
    held = ", ".join(result["binding"])
    setting, target = result["setting"], result["test_image"]
    canvas.suptitle(
        f"Loss of test image {target['index']} (a {target['label']} taken for a {target['taken_for']}), "
        f"{len(actual)} removals of {setting['n']}, L2 {setting['l2']:g}, τ {setting['tau']:g}, binding: {held}"
    )
    canvas.savefig(path, dpi=130)


def images(path: Path, result: dict[str, Any], data: str | None) -> None:
    """The test image, and the training images whose removal would raise and lower its loss most."""
    from matplotlib.figure import Figure

    digits = mnist(result["setting"]["n"], 1_000, data=data)
    canvas = Figure(figsize=(11, 3.6), layout="constrained")
    axes = canvas.subplots(2, 9)
    target = result["test_image"]["index"]
    for row, kind in enumerate(("helpful", "harmful")):
        axes[row][0].imshow(digits.test[target].numpy(), cmap="gray_r")
        axes[row][0].set_title("test image" if row == 0 else "", fontsize=8)
        for ax, one in zip(axes[row][1:], result[kind], strict=True):
            ax.imshow(digits.train[one["index"]].numpy(), cmap="gray_r")
            ax.set_title(f"{one['score']:+.4f}", fontsize=8)
        axes[row][1].set_ylabel(kind)
        for ax in axes[row]:
            ax.set_xticks([])
            ax.set_yticks([])
    canvas.suptitle("Change of the test image's loss if the training image is removed (DIF): raises it, lowers it")
    canvas.savefig(path, dpi=130)
