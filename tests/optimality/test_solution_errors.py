"""What is refused of a point: that it is no solution, or has no derivative."""

import pytest
import torch
from refusals import (
    CAP,
    ESTIMATORS,
    F64,
    GROUP,
    INF,
    NAN,
    PROBLEM,
    SADDLE,
    START,
    TRAIN,
    X,
    Y,
    estimator,
    invalid,
    kinked,
    not_complementary,
    not_feasible,
    not_stationary,
    point,
    refused,
    roots,
    samples,
    solution,
    solve,
    squares,
    stated,
    table,
    through,
    untouched,
)
from torch import nn

import dif


def test_a_point_without_a_second_derivative_is_refused():
    odd = dif.Samples(lambda p, z: (z[0] @ p["w"]) ** 2 + (p["w"].abs() ** 1.5).sum(), (X, Y), name="odd")
    solution = dif.Solution(dif.Problem(odd.mean() + dif.ridge(1.0)), point(0.0, 0.0))
    for strict in (True, False):
        invalid(
            lambda strict=strict: dif.DirectionalInfluence(solution, strict=strict),
            "NaN or infinite",
            "The curvature at the given parameters is NaN or infinite.",
            "The losses have no second derivative there (a norm or a root at 0), so the point cannot be judged.",
        )


TARGETS = {
    "none": (None, "NoneType"),
    "text": ("loss", "str"),
    "no terms": ([], "list"),
    "a number": (3.0, "float"),
    "a function": (squares, "function"),
    "a constraint": (CAP, "Constraint"),
    "a mixed list": ([TRAIN.mean(), 3.0], "list"),
    "a tensor": (X, "Tensor"),
    "a list of samples": ([TRAIN], "list"),
    "a problem": (PROBLEM, "Problem"),
}


@table(TARGETS)
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_targets_are_checked(case, kind):
    target, measured = case
    texts = ("The target must be a Term", "dif.Samples(loss, test_data)")
    invalid(lambda: estimator(kind).scores(target, TRAIN.remove(0)), measured, *texts)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_a_point_that_is_not_a_solution_is_refused_with_its_residual(kind):
    texts = ("The point does not solve the problem", "dif.fit(problem, solution.params)")
    at = not_stationary()
    gradient, root = 2 * X.T @ Y / 8, (2 * X.T @ X / 8).diagonal().sqrt()
    residual = float((gradient / root).norm()) / at.scales.size  # θ = 0: in units of what the samples would move
    assert residual == pytest.approx(at.kkt.stationarity)
    assert 0.3 < at.scales.size / float((2 * X * Y[:, None] / 8 / root).norm()) < 3
    error = refused(
        dif.NotASolutionError, lambda: kind(at), *texts, "stationarity", f"‖∇L‖ = {float(gradient.norm()):.3g}"
    )
    assert f"The relative KKT residual is {residual:.3g} (stationarity {residual:.2e}" in error.found
    assert error.allowed == "It must be at most 0.0001."

    error = refused(
        dif.NotASolutionError, lambda: kind(not_feasible()), *texts, "feasibility of cap is the largest part"
    )
    units = not_feasible().scales
    root = (2 * X.T @ X / 8).diagonal().sqrt()
    assert float(units.norms[0]) == pytest.approx(float((1 / root).norm()))
    away = 2 / (float(units.norms[0]) * units.size)  # f − τ = 2
    assert f"The relative KKT residual is {away:.3g} (" in error.found
    assert f"feasibility {away:.2e}" in error.found

    error = refused(
        dif.NotASolutionError, lambda: kind(not_complementary()), *texts, "complementarity of loose is the largest part"
    )
    gap = 1 / 3**0.5 / (10 / 3)  # slack 1 in units of what the three samples, of gradient −10/3 each, would move
    parts = f"stationarity 0.00e+00, feasibility 0.00e+00, complementarity {gap:.2e}"
    assert f"The relative KKT residual is {gap:.3g} ({parts}" in error.found


@pytest.mark.parametrize("kind", ESTIMATORS[:4])
@pytest.mark.parametrize("bad", [not_stationary, not_feasible], ids=lambda f: f.__name__)
def test_without_strict_a_point_that_is_not_a_solution_is_recorded_and_answered(kind, bad):
    at = bad()
    with untouched():
        change = kind(at, strict=False).change(TRAIN.remove(0))
        scores = kind(at, strict=False).scores(TRAIN.mean(), TRAIN.remove_each())
    for answer in (change, scores):
        assert answer.diagnostics["kkt"] == {
            "stationarity": at.kkt.stationarity,
            "feasibility": at.kkt.feasibility,
            "complementarity": at.kkt.complementarity,
        }
    assert at.kkt.residual > at.tol
    assert not at.converged
    assert torch.isfinite(change.flat).all()
    assert torch.isfinite(scores.values).all()


