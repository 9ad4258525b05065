"""The CVXPY adapter, compared with solving again: both sides of kinks, duals and values, all kinds of parameters."""

import numpy as np
import pytest

import dif
from studies import regression

cp = pytest.importorskip("cvxpy")
from dif.adapters.cvxpy import Sensitivity  # noqa: E402

TIGHT = {"solver": "CLARABEL", "tol_gap_abs": 1e-13, "tol_gap_rel": 1e-13, "tol_feas": 1e-13}


def read_values(items):
    return [np.array(t.value if isinstance(t, cp.Variable) else t.dual_value, dtype=float) for t in items]


def difference_quotients(problem, parameter, directions, items, eps):
    """Return one-sided difference quotients of the values and duals, and of the optimal value."""
    before = np.array(parameter.value, dtype=float)
    problem.solve(**TIGHT)
    here, value, rows = read_values(items), problem.value, []
    for direction in directions:
        parameter.value = before + eps * direction
        problem.solve(**TIGHT)
        rows.append(
            [*((b - a) / eps for a, b in zip(here, read_values(items), strict=True)), (problem.value - value) / eps]
        )
    parameter.value = before
    problem.solve(**TIGHT)
    return [np.stack([row[k] for row in rows]) for k in range(len(items) + 1)]


def check_against_differences(problem, parameter, directions, items, eps=1e-5, atol=2e-5):
    problem.solve()
    sensitivity = Sensitivity(problem)
    found = sensitivity.along({parameter: directions})
    *expected, value = difference_quotients(problem, parameter, directions, items, eps)
    for item, change in zip(items, expected, strict=True):
        assert found[item].shape == change.shape
        np.testing.assert_allclose(found[item], change, atol=atol * max(1.0, float(np.abs(change).max())))
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
    assert len(sensitivity.qp.weak) == 3  # both sides of |θ| and the ball; no row binds
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
    """Compare with DirectionalInfluence on the same problem and with solving again without some of the samples."""
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
    actual = regression.retrain_with_cvxpy(0, stated, removed, show_progress=False).numpy()
    assert np.linalg.norm(found[theta][removed] - actual) <= 0.02 * np.linalg.norm(actual)


def test_a_portfolio_that_is_maximised():
    rng = np.random.default_rng(1)
    B = rng.normal(size=(12, 12))
    gain, share = cp.Parameter(12, value=rng.normal(size=12) * 0.1), cp.Variable(12, nonneg=True)
    budget, most = cp.sum(share) == 1, share <= 0.2
    risk = cp.quad_form(share, B @ B.T / 12 + 0.1 * np.eye(12))
    problem = cp.Problem(cp.Maximize(gain @ share - risk), [budget, most])
    sensitivity = check_against_differences(problem, gain, rng.normal(size=(5, 12)), [share, budget, most], atol=1e-4)
    assert len(sensitivity.qp.binding) > 1


def test_the_dual_of_a_support_vector_machine():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(30, 3))
    y = np.sign(X[:, 0] + 0.5 * rng.normal(size=30))
    most, a = cp.Parameter(30, nonneg=True, value=np.ones(30)), cp.Variable(30)
    rows = [a >= 0, a <= most, y @ a == 0]
    problem = cp.Problem(cp.Minimize(0.5 * cp.sum_squares((y[:, None] * X).T @ a) - cp.sum(a)), rows)
    problem.solve(**TIGHT)
    full = np.flatnonzero(a.value > 1 - 1e-6)[:6]  # at their bound, with which the solution moves
    check_against_differences(problem, most, -np.eye(30)[full], [a, rows[2]])


