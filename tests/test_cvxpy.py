"""The CVXPY adapter against solving again: each branch of a kink, duals and values, every kind of parameter."""

import numpy as np
import pytest

import dif
from dif.studies import regression

cp = pytest.importorskip("cvxpy")
from dif.adapters.cvxpy import Sensitivity  # noqa: E402

TIGHT = {"solver": "CLARABEL", "tol_gap_abs": 1e-13, "tol_gap_rel": 1e-13, "tol_feas": 1e-13}


def state(things):
    return [np.array(t.value if isinstance(t, cp.Variable) else t.dual_value, dtype=float) for t in things]


def solved_again(problem, parameter, directions, things, eps):
    """One-sided difference quotients of the values and duals, and of the optimal value."""
    before = np.array(parameter.value, dtype=float)
    problem.solve(**TIGHT)
    here, value, rows = state(things), problem.value, []
    for direction in directions:
        parameter.value = before + eps * direction
        problem.solve(**TIGHT)
        rows.append([*((b - a) / eps for a, b in zip(here, state(things), strict=True)), (problem.value - value) / eps])
    parameter.value = before
    problem.solve(**TIGHT)
    return [np.stack([row[k] for row in rows]) for k in range(len(things) + 1)]


def agrees(problem, parameter, directions, things, eps=1e-5, atol=2e-5):
    problem.solve()
    sensitivity = Sensitivity(problem)
    found = sensitivity.along({parameter: directions})
    *expected, value = solved_again(problem, parameter, directions, things, eps)
    for thing, change in zip(things, expected, strict=True):
        assert found[thing].shape == change.shape
        np.testing.assert_allclose(found[thing], change, atol=atol * max(1.0, float(np.abs(change).max())))
    np.testing.assert_allclose(found.objective, value, atol=10 * eps * max(1.0, float(np.abs(value).max())))
    assert max(float(np.abs(change).max()) for change in expected) > 1e-3
    return sensitivity


def toy():
    X, y = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), np.array([1.0, 0.0, 0.5])
    w, theta = cp.Parameter(3, nonneg=True, value=np.full(3, 1 / 3)), cp.Variable(2)
    ball = cp.norm1(theta) <= 1
    problem = cp.Problem(cp.Minimize(cp.sum(cp.multiply(w, cp.square(X @ theta - y)))), [ball])
    problem.solve()
    return problem, w, theta, ball


def test_both_branches_at_the_kink_of_the_toy():
    problem, w, theta, ball = toy()
    sensitivity = Sensitivity(problem)
    assert len(sensitivity.qp.weak) == 3  # two sides of |θ| and the ball: no row binds
    assert len(sensitivity.qp.binding) == 0
    removal = np.array([[0.0, -1 / 3, 0.0]])
    found = sensitivity.along({w: np.concatenate([removal, -removal])})
    np.testing.assert_allclose(found[theta], [[1 / 6, -1 / 6], [-1 / 4, 0.0]], atol=1e-6)
    np.testing.assert_allclose(found[ball], [1 / 9, 0.0], atol=1e-6)
    for branch, direction in enumerate((removal[0], -removal[0])):
        w.value = np.full(3, 1 / 3) + 1e-4 * direction
        problem.solve(**TIGHT)
        np.testing.assert_allclose(found[theta][branch], (theta.value - 0.5) / 1e-4, atol=1e-4)
    w.value = np.full(3, 1 / 3)
    np.testing.assert_allclose(sensitivity.remove_each(w, renormalise=False)[theta][1], [1 / 6, -1 / 6], atol=1e-6)


