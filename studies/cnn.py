"""The paper's fairness-constrained network on MNIST (section 5.2): predicted and retrained changes of a test loss.

The study runs in stages (fit, score, retrain, compare); each is saved, so that an interrupted run can be resumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dif
from dif.derivatives.fingerprint import encode_tensor, hash_all
from dif.derivatives.hessian import DENSE_LIMIT
from dif.derivatives.program import Targets
from dif.derivatives.weight_change import Direction
from dif.estimators.first_order import FirstOrderEstimator
from dif.estimators.protocol import differences
from dif.linalg.solvers import SolverSeries
from dif.runtime.archive import open_atomically
from studies import results
from studies.cnn_curvature import GroupRisks
from studies.cnn_figures import draw_figure, draw_images
from studies.cnn_fit import Checkpoint, GroupProgram, State, minimise
from studies.data import mnist
from studies.network import (
    PAPER,
    REEVALUATED,
    RENORMALISED,
    SMALL,
    AllConvolutional,
    assign_groups,
    bound_group_risks,
    check_removals,
    class_scores,
    cross_entropy,
    preprocess,
    score_losses,
)
from studies.plain import retrain, sample_losses, whiten

DAMPINGS = (0.0, *(10.0**e * f for e in range(-4, 1) for f in (1.0, 3.0)))  # δ in H + δI, tried in this order
BATCH = 256  # images per mini-batch
BY_LAYERS = 10_000  # training images from which the Hessian is assembled layer by layer, halved images on a GPU apart
TOLERANCE = 1e-8  # relative KKT residual of retrainings there; elsewhere that of `dif.Retraining`
PASSES = 150  # over the data, at most, in one call of a retraining there; a later call goes on where it stopped
_SAVED = 8  # retrainings that are begun together there, so that a killed study loses few
PAPERS = "paper"  # removal convention of the paper: weights 1/Nⱼ unchanged
_FIGURES = ("cnn.png", "cnn-images.png")  # files that the study draws


@dataclass(frozen=True)
class Setting:
    """All settings on which the results of the study depend."""

    n: int = 6_000
    groups: int = 3
    alpha: float = 0.5  # share of the samples assigned to groups at random; the others by label
    tau: float = 0.002  # how much the risk of a group may exceed the mean of the groups
    l2: float = 0.006  # weight of the ridge
    model: str = "paper"  # or "small"
    side: int = 14  # pixels along each side of an image: 28, or 14 by averaging 2 × 2 pixels
    channels: int = 4  # per convolution
    seed: int = 0
    epochs: int = 100  # of mini-batches, before the exact solver
    removals: int = 100  # how many of the most influential samples are retrained
    image: int = 0  # which of the misclassified test images is the target: 0 is the first

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """Kernel and stride of each convolution."""
        return PAPER if self.model == "paper" else SMALL


SMALL_STUDY = Setting(n=2_000, tau=0.01, l2=0.01, model="small", epochs=200, removals=40)  # two minutes on two cores


@dataclass(frozen=True, eq=False)
class Task:
    """The problem of a setting, with its data on a device."""

    train: dif.Samples
    problem: dif.Problem
    start: AllConvolutional
    images: tuple[Tensor, Tensor]  # preprocessed training images and their labels
    group: Tensor  # group of each training sample
    test: Tensor  # preprocessed test images
    test_labels: Tensor


def build_task(setting: Setting, data: str | None, device: str, fast: bool | None = None) -> Task:
    """Build the problem min R̄ + ridge s.t. Rᵢ ≤ R̄ + τ, where R̄ is the mean of the risks Rᵢ of the groups.

    With `fast` (None: on a GPU), the model's outputs are named for Gauss–Newton curvature.
    """
    digits = mnist(setting.n, 1_000, data=data)
    images, test = (preprocess(part, setting.side, device, torch.float64) for part in (digits.train, digits.test))
    labels = digits.train_labels.to(device)
    if device.startswith("cuda") if fast is None else fast:
        train = dif.Samples(score_losses, (images, labels), name="train", outputs=class_scores)
    else:
        train = dif.Samples(cross_entropy, (images, labels), name="train")
    group = assign_groups(digits.train_labels, setting.groups, setting.alpha, setting.seed)
    generator_state = torch.get_rng_state()
    torch.manual_seed(setting.seed)
    start = AllConvolutional(setting.layers, setting.channels).double().to(device)
    torch.set_rng_state(generator_state)
    problem = state_problem(train, group, setting)
    return Task(train, problem, start, (images, labels), group, test, digits.test_labels.to(device))


def state_problem(train: dif.Samples, group: Tensor, setting: Setting) -> dif.Problem:
    """State min R̄ + ridge s.t. Rᵢ ≤ R̄ + τ."""
    _, mean, constraints = bound_group_risks(train, group, setting.groups, setting.tau)
    return dif.Problem(mean + dif.ridge(setting.l2), constraints)


def to_single(task: Task, setting: Setting) -> Task:
    """Return the task in single precision, in which mini-batches take half the time."""
    images, labels = task.images[0].float(), task.images[1]
    train = dif.Samples(cross_entropy, (images, labels), name="train")
    problem = state_problem(train, task.group, setting)
    return replace(task, train=train, problem=problem, start=deepcopy(task.start).float(), images=(images, labels))


# The stages, each saved to disk


def load_or_fit(task: Task, setting: Setting, out: Path, show_progress: bool) -> dif.Solution:
    """Return the solution saved in `out`; if there is none, fit it to a certified KKT point and save it."""
    path = out / "solution.npz"
    if path.exists():
        with np.load(path, allow_pickle=False) as file:
            theta, lam = (torch.as_tensor(file[name]) for name in ("theta", "lam"))
        model = deepcopy(task.start)
        sizes = (sum(p.numel() for p in model.parameters()), setting.groups)
        if (theta.numel(), lam.numel()) != sizes:
            raise dif.InvalidInputError(
                f"{str(path)!r} holds {theta.numel()} parameters and {lam.numel()} multipliers, but this study has "
                f"{sizes[0]} and {sizes[1]}. Choose another folder with --out, or delete that file."
            )
        nn.utils.vector_to_parameters(theta.to(task.test), model.parameters())
        return dif.Solution(task.problem, model, lam.tolist())
    with results.time(out, "fit"):
        solution = (fit_by_layers if by_layers(task) else fit)(task, setting, show_progress, checkpoint=out / "fit.npz")
    if not by_layers(task):  # there it takes long without the Hessian, which follows
        solution.check()
    with open_atomically(path) as file:
        np.savez(file, theta=solution.theta.cpu().numpy(), lam=solution.lam.cpu().numpy())
    return solution


def fit(task: Task, setting: Setting, show_progress: bool, **options: Any) -> dif.Solution:
    """Fit the model from its random start, by mini-batches and then with all samples."""
    checkpoint = options.get("checkpoint")
    options |= {"show_progress": show_progress}
    if setting.epochs == 0 or (checkpoint is not None and checkpoint.exists()):  # no mini-batches, or they are done
        return dif.fit(task.problem, task.start, **options)
    run = train(task, setting, show_progress)
    return dif.fit(task.problem, run.params, multipliers=run.multipliers, **options)


def by_layers(task: Task) -> bool:
    """Whether Hessians are assembled layer by layer, because products take long."""
    images, _ = task.images
    return len(images) >= BY_LAYERS and not (images.is_cuda and images.shape[-1] < 28)


def fit_by_layers(task: Task, setting: Setting, show_progress: bool, *, checkpoint: Path) -> dif.Solution:
    """Fit the model: mini-batches in single precision, then all samples, with Hessians by layers."""
    problem, files = group_program(task), checkpoint_files(checkpoint.parent)
    if files.state.exists():
        state = State.load(files.state)
        state = replace(state, theta=state.theta.to(task.test), lam=state.lam.to(task.test))
    else:
        run = train(to_single(task, setting), setting, show_progress)
        state = State(run.theta.double(), run.point.lam.double())
        files.save(state)
    state = minimise(problem, state, setting.l2, 1e-10, files)
    return dif.Solution.of_program(problem.program, state.theta, state.lam)


def checkpoint_files(out: Path) -> Checkpoint:
    """Return the files of a fit by layers in this folder."""
    return Checkpoint(out / "fit.npz", out / "hessian.npz", out / "hessian-part.npz")


def group_program(task: Task) -> GroupProgram:
    """Return the compiled problem, with sums over the groups that are computed by layers."""
    program = dif.Solution(task.problem, task.start, [0.0] * len(task.problem.constraints)).program
    return GroupProgram(program, GroupRisks(task.start, *task.images, task.group.to(task.test.device)))


def train(task: Task, setting: Setting, show_progress: bool) -> dif.Run:
    """Train the model from its random start on mini-batches: Adam on θ, ascent on λ."""
    training = dif.Training(
        task.problem, task.start, dif.Adam(1e-2), dif.Ascent(0.1), BATCH, setting.epochs, setting.seed, "cosine"
    )
    return training.run(keep="sqrt", show_progress=show_progress)


def find_target(task: Task, solution: dif.Solution, number: int = 0) -> tuple[int, int, float, dif.Samples]:
    """Return index and predicted label of a misclassified test image, the test error, and the loss of that image.

    `number` counts the misclassified test images from 0.
    """
    with torch.no_grad():
        predicted = solution.params(task.test).argmax(1)  # type: ignore[operator]
    wrong = torch.nonzero(predicted != task.test_labels).reshape(-1)
    if len(wrong) <= number:
        raise dif.InvalidInputError(
            f"{len(wrong)} of the {len(predicted)} test images are misclassified, and --image is {number}. "
            "Choose an earlier one, train with more regularisation (--l2), or on fewer samples (--n)."
        )
    image = int(wrong[number])
    test = dif.Samples(cross_entropy, (task.test[[image]], task.test_labels[[image]]), name="test")
    return image, int(predicted[image]), len(wrong) / len(predicted), test


def build_estimators(
    solution: dif.Solution, test: dif.Samples, train: dif.Samples
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the estimators, each with the least damping of the grid that it needs, and remarks on the damping."""
    estimators: dict[str, Any] = {}
    remarks: dict[str, str] = {}
    solver = None if solution.curvature.assembled else SolverSeries()  # all share one preconditioner
    kinds: dict[str, Callable[[float], Any]] = {
        "DIF": lambda damping: dif.DirectionalInfluence(
            solution, damping=damping, switching=False, solver=solver
        ),  # as in the paper
        "DIF (switching)": lambda damping: dif.DirectionalInfluence(
            solution, damping=damping, switching=True, strict=False, solver=solver
        ),
        "classical IF": lambda damping: dif.ClassicalInfluence(solution, damping=damping, solver=solver),
        "penalty IF": lambda damping: dif.PenaltyInfluence(solution, damping=damping, solver=solver),
    }
    least = 0.0  # at θ̄, penalty IF has the curvature of classical IF if there are only inequalities
    for name, make in kinds.items():
        damped = find_least_damping(make, test, train, least)
        if damped is None:
            remarks[name] = f"its curvature is not positive definite, even damped by {DAMPINGS[-1]:g}"
            continue
        estimators[name], damping = damped
        if damping:
            remarks[name] = f"its curvature is not positive definite; damped by {damping:g}"
        least = damping if name == "classical IF" else 0.0
    estimators["Newton"] = dif.NewtonInfluence(solution, strict=False)
    return estimators, remarks