@pytest.mark.parametrize("kind", ["lasso", "matrix", "symmetric", "hinge", "scalar"])
def test_other_parameters(kind):
    rng = np.random.default_rng(2)
    X = rng.normal(size=(30, 3))
    y, theta = X @ [1.0, 0.0, 0.3] + 0.1 * rng.normal(size=30), cp.Variable(3)
    error = cp.sum_squares(X @ theta - y) / 30
    if kind == "lasso":
        price = cp.Parameter(nonneg=True, value=0.2)
        check_against_differences(
            cp.Problem(cp.Minimize(error + price * cp.norm1(theta))), price, np.array([1.0, -1.0]), [theta]
        )
    elif kind == "matrix":
        rows = cp.Parameter((2, 3), value=rng.normal(size=(2, 3)))
        below = rows @ theta <= -0.2
        directions = rng.normal(size=(3, 2, 3))
        check_against_differences(
            cp.Problem(cp.Minimize(error), [below]), rows, directions, [theta, below], eps=1e-6, atol=1e-4
        )
    elif kind == "symmetric":
        S, trace = cp.Variable((3, 3), symmetric=True), cp.Parameter(value=0.5)
        fixed = cp.trace(S) == trace
        problem = cp.Problem(cp.Minimize(cp.sum_squares(S - rng.normal(size=(3, 3)))), [fixed])
        check_against_differences(problem, trace, np.array([1.0, -2.0]), [S, fixed])
    elif kind == "hinge":
        w = cp.Parameter(30, nonneg=True, value=np.full(30, 1 / 30))
        sides = np.sign(y + 0.3 * rng.normal(size=30))
        loss = cp.multiply(w, cp.square(cp.pos(1 - cp.multiply(sides, X @ theta))))
        check_against_differences(
            cp.Problem(cp.Minimize(0.05 * cp.sum_squares(theta) + cp.sum(loss))), w, -np.eye(30) / 30, [theta]
        )
    else:
        shift = cp.Parameter(value=1.0)
        far = cp.norm1(theta) <= 100  # its epigraph variable is not unique, which does not matter
        sensitivity = check_against_differences(
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
def test_attributes_of_variables_do_not_change_the_derivative(attributes, start):
    c, v = cp.Parameter(2, value=start), cp.Variable(2, **attributes)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(v - c)))
    problem.solve()
    np.testing.assert_allclose(Sensitivity(problem).along({c: [1.0, 1.0]})[v], [[1.0, 0.0]], atol=1e-9)


def test_a_diagonal_variable():
    D, g = cp.Variable((2, 2), diag=True), cp.Parameter(value=1.0)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(D - g * np.eye(2))))
    problem.solve()
    np.testing.assert_allclose(Sensitivity(problem).along({g: 1.0})[D], np.eye(2)[None], atol=1e-9)


def test_solutions_that_are_not_unique_are_refused_wherever_they_are():
    meaning = "The solution or its multipliers are not unique, so there is no derivative."
    x, c = cp.Variable(2, nonneg=True), cp.Parameter(2, value=[1.0, 1.0])
    line = cp.Problem(cp.Minimize(c @ x), [cp.sum(x) == 1])
    w, v = cp.Parameter(4, nonneg=True, value=np.full(4, 0.25)), cp.Variable()
    median = cp.Problem(cp.Minimize(cp.sum(cp.multiply(w, cp.abs(v - np.arange(4.0))))))
    rng = np.random.default_rng(0)
    X, y, theta = rng.normal(size=(50, 6)), rng.normal(size=50), cp.Variable(6)
    X[:, -1] = X[:, :-1].sum(1)
    each = cp.Parameter(50, nonneg=True, value=np.full(50, 0.02))
    loss = cp.sum(cp.multiply(each, cp.square(X @ theta - y)))
    p, b = cp.Parameter(value=0.0), cp.Variable(2)
    one_side = cp.Problem(cp.Minimize(cp.square(b[0]) + cp.pos(b[0] - b[1]) + p * b[1]), [b[1] <= 1e9])
    for problem in (line, median, cp.Problem(cp.Minimize(loss)), one_side):
        problem.solve()
        refused(problem, "singular", meaning)
    shrunk = cp.Problem(cp.Minimize(loss + 1e-6 * cp.sum_squares(theta)))
    shrunk.solve()
    H = 2 * X.T @ X / 50 + 2e-6 * np.eye(6)
    at = np.linalg.solve(H, 2 * X.T @ y / 50)
    expected = np.linalg.solve(H, (2 * X[7] * (X[7] @ at - y[7])) / 50)
    found = Sensitivity(shrunk).remove_each(each, renormalise=False)[theta][7]
    np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max())


