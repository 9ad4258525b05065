"""Fairness constraints by name on real loans: certified solutions, and DIF against re-solving with SciPy."""

from functools import cache

import numpy as np
import pytest
import torch
from fair_oracle import FairOracle
from refusals import invalid
from scipy.optimize import minimize
from scipy.special import expit

import dif
import dif.fairness
from dif.data import german_credit

CREDIT = german_credit()
X, Y, YOUNG = CREDIT.X[:700], CREDIT.paid[:700], (CREDIT.age <= 30)[:700].numpy()
AGE = np.where(YOUNG, "young", "old")
X_TEST, Y_TEST, YOUNG_TEST = CREDIT.X[700:].numpy(), CREDIT.paid[700:].numpy(), (CREDIT.age <= 30)[700:].numpy()
RIDGE = 0.02


def loss(params, batch):
    return torch.nn.functional.softplus(-batch[1] * (batch[0] @ params["w"]))


def score(params, batch):
    return batch[0] @ params["w"]


def error(params, batch):
    return torch.sigmoid(-batch[1] * score(params, batch))


TRAIN = dif.Samples(loss, (X, Y), name="train")
BOUNDS = {
    "demographic parity": 0.02,
    "equal opportunity": 0.02,
    "false positive rate parity": 0.01,
    "equalised odds": 0.01,
    "error rate parity": 0.02,
    "bounded group loss": 0.535,
}


def constrain(kind, features=AGE, **options):
    options = {"bound": BOUNDS[kind], "sensitive_features": features} | options
    build = getattr(dif.fairness, kind.replace(" ", "_"))
    if kind == "bounded group loss":
        return build(TRAIN, **options)
    if kind == "error rate parity":
        return build(TRAIN, error, **options)
    labels = {} if kind == "demographic parity" else {"labels": Y}
    return build(TRAIN, score, **(labels | options))


@cache
def solve(kind, **options):
    problem = dif.Problem(TRAIN.mean() + dif.ridge(RIDGE), constrain(kind, **options))
    return dif.fit(problem, {"w": torch.zeros(X.shape[1], dtype=torch.float64)}, show_progress=False)


def losses(w):
    return np.logaddexp(0, -Y_TEST * (X_TEST @ w))


def rates(w):
    return expit(X_TEST @ w)


@pytest.mark.parametrize("kind", BOUNDS)
def test_removals_agree_with_re_solving_by_scipy(kind):
    solution = solve(kind)
    certificate = dif.Certificate.of(solution)
    assert certificate.holds
    assert any(row.state == "binding" for row in certificate.constraints)
    oracle = FairOracle(kind, X.numpy(), Y.numpy(), YOUNG.astype(int), BOUNDS[kind], RIDGE)
    theta = oracle.solve(np.ones(700, dtype=bool), np.zeros(X.shape[1]))
    np.testing.assert_allclose(solution.theta, theta, atol=1e-5)

    gone = np.random.default_rng(0).permutation(700)[:100]
    test = dif.Samples(loss, (X_TEST, Y_TEST), name="test")
    shown = test.view(lambda params, batch: torch.sigmoid(score(params, batch)), name="rate")
    old = ~YOUNG_TEST
    targets = [test.mean(), test.mean(where=YOUNG_TEST), shown.mean(where=YOUNG_TEST) - shown.mean(where=old)]
    found = dif.DirectionalInfluence(solution).scores(targets, TRAIN.remove_each(gone), show_progress=False)
    assert found.trusted

    def measure(w):
        gap = rates(w)[YOUNG_TEST].mean() - rates(w)[old].mean()
        return np.array([losses(w).mean(), losses(w)[YOUNG_TEST].mean(), gap])

    before, actual = measure(theta), []
    for i in gone:
        here = np.arange(700) != i
        actual.append(measure(oracle.solve(here, theta)) - before)
    correlations = [np.corrcoef(found.values[:, t], np.array(actual)[:, t])[0, 1] for t in range(3)]
    assert min(correlations) > 0.99, correlations


def test_the_constraint_holds_for_both_groups_although_only_one_is_constrained():
    solution = solve("demographic parity")
    assert solution.problem.names == ("demographic parity, young, at most", "demographic parity, young, at least")
    p = expit(X.numpy() @ solution.theta.numpy())
    gaps = [p[YOUNG].mean() - p.mean(), p[~YOUNG].mean() - p.mean()]
    np.testing.assert_allclose(min(gaps), -0.02, atol=1e-9)
    assert 0 < max(gaps) < 0.02


