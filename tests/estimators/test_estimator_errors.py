"""Errors raised by estimators and their results."""

import re
import sys
from functools import cache

import numpy as np
import pytest
import torch
from problems import fair_logistic, fit_problem
from refusals import (
    CAP,
    ESTIMATORS,
    F64,
    INF,
    NAN,
    PROBLEM,
    SADDLE,
    START,
    TRAIN,
    drawn,
    estimator,
    influence,
    invalid,
    kinked,
    logistic,
    not_feasible,
    point,
    refused,
    samples,
    solution,
    solve,
    stated,
    table,
    through,
)
from torch import nn

import dif
from dif.linalg.solvers import DenseCholesky
from dif.report.builder import Report


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_change_takes_one_perturbation(kind):
    text = "make it with train.remove([i]), say."
    invalid(lambda: estimator(kind).change(3), "int", text)
    invalid(lambda: estimator(kind).change([TRAIN.remove(0)]), "list", text)
    many = TRAIN.remove_each()
    for action in (estimator(kind).change, dif.PathInfluence(solution()).follow):
        invalid(lambda action=action: action(many), "8 perturbations were given where there must be one;")


@pytest.mark.parametrize("kind", ESTIMATORS[:3])
def test_scores_refuse_perturbed_samples_without_a_derivative(kind):
    train, at = kinked()
    added = train.add(torch.tensor([0.0, 2.0], dtype=F64))
    texts = ("perturbed samples of 'new roots' are not finite, so their influence is not defined",)
    invalid(lambda: kind(at).scores(train.mean(), added), "The losses or gradients of 1 of 2", *texts)


def test_retraining_without_strict_records_the_start():
    change = dif.Retraining(not_feasible(), strict=False).change(TRAIN.remove(0))
    assert change.diagnostics["kkt"]["feasibility"] == not_feasible().kkt.feasibility


def test_a_linear_solve_that_misses_its_tolerance_is_refused():
    # no problem reaches this through the public API: Cholesky with refinement is backward stable
    H = torch.tensor([[3.0, 1.0], [1.0, 0.7]], dtype=F64)
    solver = DenseCholesky(H, tolerance=0.0)
    text = "The curvature is too badly conditioned for this precision."
    error = refused(
        dif.NotConvergedError, lambda: solver.solve(drawn(2, 5)), "relative residual of the linear solve", text
    )
    assert error.found == f"The relative residual of the linear solve is {solver.residual:.3g}."
    assert error.allowed == "It must be at most 0."


def test_a_pivot_of_rounding_size_is_refused():
    thin = dif.Function(lambda p: 0.5 * p["w"].sum() ** 2 + 0.5e-15 * p["w"][1] ** 2, name="thin")
    at = dif.Solution(dif.Problem(thin), START)
    meaning = "The curvature is not positive definite, so the linearised problem has no unique solution."
    error = refused(dif.DegenerateError, lambda: dif.ClassicalInfluence(at), meaning)
    assert error.found.startswith("The smallest of the pivots of the curvature is ")
    assert 0 <= float(error.found.split()[9]) < 2.2e-14
    assert error.allowed == "All must be above 2.2e-14."


@cache
def convex_on_the_wall():
    """Return a solution with λ̄ = 1 whose problem is convex only while the constraint w₁ ≤ 1 holds."""
    problem = dif.Problem(SADDLE.mean(), [(dif.linear([0.0, 1.0]) <= 1.0).named("wall")])
    return dif.Solution(problem, point(0.0, 1.0))


