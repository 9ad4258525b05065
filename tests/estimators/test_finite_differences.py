"""DIF against one-sided finite differences of re-solving, on problems whose binding and weak rows are prescribed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from oracle import Oracle, Point, Removal, slope, weights_of

import dif

KINDS = ("linear", "quadratic", "group", "group gap")  # group gap: mean over a group minus mean over all
LOSSES = ("squared", "logistic")
MODES = ("objective", "constraint", "both", "everything")
TOLERANCE = 1e-4
FLOOR = 1e-4  # smaller changes are compared absolutely: typical ones are about 0.05, differences have noise about 1e-10
CLEAR = 1e-6  # a multiplier or a row that moves by more has taken its branch


@dataclass(frozen=True)
class Structure:
    """The structure that hypothesis draws; the numbers follow from the seed."""

    loss: str
    d: int
    n: int
    roles: tuple[str, ...]  # of each row: equality, binding, weak or inactive
    kinds: tuple[str, ...]
    mode: str  # what the samples are removed from
    touched: int | None  # the row of modes "constraint" and "both"
    removed: int  # how many samples
    renormalise: bool
    indefinite: bool
    convex: bool
    stacked: bool  # neighbouring linear rows written as one constraint, and single ones with >=
    seed: int

    def count(self, *roles: str) -> int:
        return sum(role in roles for role in self.roles)


@st.composite
def structures(draw, convex: bool = False) -> Structure:
    held, weak, inactive = draw(st.integers(0, 3)), draw(st.integers(0, 3)), draw(st.integers(0, 2))
    equalities = draw(st.integers(0, min(held, 2)))
    inactive = min(inactive, 6 - (held - equalities) - weak)
    roles = ["equality"] * equalities + ["binding"] * (held - equalities) + ["weak"] * weak + ["inactive"] * inactive
    roles = tuple(draw(st.permutations(roles)))
    kinds = draw(st.lists(st.sampled_from(KINDS[:3] if convex else KINDS), min_size=len(roles), max_size=len(roles)))
    if convex:
        kinds = ["linear" if role == "equality" else kind for role, kind in zip(roles, kinds, strict=True)]
    active = [j for j, role in enumerate(roles) if role != "inactive"]
    mode = draw(st.sampled_from(MODES if active and not convex else ("objective", "everything")))
    touched = None
    if mode in ("constraint", "both"):
        touched = draw(st.sampled_from(active))
        kinds[touched] = draw(st.sampled_from(KINDS[2:]))
    return Structure(
        loss=draw(st.sampled_from(LOSSES)),
        d=max(draw(st.integers(3, 6)), len(active)),
        n=draw(st.integers(12, 30)),
        roles=roles,
        kinds=tuple(kinds),
        mode=mode,
        touched=touched,
        removed=draw(st.integers(1, 2)),
        renormalise=draw(st.booleans()),
        indefinite=not convex and held > 0 and draw(st.booleans()),
        convex=convex,
        stacked=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@dataclass(frozen=True, eq=False)
class Case:
    structure: Structure
    oracle: Oracle
    at: Point  # the solution, known by construction
    ridge: float
    Q: np.ndarray | None
    removal: Removal

    def rows(self, *roles: str) -> list[int]:
        return [j for j, role in enumerate(self.structure.roles) if role in roles]


def case_of(structure: Structure) -> Case:
    """Return the first well-conditioned draw of the numbers."""
    for attempt in range(100):
        case = draw_case(structure, np.random.default_rng([structure.seed, attempt]))
        if is_well_conditioned(case):
            return case
    assume(False)
    raise AssertionError("not reached")


def draw_case(structure: Structure, rng: np.random.Generator) -> Case:
    """Draw θ̄ and λ̄ first, then the bounds and the linear term of the objective that make them a solution."""
    n, d, m = structure.n, structure.d, len(structure.roles)
    X, theta = rng.normal(size=(n, d)), rng.normal(size=d) * rng.uniform(0.3, 1.0)
    y = X @ rng.normal(size=d) + rng.normal(size=n) if structure.loss == "squared" else rng.choice([-1.0, 1.0], size=n)
    ridge = rng.uniform(0.05, 0.5)
    everyone = np.ones(n, dtype=bool)
    means, B, A = [((1.0, everyone),)], np.zeros((1 + m, d, d)), np.zeros((1 + m, d))
    B[0] = ridge * np.eye(d)
    for j, kind in enumerate(structure.kinds, start=1):
        group = np.isin(np.arange(n), rng.choice(n, size=rng.integers(4, n - 3), replace=False))
        means.append({"group": ((1.0, group),), "group gap": ((1.0, group), (-1.0, everyone))}.get(kind, ()))
        if kind in ("linear", "quadratic"):
            A[j] = rng.normal(size=d)
        if kind == "quadratic":
            S = rng.normal(size=(d, d))
            B[j] = S @ S.T / d if structure.convex else 0.3 * (S + S.T)
    roles = np.array(structure.roles, dtype=object)
    is_in = {role: roles == role for role in ("equality", "binding", "inactive")}
    W = np.array([weights_of(row, n) for row in means])
    oracle = Oracle(structure.loss, X, y, tuple(means), W, B, A, np.zeros(m), is_in["equality"])

    lam = is_in["binding"] * rng.uniform(0.3, 1.5, size=m)
    lam = lam + is_in["equality"] * rng.uniform(0.3, 1.5, size=m) * rng.choice([-1.0, 1.0], size=m)
    oracle.tau[:] = oracle.values(theta)[1:] + is_in["inactive"] * rng.uniform(0.2, 1.0, size=m)
    Q = None
    if structure.indefinite:  # strongly negative curvature across the binding rows, none along them
        held = np.flatnonzero(is_in["equality"] | is_in["binding"])
        g = rng.normal(size=len(held)) @ oracle.gradients(theta)[1:][held]
        g /= np.linalg.norm(g)
        Q = -(max(g @ oracle.lagrangian(theta, lam)[1] @ g, 0.0) + rng.uniform(1.0, 3.0)) * np.outer(g, g)
        B[0] += Q
    A[0] -= oracle.lagrangian(theta, lam)[0]

    touched = structure.touched
    pool = everyone if touched is None else means[1 + touched][0][1]
    rows = {
        "objective": (0,),
        "constraint": (1 + (touched or 0),),
        "both": (0, 1 + (touched or 0)),
        "everything": tuple(range(1 + m)),
    }
    gone = np.isin(np.arange(n), rng.choice(np.flatnonzero(pool), size=structure.removed, replace=False))
    removal = Removal(gone, rows[structure.mode], structure.renormalise)
    at = Point(theta, lam, is_in["equality"] | is_in["binding"])
    return Case(structure, oracle, at, ridge, Q, removal)


def is_well_conditioned(case: Case) -> bool:
    """Check for independent active gradients, curvature along the binding rows, and a removal with an effect."""
    oracle, theta, lam = case.oracle, case.at.theta, case.at.lam
    active = case.rows("equality", "binding", "weak")
    G = oracle.gradients(theta)[1:][active]
    norms = np.linalg.norm(G, axis=1)
    if len(G) and (norms.min() < 0.2 or np.linalg.svd(G / norms[:, None])[1][-1] < 0.15):
        return False
    after = oracle.moved(case.removal, 1.0)
    pull = after.lagrangian(theta, lam)[0]
    lift = (after.values(theta) - oracle.values(theta))[1:][active]
    felt = np.linalg.norm(np.concatenate([pull, lift])) > 5e-3
    return bool(felt) and oracle.tangent_curvature(theta, lam, case.at.held) > 0.15


def is_indefinite(case: Case) -> bool:
    return bool(np.linalg.eigvalsh(case.oracle.lagrangian(case.at.theta, case.at.lam)[1])[0] < -0.5)


# The same problem in the library's words


def squared(params, batch):
    X, y = batch
    return 0.5 * (X @ params["theta"] - y) ** 2


def logistic(params, batch):
    X, y = batch
    return torch.nn.functional.softplus(-y * (X @ params["theta"]))


@dataclass(frozen=True, eq=False)
class Stated:
    problem: dif.Problem
    train: dif.Samples
    owner: list[dif.Constraint]  # the constraint of each row


def quadratic(M: np.ndarray, name: str) -> dif.Function:
    matrix = torch.tensor(M)
    return dif.Function(lambda params: 0.5 * params["theta"] @ matrix @ params["theta"], name=name)


def state(case: Case) -> Stated:
    oracle, structure = case.oracle, case.structure
    loss = squared if structure.loss == "squared" else logistic
    train = dif.Samples(loss, (torch.tensor(oracle.X), torch.tensor(oracle.y)), name="train")
    risk = train.mean()
    objective = risk + dif.ridge(case.ridge) + dif.linear(oracle.A[0])
    if case.Q is not None:
        objective = objective + quadratic(case.Q, "Q")
    owner: list[dif.Constraint] = []
    while len(owner) < len(structure.roles):
        j = len(owner)
        sort = (structure.kinds[j], structure.roles[j] == "equality")
        rows = [j]
        while structure.stacked and sort[0] == "linear" and rows[-1] + 1 < len(structure.roles):
            after = rows[-1] + 1
            if (structure.kinds[after], structure.roles[after] == "equality") != sort:
                break
            rows.append(after)
        constraint = constraint_of(case, train, risk, rows, sort[1])
        owner += [constraint] * len(rows)
    constraints = [c for j, c in enumerate(owner) if j == 0 or c is not owner[j - 1]]
    return Stated(dif.Problem(objective, constraints), train, owner)


def constraint_of(case: Case, train: dif.Samples, risk: dif.Term, rows: list[int], equality: bool) -> dif.Constraint:
    oracle, j = case.oracle, rows[0]
    kind, tau = case.structure.kinds[j], float(oracle.tau[j])
    if len(rows) > 1:
        term, tau = dif.linear(oracle.A[1:][rows]), torch.tensor(oracle.tau[rows])
    elif kind == "linear":
        if case.structure.stacked and not equality:
            return dif.linear(-oracle.A[1 + j]) >= -tau
        term = dif.linear(oracle.A[1 + j])
    elif kind == "quadratic":
        term = quadratic(oracle.B[1 + j], f"B{j}") + dif.linear(oracle.A[1 + j])
    else:
        term = train.mean(where=torch.tensor(oracle.means[1 + j][0][1]))
        if kind == "group gap":
            return term == risk + tau if equality else term <= risk + tau
    return term == tau if equality else term <= tau


def removal_of(case: Case, stated: Stated) -> dif.Perturbation:
    mode, touched = case.structure.mode, case.structure.touched
    terms = None
    if mode != "everything":
        terms = [stated.problem.objective] if mode in ("objective", "both") else []
        terms += [stated.owner[touched]] if touched is not None else []
    gone = np.flatnonzero(case.removal.gone).tolist()
    return stated.train.remove(gone, terms=terms, renormalise=case.removal.renormalise)


def solution_of(case: Case, problem: dif.Problem) -> dif.Solution:
    return dif.Solution(problem, {"theta": torch.tensor(case.at.theta)}, torch.tensor(case.at.lam))


def error(found: np.ndarray, true: np.ndarray, unit: float = 1.0) -> float:
    return float(np.linalg.norm(found - true) / max(np.linalg.norm(true), FLOOR * unit))


# The tests


class Ledger:
    """Counts of what the problems of a run covered."""

    def __init__(self) -> None:
        self.seen = Counter()
        self.problems: set[Structure] = set()
        self.worst = 0.0

    def enter(self, case: Case) -> None:
        structure = case.structure
        if structure in self.problems:
            return
        self.problems.add(structure)
        self.seen.update([
            ("binding", structure.count("equality", "binding")),
            ("weak", structure.count("weak")),
            ("loss", structure.loss),
            ("mode", structure.mode),
            ("renormalise", structure.renormalise),
            ("indefinite", is_indefinite(case)),
            *{("kind", kind, role) for kind, role in zip(structure.kinds, structure.roles, strict=True)},
        ])  # fmt: skip


def same_rows(solution: dif.Solution, case: Case) -> bool:
    active = solution.active
    return [list(active.binding), list(active.weak), list(active.inactive)] == [
        case.rows("equality", "binding"), case.rows("weak"), case.rows("inactive"),
    ]  # fmt: skip


def check(case: Case, ledger: Ledger) -> None:
    ledger.enter(case)
    here = state(case)
    solution = solution_of(case, here.problem)
    assert same_rows(solution, case), str(solution.active)
    influence = dif.DirectionalInfluence(solution, switching=False)
    removal = removal_of(case, here)
    Q = case.oracle.losses(case.at.theta)[1][:, None] * case.oracle.X  # gradients of the losses, which are the targets
    switched_on = let_go = 0
    for sign in (1.0, -1.0):
        true = slope(case.oracle, case.at, case.removal, sign)
        assert true.doubt < 0.01 * TOLERANCE  # the truth itself is known well enough
        assert true.held[case.at.held].all()
        assert not true.held[case.rows("inactive")].any()
        change = influence.change(sign * removal)
        lam = change.multipliers.flat.numpy()
        scores = influence.scores(here.train, sign * removal, assess=0).values[0].numpy()
        errors = {
            "theta": error(change.flat.numpy(), true.theta),
            "multipliers": error(lam, true.lam),
            "scores": error(scores, Q @ true.theta, unit=np.linalg.norm(Q)),
        }
        assert max(errors.values()) <= TOLERANCE, (sign, errors)
        ledger.worst = max(ledger.worst, *errors.values())
        for j in case.rows("weak"):
            if true.lam[j] > CLEAR:
                assert true.held[j]
                assert lam[j] > 0
                switched_on += 1
            elif true.rows[j] < -CLEAR:
                assert not true.held[j]
                assert lam[j] == 0
                let_go += 1
    if case.rows("weak"):  # no direction can hold all weak rows, or let all go, both ways
        assert switched_on > 0
        assert let_go > 0
    ledger.seen.update({"switched on": switched_on, "let go": let_go})


def examples(count: int) -> settings:
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )  # fmt: skip


def test_directional_influence_is_the_derivative_of_resolving():
    ledger = Ledger()

    @examples(300)
    @given(structures())
    def problems(structure: Structure) -> None:
        check(case_of(structure), ledger)

    problems()
    seen = ledger.seen
    print(f"{len(ledger.problems)} problems, worst relative error {ledger.worst:.1e}, covered: {dict(seen)}")
    assert len(ledger.problems) >= 200
    assert min(seen["switched on"], seen["let go"]) >= 100
    assert seen["indefinite", True] >= 0.2 * len(ledger.problems)
    for count in range(4):
        assert min(seen["binding", count], seen["weak", count]) >= 20
    assert min(seen["loss", loss] for loss in LOSSES) >= 40
    assert min(seen["mode", mode] for mode in MODES) >= 20
    assert min(seen["renormalise", flag] for flag in (False, True)) >= 40
    roles = ("equality", "binding", "weak", "inactive")
    assert min(seen["kind", kind, role] for kind in KINDS for role in roles) >= 5


def test_fit_finds_the_constructed_solution():
    ledger = Ledger()

    @examples(50)
    @given(structures(convex=True))
    def problems(structure: Structure) -> None:
        case = case_of(structure)
        start = {"theta": torch.zeros(structure.d, dtype=torch.float64)}
        solution = dif.fit(state(case).problem, start, show_progress=False)
        assert solution.converged
        assert np.abs(solution.theta.numpy() - case.at.theta).max() <= 1e-7
        assert np.abs(solution.lam.numpy() - case.at.lam).max(initial=0.0) <= 1e-7
        assert same_rows(solution, case), str(solution.active)
        ledger.enter(case)

    problems()
    seen = ledger.seen
    print(f"{len(ledger.problems)} problems, covered: {dict(seen)}")
    assert len(ledger.problems) >= 20
    assert min(seen["kind", kind, role] for kind in KINDS[:3] for role in ("binding", "weak", "inactive")) >= 1
    assert min(seen["weak", count] for count in range(4)) >= 1
    assert min(seen["loss", loss] for loss in LOSSES) >= 5


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_renormalised_removal_keeps_double_precision(offset):
    """A constant in every loss drops out of a mean over the samples left: f goes from 9/4 to 1/3, slope −1."""
    z = torch.tensor([1.0, 2.0, 6.0, 3.0], dtype=torch.float64)
    train = dif.Samples(lambda params, z: 0.5 * (z - params["m"]) ** 2 + offset, z)
    problem = dif.Problem(dif.Function(lambda params: params["m"] ** 2), [train.mean() <= 2.25 + offset])
    solution = dif.Solution(problem, {"m": torch.tensor(2.0, dtype=torch.float64)}, [4.0])
    change = dif.DirectionalInfluence(solution, switching=False).change(train.remove([2]))
    assert float(change.flat) == pytest.approx(1 / 3 - 2.25, abs=1e-8)


# The oracle itself


def test_oracle_agrees_with_scipy():
    """SLSQP on the function values alone, a third of the removal carried out."""
    solved = []

    @examples(30)
    @given(structures(convex=True))
    def problems(structure: Structure) -> None:
        case = case_of(structure)
        after = case.oracle.moved(case.removal, 1 / 3)
        found = after.minimum(case.at)

        def margin(theta: np.ndarray) -> np.ndarray:
            return after.tau - after.values(theta)[1:]

        equality, rules = after.equality, []
        if equality.any():
            rules.append({"type": "eq", "fun": lambda theta: margin(theta)[equality]})
        if not equality.all():
            rules.append({"type": "ineq", "fun": lambda theta: margin(theta)[~equality]})
        other = scipy.optimize.minimize(
            lambda theta: after.values(theta)[0], np.zeros(structure.d), method="SLSQP", jac="3-point",
            constraints=rules, options={"ftol": 1e-14, "maxiter": 500},
        )  # fmt: skip
        assert np.abs(margin(other.x)[equality]).max(initial=0.0) < 1e-6
        assert margin(other.x)[~equality].min(initial=0.0) > -1e-6
        assert np.abs(found.theta - other.x).max() < 1e-5
        solved.append(structure)

    problems()
    assert len(solved) >= 20


@pytest.mark.parametrize("loss", LOSSES)
def test_oracle_derivatives(loss):
    structure = Structure(loss, 4, 20, ("binding",) * 4, KINDS, "everything", None, 1, True, True, False, False, seed=7)
    oracle = draw_case(structure, np.random.default_rng(7)).oracle
    theta, mu, step = np.linspace(-0.4, 0.5, 4), np.array([1.0, 0.3, 0.7, 1.1, 0.2]), 1e-5
    for k, e in enumerate(np.eye(4)):
        up, down = theta + step * e, theta - step * e
        by_difference = (oracle.values(up) - oracle.values(down)) / (2 * step)
        assert np.abs(oracle.gradients(theta)[:, k] - by_difference).max() < 1e-8
        by_difference = mu @ (oracle.gradients(up) - oracle.gradients(down)) / (2 * step)
        assert np.abs(oracle.hessian(theta, mu)[k] - by_difference).max() < 1e-8