def test_two_groups_of_equal_size_have_a_regular_solution():
    """Stated for both groups, the constraints would be the same twice, and the multipliers not unique."""
    order = np.argsort(CREDIT.age[:700].numpy(), kind="stable")
    half = np.isin(np.arange(700), order[:350])
    problem = dif.Problem(TRAIN.mean() + dif.ridge(RIDGE), constrain("demographic parity", half, bound=0.01))
    solution = dif.fit(problem, {"w": torch.zeros(X.shape[1]).double()}, show_progress=False)
    assert dif.Certificate.of(solution).holds
    p = expit(X.numpy() @ solution.theta.numpy())
    np.testing.assert_allclose(np.abs([p[half].mean(), p[~half].mean()] - p.mean()), 0.01, atol=1e-9)


def divide(sizes, kind, seed=1):
    """Two groups of people, one with higher scores, under a constraint stated by name, and the oracle."""
    rng, group = np.random.default_rng(seed), np.repeat([0, 1], sizes)
    features = np.c_[rng.normal(size=(len(group), 3)), np.ones(len(group))]
    features[:, 0] += 0.8 * group
    labels = np.sign(features[:, 0] + 0.5 * rng.normal(size=len(group)) - 0.4)
    train = dif.Samples(loss, (torch.tensor(features), torch.tensor(labels)), name="train")
    options = {"sensitive_features": group, "bound": 0.03}
    if kind == "error rate parity":
        rows = dif.fairness.error_rate_parity(train, error, **options)
    else:
        known = {} if kind == "demographic parity" else {"labels": labels}
        rows = getattr(dif.fairness, kind.replace(" ", "_"))(train, score, **options, **known)
    problem = dif.Problem(train.mean() + dif.ridge(RIDGE), rows)
    solution = dif.fit(problem, {"w": torch.zeros(4).double()}, show_progress=False)
    return train, solution, FairOracle(kind, features, labels, group, 0.03, RIDGE)


@pytest.mark.parametrize(
    ("kind", "sizes", "leaving"),
    [
        ("demographic parity", (60, 50), 40),
        ("equalised odds", (60, 50), 40),
        ("demographic parity", (100, 100), 1),
        ("error rate parity", (100, 100), 5),
    ],
)
def test_the_rule_holds_for_the_group_that_a_removal_makes_the_smaller_one(kind, sizes, leaving):
    train, solution, oracle = divide(sizes, kind)
    assert dif.Certificate.of(solution).holds
    removal, here = train.remove(range(leaving)), np.arange(sum(sizes)) >= leaving
    theta = oracle.solve(here, solution.theta.numpy())
    again = dif.fit(solution.problem.after(removal), solution.params, show_progress=False)
    np.testing.assert_allclose(again.theta, theta, atol=1e-6)
    for exact in (dif.Retraining(solution), dif.PathInfluence(solution)):
        np.testing.assert_allclose(exact.change(removal).flat + solution.theta, theta, atol=1e-6)
    if leaving <= 5:
        actual = theta - oracle.solve(np.ones(len(here), dtype=bool), solution.theta.numpy())
        found = dif.DirectionalInfluence(solution).change(removal).flat.numpy()
        assert np.linalg.norm(found - actual) < 0.15 * np.linalg.norm(actual)


def gather(X, y, group, region, bound):
    """θ of least squares under demographic parity of linear scores within each region, for these people; by SciPy."""
    means = [
        (group == g)[here] @ X[here] / (group == g)[here].sum() - X[here].mean(0)
        for here in (region == r for r in np.unique(region))
        for g in np.unique(group[here])
    ]
    rows = np.concatenate([means, np.negative(means)])
    H, pull = 2 * X.T @ X / len(y) + RIDGE * np.eye(X.shape[1]), 2 * X.T @ y / len(y)
    limits = {"type": "ineq", "fun": lambda w: bound - rows @ w, "jac": lambda w: -rows}
    options = {"ftol": 1e-16, "maxiter": 1000}
    quadratic = lambda w: (0.5 * w @ H @ w - pull @ w, H @ w - pull)  # noqa: E731
    return minimize(quadratic, np.zeros(len(H)), method="SLSQP", jac=True, constraints=[limits], options=options).x


