"""Data of any kind and size: the same numbers as from tensors; what cannot be trusted is refused."""

import numpy as np
import pytest
import torch
from problems import F64, class_data, fair_logistic, fit_problem, logistic, zeros
from torch.func import grad, vmap
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import dif
from dif.derivatives.losses import cost, sample_gradients, sample_slopes
from dif.derivatives.weight_change import Direction
from dif.problem.parameters import Parameters
from dif.problem.weights import Changes

X, Y = class_data()


class Items(Dataset):
    """Fetched one by one, or several at once."""

    def __init__(self, n=60):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return X[i], Y[i]


class Several(Items):
    def __getitems__(self, indices):
        return [(X[i], Y[i]) for i in indices]


def score(data, **options):
    train = dif.Samples(logistic, data, name="train", **options)
    group, risk = torch.arange(60) % 3, train.mean()
    constraints = [(train.mean(where=group == g) <= risk + (-0.02 if g == 1 else 0.3)).named(f"{g}") for g in (1, 2)]
    solution = dif.fit(dif.Problem(risk + dif.ridge(0.05), constraints), zeros(), show_progress=False)
    return dif.DirectionalInfluence(solution).scores(train, train.remove_each()).values


def on_disk(folder):
    for name, t in (("x", X), ("y", Y)):
        np.save(folder / f"{name}.npy", t.numpy())
    return tuple(np.load(folder / f"{name}.npy", mmap_mode="r+") for name in ("x", "y"))


@pytest.mark.parametrize("kind", ["items", "several", "memory map", "loader", "loader with workers", "shuffled loader"])
def test_the_same_scores_from_anywhere(kind, tmp_path):
    data = {
        "items": Items,
        "several": Several,
        "memory map": lambda: on_disk(tmp_path),
        "loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=7),
        "loader with workers": lambda: DataLoader(Items(), batch_size=40, num_workers=1),
        "shuffled loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True),
    }[kind]()
    state = torch.random.get_rng_state()
    found = score(data)
    np.testing.assert_allclose(found, score((X, Y)), rtol=1e-9, atol=1e-13)
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_loader_brings_its_batch_size_and_its_collate():
    collate = lambda items: tuple(torch.stack(t) for t in zip(*items, strict=True))  # noqa: E731
    loader = DataLoader(Items(), batch_size=9, collate_fn=collate)
    train = dif.Samples(logistic, loader)
    assert train.batch_size == 9
    assert [len(batch[0]) for _, batch in train.batches()] == [9] * 6 + [6]
    assert dif.Samples(logistic, loader, batch_size=20).batch_size == 20


def test_a_dataset_that_changes_its_length_is_refused():
    data = Items()
    train = dif.Samples(logistic, data, name="train")
    solution = dif.fit(dif.Problem(train.mean() + dif.ridge(0.05)), zeros(), show_progress=False)
    influence = dif.DirectionalInfluence(solution)
    data.n = 50
    with pytest.raises(
        dif.InvalidInputError, match=r"'train' must have length 60, as when the Samples were created, not 50\."
    ):
        influence.scores(train.mean(), train.remove_each())


def test_streams_without_an_index_are_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(zip(X, Y, strict=True))

    for data in (Stream(), DataLoader(Stream(), batch_size=4), iter([1.0])):
        with pytest.raises(dif.InvalidInputError, match="or a Dataset with a length, not of type"):
            dif.Samples(logistic, data)


@pytest.mark.parametrize(
    ("options", "found"),
    [({"batch_size": None}, "without batches"), ({"sampler": range(30)}, "whose sampler selects 30 of 60 samples")],
)
def test_loaders_that_leave_samples_out_are_refused(options, found):
    with pytest.raises(dif.InvalidInputError, match="it must have batches over all its samples") as caught:
        dif.Samples(logistic, DataLoader(TensorDataset(X, Y), **options))
    assert f"A DataLoader {found} was given as data of Samples 'samples';" in str(caught.value)


def test_scores_go_to_disk_as_they_come(tmp_path):
    train, problem, _ = fair_logistic()
    influence = dif.DirectionalInfluence(fit_problem(problem))
    held = influence.scores(train, train.remove_each())
    path = tmp_path / "scores.npy"
    written = influence.scores(train, train.remove_each(), out=path)
    assert torch.equal(written.values, held.values)
    loaded = dif.Influence.load(path)
    assert torch.equal(loaded.values, held.values)
    assert (loaded.perturbations, loaded.targets, loaded.estimator) == (held.perturbations, held.targets, "DIF")
    assert loaded.compare(held).relative_error == 0
    assert np.load(path, mmap_mode="r").shape == (60, 60)
    with pytest.raises(dif.InvalidInputError, match=r"`out` must be a name ending in \.npy, such as"):
        influence.scores(train, train.remove_each(), out=tmp_path / "scores.csv")
    with pytest.raises(dif.InvalidInputError, match="no term of the problem uses these samples"):
        influence.scores(train, dif.Samples(logistic, (X, Y)).remove_each(), out=path)
    assert torch.equal(dif.Influence.load(path).values, held.values)  # what was there stays
    with pytest.raises(FileNotFoundError, match="Create it first"):
        influence.scores(train, train.remove_each(), out=tmp_path / "none" / "scores.npy")
    (tmp_path / "scores.npy.journal").write_text("{}")
    with pytest.raises(dif.InvalidInputError, match=r"scores.npy' is damaged, or was not written by dif"):
        dif.Influence.load(path)