def test_a_constraint_that_becomes_inactive_where_only_it_kept_the_problem_convex():
    at = convex_on_the_wall()
    assert at.active.binding == (0,)
    push = SADDLE.add(torch.tensor([[1.0, 5.0]], dtype=F64))  # λ = 1 − 5/4 after it
    switching = dif.DirectionalInfluence(at, switching=True)
    for action in (lambda: switching.change(push), lambda: switching.scores(SADDLE.mean(), push)):
        error = refused(
            dif.DegenerateError,
            action,
            "The constraint becomes inactive, but the Lagrangian is convex only while it holds, so the linearised "
            "problem has no minimum.",
        )
        assert error.found == "The multiplier of wall would be -0.25 after the step."
        assert error.allowed == "The multiplier of an inequality must be at least 0."
    lenient = dif.DirectionalInfluence(at, switching=True, strict=False)
    answer = lenient.scores(SADDLE.mean(), push)
    assert bool(answer.values.isnan().all())
    assert "The constraint becomes inactive" in answer.diagnostics["unanswered"][push.labels[0]]
    assert bool(lenient.change(push).flat.isnan().all())
    newton = dif.NewtonInfluence(at)
    for action in (lambda: newton.change(push), lambda: newton.scores(SADDLE.mean(), push)):
        found = "The quadratic problem of this step is not convex on the constraints that hold."
        meaning = (
            "It has no minimum: a constraint that kept it convex becomes inactive, or the Lagrangian curves downwards "
            "along the constraints."
        )
        assert refused(dif.DegenerateError, action, meaning, "use DirectionalInfluence").found == found
    assert torch.isfinite(dif.DirectionalInfluence(at).change(push).flat).all()
    refused(dif.UnboundedError, lambda: dif.Retraining(at).change(push), "The objective is unbounded below")
    refused(dif.DegenerateError, lambda: dif.DirectionalInfluence(at, rho=1e-3), "pivots of the curvature")


def test_bounds_of_dependent_constraints_that_move_apart_are_refused():
    equalities = dif.Problem(TRAIN.mean(), [dif.linear([1.0, 1.0]) == -1.0, dif.linear([2.0, 2.0]) == -2.0])
    at = dif.DirectionalInfluence(dif.Solution(equalities, solution().params), strict=False)
    first, second = equalities.constraints
    check_unanswered(at, first.shift(1.0), "equalities moved apart by")
    together = at.scores(TRAIN, first.shift(1.0) + second.shift(2.0)).values
    derivative = dif.DirectionalInfluence(solution(), switching=False)
    assert (together - derivative.scores(TRAIN, CAP.shift(1.0)).values).abs().max() < 1e-9

    twice = stated(2)
    at = dif.DirectionalInfluence(dif.Solution(twice, solution().params, [float(solution().lam[0]), 0.0]), strict=False)
    check_unanswered(at, twice.constraints[1].shift(-1.0), "moved past them")
    assert torch.equal(at.scores(TRAIN, twice.constraints[1].shift(1.0)).values.abs(), torch.zeros(1, 8, dtype=F64))

    free = solve(TRAIN.mean())
    edge = float(free.theta[0])
    pinched = dif.Problem(TRAIN.mean(), [dif.linear([1.0, 0.0]) <= edge, dif.linear([1.0, 0.0]) >= edge])
    at = dif.DirectionalInfluence(dif.Solution(pinched, free.params, [0.0, 0.0]), strict=False)
    check_unanswered(at, pinched.constraints[0].shift(-0.1), "inequalities moved apart")
    assert torch.isfinite(at.scores(TRAIN, pinched.constraints[0].shift(0.1)).values).all()


def check_unanswered(at, perturbation, reason):
    """Check that change, scores and prices are NaN, with the reason in the diagnostics."""
    for answer in (at.change(perturbation), at.scores(TRAIN, perturbation), at.prices(perturbation)):
        assert torch.isnan(answer.flat if isinstance(answer, dif.Change) else answer.values).all()
        (found,) = answer.diagnostics["unanswered"].values()
        assert reason in found


def test_a_changed_problem_without_feasible_points_is_refused_by_name_or_recorded():
    text = (
        "The linearised constraints contradict each other: they depend on each other and the perturbation moves them "
        "apart, or the changed problem is infeasible."
    )
    low, high = dif.linear([1.0, 1.0]) >= 0.9, dif.linear([1.0, 1.0]) <= 1.0
    at = solve(TRAIN.mean() + dif.ridge(0.1), [low, high])
    shut, sound = high.shift(-0.2), TRAIN.remove_each([0, 1])
    for kind, options in ((dif.DirectionalInfluence, {"switching": True}), (dif.NewtonInfluence, {})):
        refused(dif.DegenerateError, lambda k=kind, o=options: k(at, **o).scores(TRAIN, sound + shut), text)
        loose = kind(at, strict=False, **options)
        mixed = loose.scores(TRAIN.mean(), TRAIN.remove_each([0]) + 0.0 * shut)
        assert torch.isfinite(mixed.values).all()
        none = loose.scores(TRAIN.mean(), sound + shut)
        assert torch.isnan(none.values).all()
        assert len(none.diagnostics["unanswered"]) == 2
        assert "remove train[0]" in next(iter(none.diagnostics["unanswered"]))