CHANGES = {
    "one leaves": lambda train, new, half: train.remove([int(half[0])]),
    "the order turns": lambda train, new, half: train.remove(half),
    "others come": lambda train, new, half: train.add(new, like=1),
    "some leave, others come": lambda train, new, half: train.remove(half) + train.add(new, like=1),
    "in thirds": lambda train, new, half: sum([(1 / 3) * train.remove(half)] * 3),
}


@cache
def compare_means(groups, regions):
    """Groups of equal size in each region under a constraint on linear scores: people, problem and solution."""
    rng, n = np.random.default_rng(0), 60
    group, region = np.arange(n) % groups, np.arange(n) // groups % regions
    X = np.c_[rng.normal(size=(n, 3)) + 0.9 * (group == 0)[:, None], np.ones(n)]
    y = X[:, 0] + 0.5 * rng.normal(size=n)
    train = dif.Samples(lambda p, z: (score(p, z) - z[1]) ** 2, (X, y), name="train")
    options = {"sensitive_features": group, "control_features": region, "bound": 0.05, "link": None}
    problem = dif.Problem(train.mean() + dif.ridge(RIDGE), dif.fairness.demographic_parity(train, score, **options))
    start = {"w": torch.zeros(4).double()}
    return train, (X, y, group, region), problem, dif.fit(problem, start, show_progress=False)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("groups", "regions"), [(2, 1), (2, 2), (3, 1)])
