"""Models that are not convex: the phases of fit, checkpoints, and retraining many problems at once."""

import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from problems import (
    F64,
    class_data,
    fair_logistic,
    fit_problem,
    logistic,
    regression_data,
    squared,
    weak_regression,
    zeros,
)
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer
from torch import nn

import dif
from dif.derivatives.hessian import Curvature
from dif.derivatives.losses import gauss_newton_hessian
from dif.derivatives.rows import Rows
from dif.derivatives.weight_change import BatchedProgram, Direction
from dif.linalg.anderson import Extrapolation
from dif.linalg.lanczos import KrylovModel, exact_step
from dif.runtime.work import Limits
from dif.solving.batched_newton import BatchedNewton
from dif.solving.fit import Checkpoint, FitState, solve

X, Y = class_data(n=60)


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def signed(model, z):
    return nn.functional.softplus(-z[1] * model(z[0])[:, 0])


def network_problem(l2=0.02):
    train = dif.Samples(signed, (X, Y), name="train")
    group = torch.arange(60) % 3
    bound = train.mean(where=group == 1) <= train.mean() - 0.06
    return train, dif.Problem(train.mean() + dif.ridge(l2), [bound.named("group 1")])


# Trust regions


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("radius", [0.01, 0.5, 30.0])
def test_the_exact_step_is_the_best_in_the_ball(seed, radius):
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(5, 5, generator=generator, dtype=F64)
    H, g = A + A.T, torch.randn(5, generator=generator, dtype=F64)
    if seed == 5:  # no slope along the most negative direction
        v = torch.linalg.eigh(H)[1][:, 0]
        g = g - (g @ v) * v
    p, gain = exact_step(*torch.linalg.eigh(H), g, radius)
    assert float(p.norm()) <= radius * (1 + 1e-9)
    assert gain == pytest.approx(float(g @ p + 0.5 * p @ H @ p), rel=1e-9)
    others = torch.randn(20000, 5, generator=generator, dtype=F64)
    others = radius * others / others.norm(dim=1, keepdim=True) * torch.rand(20000, 1, generator=generator) ** 0.2
    assert gain <= float((others @ g + 0.5 * ((others @ H) * others).sum(1)).min())
    model = KrylovModel(lambda v: H @ v, g, radius, 50, accuracy=1e-12)
    q, predicted = model.step(radius)
    assert float(q.norm()) <= radius * (1 + 1e-9)
    assert predicted == pytest.approx(float(g @ q + 0.5 * q @ H @ q), rel=1e-9)
    if seed < 5:  # a Krylov space contains no direction that is orthogonal to g and its products
        assert predicted == pytest.approx(gain, rel=1e-9)
        assert model.step(0.1 * radius)[1] == pytest.approx(exact_step(*torch.linalg.eigh(H), g, 0.1 * radius)[1])


def test_a_product_that_is_not_finite_gives_no_step():
    model = KrylovModel(lambda v: v * float("nan"), torch.ones(3, dtype=F64), 1.0, 50)
    step, gain = model.step(1.0)
    assert step.tolist() == [0.0, 0.0, 0.0]
    assert gain == 0.0


def test_a_saddle_is_left():
    """(θ₁² − 1)² + θ₂² from its saddle, where the gradient vanishes: negative curvature leads on."""
    f = dif.Function(lambda p: ((p["x"][0] ** 2 - 1) ** 2 + p["x"][1] ** 2).sum(), name="double well")
    solution = dif.fit(dif.Problem(f), {"x": torch.tensor([0.0, 0.3], dtype=F64)}, show_progress=False)
    np.testing.assert_allclose(solution.theta.abs(), [1.0, 0.0], atol=1e-9)
    assert solution.active.curvature > 0


def test_a_saddle_is_left_without_a_matrix(monkeypatch):
    """A network with zero weights: the gradient vanishes, the curvature does not."""
    monkeypatch.setattr("dif.derivatives.hessian._AFFORDABLE", {"cpu": 0.0})
    monkeypatch.setattr("dif.derivatives.hessian._ANYWAY", 0)
    loss = lambda p, z: nn.functional.softplus(-z[1] * (torch.tanh(z[0] @ p["a"]) @ p["v"]))  # noqa: E731
    train = dif.Samples(loss, (X, Y), name="train")
    start = {"a": torch.zeros(4, 6, dtype=F64), "v": torch.zeros(6, dtype=F64)}
    solution = dif.fit(dif.Problem(train.mean() + dif.ridge(1e-2)), start, show_progress=False)
    assert solution.converged
    assert solution.objective < np.log(2) - 0.1
    assert solution.active.curvature > -1e-6