def refused(problem, *texts):
    with pytest.raises(dif.DifError) as caught:
        Sensitivity(problem)
    for text in texts:
        assert text in str(caught.value)


def test_unsupported_problems_are_refused():
    z, g, quadratic = cp.Variable(2), cp.Parameter(value=1.0), "it must be a DPP quadratic program with parameters."
    whole, turned = cp.Variable(2, integer=True), cp.Variable(2, complex=True)
    both = cp.Parameter((2, 2), symmetric=True, value=np.eye(2))
    for objective, text in (
        (cp.sum(cp.exp(z)) + g * z[0], "exp"),
        (cp.sum_squares(z), "has no Parameter"),
        (g**2 * cp.sum_squares(z), "is not DPP"),
        (cp.sum_squares(whole - g), "integer"),
        (cp.sum_squares(cp.Variable((2, 2)) - both), "symmetric"),
        (cp.sum_squares(cp.real(turned) - g), "complex"),
    ):
        refused(cp.Problem(cp.Minimize(objective)), text, quadratic)
    still = cp.Problem(cp.Minimize(cp.sum_squares(z - g)))
    g.value = 0.0
    still.solve()
    g.value = 5.0  # the same optimal value, another solution
    refused(still, "at the optimum", "The parameters have changed since the solve, or the solver stopped early.")
    g.value = 1.0
    z = cp.Variable(2)
    refused(cp.Problem(cp.Minimize(cp.sum_squares(z - g))), "must be solved first: its status is None.")
    refused(z, "`problem` must be a cvxpy.Problem, not a Variable.")


def test_missing_derivatives_and_invalid_directions_are_refused():
    z, g = cp.Variable(2), cp.Parameter(value=1.0)
    meaning = "The solution or its multipliers are not unique, so there is no derivative."
    flat = cp.Problem(cp.Minimize(cp.square(z[0] + z[1] - g)))
    flat.solve()
    refused(flat, "singular", meaning)
    twice = cp.Problem(cp.Minimize(cp.sum_squares(z - g)), [z[0] <= 0.5, z[0] <= 0.5])
    twice.solve()
    refused(twice, "singular", meaning)
    sound = cp.Problem(cp.Minimize(cp.sum_squares(z - g)), [z[0] <= 0.5])
    sound.solve()
    g.value = 7.0
    refused(sound, "42.25", "The parameters have changed since the solve, or the solver stopped early.")
    sound.solve()
    sensitivity = Sensitivity(sound)
    g.value = 8.0
    with pytest.raises(dif.InvalidInputError, match="The parameters have changed; solve again"):
        sensitivity.along({g: 1.0})
    g.value = 7.0
    for action, found in (
        (lambda: sensitivity.along({g: [1.0, np.nan]}), "has 1 of 2 entries that are not finite; it must be a finite"),
        (lambda: sensitivity.along({g: [[1.0]]}), r"has shape \(1, 1\); it must be a finite array of shape \(\)"),
        (lambda: sensitivity.along({cp.Parameter(): 1.0}), "was given, but the problem has no such parameter"),
        (lambda: sensitivity.remove_each(g), r"`weights` must have shape \(n,\) with n ≥ 2, one per sample, not \(\)"),
        (lambda: sensitivity.along({g: 1.0})[cp.Variable()], "must be a variable or a constraint of the problem"),
    ):
        with pytest.raises(dif.InvalidInputError, match=found):
            action()


def test_an_active_set_that_keeps_changing_is_refused(monkeypatch):
    z, g = cp.Variable(2), cp.Parameter(value=1.0)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(z - g)), [z >= g, cp.sum(z) <= 4.0])
    problem.solve()
    monkeypatch.setattr("dif.adapters.quadratic_program._ROUNDS", 0)
    meaning = "The solution is too degenerate: the same constraints are added and dropped in turn."
    refused(problem, "still changing after 0 rounds", meaning)
    g.value = 3.0
    refused(problem, "status", "It has no solution for the current values of its parameters, or is too badly scaled.")