def test_the_gap_of_dependent_bounds_is_measured_whatever_rho():
    equalities = dif.Problem(TRAIN.mean(), [dif.linear([1.0, 1.0]) == -1.0, dif.linear([2.0, 2.0]) == -2.0])
    at, shift = dif.Solution(equalities, solution().params), equalities.constraints[0].shift(1.0)
    small, large = (
        dif.DirectionalInfluence(at, rho=rho, strict=False).scores(TRAIN, shift).diagnostics["unanswered"]
        for rho in (0.1, 10.0)
    )
    assert small == large != {}


@pytest.mark.parametrize(("rho", "k"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (NAN, 1.0), (1.0, INF)])
def test_penalties_must_be_positive(rho, k):
    action = lambda: dif.PenaltyInfluence(solution(), rho, k)  # noqa: E731
    wrong = rho if rho != 1.0 else k
    invalid(action, f"must be a positive number, not {wrong}.", "Penalty weight ")


def test_a_penalised_objective_that_cannot_be_minimised():
    action = lambda: dif.PenaltyInfluence(solution(), 1e30, 1e30, at_minimiser=True)  # noqa: E731
    meaning = "The penalised objective was not minimised: large penalties are badly conditioned."
    error = refused(dif.NotConvergedError, action, meaning, "Use smaller rho and k")
    measured = re.fullmatch(
        r"The gradient of the penalised objective is (.+) where its minimisation stopped\.", error.found
    )
    assert float(measured[1]) > 1e-11
    assert error.allowed == "It must be at most 1e-11."


def test_a_retraining_that_stops_early_is_refused_or_recorded_as_nan():
    train = samples(logistic, name="signs")
    at = solve(train.mean() + dif.ridge(0.1))
    removals = train.remove_groups([[0, 1, 2], [3]])
    text = "The changed problem was not solved, so its difference from the old solution means nothing."
    error = refused(
        dif.NotConvergedError, lambda: dif.Retraining(at, max_iter=1).change(removals[0]), text, "Raise max_iter"
    )
    found = r"Retraining after 'remove signs\[0, 1, 2\]' stopped at a KKT residual of (.+)\."
    assert float(re.fullmatch(found, error.found)[1]) > 1e-10
    assert error.allowed == "It must be at most 1e-10."
    refused(dif.NotConvergedError, lambda: dif.Retraining(at, max_iter=1).scores(train.mean(), removals), text)
    recorded = dif.Retraining(at, max_iter=1, strict=False).scores(train.mean(), removals)
    assert torch.isnan(recorded.values).all()
    assert list(recorded.diagnostics["failed"]) == removals.labels
    full = dif.Retraining(at).scores(train.mean(), removals)
    assert max(full.diagnostics["residuals"]) <= 1e-10
    invalid(lambda: recorded.compare(full), "shapes (2, 1) and (2, 1), and 2 values are not finite.")


RESULTS = {
    "top of nothing": (lambda: influence().top(0), "`k` must be an integer ≥ 1, not 0."),
    "top of a missing target": (
        lambda: influence().top(3, 8),
        "`target` must be a number from 0 to 7 or one of the names train[0], train[1], ",
        "… 8 in all, not 8.",
    ),
    "top of an unknown name": (
        lambda: influence().top(3, "test"),
        "or one of the names train[0], train[1], ",
        "not 'test'.",
    ),
    "other perturbations": (
        lambda: influence().compare(estimator(dif.NewtonInfluence).scores(TRAIN, TRAIN.remove_groups([[1, 2], [3]]))),
        "but of 8 × 8 and 2 × 8 scores they share 1 perturbation and 8 targets;",
        "The perturbations of one Influence must be among those of the other, and likewise the targets, ",
    ),
    "other targets": (
        lambda: influence().compare(estimator(dif.NewtonInfluence).scores(TRAIN.mean(), TRAIN.remove_each())),
        "but of 8 × 8 and 8 × 1 scores they share 8 perturbations and 0 targets;",
        "score the same perturbations and targets with both estimators.",
    ),
    "one value": (
        lambda: (one := estimator(dif.DirectionalInfluence).scores(TRAIN.mean(), TRAIN.remove(0))).compare(one),
        "these have shapes (1, 1) and (1, 1), and 0 values are not finite.",
    ),
    "other shape": (
        lambda: dif.Agreement.of(torch.ones(3), torch.ones(4)),
        "these have shapes (3,) and (4,), and 0 values are not finite.",
        "Predicted and actual changes must have the same shape and at least 2 values, all of them finite;",
    ),
}


