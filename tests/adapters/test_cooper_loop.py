"""Cooper loops as runs: equal to Cooper's own steps, with derivatives and reruns."""

import numpy as np
import pytest
import torch
from refusals import invalid
from torch import nn

import dif

cooper = pytest.importorskip("cooper")
from test_cooper import GROUP, N, X, Y, fair_problem, loss, network  # noqa: E402

from dif.adapters.cooper import Constrained, unroll  # noqa: E402

QUIET = {"show_progress": False}
SCHEMES = [
    cooper.optim.SimultaneousOptimizer,
    cooper.optim.AlternatingPrimalDualOptimizer,
    cooper.optim.AlternatingDualPrimalOptimizer,
]


def draw(epochs, size=24):
    generator = torch.Generator().manual_seed(2)
    return [b for _ in range(epochs) for b in torch.randperm(N, generator=generator).split(size)]


def optimise(cmp, parameters, scheme, primal="adam"):
    optimizers = {
        "adam": lambda: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.02, momentum=0.5, nesterov=True),
    }
    dual = torch.optim.SGD(cmp.dual_parameters(), lr=0.2, maximize=True, momentum=0.5)
    return scheme(cmp=cmp, primal_optimizers=optimizers[primal](), dual_optimizers=dual)


class Rates(cooper.ConstrainedMinimizationProblem):
    """A problem as Cooper's users write it, with weights: the loss, a group's loss and the norm of the last layer."""

    def __init__(self, model, formulation):
        super().__init__()
        self.model = model
        for name, kind in (
            ("group", cooper.ConstraintType.INEQUALITY),
            ("norm", cooper.ConstraintType.EQUALITY),
        ):
            multiplier = cooper.multipliers.DenseMultiplier(num_constraints=1, dtype=torch.float64)
            options = {}
            if formulation is cooper.formulations.AugmentedLagrangian:
                options["penalty_coefficient"] = cooper.penalty_coefficients.DensePenaltyCoefficient(
                    torch.tensor([0.7], dtype=torch.float64)
                )
            setattr(self, name, cooper.Constraint(kind, formulation, multiplier, **options))
            if name not in self._constraints:
                self._register_constraint(name, getattr(self, name))

    def compute_cmp_state(self, batch, weights=None):
        weights = torch.ones(len(batch), dtype=torch.float64) if weights is None else weights
        losses = loss(self.model, (X[batch], Y[batch]))
        mine = weights * (GROUP[batch] == 2)
        mean = (weights * losses).sum() / weights.sum()
        group = (mine * losses).sum() / mine.sum() - 0.5
        norm = (self.model[2].weight ** 2).sum() - 1.0
        states = {
            self.group: cooper.ConstraintState(violation=group, strict_violation=2 * group),
            self.norm: cooper.ConstraintState(violation=norm),
        }
        return cooper.CMPState(loss=mean, observed_constraints=states)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_stated_problem_makes_coopers_own_steps(scheme):
    _train, problem = fair_problem()
    model, batches = network(), draw(10)
    cmp = Constrained(problem, model)
    run = unroll(optimise(cmp, model.parameters(), scheme), batches, **QUIET)
    theirs = optimise(cmp, model.parameters(), scheme)
    for batch in batches:
        theirs.roll(compute_cmp_state_kwargs={"indices": batch})
    assert run.loop.length == 100
    for name, tensor in model.named_parameters():
        np.testing.assert_allclose(run.params[name], tensor.detach(), atol=1e-10)
    found = torch.cat([run.state["multipliers"][name] for name in problem.names])
    np.testing.assert_allclose(found, torch.cat([m.weight.detach() for m in cmp.multipliers()]), atol=1e-10)
    assert float(found.max()) > 0