def test_directions_of_several_parameters_go_together():
    z, g, h = cp.Variable(2), cp.Parameter(value=1.0), cp.Parameter(2, value=np.zeros(2))
    problem = cp.Problem(cp.Minimize(cp.sum_squares(z - g - h)), [z[0] <= 0.5])
    problem.solve()
    sensitivity = Sensitivity(problem)
    found = sensitivity.along({g: [1.0, 2.0], h: [[0.0, 1.0], [0.0, 0.0]]})
    np.testing.assert_allclose(found[z], [[0.0, 2.0], [0.0, 2.0]], atol=1e-9)
    np.testing.assert_allclose(sensitivity.along({g: 1.0, h: np.ones((3, 2))})[z], [[0.0, 2.0]] * 3, atol=1e-9)
    with pytest.raises(dif.InvalidInputError, match="has 2 directions; it must have 1 or 3, as the others"):
        sensitivity.along({g: [1.0, 2.0], h: np.ones((3, 2))})


# Solutions fixed by the active rows, terms of parameters only, scales


@pytest.mark.parametrize("seed", range(60))
def test_the_active_rows_may_fix_the_solution(seed):
    rng = np.random.default_rng(seed)
    d = int(rng.integers(1, 6))
    R, at, x = rng.normal(size=(d + 3, d)), rng.normal(size=d), cp.Variable(d)
    L = np.linalg.cholesky(R.T @ R).T
    most, pull = cp.Parameter(d, value=at), L.T @ L @ at + rng.uniform(0.1, 2.0, size=d)
    box = cp.Problem(cp.Minimize(0.5 * cp.sum_squares(L @ x) - pull @ x), [x <= most])
    box.solve()
    np.testing.assert_allclose(Sensitivity(box).along({most: np.eye(d)})[x], np.eye(d), atol=1e-9)


def test_a_projection_onto_the_negative_orthant_is_unique():
    x, k = cp.Variable(3), cp.Parameter(3)
    projection = cp.Problem(cp.Minimize(cp.sum_squares(x - k)), [x <= 0])
    for third in (3.0, -3.0):
        k.value = [1.0, 2.0, third]
        projection.solve()
        moved = np.diag([0.0, 0.0, float(third < 0)])
        np.testing.assert_allclose(Sensitivity(projection).along({k: np.eye(3)})[x], moved, atol=1e-9)


def offsets():
    s, n, k = cp.Parameter(value=0.7), cp.Parameter(nonneg=True, value=0.3), cp.Parameter(2, value=[1.0, -2.0])
    none = np.zeros(2)
    return {
        "square": (s, cp.square(s), [], 1.4, none),
        "absolute": (k, cp.norm1(k), [], 0.0, none),
        "root": (n, -cp.sqrt(n), [], -0.5 / np.sqrt(0.3), none),
        "norm": (k, cp.norm(k), [], -1.0 / np.sqrt(5.0), none),
        "square of absolute": (s, cp.square(cp.abs(s)), [], 1.4, none),
        "exponential bound": (s, 0.0, [lambda x: x >= cp.exp(s)], 10.2072363, np.full(2, np.exp(0.7))),
        "tied bounds": (k, 0.0, [lambda x: x >= cp.abs(k[1])], 0.0, None),
        "row of parameters": (s, 0.0, [lambda x: s >= 0.0], 0.0, none),
        "always slack": (s, s, [lambda x: cp.sum(x) <= 100 + s], 1.0, none),
        "times 0": (s, 0.0, [lambda x: 0 * s + x >= 0], 0.0, none),
    }