@table(RESULTS)
def test_results_refuse(case):
    invalid(*case)


def newer(path, raw):
    with np.load(path) as file:
        arrays = dict(file)
    about = str(arrays.pop("about")).replace('"version": 1', '"version": 9')
    np.savez(path, **arrays, about=np.array(about))


FILES = {
    "empty": (lambda path, raw: path.write_bytes(b""), "No data left in file"),
    "text": (lambda path, raw: path.write_text("perturbation,score"), "pickled"),
    "half": (lambda path, raw: path.write_bytes(raw[: len(raw) // 2]), "File is not a zip file"),
    "flipped": (lambda path, raw: path.write_bytes(raw[:300] + bytes([raw[300] ^ 255]) + raw[301:]), "Bad CRC-32"),
    "another archive": (lambda path, raw: np.savez(path, other=np.zeros(3)), "KeyError"),
    "newer": (newer, "it is 'influence', version 9, not 'influence', version 1"),
}


@table(FILES)
def test_damaged_files_are_refused(case, tmp_path):
    damage, found = case
    path = tmp_path / "scores.npz"
    influence().save(path)
    assert torch.equal(dif.Influence.load(path).values, influence().values)
    damage(path, path.read_bytes())
    invalid(lambda: dif.Influence.load(path), found, f"'{path}' is damaged, or was not written by dif: ")


def test_a_missing_file_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        dif.Influence.load(tmp_path / "none.npz")
    with pytest.raises(
        FileNotFoundError, match=r"There is no report file '.*none.json'. Write one with `dif score FILE`."
    ):
        Report.load(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError):
        influence().save(tmp_path / "none" / "scores.npz")


def test_a_save_that_fails_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "scores.npz"
    influence().save(path)
    old = path.read_bytes()
    unsound = dif.Influence(torch.zeros(1, 1), ("a",), ("b",), "DIF", {"not for JSON": torch.zeros(1)})
    with pytest.raises(TypeError):
        unsound.save(path)
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["scores.npz"]


def test_a_frame_needs_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r'pip install "directional-influence\[pandas\]"'):
        influence().to_frame()


@pytest.mark.parametrize(
    "ask",
    [
        lambda at, train: dif.DirectionalInfluence(at).change(train.remove(0)),
        lambda at, train: dif.DirectionalInfluence(at).scores(train.mean(), train.remove_each()),
        lambda at, train: dif.Retraining(at).change(train.remove(0)),
    ],
    ids=["change", "scores", "retraining"],
)
def test_a_module_put_into_training_mode_after_the_fit_is_refused(ask):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1)).double().eval()
    train = samples(through)
    at = solve(train.mean() + dif.ridge(0.1), params=model)
    model.train()
    refused(dif.InvalidInputError, lambda: ask(at, train), "modules in training mode", keep=[model])


def test_wrong_objects_are_named():
    text = "`problem` must be a dif.Problem, not of type Term; state it as dif.Problem(objective, constraints)."
    invalid(lambda: dif.fit(TRAIN.mean(), START), text)
    invalid(
        lambda: dif.Function(3.0, name="three"),
        "`fn` of Function 'three' must be a callable fn(params), not of type float.",
    )
    found = "The object of type NoneType that was given as `dw` of 'train' cannot be read as numbers;"
    invalid(lambda: TRAIN.reweight(None), found)
    found = "The array of dtype <U1 that was given as data of Samples 'odd' cannot be read as numbers;"
    invalid(lambda: samples(through, np.array(["a", "b"])), found, "encode text as numbers")
    invalid(lambda: TRAIN.mean() / 0, "A Term cannot be divided by 0.")
    constant = dif.Term(constant=torch.ones((), dtype=F64))
    text = "is a constant, which does not change with the parameters"
    invalid(lambda: estimator(dif.DirectionalInfluence).scores(constant, TRAIN.remove(0)), "Term(1)", text)


SOLVER_MEANING = "takes the curvature and returns a dif.LinearSolver"
NO_SAMPLES = "`samples` must be a dif.Samples, not of type int."
ESTIMATOR_MEANING = "The estimator scores the removal of each sample at that solution."