def test_every_way_to_solve_it_again_states_the_rule_for_whoever_is_left(change, groups, regions):
    """With linear scores and squared losses a Newton step is exact, too.

    All groups have the same size at first, and of two groups only the second is stated.
    """
    train, old, problem, solution = compare_means(groups, regions)
    rng, (group, region) = np.random.default_rng(1), old[2:]
    half = np.flatnonzero((group == 0) & (region == 0))[: 20 // regions // groups + 1]
    new = np.c_[rng.normal(size=(8, 3)), np.ones(8)], rng.normal(size=8)
    perturbation = CHANGES[change](train, tuple(map(torch.tensor, new)), half.tolist())
    leave = half[:1] if change == "one leaves" else half if change != "others come" else half[:0]
    come = 8 if "come" in change else 0
    parts = zip(old, (*new, np.ones(8, int), np.zeros(8, int)), strict=True)
    expected = gather(*(np.concatenate([np.delete(part, leave, 0), more[:come]]) for part, more in parts), 0.05)
    again = dif.fit(problem.after(perturbation), solution.params, show_progress=False).theta
    np.testing.assert_allclose(again, expected, atol=1e-6)
    for exact in (dif.NewtonInfluence, dif.PathInfluence, dif.Retraining):
        np.testing.assert_allclose(solution.theta + exact(solution).change(perturbation).flat, expected, atol=1e-6)


def test_scores_follow_the_smaller_group_in_every_removal():
    """Groups of equal size: whoever leaves makes the own group the smaller one."""
    train, solution, oracle = divide((100, 100), "demographic parity")
    gone = [0, 7, 19, 101, 155, 199]
    group = torch.tensor(oracle.group)
    rate = train.view(lambda params, batch: torch.sigmoid(score(params, batch)), name="rate")
    gap = rate.mean(where=group == 1) - rate.mean(where=group == 0)
    before = solution.value(gap)
    measure = lambda w: np.subtract(*(expit(oracle.X @ w)[oracle.group == g].mean() for g in (1, 0)))  # noqa: E731
    actual = [measure(oracle.solve(np.arange(200) != i, solution.theta.numpy())) - float(before) for i in gone]
    for estimator, tolerance in ((dif.DirectionalInfluence, 0.1), (dif.NewtonInfluence, 0.05), (dif.Retraining, 1e-3)):
        found = estimator(solution).scores(gap, train.remove_each(gone), show_progress=False).values[:, 0].numpy()
        assert np.linalg.norm(found - actual) < tolerance * np.linalg.norm(actual), estimator


def test_equal_means_are_one_equality_per_group_except_the_largest():
    three = np.where(CREDIT.age[:700].numpy() > 50, "senior", AGE)
    rows = constrain("demographic parity", three, bound=0.0)
    assert [row.name for row in rows] == ["demographic parity, senior", "demographic parity, young"]
    problem = dif.Problem(TRAIN.mean() + dif.ridge(RIDGE), rows)
    solution = dif.fit(problem, {"w": torch.zeros(X.shape[1]).double()}, show_progress=False)
    assert dif.Certificate.of(solution).holds
    p = expit(X.numpy() @ solution.theta.numpy())
    np.testing.assert_allclose([p[three == g].mean() for g in ("old", "senior", "young")], p.mean(), atol=1e-9)


@pytest.mark.parametrize("kind", ["demographic parity", "equalised odds"])
def test_ratios(kind):
    solution = solve(kind, bound=0.0, ratio=0.95)
    assert dif.Certificate.of(solution).holds
    oracle = FairOracle(kind, X.numpy(), Y.numpy(), YOUNG.astype(int), 0.0, RIDGE, 0.95)
    theta = oracle.solve(np.ones(700, dtype=bool), np.zeros(X.shape[1]))
    np.testing.assert_allclose(solution.theta, theta, atol=2e-5)
    assert float(solution.lam.max()) > 1e-3


def test_mean_scores_are_a_linear_program_away_from_cvxpy():
    """Parity of scores is linear in the parameters, so the problem is convex, and CVXPY solves it."""
    cp = pytest.importorskip("cvxpy")
    rows = constrain("demographic parity", bound=0.05, link=None)
    start = {"w": torch.zeros(X.shape[1]).double()}
    solution = dif.fit(dif.Problem(TRAIN.mean() + dif.ridge(RIDGE), rows), start, show_progress=False)
    A, w = X.numpy(), cp.Variable(X.shape[1])
    risk = cp.sum(cp.logistic(cp.multiply(-Y.numpy(), A @ w))) / 700
    gap = (A[YOUNG].mean(0) - A.mean(0)) @ w
    held = cp.abs(gap) <= 0.05
    cp.Problem(cp.Minimize(risk + 0.5 * RIDGE * cp.sum_squares(w)), [held]).solve(solver=cp.CLARABEL, tol_gap_rel=1e-12)
    np.testing.assert_allclose(solution.theta, w.value, atol=1e-5)
    np.testing.assert_allclose(float(solution.lam.max()), held.dual_value, rtol=1e-4)


def test_weights_are_repetitions():
    """A weight of 2 is a second person who is the same, in the objective and in every mean of the constraints."""
    weights = 1 + (np.arange(700) % 3 == 0)
    twice = np.repeat(np.arange(700), weights)
    rows = constrain("equalised odds", sample_weight=weights)
    start = {"w": torch.zeros(X.shape[1]).double()}
    risk = TRAIN.mean(weights=weights)
    weighted = dif.fit(dif.Problem(risk + dif.ridge(RIDGE), rows), start, show_progress=False)
    people = dif.Samples(loss, (X[twice], Y[twice]), name="train")
    rows = dif.fairness.equalised_odds(
        people, score, labels=Y[twice], sensitive_features=AGE[twice], bound=BOUNDS["equalised odds"]
    )
    repeated = dif.fit(dif.Problem(people.mean() + dif.ridge(RIDGE), rows), start, show_progress=False)
    np.testing.assert_allclose(weighted.theta, repeated.theta, atol=1e-9)
    np.testing.assert_allclose(weighted.lam, repeated.lam, atol=1e-8)
    changes = dif.DirectionalInfluence(weighted), dif.DirectionalInfluence(repeated)
    one = changes[0].change(TRAIN.remove([3])).flat  # of weight 2
    both = changes[1].change(people.remove(np.flatnonzero(twice == 3))).flat
    np.testing.assert_allclose(one, both, atol=1e-9)
    again = dif.fit(weighted.problem.after(TRAIN.remove([3])), weighted.params, show_progress=False)
    gone = people.remove(np.flatnonzero(twice == 3))
    np.testing.assert_allclose(
        again.theta, dif.fit(repeated.problem.after(gone), start, show_progress=False).theta, atol=1e-9
    )


def test_several_features_are_combined_and_frames_are_read():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"age": AGE, "housing": np.array(CREDIT.features["housing"][:700])})
    names = [row.name for row in constrain("bounded group loss", frame, bound=5.0)]
    assert names[0] == "bounded group loss, old, free"
    assert len(names) == 6
    by_number = [row.name for row in constrain("bounded group loss", torch.tensor([10, 2] * 350), bound=5.0)]
    assert by_number == ["bounded group loss, 2", "bounded group loss, 10"]
    mixed = constrain("bounded group loss", pandas.Series([1, "one"] * 350, dtype=object), bound=5.0)
    assert [row.name for row in mixed] == ["bounded group loss, 1", "bounded group loss, one"]


