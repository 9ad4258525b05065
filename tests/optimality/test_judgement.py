"""What the judgement of a point says: its causes and its words."""

import pytest
import torch
from refusals import PROBLEM, not_feasible, point

import dif

F64 = torch.float64


def logistic(params, batch):
    return torch.nn.functional.softplus(-batch[1] * (batch[0] @ params["w"]))


def separable():
    torch.manual_seed(0)
    X = torch.randn(300, 3).double()
    return dif.Samples(logistic, (X, torch.sign(X[:, 0])), name="train")


def test_separable_data_are_named_as_the_cause():
    train, start = separable(), {"w": torch.zeros(3, dtype=F64)}
    cause = "The objective falls without end as the parameters grow"
    with pytest.warns(dif.NotConvergedWarning, match=f"{cause}.*Add a ridge"):
        solution = dif.fit(dif.Problem(train.mean()), start, show_progress=False)
    assert solution.kinks == ()  # the tail of a softplus is an exponential
    words = str(dif.Certificate.of(solution))
    assert cause in words
    assert "Add a ridge" in words
    assert "kink" not in words
    with pytest.raises(dif.NotASolutionError, match=cause):
        solution.check()
    assert dif.fit(dif.Problem(train.mean() + dif.ridge(1e-3)), start, show_progress=False).converged


@pytest.mark.parametrize("size", [1.0, 1e-9])
def test_a_point_that_is_only_far_from_the_minimum_is_not_said_to_run_away(size):
    X = torch.randn(60, 2, dtype=F64, generator=torch.Generator().manual_seed(1))
    train = dif.Samples(lambda p, z: (z[0] @ p["w"] - z[1]) ** 2, (X, X @ torch.tensor([2.0, 1.0], dtype=F64)))
    at = dif.Solution(dif.Problem(train.mean()), {"w": size * torch.tensor([1.0, 0.5], dtype=F64)})
    assert not at.converged
    assert "without end" not in str(dif.Certificate.of(at))


def test_violated_constraints_are_called_violated_with_the_amount():
    at = not_feasible()
    (row,) = dif.Certificate.of(at).constraints
    assert row.state == "violated"
    assert at.active.violated == {0: -row.slack}
    assert at.active.violated[0] == pytest.approx(2.0)
    assert "cap: violated by 2 (relative slack" in str(at.active)
    assert str(at).splitlines()[-1].split() == ["cap", "violated", "-2", "0"]
    words = str(dif.Certificate.of(at))
    assert "Violated: cap by 2." in words
    assert "touch without force" not in words
    with pytest.raises(dif.NotASolutionError, match=r"Violated: cap by 2\."):
        at.check()
    equal = dif.Solution(dif.Problem(PROBLEM.objective, [dif.linear([1.0, 1.0]) == 5.0]), point(1.0, 0.0))
    assert equal.active.violated == {0: 4.0}  # an equality below its bound is violated as well


def test_the_certificate_claims_no_more_than_it_measured():
    """Single removals may switch constraints although their state at the point is clear."""
    X = torch.randn(60, 2, dtype=F64, generator=torch.Generator().manual_seed(2))
    train = dif.Samples(lambda p, z: 0.5 * ((p["w"] - z) ** 2).sum(1), X, name="train")
    near = float(X[:, 0].mean()) + 5e-3  # within what single removals move
    problem = dif.Problem(train.mean(), [dif.linear([1.0, 0.0]) <= near])
    solution = dif.fit(problem, {"w": torch.zeros(2, dtype=F64)}, show_progress=False)
    switched = dif.DirectionalInfluence(solution).scores(train.mean(), train.remove_each()).diagnostics["switched"]
    assert switched > 10
    (clear,) = (f for f in dif.Certificate.of(solution).findings if f.what == "Is it clear which constraints bind?")
    assert clear.verdict == "good"
    assert "at this point" in clear.meaning
    assert "DirectionalInfluence(solution).margins(removals)" in clear.meaning
