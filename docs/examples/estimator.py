import torch

import dif
from dif.derivatives.program import Targets
from dif.derivatives.weight_change import Direction
from dif.estimators.protocol import by_chunk, differences, fill_scores
from dif.linalg.solvers import build_solver
from dif.optimality.solution import expect_solution


class Unconstrained:
    """Predicts Δθ = −H⁻¹b: classical influence with the Hessian of the Lagrangian, without the constraints."""

    name = "unconstrained"

    def __init__(self, solution):
        self.solution = expect_solution(solution)
        solution.check()
        self.solver = build_solver(solution.curvature)

    def _move(self, perturbation):
        at = self.solution
        _, DJ = Direction.resolve_single(at.program, perturbation).first_order(0, at.theta, at.parts, at.part_gradients)
        b = at.program.weights(at.lam) @ DJ
        return -self.solver.solve(b[:, None])[:, 0]

    def change(self, perturbation):
        at, move = self.solution, self._move(perturbation)
        return dif.Change(at.program.parameters.tensors(move), at.multipliers, move)

    def scores(self, target, perturbations, *, out=None, jobs=1, show_progress=True):
        at, targets = self.solution, Targets(target, self.solution)

        def work(some):
            return differences(at, targets, map(self._move, some.perturbation)), {}

        direction = Direction(at.program, perturbations)
        score = by_chunk(work, direction, jobs=jobs)
        return fill_scores(self, at, targets, direction, score, {}, out=out, show_progress=show_progress)


X, y = torch.randn(50, 2).double(), torch.randn(50).double()
train = dif.Samples(lambda p, z: (z[1] - z[0] @ p["w"]) ** 2, (X, y), name="train")
solution = dif.fit(dif.Problem(train.mean() + dif.ridge(0.1)), {"w": torch.zeros(2).double()})
removals = train.remove_each()
assert isinstance(Unconstrained(solution), dif.Estimator)
predicted = Unconstrained(solution).scores(train.mean(), removals)
print(predicted.compare(dif.Retraining(solution).scores(train.mean(), removals)))