def test_dif_fairness_needs_no_import_of_its_own():
    assert dif.__getattr__("fairness") is dif.fairness
    with pytest.raises(AttributeError, match="no attribute 'fairnes'"):
        dif.__getattr__("fairnes")


def test_wrong_inputs_are_refused():
    missing = np.array(["a", None] * 350, dtype=object)
    pandas = pytest.importorskip("pandas")
    for action, measured in (
        (lambda: constrain("demographic parity", AGE[:5]), "shape (5,)"),
        (lambda: constrain("demographic parity", None), "None"),
        (lambda: constrain("demographic parity", missing), "350"),
        (lambda: constrain("demographic parity", pandas.array(["a", pandas.NA] * 350)), "missing for 350 of 700"),
        (lambda: constrain("demographic parity", ["a"] * 700), "at least 2 samples each, not 1,"),
        (lambda: constrain("demographic parity", np.arange(700)), "not 700, 700 of them with one sample"),
        (
            lambda: constrain("equal opportunity", np.where(Y > 0, "a", "b")),
            "Group 'b' has no samples in equal opportunity, so its mean is not defined",
        ),
        (
            lambda: constrain("equal opportunity", labels=np.arange(700)),
            "`labels` must contain 0 and 1, −1 and 1, or False and True, not 0, 1, 10, 100",
        ),
        (lambda: constrain("equal opportunity", labels=np.ones(700)), "or False and True, not 1.0"),
        (
            lambda: constrain("equalised odds", labels=[0, 1]),
            "`labels` must have shape (700,), one value per sample, not an array of shape (2,)",
        ),
        (lambda: constrain("demographic parity", bound=-0.1), "`bound` must be a number ≥ 0, not -0.1"),
        (lambda: constrain("bounded group loss", bound=None), "`bound` must be a number ≥ 0, not None"),
        (
            lambda: constrain("demographic parity", ratio=1.2),
            "`ratio` must be above 0 and at most 1, such as 0.8 for the four-fifths rule, not 1.2",
        ),
        (
            lambda: constrain("equal opportunity", ratio=0.8, link=None),
            "`ratio` cannot be used with link=None, because mean scores may be negative; pass `bound` instead",
        ),
        (lambda: constrain("demographic parity", link=3), "`link` must be a function"),
        (lambda: constrain("bounded group loss", loss=3), "`loss` must be a function"),
        (
            lambda: dif.fairness.demographic_parity([1], score, sensitive_features=[1]),
            "`train` must be the dif.Samples of the objective, not",
        ),
        (lambda: TRAIN.mean(where=Y > 0, weights=np.where(Y > 0, 0.0, 1.0)), "not 0 below 0 and 0 above 0;"),
        (lambda: constrain("demographic parity", sample_weight=-np.ones(700)), "not 700 below 0"),
        (lambda: constrain("demographic parity", sample_weight=np.ones(7)), "(7,)"),
    ):
        invalid(action, measured)


@pytest.mark.parametrize("kind", list(BOUNDS)[:4])
def test_ratios_of_means_that_may_be_negative_are_refused(kind):
    """For m < 0 the rows ratio·m_g ≤ m and m_g ≥ ratio·m contradict each other at m_g = m."""
    words = "may be negative; pass `bound` instead, or a link whose values are positive, such as torch.sigmoid."
    for link, found in ((None, "link=None"), (torch.tanh, "this `link`"), (lambda f: f, "this `link`")):
        invalid(
            lambda link=link: constrain(kind, ratio=0.8, link=link), f"`ratio` cannot be used with {found}, ", words
        )
        assert constrain(kind, ratio=1.0, link=link)
    assert constrain(kind, ratio=0.8, link=lambda f: torch.sigmoid(5 * f))