def test_slopes_both_ways_are_one(monkeypatch):
    """Forward mode and per-sample gradients times V, whatever the price list says; and in passes of any size."""
    train, problem, _ = fair_logistic()
    solution = fit_problem(problem)
    direction = Direction(solution.program, train.remove_each())
    V = torch.randn(4, 5, dtype=F64, generator=torch.Generator().manual_seed(0))
    weights = solution.program.weights(solution.lam)
    found = []
    for price, size in ((0, 2**21), (10**9, 2**21), (0, 64), (10**9, 64)):
        monkeypatch.setattr("dif.derivatives.losses._PER_ENTRY", {"cpu": price})
        monkeypatch.setattr("dif.derivatives.losses._PASS", size)
        monkeypatch.setattr("dif.derivatives.losses._GRADIENTS", size)
        found.append(
            torch.cat(
                direction.first_order_effects(solution.theta, weights, solution.parts, solution.part_gradients, V), 1
            )
        )
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-12, atol=1e-15)


def test_the_cost_of_a_sample_is_counted():
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3)).double()
    loss = lambda m, z: (m(z) ** 2).sum(1)  # noqa: E731
    train = dif.Samples(loss, torch.randn(50, 30, dtype=F64))
    layout, theta = dif.problem.parameters.Parameters.of(model)
    found = cost(train, layout, theta)
    assert found.inputs == 30
    assert 2 * (30 * 20 + 20 * 3) <= found.flops <= 2.2 * (30 * 20 + 20 * 3)
    assert 20 + 20 + 3 + 3 + 1 <= found.elements <= 60