@pytest.mark.parametrize("case", offsets())
def test_terms_of_parameters_only(case):
    s, term, rows, value, moved = offsets()[case]
    x, w = cp.Variable(2), cp.Parameter(2, nonneg=True, value=[1.0, 1.5])
    loss = cp.sum(cp.multiply(w, cp.square(x - 1))) + term
    problem = cp.Problem(cp.Minimize(loss), [row(x) for row in rows])
    problem.solve(solver="CLARABEL")
    before = np.array(s.value)
    direction = np.ones(s.shape)
    found = Sensitivity(problem).along({s: direction})
    assert np.array_equal(s.value, before)
    if case == "tied bounds":  # x = |k₂|, and k₂ = −2 grows
        value, moved = -5.0, np.full(2, -1.0)
    np.testing.assert_allclose(found.objective, [value], atol=1e-7)
    np.testing.assert_allclose(found[x], [moved], atol=1e-7)
    assert Sensitivity(problem).along({s: 0 * direction}).objective == [0.0]
    assert abs(float(Sensitivity(problem).along({w: [1.0, 0.0]}).objective[0])) < 10.0


def test_both_sides_of_a_kink_of_the_parameters_and_none_at_the_edge_of_a_domain():
    x, s, n = cp.Variable(), cp.Parameter(value=0.0), cp.Parameter(nonneg=True, value=0.0)
    problem = cp.Problem(cp.Minimize(cp.square(x - 1) + cp.abs(s) - cp.sqrt(n)))
    problem.solve(solver="CLARABEL")
    sensitivity = Sensitivity(problem)
    np.testing.assert_allclose(sensitivity.along({s: [1.0, -2.0]}).objective, [1.0, 2.0], atol=1e-9)
    with pytest.raises(dif.DegenerateError) as caught:
        sensitivity.along({n: 1.0})
    assert caught.value.meaning == "The term has no derivative along one of the directions."


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("bound", [False, True])
def test_features_of_any_size(scale, bound):
    rng = np.random.default_rng(0)
    X, y, theta = rng.normal(size=(20, 3)), cp.Parameter(20, value=rng.normal(size=20)), cp.Variable(3)
    X[:, 0] *= 0.1
    rows = [cp.sum(scale * theta) <= -2]
    problem = cp.Problem(cp.Minimize(cp.sum_squares(scale * X @ theta - y)), rows if bound else [])
    problem.solve(solver="CLARABEL")
    H, e = np.linalg.inv(X.T @ X), np.ones(3)
    T = H - np.outer(H @ e, H @ e) / (e @ H @ e) if bound else H
    np.testing.assert_allclose(
        Sensitivity(problem).along({y: np.eye(20)})[theta].T * scale, T @ X.T, atol=1e-9 * np.abs(T @ X.T).max()
    )


def test_problems_at_zero_and_far_below_one():
    x, k, w = cp.Variable(2), cp.Parameter(2, value=np.zeros(2)), cp.Parameter(2, nonneg=True, value=[1.0, 2.0])
    both = np.concatenate([np.eye(2), -np.eye(2)])
    for size in (1.0, 1e-6):
        nothing = cp.Problem(cp.Minimize(size * cp.sum_squares(x - k)), [x >= 0])
        nothing.solve()
        np.testing.assert_allclose(Sensitivity(nothing).along({k: both})[x], both.clip(min=0.0), atol=1e-9)
    steep = cp.Problem(cp.Minimize(w @ cp.abs(x)))
    steep.solve()
    np.testing.assert_allclose(Sensitivity(steep).along({w: np.eye(2)})[x], np.zeros((2, 2)), atol=1e-9)
    k.value = [1e-6, -2e-6]
    small = cp.Problem(cp.Minimize(cp.sum_squares(x - k)), [x <= 1e-7, x <= 1e9, x <= np.inf])
    small.solve(solver="CLARABEL")
    np.testing.assert_allclose(Sensitivity(small).along({k: np.eye(2)})[x], np.diag([0.0, 1.0]), atol=1e-9)


# Random problems


