# pyright: strict
"""A user's program under pyright's strict rules: every public name, no type unknown. Checked by `make lint`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_type

import torch
from torch import Tensor

import dif
import dif.fairness


def loss(params: Mapping[str, Tensor], z: tuple[Tensor, Tensor]) -> Tensor:
    """One number per sample."""
    return (z[0] @ params["w"] - z[1]) ** 2


def main() -> None:
    """Everything a reader of the documentation would write."""
    data = (torch.randn(50, 3).double(), torch.randn(50).double())
    train = dif.Samples(loss, data, name="train", batch_size=16)
    group = torch.arange(50) % 2 == 0
    risk = assert_type(train.mean(), dif.Term)
    gap = assert_type(train.mean(where=group) - risk, dif.Term)
    bound = assert_type(gap <= 0.1, dif.Constraint)
    norm = dif.Function(lambda p: (p["w"] ** 2).sum(), name="norm")
    problem = dif.Problem(risk + dif.ridge(0.1) + 0.01 * norm, [bound, dif.linear(torch.eye(3)) <= 5.0])
    solution = assert_type(dif.fit(problem, {"w": torch.zeros(3).double()}), dif.Solution)
    checked = dif.Solution.from_params(problem, solution.params)
    assert_type(checked.converged, bool)
    assert_type(solution.theta, Tensor)
    assert_type(solution.objective, float)
    assert_type(solution.value(gap), float)
    solution.save("solution.npz")
    assert_type(dif.Solution.load("solution.npz", problem, solution.params), dif.Solution)
    kkt, active = assert_type(solution.kkt, dif.KKT), assert_type(solution.active, dif.ActiveSet)
    print(kkt.residual, active.binding, active.names, solution.multipliers["gap"])

    fair = dif.fairness.demographic_parity(train, loss, sensitive_features=group, bound=0.1, link=None)
    assert_type(fair, list[dif.Constraint])
    assert_type(train.mean(where=group, weights=torch.ones(50)), dif.Term)

    removals = assert_type(train.remove_each(), dif.Perturbation)
    several = 0.5 * train.remove([1, 2]) + bound.shift(0.01)
    new = train.add(data, like=0) + train.replace([3], (data[0][:1], data[1][:1])) + train.reweight(torch.ones(50))
    influence = dif.DirectionalInfluence(solution, switching=True, damping=0.0)
    scores = assert_type(influence.scores(train, removals, out="scores.npy", jobs=2), dif.Influence)
    assert_type(scores.values, Tensor)
    assert_type(scores.rows(0, 10), Tensor)
    print([(one.index, one.label, one.value, one.name) for one in scores.top(5)])
    print(scores.proponents(5), scores.opponents(5, "gap"), scores.summary(k=3), scores.index, len(scores))
    for some in (scores[3], scores[3:10], scores["train[17]"], scores[group], scores[[1, 2]]):
        assert_type(some, dif.Influence)
    named = influence.scores({"risk": risk, "gap": gap.named("gap")}, removals)
    named.plot(k=5, target="gap")
    named.report("report.html", features={"y": data[1]}, retrained=scores)
    change = assert_type(influence.change(several), dif.Change)
    print(change.theta["w"], change.flat, change.multipliers[0], influence.change(new).diagnostics)
    agreement = scores.compare(dif.Retraining(solution, keep="kept").scores(train, removals, jobs=2))
    assert_type(agreement, dif.Agreement)
    assert_type(agreement.pearson, float)
    print(influence.by_term(risk, removals), influence.prices(removals))
    for estimator in (
        dif.ClassicalInfluence(solution),
        dif.PenaltyInfluence(solution),
        dif.NewtonInfluence(solution),
    ):
        assert_type(estimator.scores(train, removals), dif.Influence)
    change.plot()
    dif.PathInfluence(solution).follow(several).plot()
    dif.bound_curve(solution, bound, [0.0], {"risk": risk}).plot(target="risk")
    print(dif.PathInfluence(solution).follow(several), dif.self_influence(influence, train))
    print(dif.AdaptiveInfluence(solution).scores(train, train.remove_groups([[1, 2], [3]])))
    assert_type(dif.bound_curve(solution, bound, [0.0, 0.1]), dif.BoundCurve)
    assert_type(dif.choose(solution, risk, train, 3), dif.Choice)
    methods = {"DIF": influence, "mine": torch.ones(50)}
    retraining = dif.Retraining(solution, keep="kept")
    halves = dif.evaluation.linear_datamodelling_score(methods, retraining, train, train, subsets=5)
    assert_type(halves, dif.evaluation.DatamodellingScore)
    assert_type(halves.scores["DIF"], float)
    print(halves.table(), dif.evaluation.removal_curve([influence], retraining, risk, train, [1, 2]))
    assert_type(dif.evaluation.leave_one_out_agreement(methods, retraining, risk, train), dif.evaluation.LeaveOneOut)
    assert_type(dif.evaluation.label_error_auc(methods, group, train).areas, dict[str, float])
    print(dif.evaluation.removal_curve({"mine": torch.ones(50)}, lambda kept: float(len(kept)), None, train, [1]))
    scores.save("scores.npz")
    assert_type(dif.Influence.load("scores.npz"), dif.Influence)
    with dif.sharded():
        dif.fit(problem, torch.nn.Linear(3, 1), tol=1e-8, max_iter=100, show_progress=False)
    try:
        dif.fit(problem, dif.variable(torch.nn.Linear(3, 1), "weight"))
    except dif.DifError as error:
        print(error.found, error.allowed, error.meaning, error.cure)


if __name__ == "__main__":
    main()