def find_least_damping(
    make: Callable[[float], Any], test: dif.Samples, train: dif.Samples, least: float = 0.0
) -> tuple[Any, float] | None:
    """Return the estimator with the smallest damping of the grid at which it works, and that damping; or None."""
    for damping in [d for d in DAMPINGS if d >= least]:
        try:
            estimator = make(damping)
            # negative curvature may show only in a solve
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
        setting: The settings of the study.
        out: Folder in which every stage is saved; a later call with the same folder continues from there.
        data: Folder with the four MNIST files; None: the images that come with dif, or a download.
        device: torch device.
        jobs: Number of processes that retrain in parallel.
        plain: How many of the removals are also retrained with SciPy's L-BFGS-B.
        paper_epsilon: Also retrain with the weights 1/Nⱼ unchanged, as the paper defines a removal.
        show_progress: Show progress bars on a terminal.
    """
    check_removals(setting.removals, setting.n)
    task = build_task(setting, data, device)
    results.write(out / "setting.json", asdict(setting))  # marks the folder as used by this setting
    solution = load_or_fit(task, setting, out, show_progress)
    with results.time(out, "Hessian"):  # hundreds of solves follow
        if by_layers(task):
            files, problem = checkpoint_files(out), group_program(task)
            solution.part_hessians = files.assemble(problem, solution.theta)
            solution.check()
        elif not solution.curvature.assembled and solution.theta.numel() <= DENSE_LIMIT:
            solution = solution.assemble(out / "hessian", show_progress=show_progress)
    with results.time(out, "curvature"):
        active = solution.active
    image, predicted_label, error, test = find_target(task, solution, setting.image)
    with results.time(out, "estimators"):
        estimators, remarks = build_estimators(solution, test, task.train)
    removals = task.train.remove_each()
    with results.time(out, "scores"):
        scored = estimators["DIF"].scores(test, removals, out=out / "scores.npy", show_progress=show_progress, assess=0)
    ranked = [entry.index for entry in scored.top(setting.removals)]
    tol, piece = (TOLERANCE, _SAVED) if by_layers(task) else (None, setting.removals)
    passes = PASSES if by_layers(task) else 20_000
    retraining = dif.Retraining(solution, keep=out / "retrained", strict=False, tol=tol, max_iter=passes)
    compared: dict[str, Any] = {}
    for convention in (RENORMALISED, PAPERS) if paper_epsilon else (RENORMALISED,):
        chosen = task.train.remove_each(ranked, renormalise=convention == RENORMALISED)
        with results.time(out, f"retraining, {convention}"):
            for end in range(piece, setting.removals, piece):  # a killed study loses no more than a piece
                retraining.scores(test, chosen[end - piece : end], jobs=jobs, show_progress=show_progress)
            actual = retraining.scores(test, chosen, jobs=jobs, show_progress=show_progress)
        predicted = {name: e.scores(test, chosen, assess=0).values for name, e in estimators.items()}
        predicted |= {
            name + REEVALUATED: reevaluate(e, test, chosen) for name, e in estimators.items() if name != "Newton"
        }
        compared[convention] = {
            "actual": actual.values[:, 0].tolist(),
            "residuals": actual.diagnostics["residuals"],
            "failed": actual.diagnostics["failed"],
            "predicted": {name: values[:, 0].tolist() for name, values in predicted.items()},
            "agreement": {name: measure_agreement(values, actual.values) for name, values in predicted.items()},
        }
    result: dict[str, Any] = {
        "study": "cnn",
        "version": dif.__version__,
        "setting": asdict(setting),
        "device": device,
        "parameters": solution.theta.numel(),
        "kkt": asdict(solution.kkt),
        "seconds": results.load_seconds(out),
        "tolerance": retraining.tol,
        "multipliers": solution.lam.tolist(),
        "binding": [active.names[j] for j in active.binding],
        "weak": [active.names[j] for j in active.weak],
        "tangent_curvature": active.curvature,
        "test_error": error,
        "test_image": {"index": image, "label": int(task.test_labels[image]), "taken_for": predicted_label},
        "rule": f"misclassified test image {setting.image}, counted from 0; the removals with the largest |DIF|",
        "remarks": remarks,
        "removed": ranked,
        "compared": compared,
        "helpful": _find_extremes(scored, 8),
        "harmful": _find_extremes(scored, -8),
    }
    if plain:
        with results.time(out, "L-BFGS-B"):
            part = compared[RENORMALISED]
            result["plain"] = check_retraining(task, setting, solution, ranked[:plain], image, part, out / "plain.json")
    return result


def check_retraining(
    task: Task, setting: Setting, solution: dif.Solution, removed: list[int], image: int, compared: dict[str, Any],
    keep: Path,
) -> dict[str, Any]:  # fmt: skip
    """Retrain some removals from θ̄ with SciPy's L-BFGS-B, which shares no code with dif, and compare the changes.

    Finished retrainings are kept in the file `keep`.
    """
    images, _ = task.images
    X, y = task.test[[image]], task.test_labels[[image]]
    before = float(sample_losses(task.start, solution.theta, X, y))
    about = {"solution": hash_all((encode_tensor(solution.theta), encode_tensor(solution.lam))).hex(), "image": image}
    kept = json.loads(keep.read_text()) if keep.exists() else about
    done = kept["retrained"] if {key: kept.get(key) for key in about} == about and "retrained" in kept else {}
    W = None
    for i in removed:
        if str(i) in done:
            continue
        W = whiten(task.start, solution.theta, images, setting.l2) if W is None else W
        risks = group_risks(task, torch.arange(setting.n) != i)

        def rows(theta: Tensor, risks: Callable[[Tensor], Tensor] = risks) -> Tensor:
            values = risks(theta)
            mean = values.mean()
            return torch.cat([(mean + 0.5 * setting.l2 * theta @ theta)[None], values - mean - setting.tau])

        theta, _, residual = retrain(rows, solution.theta, solution.lam, W)
        change = float(sample_losses(task.start, theta, X, y)) - before
        done[str(i)] = {"change": change, "residual": residual}
        results.write(keep, {**about, "retrained": done})
    changes, residuals = ([done[str(i)][key] for i in removed] for key in ("change", "residual"))
    differences = [abs(a - b) / abs(b) for a, b in zip(changes, compared["actual"], strict=False)]
    return {
        "removed": removed,
        "changes": changes,
        "residuals": residuals,
        "largest_difference": max(differences),
    }


def reevaluate(estimator: FirstOrderEstimator, target: Any, removals: dif.Perturbation) -> Tensor:
    """Return the difference of each target between θ̄ and θ̄ + Δθ, (P, T); `scores` has its first-order part, qᵀΔθ."""
    direction, targets = Direction(estimator.at.program, removals), Targets(target, estimator.at)
    return differences(estimator.at, targets, estimator.ends(estimator.linearise(direction), direction)[0])


def group_risks(task: Task, kept: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function θ → risks of the groups, (groups,), over the images that are kept."""
    images, labels = task.images
    if by_layers(task):
        return GroupRisks(task.start, images[kept], labels[kept], task.group[kept].to(images.device))
    groups = range(int(task.group.max()) + 1)
    shares = torch.stack([m / m.sum() for m in ((task.group == g) & kept for g in groups)]).to(images)
    return lambda theta: shares @ sample_losses(task.start, theta, images, labels)


