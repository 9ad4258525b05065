"""Training on mini-batches: equal to torch.optim, deterministic, resumed after an interruption, refused in words."""

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from refusals import invalid, table
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
    steps, usual = [], dif.training.run.Loop.advance

    def advance(self, t, *args, **options):
        steps.append(t)
        if len(steps) == 8:
            raise KeyboardInterrupt
        return usual(self, t, *args, **options)

    monkeypatch.setattr("dif.training.run.Loop.advance", advance)
    with pytest.raises(KeyboardInterrupt):
        training.run(keep=tmp_path / "run", show_progress=False)
    resumed = training.run(keep=tmp_path / "run", show_progress=False)
    assert steps == [*range(8), *range(7, 18)]
    assert torch.equal(resumed.theta, whole.theta)
    assert resumed.history == whole.history
    lines = (tmp_path / "run" / "history.jsonl").read_text()
    for damaged in (lines[:-20], lines[:-20] + "7" + lines[-19:]):  # the last line is cut off, or changed
        (tmp_path / "run" / "history.jsonl").write_text(damaged)
        for _ in range(2):
            assert training.run(keep=tmp_path / "run", show_progress=False).history == whole.history
        steps.remove(17)
    other = dif.Training(problem, params, dif.SGD(0.2, momentum=0.9), dif.Ascent(0.5), 10, 3, seed=1)
    invalid(
        lambda: other.run(keep=tmp_path / "run", show_progress=False),
        "holds another run: the batches and the optimiser or the schedule differ. Pass the same ones",
    )
    assert len(steps) == 19
    assert torch.equal(training.run(keep=tmp_path / "run", show_progress=False).theta, whole.theta)


def test_two_trainings_in_one_folder_wait_for_each_other(tmp_path, monkeypatch):
    X, y, group, params = classify(n=20)
    _, problem = state_problem(X, y, group)
    training = dif.Training(problem, params, dif.SGD(0.1), dif.Ascent(0.5), 10, 3)
    whole, steps, usual = training.run(show_progress=False), [], dif.training.run.Loop.advance

    def observe(self, t, *args):
        steps.append(t)
        time.sleep(0.02)
        return usual(self, t, *args)

    monkeypatch.setattr("dif.training.run.Loop.advance", observe)
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda _: training.run(keep=tmp_path / "run", show_progress=False), range(2)))
    assert steps == list(range(6))
    for run in runs:
        assert run.history == whole.history
        assert torch.equal(run.theta, whole.theta)
    assert len((tmp_path / "run" / "history.jsonl").read_text().splitlines()) == 1 + 6


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
    cure = "Delete it; training with the same folder then continues from the state before it."
    invalid(lambda: scores(run), f"'{damaged}' is damaged, or was not written by dif: ", cure)
    damaged.write_bytes((tmp_path / "run" / "state_000002.npz").read_bytes())
    invalid(lambda: scores(run), f"'{damaged}' is damaged, or was not written by dif: it has another step.", cure)
    damaged.unlink()
    with pytest.raises(FileNotFoundError, match=r"no state of a run file '.*state_000003.npz'"):
        scores(run)
    assert torch.equal(scores(training.run(keep=tmp_path / "run", show_progress=False)).values, whole)
    first = tmp_path / "run" / "state_000000.npz"
    first.write_bytes(first.read_bytes()[:-100])
    again = lambda: training.run(keep=tmp_path / "run", show_progress=False)  # noqa: E731
    invalid(again, f"'{first}' is damaged", "Delete this folder to start again, or choose another one.")


DATA = classify(n=12)
PARAMS = DATA[3]
PEOPLE, BOUNDED = state_problem(*DATA[:3])


def training(problem=BOUNDED, params=PARAMS, optimizer=dif.SGD(0.1), **options):  # noqa: B008
    return dif.Training(problem, params, optimizer, **options)


def changed(loss, name):
    """A training of another loss of the same people."""
    return training(dif.Problem(PEOPLE.view(loss, name=name).mean()), optimizer=dif.SGD(1e3), epochs=9, batch_size=4)


