"""The Cooper adapter: mini-batch training, polishing with dif.fit, and influence compared with retraining."""

import numpy as np
import pytest
import torch
from torch import nn

import dif

cooper = pytest.importorskip("cooper")
from dif.adapters.cooper import Constrained, solution_of  # noqa: E402

F64 = torch.float64
generator = torch.Generator().manual_seed(0)
N = 240
X = torch.randn(N, 2, generator=generator, dtype=F64)
GROUP = torch.arange(N) % 3
Y = torch.where(
    (X[:, 0] * X[:, 1] + 0.6 * (GROUP == 2) + 0.2 * torch.randn(N, generator=generator)) > 0, 1.0, -1.0
).double()


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def loss(model, batch):
    return nn.functional.softplus(-batch[1] * model(batch[0])[:, 0])


def fair_problem():
    samples = dif.Samples(loss, (X, Y), name="train")
    risk = samples.mean()
    fair = [(samples.mean(where=GROUP == g) <= risk + 0.02).named(f"group {g}") for g in range(3)]
    return samples, dif.Problem(risk + dif.ridge(0.02), fair)


def test_from_mini_batches_to_a_certified_solution():
    samples, problem = fair_problem()
    model = network()
    cmp = Constrained(problem, model)
    primal = torch.optim.Adam(model.parameters(), lr=1e-2)
    dual = torch.optim.SGD(cmp.dual_parameters(), lr=0.1, maximize=True)
    joint = cooper.optim.SimultaneousOptimizer(cmp=cmp, primal_optimizers=primal, dual_optimizers=dual)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(part, T_max=60) for part in (primal, dual)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        for indices in torch.randperm(N, generator=generator).split(32):
            joint.roll(compute_cmp_state_kwargs={"indices": indices})
        for schedule in schedules:
            schedule.step()
    rough = solution_of(problem, model, cmp)
    assert not rough.converged
    assert 1e-4 < rough.kkt.residual < 0.5
    with pytest.raises(dif.NotASolutionError, match="The relative KKT residual is"):
        dif.DirectionalInfluence(rough)
    polished = dif.fit(problem, rough.params, multipliers=rough.lam, show_progress=False)
    assert polished.kkt.residual < 1e-9
    assert polished.active.binding
    removals = samples.remove_each(range(0, N, 8))
    target = samples.mean(where=GROUP == 1)
    predicted = dif.DirectionalInfluence(polished).scores(target, removals)
    actual = dif.Retraining(polished).scores(target, removals)
    assert len(removals) == 30
    assert predicted.compare(actual).pearson >= 0.99


def test_estimates_from_batches_add_up_to_the_whole():
    """Batches give unbiased estimates: their mean over a partition into equal batches is the value on all samples."""
    _, problem = fair_problem()
    cmp = Constrained(problem, network())
    whole = cmp.compute_cmp_state()
    parts = [cmp.compute_cmp_state(indices) for indices in torch.randperm(N).split(40)]
    np.testing.assert_allclose(sum(p.loss.item() for p in parts) / len(parts), whole.loss.item(), rtol=1e-12)
    solution = dif.Solution(problem, network())
    np.testing.assert_allclose(whole.loss.item(), solution.objective, rtol=1e-12)
    for constraint, row in zip(cmp.constraints(), solution.c, strict=True):
        estimates = [p.observed_constraints[constraint].violation.item() for p in parts]
        np.testing.assert_allclose(np.mean(estimates), float(row), atol=1e-12)
        np.testing.assert_allclose(whole.observed_constraints[constraint].violation.item(), float(row), atol=1e-12)