@pytest.mark.parametrize("bounds", ["paper", "binding"])
def test_the_papers_regression_all_samples_at_once(bounds):
    """Equal to DirectionalInfluence on the same problem, and to solving again without some of the samples."""
    X, y = (t.numpy() for t in regression.data(0))
    train, stated = regression.problem(0, bounds)
    limits, n = stated.constraints[1].tau.numpy(), regression.N
    w, theta = cp.Parameter(n, nonneg=True, value=np.full(n, 1 / n)), cp.Variable(regression.D)
    total, rows = cp.sum(theta) == regression.B_EQ, np.array(regression.A_INEQ) @ theta <= limits
    problem = cp.Problem(cp.Minimize(0.5 * cp.sum(cp.multiply(w, cp.square(X @ theta - y)))), [total, rows])
    problem.solve()
    found = Sensitivity(problem).remove_each(w)
    influence = dif.DirectionalInfluence(dif.fit(stated, regression.start(), show_progress=False))
    entries = [dif.linear(np.eye(regression.D)[k]).as_term() for k in range(regression.D)]
    mine = influence.scores(entries, train.remove_each(), show_progress=False).values.numpy()
    np.testing.assert_allclose(found[theta], mine, atol=1e-6 * np.abs(mine).max())
    change = influence.change(train.remove([3]))
    np.testing.assert_allclose(np.append(found[total][3], found[rows][3]), change.multipliers.flat, atol=1e-9)
    removed = list(range(0, n, 50))
    actual = regression.cvxpy_retraining(0, stated, removed, show_progress=False).numpy()
    assert np.linalg.norm(found[theta][removed] - actual) <= 0.02 * np.linalg.norm(actual)


def test_a_portfolio_that_is_maximised():
    rng = np.random.default_rng(1)
    B = rng.normal(size=(12, 12))
    gain, share = cp.Parameter(12, value=rng.normal(size=12) * 0.1), cp.Variable(12, nonneg=True)
    budget, most = cp.sum(share) == 1, share <= 0.2
    risk = cp.quad_form(share, B @ B.T / 12 + 0.1 * np.eye(12))
    problem = cp.Problem(cp.Maximize(gain @ share - risk), [budget, most])
    sensitivity = agrees(problem, gain, rng.normal(size=(5, 12)), [share, budget, most], atol=1e-4)
    assert len(sensitivity.qp.binding) > 1


def test_the_dual_of_a_support_vector_machine():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(30, 3))
    y = np.sign(X[:, 0] + 0.5 * rng.normal(size=30))
    most, a = cp.Parameter(30, nonneg=True, value=np.ones(30)), cp.Variable(30)
    rows = [a >= 0, a <= most, y @ a == 0]
    problem = cp.Problem(cp.Minimize(0.5 * cp.sum_squares((y[:, None] * X).T @ a) - cp.sum(a)), rows)
    problem.solve(**TIGHT)
    full = np.flatnonzero(a.value > 1 - 1e-6)[:6]  # at their bound: the solution moves with it
    agrees(problem, most, -np.eye(30)[full], [a, rows[2]])


@pytest.mark.parametrize("kind", ["lasso", "matrix", "symmetric", "hinge", "scalar"])
def test_other_parameters(kind):
    rng = np.random.default_rng(2)
    X = rng.normal(size=(30, 3))
    y, theta = X @ [1.0, 0.0, 0.3] + 0.1 * rng.normal(size=30), cp.Variable(3)
    error = cp.sum_squares(X @ theta - y) / 30
    if kind == "lasso":
        price = cp.Parameter(nonneg=True, value=0.2)
        agrees(cp.Problem(cp.Minimize(error + price * cp.norm1(theta))), price, np.array([1.0, -1.0]), [theta])
    elif kind == "matrix":
        rows = cp.Parameter((2, 3), value=rng.normal(size=(2, 3)))
        below = rows @ theta <= -0.2
        directions = rng.normal(size=(3, 2, 3))
        agrees(cp.Problem(cp.Minimize(error), [below]), rows, directions, [theta, below], eps=1e-6, atol=1e-4)
    elif kind == "symmetric":
        S, trace = cp.Variable((3, 3), symmetric=True), cp.Parameter(value=0.5)
        fixed = cp.trace(S) == trace
        problem = cp.Problem(cp.Minimize(cp.sum_squares(S - rng.normal(size=(3, 3)))), [fixed])
        agrees(problem, trace, np.array([1.0, -2.0]), [S, fixed])
    elif kind == "hinge":
        w = cp.Parameter(30, nonneg=True, value=np.full(30, 1 / 30))
        sides = np.sign(y + 0.3 * rng.normal(size=30))
        loss = cp.multiply(w, cp.square(cp.pos(1 - cp.multiply(sides, X @ theta))))
        agrees(cp.Problem(cp.Minimize(0.05 * cp.sum_squares(theta) + cp.sum(loss))), w, -np.eye(30) / 30, [theta])
    else:
        shift = cp.Parameter(value=1.0)
        far = cp.norm1(theta) <= 100  # its epigraph has no curvature and no force: not unique, and of no matter
        sensitivity = agrees(
            cp.Problem(cp.Minimize(cp.sum_squares(theta - shift)), [far]), shift, np.array([1.0]), [theta]
        )
        assert len(sensitivity.qp.binding) == len(sensitivity.qp.weak) == 0