@pytest.mark.parametrize("formulation", ["Lagrangian", "AugmentedLagrangian"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_problem_of_ones_own_makes_coopers_own_steps_and_its_derivatives_are_right(scheme, formulation):
    model, batches = network(), draw(10)
    cmp = Rates(model, getattr(cooper.formulations, formulation))
    run = unroll(optimise(cmp, model.parameters(), scheme, "sgd"), batches, model=model, **QUIET)
    theirs = optimise(cmp, model.parameters(), scheme, "sgd")
    for batch in batches:
        theirs.roll(compute_cmp_state_kwargs={"batch": batch})
    for name, tensor in model.named_parameters():
        np.testing.assert_allclose(run.params[name], tensor.detach(), atol=1e-10)
    for name, multiplier in cmp.named_multipliers():
        np.testing.assert_allclose(run.state["multipliers"][name], multiplier.weight.detach(), atol=1e-10)
    target = dif.Function(lambda p: p["0.weight"].pow(3).sum() + p["2.bias"].sum())
    removals, h = run.samples[0].remove_each([3, 50]), 1e-5
    scores = dif.UnrolledInfluence(run).scores(target, 0.5 * removals, probe=0, **QUIET).values / 0.5
    ends = [dif.Retraining(run).scores(target, sign * h * removals, **QUIET).values for sign in (1, -1)]
    np.testing.assert_allclose((ends[0] - ends[1]) / (2 * h), scores, rtol=1e-5, atol=1e-9)


def test_removals_of_the_problems_samples_and_views_of_them():
    train, _ = fair_problem()
    rate = train.view(lambda m, z: torch.sigmoid(m(z[0])[:, 0]), name="rate")
    problem = dif.Problem(train.mean() + dif.ridge(0.02), [(rate.mean() <= 0.3).named("rate")])
    model, batches = network(), draw(3)
    cmp = Constrained(problem, model)
    run = unroll(optimise(cmp, model.parameters(), SCHEMES[0], "sgd"), batches, **QUIET)
    found = dif.UnrolledInfluence(run).scores(dif.Samples(loss, (X[:9], Y[:9])).mean(), train.remove_each(), **QUIET)
    assert found.diagnostics["probe"]["agreement"] > 0.99
    model.load_state_dict(network().state_dict())
    clone = Constrained(problem, model)
    theirs = optimise(clone, model.parameters(), SCHEMES[0], "sgd")
    for batch in batches:
        theirs.roll(compute_cmp_state_kwargs={"indices": batch[batch != 7]})
    change = dif.Retraining(run).change(train.remove([7]))
    for name, tensor in model.named_parameters():
        np.testing.assert_allclose(run.params[name] + change.theta[name], tensor.detach(), atol=1e-12)
    invalid(
        lambda: dif.UnrolledInfluence(run).change(train.replace([7], (X[:1], Y[:1]))),
        "(float64[2], float64[])",
        "so that the step gets data",
    )


def test_what_cannot_be_rebuilt_is_refused():
    _train, problem = fair_problem()
    model = network()
    cmp = Constrained(problem, model)
    dual = lambda: torch.optim.SGD(cmp.dual_parameters(), lr=0.1, maximize=True)  # noqa: E731
    make = lambda primal, scheme=SCHEMES[0]: scheme(cmp=cmp, primal_optimizers=primal, dual_optimizers=dual())  # noqa: E731
    rprop = make(torch.optim.Rprop(model.parameters()))
    text = "must be a new SGD, Adam or AdamW of torch"
    invalid(lambda: unroll(rprop, draw(1)), "The optimiser of the params", "not a Rprop.", text)
    used = make(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    used.roll(compute_cmp_state_kwargs={"indices": torch.arange(4)})
    invalid(lambda: unroll(used, draw(1)), "not a SGD that has made steps.", text)
    one = cooper.optim.UnconstrainedOptimizer(cmp=cmp, primal_optimizers=torch.optim.SGD(model.parameters(), lr=0.1))
    invalid(
        lambda: unroll(one, draw(1)),
        "The optimiser must be one of SimultaneousOptimizer",
        "not a UnconstrainedOptimizer;",
    )
    own = Rates(network(), cooper.formulations.Lagrangian)
    alone = optimise(own, own.model.parameters(), SCHEMES[0])
    invalid(lambda: unroll(alone, draw(1)), "`model` must be the nn.Module that the Rates evaluates")

    invalid(
        lambda: unroll(optimise(own, own.model.parameters(), SCHEMES[0], "sgd"), draw(1), model=network(), **QUIET),
        "The problem does not depend on 0.weight",
    )
    own.model.unused = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    invalid(
        lambda: unroll(optimise(own, own.model.parameters(), SCHEMES[0], "sgd"), draw(1), model=own.model, **QUIET),
        "The problem does not depend on unused;",
    )

    class Implicit(nn.Module):
        expects_constraint_features = True

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

    own.group.multiplier = Implicit()
    invalid(
        lambda: unroll(alone, draw(1), model=own.model),
        "The multipliers of group must be DenseMultipliers, without features.",
    )
