"""Fair logistic regression in numpy, solved by SciPy's SLSQP: the truth for tests of fairness, owing nothing to dif."""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit


@dataclass(frozen=True, eq=False)
class FairOracle:
    """min mean log-loss + ½·ridge·‖w‖², where every group is compared with all people, as fairlearn does."""

    kind: str  # the name of the constraint
    X: np.ndarray  # (n, d)
    y: np.ndarray  # (n,) −1 or 1
    group: np.ndarray  # (n,) numbers
    bound: float
    ridge: float
    ratio: float = 1.0

    def solve(self, here, start):
        """θ of the problem of the people who are here, (n,) bool."""
        means = self.means(here)
        rows = {
            "type": "ineq",
            "fun": lambda w: self.bound - means @ self.values(w)[0],
            "jac": lambda w: -(means * self.values(w)[1]) @ self.X,
        }
        options = {"ftol": 1e-14, "maxiter": 1000}
        found = minimize(self.objective, start, (here,), "SLSQP", jac=True, constraints=[rows], options=options)
        assert rows["fun"](found.x).min() > -1e-8
        return found.x

    def objective(self, w, here):
        margin = self.y * (self.X @ w)
        slopes = here * -self.y * expit(-margin) / here.sum()
        return np.logaddexp(0, -margin)[here].mean() + 0.5 * self.ridge * w @ w, slopes @ self.X + self.ridge * w

    def values(self, w):
        """What the constraint takes the means of, and its derivative in the score, each (n,)."""
        score = self.X @ w
        if self.kind == "bounded group loss":
            return np.logaddexp(0, -self.y * score), -self.y * expit(-self.y * score)
        sign = -self.y if self.kind == "error rate parity" else np.ones(len(score))
        chance = expit(sign * score)
        return chance, sign * chance * (1 - chance)

    def means(self, here):
        """The constraints as weights of the people: each row times `values` is at most `bound`."""
        groups = [self.group == g for g in np.unique(self.group)]
        if self.kind == "bounded group loss":
            return np.array([share(here & inside) for inside in groups])
        events = {
            "equal opportunity": [self.y > 0],
            "false positive rate parity": [self.y < 0],
            "equalised odds": [self.y > 0, self.y < 0],
        }.get(self.kind, [here])
        pairs = [(share(here & event & inside), share(here & event)) for event in events for inside in groups]
        above = [self.ratio * group - everyone for group, everyone in pairs]
        return np.array([*above, *(self.ratio * everyone - group for group, everyone in pairs)])


def share(mask):
    return mask / mask.sum()