DUPLICATES = {"linear": None, "of the data": GROUP == 1}


@pytest.mark.parametrize("where", DUPLICATES.values(), ids=DUPLICATES.keys())
@pytest.mark.parametrize("split", [False, True], ids=["one carries λ", "both carry λ"])
def test_dependent_active_gradients_are_refused_or_recorded(where, split):
    once, twice = stated(1, where=where), stated(2, where=where)
    good = dif.fit(once, START, show_progress=False)
    lam = float(good.lam[0])
    assert lam > 0.1
    assert good.active.binding == (0,)
    doubled = dif.Solution(twice, good.params, [lam / 2, lam / 4] if split else [lam, 0.0])
    assert doubled.converged

    texts = (
        "scaled active gradients (constraint 0, constraint 1)",
        "(LICQ fails), so the multipliers are not unique",
        "strict=False",
    )
    for kind in (dif.DirectionalInfluence, dif.NewtonInfluence):
        error = refused(dif.DegenerateError, lambda kind=kind: kind(doubled), *texts)
        assert error.found.endswith(f"is {doubled.active.licq:.3g}.")
        assert doubled.active.licq < 1e-12
        assert error.allowed == "It must be above 1.5e-08."

    removals = TRAIN.remove_groups([[0], [5], [4, 6], [1, 7]])
    for options in ({}, {"switching": True}):
        strict = dif.DirectionalInfluence(good, **options)
        loose = dif.DirectionalInfluence(doubled, strict=False, **options)
        assert loose.scores(TRAIN, removals).diagnostics["licq"] == doubled.active.licq
        gap = loose.scores(TRAIN, removals).values - strict.scores(TRAIN, removals).values
        assert gap.abs().max() < 1e-9
        for removal in (*removals, TRAIN.remove(5, renormalise=False), TRAIN.reweight(torch.arange(8) / 80)):
            assert (loose.change(removal).flat - strict.change(removal).flat).abs().max() < 1e-9
    for removal in removals:
        gap = (
            dif.NewtonInfluence(doubled, strict=False).change(removal).flat
            - dif.NewtonInfluence(good).change(removal).flat
        )
        assert gap.abs().max() < 1e-9


def test_duplicated_weak_constraints_answer_like_one_without_strict():
    free = solve(TRAIN.mean())
    limit = float(free.theta.sum())
    rows = [dif.linear([1.0, 1.0]) <= limit, dif.linear([3.0, 3.0]) <= 3 * limit]
    one = dif.DirectionalInfluence(dif.Solution(dif.Problem(TRAIN.mean(), rows[:1]), free.params, [0.0]))
    at = dif.Solution(dif.Problem(TRAIN.mean(), rows), free.params, [0.0, 0.0])
    assert at.active.weak == (0, 1)
    refused(dif.DegenerateError, lambda: dif.DirectionalInfluence(at), "LICQ fails")
    two = dif.DirectionalInfluence(at, strict=False)
    for removal in TRAIN.remove_each():
        assert (one.change(removal).flat - two.change(removal).flat).abs().max() < 1e-9


def test_no_positive_curvature_on_the_tangent_space_is_refused():
    at = dif.Solution(dif.Problem(SADDLE.mean(), [dif.linear([1.0, 0.0]) == 0.0]), START)
    texts = ("curvature of the Lagrangian along the binding constraints", "The solution is not a strict minimum (the")
    for kind in (dif.DirectionalInfluence, dif.NewtonInfluence):
        error = refused(dif.DegenerateError, lambda kind=kind: kind(at), *texts, "Add a ridge")
        assert error.found.endswith("is -1.")
        assert error.allowed == f"It must be above {at.active.curvature_floor:.1e} of each coordinate's own."
    # without strict there is still no unique answer, and none is given
    error = refused(dif.DegenerateError, lambda: dif.DirectionalInfluence(at, strict=False), "pivots of the curvature")
    assert error.found == "One of the pivots of the curvature is not positive."
    none = dif.NewtonInfluence(at, strict=False).change(SADDLE.remove(0))
    assert bool(torch.isnan(none.flat).all())
    assert "The quadratic problem of this step is not convex" in none.diagnostics["unanswered"]