def at_a_kink(seed):
    """Build a random problem with a known solution and with binding, weak and inactive rows.

    Return it with two directions, its variable and constraints, and whether its active rows are dependent. The cost is
    chosen so that the given point is a solution.
    """
    rng = np.random.default_rng(seed)
    kind, d = ("rows", "box", "lasso", "ball", "pieces", "largest")[seed % 6], int(rng.integers(1, 6))
    at = rng.normal(size=d) * float(rng.random() < 0.9)
    if kind in ("lasso", "ball"):
        at = at * (rng.random(d) < 0.5)
    count = int(rng.choice([0, max(d - 1, 1), d + 5], p=[0.15, 0.15, 0.7]))  # 0: a vertex, or not unique
    X, y = rng.normal(size=(count, d)) * 10.0 ** rng.uniform(-0.3, 0.3, size=d), rng.normal(size=count)
    x, cost = cp.Variable(d), cp.Parameter(d)
    loss, slope = 0.5 * cp.sum_squares(X @ x - y) if count else 0.0, X.T @ (X @ at - y)
    rows, dependent = [], False

    def matrix(active):
        """Return rows whose active ones are far from dependent, and from orthogonal to the null space of X."""
        unseen = np.linalg.svd(X)[2][count:] if count else np.eye(d)
        while True:
            G = rng.normal(size=(active + 3, d))
            apart = active in range(1, d + 1) and np.linalg.svd(G[:active])[1][-1] > 0.2
            if (
                active == 0
                or active > d
                or (apart and (count >= d or np.abs(G[:active] @ unseen.T).max(1).min() > 0.2))
            ):
                return G

    def forces(n):
        return rng.uniform(0.1, 2.0, size=n) * (rng.random(n) < rng.choice([0.3, 0.7, 1.0]))

    signs = np.where(at != 0, np.sign(at), rng.choice([-1.0, -0.4, 0.0, 0.5, 1.0], size=d))
    if kind == "rows":
        k = int(rng.integers(0, d + 1)) + int(rng.random() < 0.1)
        G, total = matrix(k), k < d and rng.random() < 0.5
        if seed % 4 == 0 and k > 1:
            G[1] = 1.7 * G[0]
        active = np.concatenate([G[:k], np.ones((int(total), d))])
        dependent = np.linalg.matrix_rank(active) < len(active)
        level = cp.Parameter(k + 3, value=G @ at + np.append(np.zeros(k), rng.uniform(0.5, 2.0, size=3)))
        rows = [G @ x <= level, cp.sum(x) == at.sum()][: 1 + int(total)]
        force = G[:k].T @ forces(k) + total * rng.normal()
    elif kind == "box":
        side, ends = rng.choice([-1.0, 1.0], size=d), np.append(at, -at)
        slack = rng.uniform(0.5, 2.0, size=2 * d) * np.append(side < 0, side > 0)
        level = cp.Parameter(2 * d, value=ends + slack)
        rows, force = [x <= level[:d], -x <= level[d:]], side * forces(d)
    elif kind == "lasso":
        level = cp.Parameter(nonneg=True, value=0.7)
        loss, force = loss + level * cp.norm1(x), 0.7 * signs
    elif kind == "ball":
        level = cp.Parameter(value=float(np.abs(at).sum()))
        rows, force = [cp.norm1(x) <= level], forces(1) * signs
    else:
        k = int(rng.integers(1, d + 1))
        G, below = matrix(k), np.append(np.zeros(k), rng.uniform(0.5, 1.0, size=3))
        level = cp.Parameter(k + 3, value=-G @ at - below)
        share = forces(k) if kind == "largest" else rng.choice([0.0, 0.4, 1.0], size=k)
        share = (share / share.sum() if share.sum() else np.eye(k)[0]) if kind == "largest" else share
        kinks = cp.max(G @ x + level) if kind == "largest" else cp.sum(cp.pos(G @ x + level))
        loss, force = loss + kinks, G[:k].T @ share
    cost.value = -slope - force
    directions = {cost: rng.normal(size=(2, d)), level: rng.normal(size=(2, *level.shape))}
    return cp.Problem(cp.Minimize(loss + cost @ x), rows), directions, [x, *rows], dependent


SOLVERS = (
    {"solver": "CLARABEL", "tol_gap_abs": 1e-12, "tol_gap_rel": 1e-12, "tol_feas": 1e-12},
    {"solver": "OSQP", "eps_abs": 1e-10, "eps_rel": 1e-10, "max_iter": 100_000, "polish": True},
)