# Phases


def test_a_fit_starts_where_mini_batches_ended():
    _, problem = network_problem()
    model = small()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.random.get_rng_state()

    training = dif.Training(problem, model, dif.Adam(0.02), dif.Ascent(0.2), 16, 40, schedule="cosine")
    first = training.run(show_progress=False)
    start = dif.Solution(problem, model, [0.0])
    assert first.end.objective < start.objective - 0.1
    assert not first.end.converged
    full = dif.fit(problem, first.params, multipliers=first.multipliers, show_progress=False)
    assert full.converged
    assert full.active.curvature > 0
    assert full.active.binding == (0,)
    assert abs(float(first.end.lam[0]) - float(full.lam[0])) < 0.5 * float(full.lam[0])
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_slow_progress_is_mentioned_early_and_stops_nothing(monkeypatch):
    _, problem = network_problem(l2=1e-4)
    expected = dif.fit(problem, small(), show_progress=False)
    monkeypatch.setattr("dif.solving.augmented_lagrangian._EARLY", 0.0)
    monkeypatch.setattr("dif.solving.augmented_lagrangian._LONG", 0.0)
    words = r"reduced the gradient from .* to .* in \d+ s\. It must be at most 1e-03 .* of 31 directions are flat"
    with pytest.warns(UserWarning, match=words) as told:
        slow = dif.fit(problem, small(), show_progress=False)
    assert len(told) == 1
    assert "dif.Training" in str(told[0].message)
    assert torch.equal(slow.theta, expected.theta)


def test_a_kept_hessian_gives_the_same_solution(monkeypatch):
    """Steps with a Hessian and a factor of an earlier point end at the point that Newton's method finds."""
    fit_module = sys.modules["dif.solving.fit"]
    _, problem, *_ = fair_logistic()
    every, hessians = {}, Rows.part_hessian
    for worth in (0.0, 1e9):  # a Hessian per step, and as few as converge
        counted = []
        monkeypatch.setattr(fit_module, "_WORTH", worth)
        monkeypatch.setattr(Rows, "part_hessian", lambda *args, c=counted: (c.append(1), hessians(*args))[1])
        solution = dif.fit(problem, zeros(), show_progress=False)
        assert solution.kkt.residual < 1e-12
        every[worth] = solution, len(counted)
    (newton, many), (kept, few) = every.values()
    np.testing.assert_allclose(kept.theta, newton.theta, atol=1e-12)
    np.testing.assert_allclose(kept.lam, newton.lam, atol=1e-12)
    assert few < many


def test_an_interrupted_fit_resumes(tmp_path):
    _, problem = network_problem()
    file = tmp_path / "fit.npz"
    options = {"checkpoint": file, "show_progress": False}
    with pytest.warns(dif.NotConvergedWarning):
        first = dif.fit(problem, small(), max_iter=20, **options)
    with np.load(file, allow_pickle=False) as stored:
        np.testing.assert_array_equal(stored["theta"], first.theta)
    resumed = dif.fit(problem, small(seed=9), **options)  # not from these params
    assert resumed.converged
    once_more = dif.fit(problem, small(seed=5), max_iter=3, **options)
    assert torch.equal(once_more.theta, resumed.theta) or float((once_more.theta - resumed.theta).norm()) < 1e-9