def test_a_flat_direction_is_refused_and_damping_is_the_named_way_out():
    flat = samples(lambda p, z: (z[0][:, 0] * p["w"].sum() - z[1]) ** 2, name="flat")
    at = solve(flat.mean())
    error = refused(dif.DegenerateError, lambda: dif.DirectionalInfluence(at), "it is not unique, or it is a saddle")
    assert abs(float(error.found.removesuffix(".").split()[-1])) < 1e-12
    for kind in (dif.ClassicalInfluence, dif.PenaltyInfluence):
        refused(dif.DegenerateError, lambda kind=kind: kind(at), "no unique solution", "or pass damping")
    damped = dif.DirectionalInfluence(at, damping=0.1).change(flat.remove(0))
    assert damped.diagnostics["damping"] == 0.1


def test_the_cure_of_a_point_that_is_not_a_solution_works_for_modules():
    problem = dif.Problem(samples(through).mean() + dif.ridge(0.1))
    at = dif.Solution(problem, nn.Linear(2, 1).double())
    assert "dif.fit(problem, solution.params)" in str(refused(dif.NotASolutionError, at.check))
    assert dif.fit(problem, at.params, show_progress=False).converged


def ball(radius):
    square = dif.Function(lambda p: (p["w"] ** 2).sum(), name="square")
    return dif.Problem(TRAIN.mean(), [(square <= radius**2).named("ball")])


def test_a_problem_without_a_point_inside_is_not_certified():
    """‖w‖² ≤ 0 allows only w = 0, where its gradient vanishes and no multiplier is large enough."""
    with pytest.warns(dif.NotConvergedWarning):
        dif.fit(ball(0.0), point(1.0, 1.0), show_progress=False)


def test_multipliers_that_drown_the_objective_are_refused():
    w = -1e-13 * torch.nn.functional.normalize(2 * X.T @ -Y, dim=0) / 1.0
    lam = float((2 * X.T @ (X @ w - Y) / 8).norm()) / 2e-13
    at = dif.Solution(ball(1e-13), {"w": w}, [lam])
    text = "Multipliers grow without bound where no point lies strictly inside the constraint"
    refused(dif.DegenerateError, lambda: dif.DirectionalInfluence(at), "multiplier of ball", text)


def test_a_target_without_a_derivative_is_named():
    train, at = kinked()
    test = dif.Samples(roots, torch.zeros(1, dtype=F64), name="test")
    invalid(
        lambda: dif.DirectionalInfluence(at).scores(test, train.remove(0)),
        "The gradient of test[0] is not finite, so the target has no derivative at the solution",
    )


def scalar_problem(*constraints):
    train = dif.Samples(lambda p, z: 0.5 * (z - p["w"][0]) ** 2, torch.full((3,), 11.0, dtype=F64), name="scalar")
    return dif.Problem(train.mean(), constraints)


def test_the_row_whose_complementarity_fails_is_named():
    tight, loose = (dif.linear([1.0]) <= 1.0).named("tight"), (dif.linear([1.0]) <= 2.0).named("loose")
    at = dif.Solution(scalar_problem(tight, loose), {"w": torch.ones(1, dtype=F64)}, [9.0, 1.0])
    refused(dif.NotASolutionError, at.check, "complementarity of loose is the largest part")


def test_the_row_whose_feasibility_fails_is_named():
    fine, coarse = (1e-3 * dif.linear([1.0]) <= 0.0).named("fine"), (1e3 * dif.linear([1.0]) <= 10999.0).named("coarse")
    at = dif.Solution(scalar_problem(fine, coarse), {"w": torch.full((1,), 11.0, dtype=F64)}, [0.0, 0.0])
    refused(dif.NotASolutionError, at.check, "feasibility of fine is the largest part")


def test_a_tolerance_is_a_positive_number():
    for tol in (NAN, 0.0, -1e-6, INF):
        invalid(lambda tol=tol: dif.Retraining(solution(), tol=tol), f"`tol` must be a positive number, not {tol}.")
        invalid(lambda tol=tol: dif.fit(PROBLEM, START, tol=tol), f"`tol` must be a positive number, not {tol}.")
        invalid(lambda tol=tol: dif.Solution(PROBLEM, START, tol=tol), f"`tol` must be a positive number, not {tol}.")