def moved_solution(problem, moves, length, items, solver):
    """Return variables, duals and value for moved parameters in one vector; infinite if there is no solution."""
    before = {p: p.value for p in moves}
    try:
        for p, move in moves.items():
            p.value = before[p] + length * move
        problem.solve(**solver)
        found = (
            [*map(np.ravel, read_values(items)), [problem.value]] if problem.status == cp.OPTIMAL else [[problem.value]]
        )
    except (cp.SolverError, ValueError):  # the step is longer than the sign of a parameter allows
        found = [[np.nan]]
    for p, value in before.items():
        p.value = value
    return np.concatenate(found)


def matches_one_sided_differences(problem, moves, items, mine):
    """Tell whether `mine` is within 1e-5 of difference quotients at two successive step sizes.

    Up to a change of the active set, x and the duals are linear and the value is quadratic in the step.
    """
    for solver in SOLVERS:
        near = 0
        for step in 10.0 ** np.arange(-1.0, -6.5, -0.5) / max(1.0, np.abs(mine).max()):
            after = [moved_solution(problem, moves, k * step, items, solver) for k in (1, 2, 3)]
            if any(len(one) < len(mine) for one in after):
                continue
            slope = (-2.5 * after[0] + 4.0 * after[1] - 1.5 * after[2]) / step
            near = near + 1 if np.abs(slope - mine).max() <= 1e-5 * max(1.0, np.abs(slope).max()) else 0
            if near == 2:
                return True
    return False


def jumps(problem, directions, items):
    """Tell whether the solution or a multiplier changes by 1e-3 when the parameters change by 1e-6: it is not unique.

    Solves that fail are ignored.
    """
    rng = np.random.default_rng(0)
    for solver in SOLVERS * 3:
        change = {p: rng.normal(size=p.shape) for p in directions}
        one, other = (moved_solution(problem, change, length, items, solver) for length in (1e-6, -1e-6))
        if np.isinf(one).any() or np.isinf(other).any():
            return True
        if len(one) == len(other) > 1 and np.abs(one - other)[:-1].max() > 1e-3:
            return True
    return False


def count_outcomes(seeds):
    """Count the outcomes; each answer must be right, and each refusal confirmed by a second solve."""
    counts = {"right": 0, "right, with weak rows": 0, "refused": 0, "refused: dependent rows": 0}
    for seed in seeds:
        problem, directions, items, dependent = at_a_kink(seed)
        problem.solve(solver="CLARABEL")
        try:
            sensitivity = Sensitivity(problem)
            found = sensitivity.along(directions)
        except dif.DifError:
            assert dependent or jumps(problem, directions, items), seed
            counts["refused: dependent rows" if dependent else "refused"] += 1
            continue
        for k in range(2):
            mine = np.append(np.concatenate([np.ravel(found[item][k]) for item in items]), found.objective[k])
            moves = {p: value[k] for p, value in directions.items()}
            assert matches_one_sided_differences(problem, moves, items, mine), (seed, k)
        counts["right, with weak rows" if len(sensitivity.qp.weak) else "right"] += 1
    return counts


@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")
def test_a_hundred_random_problems_at_kinks_and_vertices():
    assert count_outcomes(range(100))["right, with weak rows"] > 25


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")
def test_five_hundred_random_problems_at_kinks_and_vertices():
    counts = count_outcomes(range(500))
    print(counts)
    assert counts["right"] + counts["right, with weak rows"] > 350


@pytest.mark.parametrize("direction", [[[1.0], [1.0, 2.0]], "a", {}])
def test_directions_that_are_not_numbers_are_refused(direction):
    x, c = cp.Variable(2), cp.Parameter(2, value=[1.0, 1.0])
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x - c)), [x >= 0])
    problem.solve(solver="CLARABEL")
    with pytest.raises(dif.InvalidInputError, match="cannot be read as numbers"):
        Sensitivity(problem).along({c: direction})