@pytest.mark.parametrize(
    ("attributes", "start"),
    [
        ({"bounds": [2, 5]}, [3.0, 9.0]),
        ({"nonpos": True}, [-3.0, 1.0]),
        ({"neg": True}, [-3.0, 1.0]),
        ({"nonneg": True}, [3.0, -1.0]),
    ],
    ids=str,
)
def test_attributes_of_variables_do_not_bend_the_answer(attributes, start):
    c, v = cp.Parameter(2, value=start), cp.Variable(2, **attributes)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(v - c)))
    problem.solve()
    np.testing.assert_allclose(Sensitivity(problem).along({c: [1.0, 1.0]})[v], [[1.0, 0.0]], atol=1e-9)


def test_a_diagonal_variable():
    D, g = cp.Variable((2, 2), diag=True), cp.Parameter(value=1.0)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(D - g * np.eye(2))))
    problem.solve()
    np.testing.assert_allclose(Sensitivity(problem).along({g: 1.0})[D], np.eye(2)[None], atol=1e-9)


def test_solutions_that_are_not_unique_are_refused_however_they_lie():
    words = "The solution or its multipliers are not unique, so there is no derivative."
    x, c = cp.Variable(2, nonneg=True), cp.Parameter(2, value=[1.0, 1.0])
    line = cp.Problem(cp.Minimize(c @ x), [cp.sum(x) == 1])
    w, v = cp.Parameter(4, nonneg=True, value=np.full(4, 0.25)), cp.Variable()
    median = cp.Problem(cp.Minimize(cp.sum(cp.multiply(w, cp.abs(v - np.arange(4.0))))))
    rng = np.random.default_rng(0)
    X, y, theta = rng.normal(size=(50, 6)), rng.normal(size=50), cp.Variable(6)
    X[:, -1] = X[:, :-1].sum(1)
    each = cp.Parameter(50, nonneg=True, value=np.full(50, 0.02))
    loss = cp.sum(cp.multiply(each, cp.square(X @ theta - y)))
    for problem in (line, median, cp.Problem(cp.Minimize(loss))):
        problem.solve()
        refused(problem, "singular", words)
    shrunk = cp.Problem(cp.Minimize(loss + 1e-6 * cp.sum_squares(theta)))
    shrunk.solve()
    H = 2 * X.T @ X / 50 + 2e-6 * np.eye(6)
    at = np.linalg.solve(H, 2 * X.T @ y / 50)
    expected = np.linalg.solve(H, (2 * X[7] * (X[7] @ at - y[7])) / 50)
    found = Sensitivity(shrunk).remove_each(each, renormalise=False)[theta][7]
    np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max())


def refused(problem, words, meaning):
    with pytest.raises(dif.DifError) as caught:
        Sensitivity(problem)
    assert words in str(caught.value)
    assert caught.value.meaning == meaning