def test_what_torch_cannot_do_is_recorded():
    """An operator without forward mode: the same scores by another way, and the answer says so."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x**2

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, slope):
            return 2 * ctx.saved_tensors[0] * slope

        @staticmethod
        def vmap(info, dims, x):
            return x**2, dims[0]

    def plain(params, z):
        return 0.5 * (z[0] @ params["theta"] - z[1]) ** 2

    def odd(params, z):
        return 0.5 * Square.apply(z[0] @ params["theta"] - z[1])

    answers = []
    for loss in (plain, odd):
        train = dif.Samples(loss, (X, Y), name="train")
        problem = dif.Problem(train.mean(), [dif.linear([1.0, 0.0, 0.0, 0.0]) <= 0.1])
        influence = dif.DirectionalInfluence(dif.fit(problem, zeros(), show_progress=False))
        answers.append(influence.scores(train, train.remove_each()))
    np.testing.assert_allclose(answers[1].values, answers[0].values, rtol=1e-8, atol=1e-12)
    assert answers[0].diagnostics["fallbacks"] == []
    assert any("no forward mode" in text for text in answers[1].diagnostics["fallbacks"])


# Which parameters are variable


def head_problem(params_of):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    loss = lambda m, z: torch.nn.functional.softplus(-z[1] * m(z[0])[:, 0])  # noqa: E731
    train = dif.Samples(loss, (X, Y), name="train")
    problem = dif.Problem(train.mean() + dif.ridge(0.05), [train.mean(where=torch.arange(60) < 20) <= 0.6])
    return model, train, dif.fit(problem, params_of(model), show_progress=False)


def test_only_the_last_layer_is_variable():
    model, train, solution = head_problem(lambda m: dif.variable(m, "2.*"))
    assert list(solution.params) == ["2.weight", "2.bias"]
    found = dif.DirectionalInfluence(solution).scores(train, train.remove_each()).values

    def frozen(m):
        m[0].requires_grad_(False)
        return m

    _, same, other = head_problem(frozen)
    np.testing.assert_allclose(other.theta, solution.theta, atol=1e-9)
    np.testing.assert_allclose(
        dif.DirectionalInfluence(other).scores(same, same.remove_each()).values, found, atol=1e-10
    )
    assert all(p.requires_grad for p in model.parameters())
    again = dif.fit(solution.problem, solution.params, show_progress=False)
    np.testing.assert_allclose(again.theta, solution.theta, atol=1e-9)


def test_names_that_match_nothing_are_refused():
    model = torch.nn.Linear(2, 1)
    for names in ("head.*", ["weight", "lora"], []):
        with pytest.raises(
            dif.InvalidInputError, match=r"must be names or patterns of parameters.* weight, bias, not "
        ):
            dif.variable(model, names)
    with pytest.raises(dif.InvalidInputError, match=r"which here are none, not \['w'\]"):
        dif.variable({"w": torch.zeros(2)}, "w")


def _through_transforms(W, x):
    """A loss with transforms of its own: the slope of a network in its input."""
    inner = vmap(lambda one: grad(lambda q: torch.tanh(q @ W["a"].T) @ W["b"])(one))(x)
    return (inner**2).sum(1) + torch.nn.functional.linear(x, W["a"]) @ W["b"]


def _both_factors(W, x):
    return torch.tanh(x @ W["a"].T) @ W["b"] + (W["a"] @ W["a"].T).sum() * x[:, 0] + torch.mm(x, W["a"].T).sum(1)


@pytest.mark.parametrize("loss", [_through_transforms, _both_factors])
def test_one_column_is_the_gradient_along_it(loss):
    torch.manual_seed(0)
    params = {"a": torch.randn(4, 3, dtype=torch.float64), "b": torch.randn(4, dtype=torch.float64)}
    x = torch.randn(7, 3, dtype=torch.float64)
    train, v = dif.Samples(loss, x), torch.randn(16, 1, dtype=torch.float64)
    parameters, theta = Parameters.of(params)
    losses, slopes = sample_slopes(train, parameters, theta, v)
    torch.testing.assert_close(slopes, sample_gradients(train, parameters, theta) @ v, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(losses, loss(params, x), rtol=1e-12, atol=1e-12)


def test_one_sweep_for_all_samples_and_one_solve_for_each_row_and_target(monkeypatch):
    """What scoring costs is counted, not timed: N is one sweep, m and T one solve each, and nothing else grows."""
    train, problem, _ = fair_logistic(batch_size=7)
    solution = fit_problem(problem)
    columns, fetched = [], []

    class Counted(dif.linalg.solvers.DenseCholesky):
        def solve(self, B):
            columns.append(B.shape[1])
            return super().solve(B)

    influence = dif.DirectionalInfluence(solution, switching=False, solver=lambda H: Counted(H.dense()))
    assert columns == [len(solution.active.active)]
    test = dif.Samples(logistic, (X[:9], Y[:9]), name="test")
    influence.scores(test, train.remove_each([0]))  # probes the new samples
    batches = dif.problem.samples.Samples.batches

    def counted(self, *args, **options):
        for place, batch in batches(self, *args, **options):
            fetched.append((self.name, place.stop - place.start))
            yield place, batch

    monkeypatch.setattr("dif.problem.samples.Samples.batches", counted)
    columns.clear()
    known = [train.weighted(torch.eye(60)[t]) for t in range(9)]  # targets of samples that are known already
    influence.scores(known, train.remove_each(), assess=0)
    assert columns == [9]
    assert sum(n for name, n in fetched if name == "train") == 60 + 60  # the gradients of the targets; the sweep

    auto = dif.DirectionalInfluence(solution, solver=lambda H: Counted(H.dense()))
    for few, most, asked, read in (
        (64, 0, [1, 9], 60),  # the moves of the row that does not bind, and of the multiplier, under each perturbation
        (0, 3, [1, 9], 60),
        (0, 0, [8, 9], 2 * 60),  # mixtures of the perturbations show how far they reach: their losses and gradients
    ):
        monkeypatch.setattr("dif.estimators.directional._PARAMETERS", few)
        monkeypatch.setattr("dif.estimators.directional._COLUMNS", most)
        columns.clear()
        fetched.clear()
        found = auto.scores(known, 1e-3 * train.remove_each(), assess=0)
        assert found.diagnostics["within_reach"] == []
        assert columns == asked
        assert sum(n for name, n in fetched if name == "train") == 60 + 60 + read


@pytest.fixture
def evaluations(monkeypatch):
    """Counts the batches of losses that are evaluated, and the resolutions of perturbations."""
    counts = {"losses": 0, "resolutions": 0}
    losses, resolve = dif.Samples.losses, Changes.of.__func__

    def evaluate(self, *arguments):
        counts["losses"] += 1
        return losses(self, *arguments)

    def resolve_counted(cls, *arguments):
        counts["resolutions"] += 1
        return resolve(cls, *arguments)

    monkeypatch.setattr(dif.Samples, "losses", evaluate)
    monkeypatch.setattr(Changes, "of", classmethod(resolve_counted))
    return counts


def test_a_solution_is_judged_once(evaluations):
    """The second estimator on a solution evaluates nothing: the judgement and the curvature are kept."""
    solution = fit_problem(fair_logistic()[1])
    evaluations["losses"] = 0
    dif.DirectionalInfluence(solution)
    assert evaluations["losses"] > 0  # the first one judges
    evaluations["losses"] = 0
    kinds = (dif.DirectionalInfluence, dif.NewtonInfluence, dif.PathInfluence, dif.AdaptiveInfluence, dif.Retraining)
    for kind in kinds:
        kind(solution)
    assert evaluations["losses"] == 0


def test_perturbations_are_resolved_once_and_a_report_asks_the_estimator(evaluations, tmp_path):
    train, problem, group = fair_logistic()
    solution = fit_problem(problem)
    gap = train.mean(where=group == 1) - train.mean(where=group == 2)
    estimator = dif.DirectionalInfluence(solution)
    evaluations["resolutions"] = 0
    scores = estimator.scores({"risk": train.mean(), "gap": gap}, train.remove_groups([[i % 60] for i in range(600)]))
    assert evaluations["resolutions"] == 1
    evaluations["losses"] = 0
    scores.report(tmp_path / "report.html")
    assert 0 < evaluations["losses"] <= 60