def test_every_newton_step_is_saved(tmp_path, monkeypatch):
    """A step may take a minute where the Hessian is expensive, so a kill loses the step at hand only."""
    train = dif.Samples(logistic, (X, Y), name="train")
    problem, file = dif.Problem(train.mean() + dif.ridge(0.01)), tmp_path / "fit.npz"
    whole = dif.fit(problem, zeros(), show_progress=False)
    save = Checkpoint.save

    def interrupt(self, state):
        save(self, state)
        raise KeyboardInterrupt

    distances = []
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", interrupt)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                dif.fit(problem, zeros(), checkpoint=file, show_progress=False)
            with np.load(file) as state:
                distances.append(float(np.linalg.norm(state["theta"] - whole.theta.numpy())))
    steps = [float(whole.theta.norm()), *distances]  # Newton's method goes on from where it was interrupted
    assert all(1e-9 < after < 0.9 * before for before, after in pairwise(steps))
    resumed = dif.fit(problem, zeros(), checkpoint=file, show_progress=False)
    np.testing.assert_allclose(resumed.theta, whole.theta, atol=1e-12)


def test_a_checkpoint_of_another_problem_is_refused(tmp_path):
    _, problem = network_problem()
    file = tmp_path / "fit.npz"
    dif.fit(problem, small(), checkpoint=file, show_progress=False)
    _, convex, _ = fair_logistic()
    damaged = tmp_path / "damaged.npz"
    damaged.write_bytes(b"nothing")
    for path in (file, damaged):
        with pytest.raises(dif.InvalidInputError, match=r"with other params|damaged.npz' is damaged") as caught:
            dif.fit(convex, zeros(), checkpoint=path, show_progress=False)
        assert "Name another file, or delete this one to start from the beginning." in str(caught.value)
    with pytest.raises(FileNotFoundError, match=r"There is no folder .* Create it first\."):
        dif.fit(convex, zeros(), checkpoint=tmp_path / "none" / "fit.npz", show_progress=False)


# Curvature