def test_gradients_reach_the_users_own_tensors():
    _, problem = fair_problem()
    model = network()
    Constrained(problem, model).compute_cmp_state(torch.arange(10)).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_multipliers_by_name_and_sign():
    """Solve min (a − 1)² + (b − 2)² s.t. a + b = 1, a ≥ 0.5, with other signs and scales in Cooper."""
    points = dif.Samples(lambda p, z: ((p["t"] - z) ** 2).sum(-1), torch.tensor([[1.0, 2.0]], dtype=F64), name="point")
    line, side = dif.linear([1.0, 1.0]), dif.linear([1.0, 0.0])
    problem = dif.Problem(points.mean(), [(line == 1.0).named("line"), (side >= 0.5).named("side")])
    solution = dif.fit(problem, {"t": torch.zeros(2, dtype=F64)}, show_progress=False)

    class Mine(cooper.ConstrainedMinimizationProblem):
        def __init__(self):
            super().__init__()
            dense = cooper.multipliers.DenseMultiplier
            # violations 1 − a − b and 10·(0.5 − a)
            self.line = cooper.Constraint(
                cooper.ConstraintType.EQUALITY, multiplier=dense(init=-solution.multipliers["line"].reshape(1))
            )
            self.side = cooper.Constraint(
                cooper.ConstraintType.INEQUALITY, multiplier=dense(init=solution.multipliers["side"].reshape(1) / 10)
            )

        def compute_cmp_state(self):
            raise NotImplementedError

    solution_read = solution_of(problem, solution.params, Mine(), signs={"line": -1.0, "side": 10.0})
    np.testing.assert_allclose(solution_read.lam, solution.lam, atol=1e-6)  # Cooper stores multipliers in float32
    assert solution_read.converged
    assert not solution_of(problem, solution.params, Mine()).converged

    with pytest.raises(dif.InvalidInputError) as caught:
        solution_of(problem, solution.params, Mine(), signs={"lime": -1.0})
    assert str(caught.value) == "`signs` must name constraints (line, side), not 'lime'."
    wide = dif.Problem(points.mean(), [(dif.linear(torch.eye(2)) <= 9.0).named("side"), (line == 1.0).named("line")])
    with pytest.raises(dif.InvalidInputError, match="must have 2 values, not 1"):
        solution_of(wide, solution.params, Mine())

    other = dif.Problem(points.mean(), [(line == 1.0).named("budget")])
    with pytest.raises(dif.InvalidInputError, match="no multipliers for budget, only for line, side"):
        solution_of(other, solution.params, Mine())

    class Implied(cooper.multipliers.ImplicitMultiplier):
        expects_constraint_features = False

        def forward(self):
            return torch.zeros(1)

        def post_step_(self):
            pass

    mine = Mine()
    mine.line.multiplier = Implied()
    with pytest.raises(dif.InvalidInputError, match="'line', a Implied, stores no value for each row"):
        solution_of(problem, solution.params, mine)


@pytest.mark.parametrize("augmented", [False, True])
def test_cooper_converges_to_the_solution_of_dif(augmented):
    """Full batches, params in a dict, a vector-valued constraint and an equality."""
    points = dif.Samples(lambda p, z: ((p["t"] - z) ** 2).sum(-1), torch.tensor([[1.0, 2.0], [0.0, 3.0]]).double())
    rows = (dif.linear(torch.eye(2)) <= torch.tensor([0.2, 5.0])).named("limits")
    problem = dif.Problem(points.mean(), [rows, (dif.linear([1.0, 1.0]) == 2.0).named("sum")])
    params = {"t": torch.zeros(2, dtype=F64, requires_grad=True)}
    options = {}
    if augmented:
        options["formulation"] = cooper.formulations.AugmentedLagrangian
        options["penalty"] = lambda size: cooper.penalty_coefficients.DensePenaltyCoefficient(
            init=torch.ones(size).double()
        )
    cmp = Constrained(problem, params, **options)
    optimizer = cooper.optim.SimultaneousOptimizer(
        cmp=cmp,
        primal_optimizers=torch.optim.SGD(params.values(), lr=0.05),
        dual_optimizers=torch.optim.SGD(cmp.dual_parameters(), lr=0.05, maximize=True),
    )
    for _ in range(3000):
        optimizer.roll()
    found, expected = solution_of(problem, params, cmp), dif.fit(problem, params, show_progress=False)
    np.testing.assert_allclose(found.theta, expected.theta, atol=1e-5)
    np.testing.assert_allclose(found.lam, expected.lam, atol=1e-4)
    assert found.converged


def test_mixed_dtypes_are_refused_before_training():
    X = torch.randn(20, 3, dtype=torch.float64)
    samples = dif.Samples(lambda m, z: m(z)[:, 0] ** 2, X, name="train")
    with pytest.raises(dif.InvalidInputError, match="like the parameters, not"):
        dif.Training(dif.Problem(samples.mean()), nn.Linear(3, 1), dif.Adam()).run(show_progress=False)