OBJECTS = {
    "solver a number": (lambda: dif.DirectionalInfluence(solution(), solver=3), "`solver` is 3;", SOLVER_MEANING),
    "solver a name": (lambda: dif.ClassicalInfluence(solution(), solver="cg"), "`solver` is 'cg';", SOLVER_MEANING),
    "solver that builds none": (
        lambda: dif.DirectionalInfluence(solution(), solver=lambda H: 3),
        "`solver` returned an object of type int;",
        "returns a dif.LinearSolver",
    ),
    "conjugate gradients": (lambda: dif.ConjugateGradients(3), "`curvature` must be a dif.Operator, not of type int."),
    "choose": (lambda: dif.choose(solution(), TRAIN.mean(), 3, 1), NO_SAMPLES),
    "smallest_set": (
        lambda: dif.smallest_set(solution(), TRAIN.mean(), 3, 0.1),
        NO_SAMPLES,
    ),
    "samples of self-influence": (
        lambda: dif.self_influence(estimator(dif.DirectionalInfluence), 3),
        NO_SAMPLES,
    ),
    "self-influence at a solution": (
        lambda: dif.self_influence(solution(), TRAIN),
        "`estimator` must be an estimator of a dif.Solution, not Solution; pass dif.DirectionalInfluence(solution)",
    ),
    "certificate": (
        lambda: dif.Certificate.of(3),
        "`solution` must be a dif.Solution, not of type int;",
        "dif.fit(problem, params)",
    ),
    "curve": (lambda: dif.bound_curve(PROBLEM, CAP, [1.0]), "`solution` must be a dif.Solution, not of type Problem;"),
}


@table(OBJECTS)
def test_objects_of_another_type_are_refused(case):
    invalid(*case)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_change_refuses_perturbed_samples_without_a_derivative(kind):
    train, at = kinked()
    text = "so their influence is not defined"
    refused(dif.InvalidInputError, lambda: kind(at).change(train.add(torch.zeros(1, dtype=F64))), text)


@pytest.mark.parametrize("factor", [NAN, INF, -INF, np.float64(NAN)])
def test_perturbations_scale_by_finite_numbers(factor):
    for action in (lambda: TRAIN.remove(0) * factor, lambda: factor * TRAIN.remove(0)):
        invalid(action, f"The factor of a perturbation must be a finite number, not {factor!r}.")


def test_damping_does_not_excuse_dependent_constraints():
    doubled = dif.fit(stated(2), START, show_progress=False)
    refused(dif.DegenerateError, lambda: dif.DirectionalInfluence(doubled, damping=1e-3), "LICQ fails")


@pytest.mark.parametrize("kind", [dif.DirectionalInfluence, dif.ClassicalInfluence])
@pytest.mark.parametrize("damping", [-1.0, NAN])
def test_damping_must_be_a_number_from_zero(kind, damping):
    invalid(lambda: kind(solution(), damping=damping), f"`damping` must be a number ≥ 0, not {damping}.")


@pytest.mark.parametrize("rho", [-1.0, NAN, INF, "large"])
def test_rho_must_be_a_number_from_zero(rho):
    invalid(lambda: dif.DirectionalInfluence(solution(), rho=rho), f"`rho` must be a number ≥ 0, not {rho!r}.")


def test_a_solver_that_cannot_be_built_is_named():
    _, problem, _ = fair_logistic()
    for wrong, found in ((dict, "`solver` could not be called with the curvature ("), (3, "`solver` is 3;")):
        with pytest.raises(dif.InvalidInputError) as caught:
            dif.DirectionalInfluence(fit_problem(problem), solver=wrong)
        assert caught.value.found.startswith(found)


def test_perturbations_are_called_by_the_name_of_their_argument():
    train, problem, _ = fair_logistic()
    with pytest.raises(dif.InvalidInputError, match=r"`perturbations` must be a dif\.Perturbation, not of type list"):
        dif.DirectionalInfluence(fit_problem(problem)).scores(train.mean(), [train.remove([0])])


def test_not_strict_means_the_same_for_the_adaptive_estimator():
    train, problem, _ = fair_logistic()
    solution = fit_problem(problem)
    off = dif.Solution(problem, {name: value + 0.01 for name, value in solution.params.items()}, solution.multipliers)
    with pytest.raises(dif.NotASolutionError):
        dif.AdaptiveInfluence(off)
    assert len(dif.AdaptiveInfluence(off, strict=False).scores(train.mean(), train.remove_each([0, 1]))) == 2