def halve():
    coarse = dif.Samples(logistic, tuple(t.to(torch.bfloat16) for t in DATA[:2]), name="coarse")
    return training(dif.Problem(coarse.mean()), {name: t.to(torch.bfloat16) for name, t in PARAMS.items()})


WRONG = {
    "lr": (lambda: dif.SGD(-0.1), "`lr` must be a number ≥ 0, not -0.1."),
    "lr of the ascent": (lambda: dif.Ascent(float("nan")), "`lr` must be a number ≥ 0, not nan."),
    "weight decay": (lambda: dif.AdamW(weight_decay=-1.0), "`weight_decay` must be a number ≥ 0, not -1.0."),
    "momentum": (lambda: dif.SGD(0.1, momentum=1.0), "`momentum` must be below 1, not 1.0"),
    "betas": (lambda: dif.Adam(betas=0.9), "`betas` must be a pair of numbers such as (0.9, 0.999), not 0.9."),
    "beta1": (lambda: dif.Adam(betas=(1.0, 0.9)), "`beta1` must be below 1, not 1.0"),
    "nesterov": (lambda: dif.SGD(0.1, nesterov=True), "`momentum` must be above 0 for Nesterov's method"),
    "nesterov in words": (
        lambda: dif.SGD(0.1, momentum=0.9, nesterov="no"),
        "`nesterov` must be True or False, not 'no'.",
    ),
    "batch size": (lambda: training(batch_size=0), "`batch_size` must be an integer ≥ 1, not 0."),
    "epochs": (lambda: training(epochs=2.5), "`epochs` must be an integer ≥ 1, not 2.5."),
    "seed": (lambda: training(seed=2**70), "`seed` must be an integer of at most 64 bits"),
    "optimiser in words": (lambda: training(optimizer="sgd"), "`optimizer` must be an optimiser such as"),
    "class of optimisers": (lambda: training(optimizer=dif.SGD), "`optimizer` must be an optimiser such as"),
    "no optimiser": (lambda: training(optimizer={}), "`optimizer` must be an optimiser such as"),
    "negative multiplier": (
        lambda: training(multipliers=[-0.1, 0.0, 0.0]).run(),
        "The multiplier of the inequality 'group 0' must be ≥ 0, not -0.1.",
    ),
    "ascent": (lambda: training(dual=3), "`dual` must be a dif.Ascent, not 3."),
    "schedule in words": (lambda: training(schedule="linear"), '`schedule` must be None, "cosine" or a function'),
    "schedule of numbers": (lambda: training(schedule=np.ones(3)), '`schedule` must be None, "cosine" or a function'),
    "schedule without a value": (
        lambda: training(schedule=lambda share: None).run(),
        "Schedule(0) must be a number ≥ 0, not None.",
    ),
    "keep": (lambda: training().run(keep=5), '`keep` must be "all", "sqrt", a folder or None, not 5.'),
    "keep nowhere": (lambda: training().run(keep=""), "a folder or None, not ''."),
    "keep in capitals": (lambda: training().run(keep="ALL"), "a folder or None, not 'ALL'."),
    "keep in a file": (lambda: training().run(keep=__file__), f"a folder or None, not {__file__!r}."),
    "half precision": (lambda: halve().run(), "bfloat16"),
    "chance in the loss": (
        lambda: changed(lambda p, z: logistic(p, z) * torch.rand(()), "noisy").run(),
        "Two calls of the loss",
    ),
    "divergence": (
        lambda: changed(lambda p, z: torch.exp(50 * logistic(p, z)), "steep").run(show_progress=False),
        "is not finite after step",
        "The training diverged, or the loss left its domain.",
    ),
}


@table(WRONG)
def test_wrong_input_is_refused(case):
    invalid(*case, keep=[PARAMS])


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(3)])
def test_chance_and_other_samples_in_a_module_are_refused(layer):
    model = nn.Sequential(layer, nn.Linear(3, 1)).double()
    people = dif.Samples(lambda m, z: nn.functional.softplus(-z[1] * m(z[0])[:, 0]), DATA[:2], name="train")
    invalid(training(dif.Problem(people.mean()), model).run, type(layer).__name__, keep=[model])


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
