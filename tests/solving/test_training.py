"""Training on mini-batches: equal to torch.optim, deterministic, resumed after an interruption, refused in words."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from refusals import invalid
from torch import nn
from trainings import classify, logistic, state_problem, violations

import dif

F64 = torch.float64
OPTIMIZERS = {
    "SGD": (dif.SGD(0.05), torch.optim.SGD, {"lr": 0.05}),
    "momentum": (dif.SGD(0.05, momentum=0.9), torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Nesterov": (
        dif.SGD(0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
    "Adam": (dif.Adam(0.02, weight_decay=0.01), torch.optim.Adam, {"lr": 0.02, "weight_decay": 0.01}),
    "AdamW": (dif.AdamW(0.02, weight_decay=0.1), torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("case", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_every_optimiser_is_that_of_torch_step_for_step(case):
    """Descent and ascent, written out with torch.optim and loss[mask].mean(), 50 steps on the same batches."""
    ours, kind, options = case
    X, y, group, params = classify()
    _, problem = state_problem(X, y, group)
    training = dif.Training(problem, params, ours, dif.Ascent(0.1), batch_size=12, epochs=10, seed=3, schedule="cosine")
    run = training.run(show_progress=False)
    assert run.loop.length == 50

    W, v = (t.clone().requires_grad_() for t in params.values())
    optimizer, lam = kind([W, v], **options), torch.zeros(3, dtype=F64)
    for t, (index,) in enumerate(run.loop.indices):
        optimizer.param_groups[0]["lr"] = options["lr"] * 0.5 * (1 + np.cos(np.pi * t / 50))
        losses = logistic({"W": W, "v": v}, (X[index], y[index]))
        norm = 0.005 * (W.square().sum() + v.square().sum())
        violation = violations(losses, group[index], W[0, 0])
        optimizer.zero_grad()
        (losses.mean() + norm + lam @ violation).backward()
        optimizer.step()
        lam = lam + 0.1 * violation.detach()
        lam[:2] = lam[:2].clamp(min=0)
        np.testing.assert_allclose(run.history.multipliers[t + 1] if t < 49 else run.end.lam, lam, atol=1e-12)
    np.testing.assert_allclose(run.theta, torch.cat([W.reshape(-1), v]).detach(), atol=1e-12)
    np.testing.assert_allclose(run.multipliers.flat, lam, atol=1e-12)


def test_a_constraint_without_members_in_the_batch_is_left_out():
    X, y, _, params = classify(n=12)
    train = dif.Samples(logistic, (X, y), name="train")
    rare = torch.arange(12) == 5
    problem = dif.Problem(train.mean(), [train.mean(where=rare) <= 0.0])
    run = dif.Training(problem, params, dif.SGD(0.1), dif.Ascent(0.5), batch_size=4, epochs=2).run(show_progress=False)
    there = [bool((index == 5).any()) for (index,) in run.loop.indices]
    lam = [row[0] for row in run.history.multipliers] + [float(run.end.lam)]
    assert [b > a for a, b in pairwise(lam)] == there
    assert sum(there) == 2


def test_the_same_seed_gives_the_same_run():
    X, y, group, params = classify()
    _, problem = state_problem(X, y, group)
    runs = [
        dif.Training(problem, params, dif.Adam(0.01), dif.Ascent(0.1), 16, 2, seed).run(show_progress=False)
        for seed in (1, 1, 2)
    ]
    assert torch.equal(runs[0].theta, runs[1].theta)
    assert not torch.equal(runs[0].theta, runs[2].theta)
    every = torch.cat([index for (index,) in runs[0].loop.indices[:4]])
    assert every.sort().values.tolist() == list(range(60))  # an epoch sees every sample once


def test_an_interrupted_training_resumes(tmp_path, monkeypatch):
    X, y, group, params = classify()
    _, problem = state_problem(X, y, group)
    training = dif.Training(problem, params, dif.SGD(0.1, momentum=0.9), dif.Ascent(0.5), 10, 3)
    whole = training.run(show_progress=False)
    steps, usual = [], dif.derivatives.training_step.TrainingStep.observe

    def advance(self, t, *args, **options):
        steps.append(t)
        if len(steps) == 8:
            raise KeyboardInterrupt
        return usual(self, t, *args, **options)

    monkeypatch.setattr("dif.derivatives.training_step.TrainingStep.observe", advance)
    with pytest.raises(KeyboardInterrupt):
        training.run(keep=tmp_path / "run", show_progress=False)
    resumed = training.run(keep=tmp_path / "run", show_progress=False)
    assert steps == [*range(8), *range(7, 18)]
    assert torch.equal(resumed.theta, whole.theta)
    assert resumed.history == whole.history
    lines = (tmp_path / "run" / "history.jsonl").read_text()
    (tmp_path / "run" / "history.jsonl").write_text(lines[:-20])  # the last line is cut off
    for _ in range(2):
        assert training.run(keep=tmp_path / "run", show_progress=False).history == whole.history
    steps.remove(17)
    other = dif.Training(problem, params, dif.SGD(0.2, momentum=0.9), dif.Ascent(0.5), 10, 3, seed=1)
    invalid(
        lambda: other.run(keep=tmp_path / "run", show_progress=False),
        "holds another run: the batches and the optimiser or the schedule differ.",
        "A run resumes only with the same data, start and batches",
    )
    assert len(steps) == 19
    assert torch.equal(training.run(keep=tmp_path / "run", show_progress=False).theta, whole.theta)


def test_damaged_files_of_a_run_are_named(tmp_path):
    X, y, group, params = classify(n=20)
    train, problem = state_problem(X, y, group)
    training = dif.Training(problem, params, dif.SGD(0.1), dif.Ascent(0.5), 10, 3)
    scores = lambda run: dif.UnrolledInfluence(run).scores(  # noqa: E731
        train.mean(), train.remove_each([0, 1]), show_progress=False, probe=0
    )
    run = training.run(keep=tmp_path / "run", show_progress=False)
    whole = scores(training.run(show_progress=False)).values
    damaged = tmp_path / "run" / "state_000003.npz"
    damaged.write_bytes(damaged.read_bytes()[:40])
    invalid(lambda: scores(run), f"'{damaged}' cannot be read (BadZipFile", "The file is missing or damaged.")
    for t in range(3, 7):
        (tmp_path / "run" / f"state_{t:06d}.npz").unlink()
    invalid(lambda: scores(run), "cannot be read (FileNotFoundError", "The file is missing or damaged.")
    assert torch.equal(scores(training.run(keep=tmp_path / "run", show_progress=False)).values, whole)
    (tmp_path / "run" / "run.json").write_text("{}")
    invalid(
        lambda: training.run(keep=tmp_path / "run", show_progress=False),
        f"'{tmp_path / 'run' / 'run.json'}' cannot be read (KeyError",
        "The file is damaged, so it is not known to which run the states belong.",
    )


def test_wrong_input_is_refused():
    X, y, group, params = classify(n=12)
    train, problem = state_problem(X, y, group)
    text = "Rates of an optimiser are numbers from 0 up."
    invalid(lambda: dif.SGD(-0.1), "`lr` is -0.1", text)
    invalid(lambda: dif.Ascent(float("nan")), "`lr` is nan", text)
    invalid(lambda: dif.Adam(betas=(1.0, 0.9)), "`beta1` is 1.0.", "at 1 the average never moves")
    invalid(lambda: dif.SGD(0.1, nesterov=True), "`momentum` is 0", "It looks ahead along the velocity")
    invalid(
        lambda: dif.Training(problem, params, dif.SGD(0.1), batch_size=0), "`batch_size` is 0.", "the batches of the"
    )
    invalid(lambda: dif.Adam(betas=0.9), "`betas` is 0.9.", "They are the decay rates of the averages")
    odd = dif.Training(problem, params, dif.SGD(0.1), schedule=lambda share: None)
    invalid(
        lambda: odd.run(show_progress=False),
        "chedule(0) is None.",
        "The learning rate of each step is multiplied by it.",
    )
    sound = dif.Training(problem, params, dif.SGD(0.1))
    for keep in (5, ""):
        invalid(
            lambda keep=keep: sound.run(keep=keep), f"`keep` is {keep!r}.", "It says which states of the run are kept"
        )
    invalid(lambda: dif.Training(problem, params, dif.SGD(0.1), seed=2**70), "`seed` is", "It sets the batches")
    for options in (
        {"optimizer": "sgd"},
        {"optimizer": dif.SGD},
        {"optimizer": {}},
        {"dual": 3},
        {"schedule": "linear"},
    ):
        ((name, value),) = options.items()
        build = lambda options=options: dif.Training(problem, params, **{"optimizer": dif.SGD(0.1), **options})  # noqa: E731
        invalid(build, f"`{name}` is {value!r}.", "Every step of the training uses it.")
    half = {name: t.to(torch.bfloat16) for name, t in params.items()}
    coarse = dif.Samples(logistic, (X.to(torch.bfloat16), y.to(torch.bfloat16)), name="coarse")
    action = lambda: dif.Training(dif.Problem(coarse.mean()), half, dif.SGD(0.1)).run()  # noqa: E731
    invalid(action, "bfloat16")
    noisy = dif.Problem(train.view(lambda p, z: logistic(p, z) * torch.rand(()), name="noisy").mean())
    invalid(lambda: dif.Training(noisy, params, dif.SGD(0.1)).run(), "Two calls of the loss", "It is random (dropout")
    for layer in (nn.Dropout(0.5), nn.BatchNorm1d(3)):
        model = nn.Sequential(layer, nn.Linear(3, 1)).double()
        network = dif.Samples(lambda m, z: nn.functional.softplus(-z[1] * m(z[0])[:, 0]), (X, y), name="train")
        action = lambda n=network, m=model: dif.Training(dif.Problem(n.mean()), m, dif.SGD(0.1)).run()  # noqa: E731
        invalid(action, type(layer).__name__, keep=[model])
    steep = dif.Problem(train.view(lambda p, z: torch.exp(50 * logistic(p, z)), name="steep").mean())
    action = lambda: dif.Training(steep, params, dif.SGD(1e3), epochs=9, batch_size=4).run(show_progress=False)  # noqa: E731
    invalid(action, "is not finite after step", "The training diverged, or the loss left its domain.")


def test_the_default_dtype_does_not_matter():
    X, y, _, params = classify(n=12)
    train = dif.Samples(logistic, (X.float(), y.float()), name="train")
    start, problem = {name: t.float() for name, t in params.items()}, dif.Problem(train.mean())
    usual = torch.get_default_dtype()
    ends = []
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            ends.append(dif.Training(problem, start, dif.SGD(0.1), batch_size=4).run(show_progress=False).theta)
    finally:
        torch.set_default_dtype(usual)
    assert torch.equal(*ends)
