"""Two thousand random problems, and malformed inputs: every answer is right, or refused with a complete error.

Unlike the problems of test_finite_differences, nothing here is made well-posed: features repeat or differ by orders of
magnitude, bounds contradict, repeat or just touch, there may be no ridge. Run with -s to see the counts.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from oracle import Oracle, Point, Removal, slope, weights_of

import dif

F64 = torch.float64
PARTS, PROBLEMS, MALFORMED = 4, 75, 360  # parts; problems and malformed inputs in each (1,740 in all)
MORE = 20  # further parts of problems, marked slow
RIGHT = 1e-3  # relative error of a right answer; finite differences are known to a tenth of that
settings.register_profile(
    "fuzz", deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
SETTINGS = settings.get_profile("fuzz")


def check_parts(error: dif.DifError) -> None:
    """Check that an error is one sentence or more, or has all four parts."""
    parts = [error.found, error.allowed, error.meaning, error.cure]
    assert all(parts) or (error.found.endswith(".") and not any(parts[1:]))


# Random problems


def squared(params, z):
    return 0.5 * (z[0] @ params["theta"] - z[1]) ** 2


def logistic(params, z):
    return torch.nn.functional.softplus(-z[1] * (z[0] @ params["theta"]))


def draw_problem(rng: np.random.Generator) -> tuple[Oracle, float]:
    """Draw a problem that may have no solution, many, or a degenerate one; return it with its ridge."""
    loss, n, d, m = (
        rng.choice(["squared", "logistic"]),
        int(rng.integers(5, 25)),
        int(rng.integers(1, 6)),
        int(rng.integers(0, 5)),
    )
    X = rng.normal(size=(n, d))
    if rng.random() < 0.3:
        X *= 10.0 ** rng.uniform(-2, 2, size=d)
    if d > 1 and rng.random() < 0.15:
        X[:, 0] = X[:, 1]
    y = X @ rng.normal(size=d) + rng.normal(size=n) if loss == "squared" else rng.choice([-1.0, 1.0], size=n)
    ridge = float(rng.choice([0.0, 1e-6, 0.05, 0.5], p=[0.15, 0.05, 0.4, 0.4]))
    everyone = np.ones(n, dtype=bool)
    means, B, A = [((1.0, everyone),)], np.zeros((1 + m, d, d)), np.zeros((1 + m, d))
    B[0] = ridge * np.eye(d)
    for j in range(1, 1 + m):
        kind = rng.choice(["linear", "group", "gap", "ball", "copy"], p=[0.4, 0.2, 0.2, 0.1, 0.1])
        group = np.isin(np.arange(n), rng.choice(n, size=int(rng.integers(1, n)), replace=False))
        means.append({"group": ((1.0, group),), "gap": ((1.0, group), (-1.0, everyone))}.get(kind, ()))
        if kind == "linear":
            A[j] = rng.normal(size=d)
        elif kind == "ball":
            B[j] = np.eye(d)
        elif kind == "copy" and j > 1:
            means[j], A[j], B[j] = means[j - 1], A[j - 1], B[j - 1]
        elif kind == "copy":
            A[j] = rng.normal(size=d)
    W = np.array([weights_of(row, n) for row in means])
    equality = rng.random(m) < 0.15
    oracle = Oracle(str(loss), X, y, tuple(means), W, B, A, np.zeros(m), equality & ~W[1:].any(1) & ~B[1:].any((1, 2)))
    start = np.linalg.lstsq(X, y, rcond=None)[0] if loss == "squared" else rng.normal(size=d)
    offset = rng.choice([-1.0, -0.1, 0.0, 0.1, 1.0], size=m) * rng.uniform(0, 1, size=m)
    oracle.tau[:] = oracle.values(start)[1:] + offset
    return oracle, ridge


def state_problem(oracle: Oracle, ridge: float) -> tuple[dif.Samples, dif.Problem]:
    """State the problem of an oracle for dif."""
    loss = squared if oracle.loss == "squared" else logistic
    train = dif.Samples(loss, (torch.tensor(oracle.X), torch.tensor(oracle.y)), name="train")
    constraints = []
    for j in range(len(oracle.tau)):
        term = 0.0
        for coefficient, mask in oracle.means[1 + j]:
            term = coefficient * train.mean(where=torch.tensor(mask)) + term
        if oracle.A[1 + j].any():
            term = dif.linear(oracle.A[1 + j]) + term
        if oracle.B[1 + j].any():
            term = dif.Function(lambda p: 0.5 * (p["theta"] ** 2).sum(), name="ball") + term
        tau = float(oracle.tau[j])
        constraints.append(term == tau if oracle.equality[j] else term <= tau)
    return train, dif.Problem(train.mean() + dif.ridge(ridge) if ridge else train.mean(), constraints)


def truth(oracle: Oracle, at: Point, removal: Removal) -> np.ndarray | None:
    """Return dθ/dε by re-solving; None where finite differences do not converge."""
    try:
        true = slope(oracle, at, removal, 1.0)
    except (AssertionError, np.linalg.LinAlgError, FloatingPointError):
        return None
    return true.theta if true.doubt < 0.1 * RIGHT else None


def solve_problem(number: int) -> str:
    """Return how problem `number` ended: right, refused (by which error), or undecided."""
    rng = np.random.default_rng([7, number])
    oracle, ridge = draw_problem(rng)
    train, problem = state_problem(oracle, ridge)
    n, d = oracle.X.shape
    gone = np.isin(np.arange(n), rng.choice(n, size=int(rng.integers(1, 3)), replace=False))
    renormalise = bool(rng.random() < 0.5)
    try:
        solution = dif.fit(problem, {"theta": torch.zeros(d, dtype=F64)}, max_iter=2000, show_progress=False)
        removal = train.remove(np.flatnonzero(gone).tolist(), renormalise=renormalise)
        found = dif.DirectionalInfluence(solution, switching=False).change(removal).flat.numpy()
    except dif.DifError as error:
        check_parts(error)
        return f"refused: {type(error).__name__}"
    whole = [dif.DirectionalInfluence(solution, switching=how, strict=False) for how in ("auto", True)]
    steps = [one.change(removal) for one in whole]
    equal = solution.program.kinds.equal
    settled = not steps[1].diagnostics["unanswered"] and torch.equal(whole[1].system.equal, equal)
    if settled:  # rows that "auto" leaves out are not missed
        gap = float((steps[0].flat - steps[1].flat).norm())
        if gap > 1e-6 * float(steps[1].flat.norm()) + 1e-9:
            return f"WRONG: problem {number}, auto off by {gap:.2e}"
    theta, lam = solution.theta.numpy(), solution.lam.numpy()
    held = oracle.equality.copy()
    held[list(solution.active.binding)] = True
    try:  # to the last digit, by the oracle's own Newton
        at = oracle.minimum(Point(theta, lam, held), reach=1e-3 * (1 + np.linalg.norm(theta)))
    except (AssertionError, np.linalg.LinAlgError):
        return "cannot be told"
    true = truth(oracle, at, Removal(gone, tuple(range(1 + len(oracle.tau))), renormalise))
    if true is None:
        return "cannot be told"
    size = np.linalg.norm(true)
    off = float(np.linalg.norm(found - true) / max(size, 1e-6 * (1 + np.linalg.norm(theta))))
    return "right" if off <= RIGHT else f"WRONG: problem {number} off by {off:.2e}"


@pytest.mark.filterwarnings("ignore::dif.NotConvergedWarning")
@pytest.mark.parametrize("part", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, PARTS + MORE))])
def test_problems_as_they_come(part, capsys):
    ends = Counter(solve_problem(part * PROBLEMS + k) for k in range(PROBLEMS))
    with capsys.disabled():
        print(f"\n{PROBLEMS} problems: {dict(ends.most_common())}")
    assert [end for end in ends if end.startswith("WRONG")] == []
    assert ends["right"] > 0.4 * PROBLEMS  # nobody hides behind refusals
    assert ends["cannot be told"] < 0.05 * PROBLEMS


# Inputs that make no sense

N, D = 20, 3
generator = torch.Generator().manual_seed(0)
X = torch.randn(N, D, generator=generator, dtype=F64)
Y = X.sum(1) + torch.randn(N, generator=generator, dtype=F64)
START = {"theta": torch.zeros(D, dtype=F64)}
NOT_NUMBERS = (float("nan"), float("inf"), "a", None, object(), [[]], {})


@pytest.fixture(scope="module")
def ground():
    train = dif.Samples(squared, (X, Y), name="train")
    bound = dif.linear(torch.eye(D)[0]) <= 0.1
    problem = dif.Problem(train.mean() + dif.ridge(0.1), [bound])
    solution = dif.fit(problem, START, show_progress=False)
    return train, bound, problem, solution, dif.DirectionalInfluence(solution)


def indices(draw):
    """Draw invalid indices of samples."""
    return draw(
        st.one_of(
            st.integers(N, 10**12), st.integers(-(10**12), -1),
            st.sampled_from(["a", None, 1.5, float("nan"), [], [[]], {}]),
            st.lists(st.integers(N, 10**6), min_size=1, max_size=5), st.integers(0, N - 1).map(lambda i: [i, i]),
            st.integers(0, N - 1).map(lambda i: [i, -1 - i]), st.integers(0, N - 1).map(lambda i: i + 0.5),
        )
    )  # fmt: skip


def vectors(draw):
    """Draw what is not one finite number per sample."""
    length = draw(st.integers(0, 3 * N).filter(lambda k: k != N))
    bad = torch.ones(N, dtype=F64)
    bad[draw(st.integers(0, N - 1))] = draw(st.sampled_from([float("nan"), float("inf")]))
    return draw(st.sampled_from([torch.ones(length), bad, torch.zeros(N), "a", None, torch.ones(N, 1), ["a"] * N]))


def masks(draw):
    """Draw what is not a mask."""
    length = draw(st.integers(0, 3 * N).filter(lambda k: k != N))
    return draw(st.sampled_from([torch.ones(length).bool(), torch.ones(N), torch.zeros(N).bool(), "a", 3, [1] * N]))


def data(draw):
    """Draw invalid data."""
    hole = X.clone()
    hole[draw(st.integers(0, N - 1)), draw(st.integers(0, D - 1))] = draw(
        st.sampled_from([float("nan"), float("-inf")])
    )
    short = draw(st.integers(0, N - 1))
    return draw(
        st.sampled_from(
            [(hole, Y), (X, Y[:short]), None, 3, "data.csv", [], {}, (X[:0], Y[:0]), iter([1]), torch.tensor(1.0)]
        )
    )


LOSSES = {
    "reduced": lambda p, z: squared(p, z).mean(),
    "too long": lambda p, z: torch.cat([squared(p, z)] * 2),
    "two columns": lambda p, z: torch.stack([squared(p, z)] * 2, 1),
    "random": lambda p, z: squared(p, z) * torch.rand(len(z[0]), dtype=F64),
    "of the batch": lambda p, z: squared(p, z) / squared(p, z).mean(),
    "integers": lambda p, z: (z[0] @ p["theta"]).long(),
    "single precision": lambda p, z: squared(p, z).float(),
    "detached": lambda p, z: squared({"theta": p["theta"].detach()}, z),
    "not finite": lambda p, z: squared(p, z) / 0.0,
    "a number": lambda p, z: 1.0,
    "nothing": lambda p, z: None,
}


def odd_loss(draw, ground):
    train = dif.Samples(draw(st.sampled_from(list(LOSSES.values()))), (X, Y))
    dif.fit(dif.Problem(train.mean() + dif.ridge(0.1)), START, show_progress=False)


def odd_params(draw, ground):
    params = draw(
        st.sampled_from([
            None, 3, [], {}, torch.zeros(D), {"theta": None}, {"theta": torch.zeros(D).long()},
            {"theta": torch.zeros(D).half()},
            {"theta": torch.full((D,), float("nan"), dtype=F64)}, {"theta": torch.zeros(D)}, {"theta": [0.0] * D},
            {"theta": torch.zeros(D, dtype=F64), "b": torch.zeros(1)},
            {"theta": torch.zeros(D, dtype=torch.complex128)},
        ])
    )  # fmt: skip
    dif.fit(ground[2], params, show_progress=False)


def odd_bound(draw, ground):
    train = ground[0]
    term = draw(st.sampled_from([train.mean(), dif.linear(torch.eye(D)), train.sum()]))
    bound = draw(
        st.sampled_from([float("nan"), float("inf"), "a", None, torch.zeros(D + 1), torch.zeros(2, 2), [None]])
    )
    dif.Problem(train.mean(), [term <= bound])
    dif.fit(dif.Problem(train.mean() + dif.ridge(0.1), [term <= bound]), START, show_progress=False)


def odd_problem(draw, ground):
    junk = (None, 3, "a", squared, ground[0], torch.zeros(3))
    if draw(st.booleans()):
        dif.Problem(draw(st.sampled_from([*junk, [ground[0].mean()]])))
    else:
        dif.Problem(ground[0].mean(), draw(st.sampled_from([[one] for one in junk] + [3, "a"])))


def odd_multipliers(draw, ground):
    count = draw(st.integers(0, 6).filter(lambda k: k != 1))
    given = draw(
        st.sampled_from([[0.0] * count, [float("nan")], "a", [-1.0], {"no such": 1.0}, [[1.0]], torch.zeros(2, 2)])
    )
    dif.DirectionalInfluence(dif.Solution(ground[2], ground[3].params, given))


def odd_number(draw, ground):
    """Pass an invalid number to one of the functions that take one."""
    solution, negative = ground[3], draw(st.floats(-1e9, -1e-9))
    bad = draw(st.sampled_from([negative, float("nan"), "a"]))
    draw(
        st.sampled_from([
            lambda: dif.ridge(bad), lambda: dif.DirectionalInfluence(solution, damping=bad),
            lambda: dif.DirectionalInfluence(solution, rho=bad), lambda: dif.ClassicalInfluence(solution, damping=bad),
            lambda: dif.fit(ground[2], START, tol=bad), lambda: dif.Retraining(solution, tol=bad),
            lambda: dif.Retraining(solution).scores(ground[0].mean(), ground[0].remove([0]), jobs=0),
            lambda: dif.Solution(ground[2], START, tol=bad),
            lambda: dif.fit(ground[2], START, max_iter=draw(st.integers(-5, 0))),
        ])
    )()  # fmt: skip


def odd_target(draw, ground):
    target = draw(st.sampled_from([None, 3, "a", [], [3], object(), torch.zeros(3), [None], START]))
    ground[4].scores(target, ground[0].remove_each(), show_progress=False)


def odd_perturbation(draw, ground):
    other = dif.Samples(squared, (X, Y), name="other")
    what = draw(st.sampled_from([None, 3, "a", [], [0, 1], other.remove([1]), object(), START]))
    method = draw(st.sampled_from(["scores", "change", "by_term"]))
    influence = ground[4]
    influence.change(what) if method == "change" else getattr(influence, method)(ground[0].mean(), what)


def odd_estimator(draw, ground):
    kind = draw(
        st.sampled_from(
            [
                dif.DirectionalInfluence,
                dif.ClassicalInfluence,
                dif.NewtonInfluence,
                dif.Retraining,
                dif.PenaltyInfluence,
            ]
        )
    )
    kind(draw(st.sampled_from([None, 3, START, ground[2], "a"])))


def not_solved(draw, ground):
    """Use a point that is not a solution."""
    values = draw(st.lists(st.floats(-1e6, 1e6), min_size=D, max_size=D))
    at = torch.tensor(values, dtype=F64)
    if (at - ground[3].theta).norm() < 1e-2:
        at = at + 1.0
    dif.DirectionalInfluence(dif.Solution(ground[2], {"theta": at}))


def odd_addition(draw, ground):
    train = ground[0]
    new = draw(
        st.sampled_from(
            [X[:1], (X[:1],), (X[:1].float(), Y[:1]), (X[:1, :2], Y[:1]), None, 3, (X[:2], Y[:1]), {"X": X}]
        )
    )
    if draw(st.booleans()):
        train.add(new)
    else:
        train.replace(draw(st.integers(0, N - 1)), new)


def odd_file(draw, ground):
    path = FOLDER / f"{draw(st.integers(0, 10**9))}.{draw(st.sampled_from(['npz', 'npy']))}"
    path.write_bytes(draw(st.binary(max_size=200)))
    path.with_name(path.name + ".json").write_bytes(
        draw(st.one_of(st.binary(max_size=60), st.just(b"{}"), st.just(b"[]")))
    )
    dif.Influence.load(path)


def odd_terms(draw, ground):
    ground[4].change(ground[0].remove([0], terms=draw(st.sampled_from([[], [3], "a", ["a"]]))))


def odd_batch_size(draw, ground):
    dif.Samples(squared, (X, Y), batch_size=draw(st.one_of(st.integers(-9, 0), st.just("a"))))


def odd_shift(draw, ground):
    ground[1].shift(draw(st.sampled_from([*NOT_NUMBERS[:3], torch.full((2,), float("nan"))])))


def odd_matrix(draw, ground):
    bound = dif.linear(torch.ones(2, draw(st.sampled_from([1, 2, 4, 9])))) <= 1.0
    dif.fit(dif.Problem(ground[0].mean() + dif.ridge(1.0), [bound]), START, show_progress=False)


def odd_ranking(draw, ground):
    scores = ground[4].scores(ground[0].mean(), ground[0].remove_each(), show_progress=False)
    if draw(st.booleans()):
        scores.top(draw(st.integers(-5, 0)))
    else:
        scores.top(3, draw(st.sampled_from([1, -2, "no", None, 0.5])))


CALLS = {
    "remove": lambda draw, ground: ground[0].remove(indices(draw)),
    "remove_each": lambda draw, ground: ground[0].remove_each([indices(draw)]),
    "remove_groups": lambda draw, ground: ground[0].remove_groups([[0], indices(draw)]),
    "reweight": lambda draw, ground: ground[0].reweight(vectors(draw)),
    "weighted": lambda draw, ground: ground[0].weighted(vectors(draw)),
    "mask": lambda draw, ground: ground[0].mean(where=masks(draw)),
    "data": lambda draw, ground: dif.Samples(squared, data(draw)),
    "no loss": lambda draw, ground: dif.Samples(draw(st.sampled_from([None, 3, "a", (X, Y)])), (X, Y)),
    "terms": odd_terms, "batch size": odd_batch_size, "shift": odd_shift, "matrix": odd_matrix, "top": odd_ranking,
    "loss": odd_loss, "params": odd_params, "bound": odd_bound, "problem": odd_problem, "multipliers": odd_multipliers,
    "number": odd_number, "target": odd_target, "perturbation": odd_perturbation, "estimator": odd_estimator,
    "point": not_solved, "addition": odd_addition, "file": odd_file,
}  # fmt: skip


@pytest.mark.parametrize("part", range(PARTS))
def test_inputs_that_make_no_sense(part, ground, tmp_path, capsys):
    global FOLDER
    FOLDER = tmp_path
    refused: Counter[str] = Counter()

    @seed(part)
    @settings(SETTINGS, max_examples=MALFORMED, derandomize=False)
    @given(st.sampled_from(list(CALLS)), st.data())
    def malformed(name, drawn):
        try:
            CALLS[name](drawn.draw, ground)
        except dif.DifError as error:
            check_parts(error)
            refused[name] += 1
        except TypeError as error:  # of an operator, as Python has it
            assert str(error).startswith("A Term can be compared with a Term or a number")  # noqa: PT017
            refused["comparison"] += 1
        else:
            pytest.fail(f"{name}: taken for good")

    malformed()
    with capsys.disabled():
        print(f"\n{sum(refused.values())} malformed inputs refused: {dict(refused)}")
    assert sum(refused.values()) >= MALFORMED