def test_an_expensive_hessian_is_replaced_by_gauss_newton_on_the_way(monkeypatch):
    """The solution is the same to the tolerance; only the outputs of the model must be named."""
    monkeypatch.setattr("dif.derivatives.hessian._AFFORDABLE", {"cpu": 0.0})
    monkeypatch.setattr("dif.derivatives.hessian._ANYWAY", 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    labels = torch.arange(60) % 3
    loss = lambda out, z: nn.functional.cross_entropy(out, z[1], reduction="none")  # noqa: E731
    matrices = []

    def assemble(*args):
        matrices.append(gauss_newton_hessian(*args))
        return matrices[-1]

    monkeypatch.setattr("dif.derivatives.rows.gauss_newton_hessian", assemble)
    fit_module = sys.modules["dif.solving.fit"]  # `dif.solving.fit` may also be the function
    attempts, iterate = [], fit_module.Newton._iterate

    def note(self, at, known):
        H = Curvature(self.program.rows, at.theta, self.program.weights(at.lam))
        self.own, self.noise, used = H.own, H.noise, self.limits.used
        kkt = self._measure(at, known)[0]
        result = iterate(self, at, known)
        attempts.append((kkt.stationarity, self.limits.used > used))
        return result

    monkeypatch.setattr(fit_module.Newton, "_iterate", note)
    train = dif.Samples(loss, (X, labels), name="train", outputs=lambda m, z: m(z[0]))
    problem = dif.Problem(train.mean() + dif.ridge(0.1), [train.mean(where=labels == 0) <= train.mean() - 0.05])
    solution = dif.fit(problem, model, show_progress=False)
    assert matrices
    assert {tried for stationarity, tried in attempts if stationarity > 1e-3} == {False}  # far away, no Newton step
    assert any(tried for _, tried in attempts)
    assert solution.kkt.residual < 1e-10
    assert float(solution.lam[0]) > 0
    assert solution.active.curvature > 0


def test_gauss_newton_is_the_outer_product():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    labels = torch.arange(60) % 3
    parts = {"outputs": lambda m, z: m(z[0])}
    loss = lambda out, z: nn.functional.cross_entropy(out, z[1], reduction="none")  # noqa: E731
    train = dif.Samples(loss, (X, labels), name="train", batch_size=25, **parts)
    problem = dif.Problem(train.mean() + dif.ridge(0.1), [train.mean(where=labels == 0) <= train.mean() - 0.05])
    solution = dif.fit(problem, model, show_progress=False)
    assert float(solution.lam[0]) > 0
    program = solution.program
    H = Curvature(program.rows, solution.theta, program.weights(solution.lam), gauss_newton=True).dense()

    def outputs(theta):
        return torch.func.functional_call(model, program.parameters.tensors(theta), (X,))

    J, P = torch.func.jacrev(outputs)(solution.theta), torch.softmax(outputs(solution.theta), 1)
    w = torch.full((60,), 1 / 60, dtype=F64)
    w = w + solution.lam[0] * ((labels == 0) / (labels == 0).sum().double() - w)
    bend = torch.diag_embed(P) - P[:, :, None] * P[:, None]
    expected = torch.einsum("n,nad,nab,nbe->de", w, J, bend, J) + 0.1 * torch.eye(len(H), dtype=F64)
    np.testing.assert_allclose(H, expected, atol=1e-12)
    influence = dif.DirectionalInfluence(solution, gauss_newton=True).scores(train, train.remove_each())
    assert influence.diagnostics["gauss_newton"]
    exact = dif.DirectionalInfluence(solution).scores(train, train.remove_each())
    assert 0.001 < influence.compare(exact).relative_error < 0.9
    _, rest = network_problem()
    with pytest.raises(dif.InvalidInputError, match="Samples 'train' must name the outputs of the model"):
        dif.ClassicalInfluence(dif.fit(rest, small(), show_progress=False), gauss_newton=True)


def test_a_sketch_of_the_curvature_preconditions(monkeypatch):
    """Where the Hessian is too expensive, that of a subset of the samples preconditions; the answer is the same."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(3000, 30, generator=generator, dtype=F64) * torch.logspace(-1.5, 0.5, 30, dtype=F64)
    y = torch.sign(X @ torch.randn(30, generator=generator, dtype=F64))
    loss = lambda p, z: nn.functional.softplus(-z[1] * (z[0] @ p["w"]))  # noqa: E731
    train = dif.Samples(loss, (X, y), name="train")
    solution = dif.fit(dif.Problem(train.mean() + dif.ridge(1e-3)), {"w": torch.zeros(30, dtype=F64)})
    dense = dif.DirectionalInfluence(solution).scores(train.mean(), train.remove_each())
    monkeypatch.setattr("dif.derivatives.hessian._AFFORDABLE", {"cpu": 0.2 * 2.5e11 / solution.curvature.share})
    monkeypatch.setattr("dif.derivatives.hessian._ANYWAY", 0)
    other = dif.Solution(solution.problem, solution.params)
    assert not other.curvature.assembled
    assert len(other.curvature.sketch().rows.tables[0].samples) == 600
    free = dif.DirectionalInfluence(other).scores(train.mean(), train.remove_each())
    np.testing.assert_allclose(free.values, dense.values, rtol=1e-7, atol=1e-12)
    assert free.diagnostics["solver"] == "ConjugateGradients"
    plain = dif.DirectionalInfluence(other, solver=lambda H: dif.ConjugateGradients(H, rank=0))
    steps = plain.scores(train.mean(), train.remove_each()).diagnostics["solver_steps"]
    assert free.diagnostics["solver_steps"] < steps


@pytest.mark.parametrize("make", [fair_logistic, weak_regression])
def test_every_estimator_without_a_matrix(make, monkeypatch):
    """Without assembling the Hessian, in fit or after it, the answers are the same."""
    train, problem, *_ = make()
    solution = fit_problem(problem)
    kinds = (dif.DirectionalInfluence, dif.ClassicalInfluence, dif.NewtonInfluence, dif.Retraining)
    removals = train.remove_groups([[0], [1, 2], [30]])
    dense = [kind(solution).scores(train, removals).values for kind in kinds]
    monkeypatch.setattr("dif.derivatives.hessian._AFFORDABLE", {"cpu": 0.0})
    monkeypatch.setattr("dif.derivatives.hessian._ANYWAY", 0)
    free = dif.fit(problem, zeros(), show_progress=False)
    np.testing.assert_allclose(free.theta, solution.theta, atol=1e-9)
    assert free.active.binding == solution.active.binding
    monkeypatch.setattr(Curvature, "dense", lambda *_: pytest.fail("the Hessian was assembled"))
    for kind, expected in zip(kinds, dense, strict=True):
        influence = kind(free).scores(train, removals)
        np.testing.assert_allclose(influence.values, expected, atol=1e-7 * float(expected.abs().max()))


# Retraining


def solve_together(solution, changes, max_iter=1000):
    """Return the ends after each stage of the batched solver, and how many programs are solved then."""
    scaled = lambda share: Direction(solution.program, share * changes).stack_programs()  # noqa: E731
    stages = BatchedNewton(solution).solve(scaled(1.0), 1e-10, max_iter, scaled)
    return [(ends, int(ends.reached.sum())) for ends in stages]


@pytest.mark.parametrize("make", [fair_logistic, weak_regression])
def test_solving_together_agrees_with_one_by_one(make):
    train, problem, *_ = make()
    solution = fit_problem(problem)
    groups = train.remove_groups([[0], [1, 2, 3], list(range(5, 15)), [20]]) + problem.constraints[0].shift(0.01)
    together = solve_together(solution, groups)[-1][0]
    assert bool(together.reached.all())
    for p in range(len(groups)):
        program = Direction(solution.program, groups[p]).perturbed_program(0)
        single = solve(program, FitState(solution.theta, solution.lam), Limits(10_000))
        np.testing.assert_allclose(together.theta[p], single.theta, atol=1e-8)
        np.testing.assert_allclose(together.lam[p], single.lam, atol=1e-8)


def test_networks_retrained_together_agree_with_fit():
    train, problem = network_problem(l2=0.05)
    solution = dif.fit(problem, small(), show_progress=False)
    removals = train.remove_each(range(20))
    actual = dif.Retraining(solution).scores(train.mean(), removals)
    assert max(actual.diagnostics["residuals"]) <= 1e-10
    for i in (0, 7, 13):
        kept = torch.arange(60) != i
        left = dif.Samples(signed, (X[kept], Y[kept]), name="left")
        group = (torch.arange(60) % 3)[kept]
        changed = dif.Problem(left.mean() + dif.ridge(0.05), [left.mean(where=group == 1) <= left.mean() - 0.06])
        again = dif.fit(changed, solution.params, multipliers=solution.lam, show_progress=False)
        change = dif.Retraining(solution).change(train.remove([i]))
        np.testing.assert_allclose(change.flat, again.theta - solution.theta, atol=1e-7)


def test_removals_are_retrained_without_hessian_products(monkeypatch):
    train, problem = network_problem()
    solution = dif.fit(problem, small())
    removals = train.remove_each(range(0, 60, 3))
    expected = dif.Retraining(solution).scores(train.mean(), removals)
    assert expected.diagnostics["failed"] == {}

    def refuse(*_):
        raise AssertionError("a product with a program's own curvature")

    monkeypatch.setattr(BatchedProgram, "products", refuse)
    ends = solve_together(solution, removals, 200)[0][0]
    assert bool(ends.reached.all())
    assert int(ends.steps.max()) <= 30


def test_large_perturbations_are_reached_through_smaller_ones(monkeypatch):
    train, problem = network_problem()
    solution = dif.fit(problem, small())
    groups = train.remove_groups([[(7 * k + 3 * j) % 60 for j in range(15)] for k in range(8)])
    monkeypatch.setattr(BatchedNewton, "_iterate_newton", lambda *_: None)
    (_, at_once), (stepwise, in_several), *_ = solve_together(solution, groups)
    assert at_once < in_several
    for p in torch.nonzero(stepwise.reached).reshape(-1).tolist():
        program = Direction(solution.program, groups[p]).perturbed_program(0)
        again = dif.Solution.of_program(program, stepwise.theta[p], stepwise.lam[p])
        assert again.kkt.residual <= 1e-8


def test_extrapolation_forgets_on_request_and_keeps_problems_apart():
    generator = torch.Generator().manual_seed(0)
    A = torch.eye(6, dtype=F64) + 0.9 * torch.diag(torch.tensor([1, -1, 0, 0, 0.5, 0], dtype=F64))
    points = torch.randn(3, 6, generator=generator, dtype=F64)
    z, first = points.clone(), points[:1].clone()
    together, single = Extrapolation(3, 6, lambda moves: moves), Extrapolation(1, 6, lambda moves: moves)
    for step in range(5):
        if step == 2:
            together.forget(torch.tensor([1]))
        live = torch.tensor([0, 1, 2])
        z[live] += together.combine(live, z[live], -z[live] @ A)
        first += single.combine(torch.tensor([0]), first, -first @ A)
    np.testing.assert_allclose(z[:1], first, atol=1e-12)
    assert float(z[[0, 2]].abs().max()) < 1e-9  # four directions to find out
    assert float(z[1].abs().max()) > 1e-6  # its history was forgotten


def test_programs_that_cannot_be_mapped_are_retrained_one_by_one():
    x, y = regression_data()

    def branching(params, z):  # a branch on data cannot be mapped over parameters
        return squared(params, z) * (1.0 if float(params["theta"].sum()) < 1e9 else 2.0)

    answers = []
    for loss in (squared, branching):
        train = dif.Samples(loss, (x, y), name="train")
        problem = dif.Problem(train.mean() + dif.ridge(0.1), [dif.linear([1.0, 0.0, 0.0, 0.0]) <= -0.2])
        answers.append(dif.Retraining(fit_problem(problem)).scores(train.mean(), train.remove_each(range(5))).values)
    np.testing.assert_allclose(answers[0], answers[1], atol=1e-10)


# What is not a solution


def test_a_network_that_stopped_early_is_refused():
    _, problem = network_problem()
    with pytest.warns(dif.NotConvergedWarning):
        early = dif.fit(problem, small(), max_iter=5, show_progress=False)
    for estimator in (dif.DirectionalInfluence, dif.ClassicalInfluence, dif.NewtonInfluence, dif.Retraining):
        with pytest.raises(dif.NotASolutionError, match="The relative KKT residual is"):
            estimator(early)


def test_a_saddle_is_refused():
    f = dif.Function(lambda p: ((p["x"][0] ** 2 - 1) ** 2 + p["x"][1] ** 2).sum(), name="double well")
    saddle = dif.Solution(dif.Problem(f), {"x": torch.zeros(2, dtype=F64)})
    assert saddle.converged
    with pytest.raises(dif.DegenerateError, match="smallest curvature of the Lagrangian"):
        dif.DirectionalInfluence(saddle)


def test_retraining_does_not_end_at_a_worse_minimum(tmp_path):
    """A gap of losses is not convex: followed while half of the samples leave, the solution leads to a bad minimum."""
    features, benign = load_breast_cancer(return_X_y=True)
    X = torch.tensor((features - features.mean(0)) / features.std(0))[:200, :8]
    y, n = torch.tensor(2.0 * benign - 1.0)[:200], 200
    large = torch.tensor(features[:200, 0] > np.median(features[:, 0]))
    train = dif.Samples(lambda p, z: nn.functional.softplus(-z[1] * (z[0] @ p["w"])), (X, y), name="train")
    problem = dif.Problem(train.mean() + dif.ridge(5e-2), [train.mean(where=large) <= train.mean() + 0.01])
    solution = dif.fit(problem, {"w": torch.zeros(8, dtype=F64)}, show_progress=False)
    rng = np.random.default_rng(0)
    for _ in range(10):
        gone = rng.choice(n, 100, replace=False)
        rng.normal(size=8)
    left = np.setdiff1d(np.arange(n), gone)
    A, b, inside = X[left].numpy(), y[left].numpy(), large[left].numpy()

    def losses(w):
        return np.logaddexp(0, -b * (A @ w))

    def objective(w):
        return losses(w).mean() + 0.025 * w @ w

    rule = {"type": "ineq", "fun": lambda w: losses(w).mean() + 0.01 - losses(w)[inside].mean()}
    best = minimize(objective, np.zeros(8), constraints=[rule], method="SLSQP", options={"ftol": 1e-13, "maxiter": 500})
    removal = train.remove(gone.tolist())
    followed = dif.PathInfluence(solution).follow(removal).end
    assert followed.converged
    assert objective(followed.theta.numpy()) > best.fun + 0.1  # a minimum, but not the one that training finds
    for _ in range(2):  # the second time from the files of the first
        retraining = dif.Retraining(solution, keep=tmp_path)
        theta = (solution.theta + retraining.change(removal).flat).numpy()
        assert objective(theta) == pytest.approx(best.fun, abs=1e-7)