def measure_agreement(predicted: Tensor, actual: Tensor) -> dict[str, Any]:
    """Return the agreement of predicted and actual changes where both are finite, and how many these are."""
    both = torch.isfinite(predicted) & torch.isfinite(actual)
    agreement = asdict(dif.Agreement.of(predicted[both], actual[both])) if int(both.sum()) > 1 else {}
    return {"answered": int(both.sum()), **agreement}


def _find_extremes(scored: dif.Influence, count: int) -> list[dict[str, Any]]:
    """Return the |count| samples whose removal raises the loss most (count > 0) or lowers it most (count < 0)."""
    order = torch.argsort(scored.values[:, 0], descending=count > 0)[: abs(count)].tolist()
    return [{"index": i, "score": float(scored.values[i, 0])} for i in order]


# Results


def reproduce(setting: Setting, out: Path, *, resume: bool = False, **options: Any) -> dict[str, Any]:
    """Run the study, write cnn.json, cnn.png and cnn-images.png, and return the numbers; with `resume`, continue it."""
    out.mkdir(parents=True, exist_ok=True)
    setting_file, result_file = out / "setting.json", out / "cnn.json"
    known = json.loads(result_file.read_text()) if result_file.exists() else None
    if setting_file.exists() or known is not None:
        before = known["setting"] if known is not None else json.loads(setting_file.read_text())
        changed = results.list_changes(before, asdict(setting))
        if changed or not resume:
            study = f"a study with {changed or 'the same setting'}"
            cure = "Choose another folder with --out." if changed else "Add --resume to continue the study there."
            raise dif.InvalidInputError(f"Folder {str(out)!r} already contains {study}. {cure}")
    conventions = 1 + bool(options.get("paper_epsilon", True))
    checks = min(options.get("plain", 0), setting.removals)
    if (
        known is None
        or known["version"] != dif.__version__
        or len(known["compared"]) < conventions
        or len(known.get("plain", {}).get("removed", ())) < checks
    ):
        known = run(setting, out, **options)
        results.write(result_file, known)
        for name in _FIGURES:
            (out / name).unlink(missing_ok=True)
    if not all((out / name).exists() for name in _FIGURES):
        draw_figure(out / _FIGURES[0], known)
        draw_images(out / _FIGURES[1], known, options.get("data"))
    return known