def alone_in_a_term():
    """A fair fit in which sample 3 is the only one of its group."""
    X = torch.randn(24, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    y = X @ torch.tensor([1.0, -0.5], dtype=F64) + 0.3
    train = dif.Samples(lambda p, z: (z[0] @ p["w"] - z[1]) ** 2, (X, y), name="train")
    only = train.mean(where=torch.arange(24) == 3)
    problem = dif.Problem(train.mean() + dif.ridge(0.1), [(only <= 0.02).named("only")])
    return train, dif.fit(problem, {"w": torch.zeros(2, dtype=F64)}, show_progress=False)


SCORERS = [
    dif.DirectionalInfluence,
    dif.ClassicalInfluence,
    dif.PenaltyInfluence,
    dif.NewtonInfluence,
    dif.PathInfluence,
    dif.AdaptiveInfluence,
    lambda at: dif.AdaptiveInfluence(at, accuracy=1e-6),
    dif.Retraining,
]


@pytest.mark.parametrize("make", SCORERS)
def test_a_removal_that_empties_a_term_leaves_the_others_answered(make, tmp_path):
    train, solution = alone_in_a_term()
    estimator, reason = make(solution), "leaves no samples in 'mean of 1 of train'"
    assert solution.active.binding == (0,)
    removals = train.remove_groups([[3], [5], [2, 3], [1, 8], [7]])
    with pytest.warns(dif.FirstOrderWarning, match=r"2 of 5 perturbations have no answer \(NaN\)\. The first is") as w:
        found = estimator.scores(train.mean(), removals, out=tmp_path / "scores.npy", show_progress=False)
    assert any("'remove train[3]': Perturbation 0 (remove train[3]) " + reason in str(one.message) for one in w)
    assert found.values.isnan()[:, 0].tolist() == [True, False, True, False, False]
    others = estimator.scores(train.mean(), removals.pick([1, 3, 4]), show_progress=False)
    np.testing.assert_allclose(found.values[[1, 3, 4]], others.values, rtol=1e-9)
    assert found.perturbations == tuple(removals.labels)
    assert list(found.diagnostics["unanswered"]) == ["remove train[3]", "remove train[2, 3]"]
    assert f"Perturbation 2 (remove train[2, 3]) {reason}" in found.diagnostics["unanswered"]["remove train[2, 3]"]
    for key in found.diagnostics.keys() & {"residuals", "remainders"}:
        assert np.isnan(found.diagnostics[key]).tolist() == [True, False, True, False, False]
    loaded = dif.Influence.load(tmp_path / "scores.npy")
    assert torch.equal(loaded.values.nan_to_num(7.0), found.values.nan_to_num(7.0))
    assert loaded.unanswered == found.unanswered
    invalid(lambda: estimator.change(removals[0]), reason)
    invalid(lambda: estimator.scores(train.mean(), removals[2]), reason)
    invalid(lambda: estimator.scores(train.mean(), removals.pick([0, 2])), reason)


def test_what_has_no_answer_has_none_by_term_either():
    train, solution = alone_in_a_term()
    estimator = dif.DirectionalInfluence(solution)
    for parts in (estimator.by_term(train.mean(), train.remove_each()), estimator.prices(train.remove_each())):
        assert torch.nonzero(parts.values.isnan().any(1)).reshape(-1).tolist() == [3]
        assert list(parts.diagnostics["unanswered"]) == ["remove train[3]"]
    assert len(estimator.margins(train.remove_each())) == 1


def test_training_again_without_the_only_sample_of_a_term_has_no_answer():
    train, solution = alone_in_a_term()
    start = {"w": torch.zeros(2, dtype=F64)}
    run = dif.Training(solution.problem, start, dif.SGD(0.1), dif.Ascent(0.1), 6, 2).run(show_progress=False)
    with pytest.warns(dif.FirstOrderWarning, match=r"1 of 24 perturbations have no answer \(NaN\)"):
        found = dif.Retraining(run).scores(train.mean(), train.remove_each(), show_progress=False)
    assert torch.nonzero(found.values.isnan()[:, 0]).reshape(-1).tolist() == [3]