def test_what_is_not_such_a_problem_is_refused_by_name():
    z, g = cp.Variable(2), cp.Parameter(value=1.0)
    quadratic = "The derivative is taken on the canonical quadratic program, whose data are affine in the parameters."
    refused(cp.Problem(cp.Minimize(cp.sum(cp.exp(z)) + g * z[0])), "exp", quadratic)
    refused(cp.Problem(cp.Minimize(cp.sum_squares(z))), "it has no Parameter", quadratic)
    refused(cp.Problem(cp.Minimize(g**2 * cp.sum_squares(z))), "DPP", quadratic)
    whole = cp.Variable(2, integer=True)
    refused(cp.Problem(cp.Minimize(cp.sum_squares(whole - g))), "integer", quadratic)
    both = cp.Parameter((2, 2), symmetric=True, value=np.eye(2))
    refused(cp.Problem(cp.Minimize(cp.sum_squares(cp.Variable((2, 2)) - both))), "symmetric", quadratic)
    turned = cp.Variable(2, complex=True)
    refused(cp.Problem(cp.Minimize(cp.sum_squares(cp.real(turned) - g))), "complex", quadratic)
    still = cp.Problem(cp.Minimize(cp.sum_squares(z - g)))
    g.value = 0.0
    still.solve()
    g.value = 5.0  # the same optimal value, another solution
    refused(still, "at best", "Its parameters have changed since, or the solver stopped early.")
    g.value = 1.0
    z = cp.Variable(2)
    refused(cp.Problem(cp.Minimize(cp.sum_squares(z - g))), "None", "The derivative is taken at a solution.")
    refused(z, "Variable", "Its canonical quadratic program is what is differentiated.")


def test_no_derivative_no_number():
    z, g = cp.Variable(2), cp.Parameter(value=1.0)
    words = "The solution or its multipliers are not unique, so there is no derivative."
    flat = cp.Problem(cp.Minimize(cp.square(z[0] + z[1] - g)))
    flat.solve()
    refused(flat, "singular", words)
    twice = cp.Problem(cp.Minimize(cp.sum_squares(z - g)), [z[0] <= 0.5, z[0] <= 0.5])
    twice.solve()
    refused(twice, "singular", words)
    sound = cp.Problem(cp.Minimize(cp.sum_squares(z - g)), [z[0] <= 0.5])
    sound.solve()
    g.value = 7.0
    refused(sound, "42.25", "Its parameters have changed since, or the solver stopped early.")
    sound.solve()
    sensitivity = Sensitivity(sound)
    g.value = 8.0
    with pytest.raises(dif.InvalidInputError) as caught:
        sensitivity.along({g: 1.0})
    assert caught.value.meaning == "It was prepared at another solution."
    g.value = 7.0
    for wrong, meaning in (
        ({g: [1.0, np.nan]}, "A direction says how much each entry of a parameter changes."),
        ({cp.Parameter(): 1.0}, "A direction says how much each entry of a parameter changes."),
    ):
        with pytest.raises(dif.InvalidInputError) as caught:
            sensitivity.along(wrong)
        assert caught.value.meaning == meaning
    with pytest.raises(dif.InvalidInputError) as caught:
        sensitivity.remove_each(g)
    assert caught.value.meaning == "Removing a sample sets its weight to 0."
    with pytest.raises(dif.InvalidInputError) as caught:
        sensitivity.along({g: 1.0})[cp.Variable()]
    assert caught.value.meaning == "Only those have a value at the solution."


def test_an_unreadable_solution_is_refused(monkeypatch):
    z, g = cp.Variable(2), cp.Parameter(value=1.0)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(z - g)), [z >= g, cp.sum(z) <= 4.0])
    problem.solve()
    monkeypatch.setattr("dif.adapters.quadratic_program._ROUNDS", 0)
    refused(problem, "still changing", "The solution is too degenerate to be read: rows are added and dropped in turn.")
    g.value = 3.0
    refused(problem, "status", "It has no solution at these values of its parameters, or is too badly scaled.")


def test_directions_of_several_parameters_go_together():
    z, g, h = cp.Variable(2), cp.Parameter(value=1.0), cp.Parameter(2, value=np.zeros(2))
    problem = cp.Problem(cp.Minimize(cp.sum_squares(z - g - h)), [z[0] <= 0.5])
    problem.solve()
    sensitivity = Sensitivity(problem)
    found = sensitivity.along({g: [1.0, 2.0], h: [[0.0, 1.0], [0.0, 0.0]]})
    np.testing.assert_allclose(found[z], [[0.0, 2.0], [0.0, 2.0]], atol=1e-9)
    np.testing.assert_allclose(sensitivity.along({g: 1.0, h: np.ones((3, 2))})[z], [[0.0, 2.0]] * 3, atol=1e-9)
    with pytest.raises(dif.InvalidInputError) as caught:
        sensitivity.along({g: [1.0, 2.0], h: np.ones((3, 2))})
    assert caught.value.meaning == "Each direction moves all parameters together."
