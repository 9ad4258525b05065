"""The paper's network study: data, model, a small version of the protocol, and resuming after a kill."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from problems import retrainings

import dif
from dif.derivatives import hessian
from dif.solving.batched_newton import BatchedNewton
from studies import assembly, cnn, cnn_curvature
from studies.cnn_curvature import GroupRisks
from studies.cnn_fit import State
from studies.data import mnist
from studies.network import PAPER, AllConvolutional, _convolve_by_matmul, assign_groups
from studies.plain import sample_losses

SMALL = cnn.Setting(n=600, tau=0.01, l2=0.03, model="small", channels=2, epochs=40, removals=12)

# Data


def test_embedded_digits():
    digits = mnist()
    assert digits.train.shape == (6000, 28, 28)
    assert digits.test.shape == (1000, 28, 28)
    assert torch.bincount(digits.train_labels).min() > 500
    assert digits.test_labels[:4].tolist() == [7, 2, 1, 0]


def test_digits_that_are_not_there(tmp_path):
    with pytest.raises(dif.InvalidInputError, match=r"MNIST has 60000 training and 10000 test images; `n` is 60001"):
        mnist(60_001)
    with pytest.raises(FileNotFoundError, match="the four files of MNIST"):
        mnist(10, data=tmp_path)
    name = "train-images-idx3-ubyte.gz"
    (tmp_path / name).write_bytes(gzip.compress(b"\0\0\x08\x03 something else"))
    with pytest.raises(dif.InvalidInputError, match=r"has the sha256 .* not 440|download it again"):
        mnist(10, data=tmp_path)
    (tmp_path / name).write_bytes(b"no gzip at all")
    with pytest.raises(dif.InvalidInputError, match="BadGzipFile"):
        mnist(10, data=tmp_path)


def test_groups_are_assigned_as_in_the_paper():
    labels = mnist(3000).train_labels
    group = assign_groups(labels, 3, 0.5, seed=1)
    sizes = torch.bincount(group)
    assert sizes.max() - sizes.min() <= 2
    # half at random: each group has some of every digit; half by label: the first has most of the zeros
    shares = torch.stack([torch.bincount(labels[group == g], minlength=10) for g in range(3)])
    assert shares.min() > 0
    assert shares[0, 0] > 2 * shares[2, 0]
    assert torch.equal(
        assign_groups(labels, 3, 0.0, 0).sort().values,
        assign_groups(labels, 3, 0.0, 0)[torch.argsort(labels)].sort().values,
    )


def test_matrix_products_are_convolutions():
    torch.manual_seed(0)
    model, h = AllConvolutional(PAPER, 3).double(), torch.rand(2, 28, 28, dtype=torch.float64)
    expected, last = model(h), h[..., None]
    for number, layer in enumerate(model.layers):
        last = _convolve_by_matmul(torch.tanh(last) if number else last, layer)
    torch.testing.assert_close(last.mean((1, 2)), expected, rtol=1e-12, atol=1e-14)


# Hessians layer by layer


def test_hessians_by_layers_are_those_of_autograd():
    torch.manual_seed(0)
    model = AllConvolutional(PAPER, 3).double()
    images, labels = torch.randn(20, 12, 12).double(), torch.randint(10, (20,))
    group = torch.arange(20) % 2
    theta = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    theta += 0.1 * torch.randn_like(theta)
    risks = GroupRisks(model, images, labels, group)
    values, gradients = risks.values_and_gradients(theta)
    exact, single = risks.hessians(theta, dtype=torch.float64), risks.hessians(theta)
    for g in range(2):

        def risk(theta, g=g):
            return sample_losses(model, theta, images[group == g], labels[group == g]).mean()

        torch.testing.assert_close(values[g], risk(theta), rtol=1e-12, atol=0)
        torch.testing.assert_close(gradients[g], torch.func.grad(risk)(theta), rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(torch.autograd.functional.jacobian(risks, theta)[g], gradients[g])
        expected = torch.func.hessian(risk)(theta)
        torch.testing.assert_close(exact[g], expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(single[g], expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    half = risks.hessians(theta, share=0.5, dtype=torch.float64)  # the first half of each group
    first = torch.arange(20) < 10
    some = GroupRisks(model, images[first], labels[first], group[first])
    torch.testing.assert_close(half, some.hessians(theta, dtype=torch.float64))


def test_a_sum_of_hessians_goes_on_where_it_was_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(cnn_curvature, "_IN_ONE_SUM", 2)
    monkeypatch.setattr(cnn_curvature, "_KEPT_EVERY", 1)
    torch.manual_seed(0)
    model, labels = AllConvolutional(SMALL.layers, 2).double(), torch.randint(10, (16,))
    theta = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    risks = GroupRisks(model, torch.randn(16, 8, 8).double(), labels, torch.arange(16) % 2, threads=1)
    whole, calls, add = risks.hessians(theta), [], cnn_curvature.add_hessian

    def count(*args):
        calls.append(args)
        if len(calls) == 6:
            raise KeyboardInterrupt
        add(*args)

    monkeypatch.setattr(cnn_curvature, "add_hessian", count)
    with pytest.raises(KeyboardInterrupt):
        risks.hessians(theta, keep=tmp_path / "part.npz")
    calls.clear()
    assert torch.equal(risks.hessians(theta, keep=tmp_path / "part.npz"), whole)
    assert len(calls) == 3
    calls.clear()
    risks.hessians(theta, share=0.5, keep=tmp_path / "part.npz")  # another sum
    assert len(calls) == 4


def test_fit_by_layers_ends_at_a_solution(tmp_path):
    """Begun again where it was killed, it ends at the same point; dif agrees that this is a solution."""
    setting = replace(SMALL, n=150, epochs=30)
    task = cnn.build_task(setting, None, "cpu")
    checkpoint = tmp_path / "fit.npz"
    solution = cnn.fit_by_layers(task, setting, False, checkpoint=checkpoint)
    assert solution.kkt.residual <= 1e-10
    assert solution.active.curvature > 0
    assert len(solution.active.binding) >= 1
    State(solution.theta + 1e-4, solution.lam, slope=1e-3).save(checkpoint)
    again = cnn.fit_by_layers(task, setting, False, checkpoint=checkpoint)
    torch.testing.assert_close(again.theta, solution.theta, rtol=0, atol=1e-7)


# Keeping retrainings


def _fit_line(n=40):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    y = X @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + 0.1 * torch.randn(n, generator=generator).double()
    train = dif.Samples(lambda p, z: 0.5 * (z[0] @ p["w"] - z[1]) ** 2, (X, y), name="train")
    problem = dif.Problem(train.mean(), [(dif.linear([[1.0, 1.0, 1.0]]) <= -1.0).named("sum")])
    return train, dif.fit(problem, {"w": torch.zeros(3, dtype=torch.float64)}, show_progress=False)


def test_kept_retrainings_are_not_done_again(tmp_path, monkeypatch):
    train, solution = _fit_line()
    removals = train.remove_each(range(20))
    plain = dif.Retraining(solution).scores(train.mean(), removals)
    dif.Retraining(solution, keep=tmp_path).scores(train.mean(), train.remove_each([3, 7, 8]))
    assert len(retrainings(tmp_path)) == 3
    seen = []
    solved = dif.Retraining.solve_together
    monkeypatch.setattr(
        dif.Retraining, "solve_together", lambda self, some: seen.extend(some.perturbation.labels) or solved(self, some)
    )
    kept = dif.Retraining(solution, keep=tmp_path).scores(train.mean(), removals)
    np.testing.assert_allclose(kept.values, plain.values, rtol=1e-7, atol=1e-15)
    assert sorted(seen) == sorted(f"remove train[{i}]" for i in range(20) if i not in (3, 7, 8))
    seen.clear()
    other = dif.Retraining(solution, keep=tmp_path).scores(train.weighted(torch.ones(40)), removals)  # another target
    assert seen == []
    np.testing.assert_allclose(
        other.values, dif.Retraining(solution).scores(train.sum(), removals).values, rtol=1e-7, atol=1e-13
    )
    # the paper's removal is another perturbation, a different tolerance another question
    seen.clear()
    dif.Retraining(solution, keep=tmp_path).scores(train.mean(), train.remove_each([3], renormalise=False))
    dif.Retraining(solution, keep=tmp_path, tol=1e-8).scores(train.mean(), train.remove_each([3]))
    assert seen == ["remove train[3]"] * 2
    for path in tmp_path.glob("*.npz"):
        path.write_bytes(b"damaged")
    with pytest.raises(
        dif.InvalidInputError, match=r"is damaged, or was not written by dif: .* Delete the file; its retrainings"
    ):
        dif.Retraining(solution, keep=tmp_path).scores(train.mean(), removals)


def test_a_hard_retraining_does_not_hold_up_the_others(tmp_path, monkeypatch):
    """Those that one stage has solved are kept before the next stage begins."""
    train, solution = _fit_line()
    removals = train.remove_each(range(6))
    whole = dif.Retraining(solution).scores(train.mean(), removals)
    solved = BatchedNewton.solve

    def stop_at_the_second_stage(self, *args):
        ends = next(solved(self, *args))
        ends.residual[2] = 1.0
        yield ends
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(BatchedNewton, "solve", stop_at_the_second_stage)
        with pytest.raises(KeyboardInterrupt):
            dif.Retraining(solution, keep=tmp_path).scores(train.mean(), removals)
    assert len(retrainings(tmp_path)) == 5
    again = dif.Retraining(solution, keep=tmp_path).scores(train.mean(), removals)
    np.testing.assert_allclose(again.values, whole.values, rtol=1e-9, atol=1e-14)
    assert len(retrainings(tmp_path)) == 6


def test_jobs_share_retrainings(tmp_path):
    train, solution = _fit_line()
    removals = train.remove_each()
    serial = dif.Retraining(solution).scores(train.mean(), removals)
    parallel = dif.Retraining(solution, keep=tmp_path).scores(train.mean(), removals, jobs=2)
    np.testing.assert_allclose(parallel.values, serial.values, rtol=1e-9, atol=1e-14)
    assert len(retrainings(tmp_path)) == 40
    with pytest.raises(dif.InvalidInputError, match=r"`jobs` must be a number of processes, .* not 0\."):
        dif.Retraining(solution).scores(train.mean(), removals, jobs=0)


def test_reevaluated_is_the_target_at_the_predicted_point():
    train, solution = _fit_line()
    removals = train.remove_each([0, 5])
    for estimator in (
        dif.DirectionalInfluence(solution),
        dif.DirectionalInfluence(solution, switching=True),
        dif.ClassicalInfluence(solution),
        dif.PenaltyInfluence(solution),
    ):
        found = cnn.reevaluate(estimator, train, removals)
        for p, removal in enumerate(removals):
            moved = {"w": solution.params["w"] + estimator.change(removal).theta["w"]}
            losses = [train.loss(point, next(train.storage.fetch([slice(None)]))) for point in (moved, solution.params)]
            np.testing.assert_allclose(found[p], losses[0] - losses[1], rtol=1e-9, atol=1e-12)


# The protocol


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    out = tmp_path_factory.mktemp("cnn")
    result = cnn.reproduce(SMALL, out, paper_epsilon=False, show_progress=False)
    return out, result


@pytest.mark.slow
def test_the_study_that_a_laptop_can_run(tmp_path):
    result = cnn.reproduce(cnn.SMALL_STUDY, tmp_path, paper_epsilon=False, show_progress=False)
    assert len(result["compared"]["renormalised"]["actual"]) == 40
    check_agreement(result)


def test_small_study(study):
    out, result = study
    assert len(result["compared"]["renormalised"]["actual"]) == 12
    check_agreement(result)
    assert {p.name for p in out.glob("*.png")} == {"cnn.png", "cnn-images.png"}
    assert json.loads((out / "cnn.json").read_text()) == json.loads(json.dumps(result))


def check_agreement(result):
    """Assert that all retrainings converged and that DIF predicts them better than classical influence."""
    part = result["compared"]["renormalised"]
    assert result["kkt"]["stationarity"] <= 1e-8
    assert result["tangent_curvature"] > 0
    assert len(result["binding"]) >= 1
    assert part["failed"] == {}
    assert max(part["residuals"]) <= 1e-10
    agreement = part["agreement"]
    assert agreement["DIF"]["pearson"] >= 0.9
    assert abs(agreement["DIF"]["slope"] - 1) <= 0.1
    assert agreement["Newton"]["relative_error"] < max(agreement["DIF"]["relative_error"], 0.02)
    assert agreement["DIF"]["relative_error"] < agreement["classical IF"]["relative_error"]


def test_a_finished_study_is_not_repeated(study):
    out, result = study
    with pytest.raises(dif.InvalidInputError, match=r"already contains .* Add --resume to continue the study there."):
        cnn.reproduce(SMALL, out, paper_epsilon=False)
    with pytest.raises(dif.InvalidInputError, match=r"tau 0\.01 \(now 0\.02\)"):
        cnn.reproduce(replace(SMALL, tau=0.02), out, resume=True)
    again = cnn.reproduce(SMALL, out, resume=True, paper_epsilon=False)
    assert again == json.loads(json.dumps(result))


def test_figures_that_are_gone_are_drawn_again(study):
    out, _ = study
    (out / "cnn.png").unlink()
    cnn.reproduce(SMALL, out, resume=True, paper_epsilon=False)
    assert (out / "cnn.png").stat().st_size > 10_000


def test_another_study_is_not_passed_off(study, tmp_path):
    """Refused are another study's cnn.json without its setting.json, and a saved solution of another size."""
    out, _ = study
    (tmp_path / "cnn.json").write_bytes((out / "cnn.json").read_bytes())
    with pytest.raises(dif.InvalidInputError, match=r"l2 0\.03 \(now 0\.3\)"):
        cnn.reproduce(replace(SMALL, l2=0.3), tmp_path, paper_epsilon=False)
    other = tmp_path / "other"
    other.mkdir()
    (other / "solution.npz").write_bytes((out / "solution.npz").read_bytes())
    with pytest.raises(
        dif.InvalidInputError,
        match=r"holds \d+ parameters and 3 multipliers, but this study has \d+ and 3. Choose another folder",
    ):
        cnn.reproduce(replace(SMALL, channels=3), other, paper_epsilon=False)


def test_a_refused_study_claims_no_folder(tmp_path):
    with pytest.raises(
        dif.InvalidInputError,
        match=r"`removals` is 12, but there are 10 training images. Each image is removed at most once.",
    ):
        cnn.reproduce(replace(SMALL, n=10), tmp_path)
    with pytest.raises(FileNotFoundError):
        cnn.reproduce(SMALL, tmp_path, data=str(tmp_path / "nowhere"))
    assert list(tmp_path.iterdir()) == []


TINY = [
    f"--{word}" for word in ("n=400", "model=small", "channels=2", "l2=0.05", "tau=0.01", "epochs=20", "removals=12")
]


def _start(out, *more):
    command = [
        sys.executable,
        "-m",
        "studies",
        "cnn",
        *TINY,
        "--no-paper-epsilon",
        "--out",
        str(out),
        *more,
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


@pytest.mark.slow
def test_a_killed_study_resumes(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    first = _start(whole)
    assert first.wait(timeout=300) == 0
    killed.mkdir()
    for name in ("setting.json", "solution.npz"):
        (killed / name).write_bytes((whole / name).read_bytes())
    process, kept = _start(killed, "--resume", "--jobs", "2"), killed / "retrained"
    limit = time.time() + 240
    while len(list(kept.glob("*.npz"))) < 3 and process.poll() is None and time.time() < limit:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = retrainings(kept)
    assert 3 <= len(done) <= 12
    assert not (killed / "cnn.json").exists()
    second = _start(killed, "--resume")
    assert second.wait(timeout=300) == 0
    after = retrainings(kept)
    assert len(after) == 12
    assert {name: after[name] for name in done} == done
    numbers = [json.loads((folder / "cnn.json").read_text())["compared"]["renormalised"] for folder in (whole, killed)]
    np.testing.assert_allclose(numbers[1]["actual"], numbers[0]["actual"], rtol=1e-7)
    assert numbers[0]["predicted"]["DIF"] == numbers[1]["predicted"]["DIF"]


@pytest.mark.slow
def test_plain_optimiser_agrees(tmp_path):
    """Retraining with SciPy's L-BFGS-B, which shares no code with dif, gives the same changes."""
    setting = cnn.Setting(n=400, tau=0.01, model="small", channels=2, l2=0.02, epochs=20, removals=6)
    result = cnn.reproduce(setting, tmp_path, paper_epsilon=False, plain=5, show_progress=False)
    assert max(result["plain"]["residuals"]) <= 1e-7
    assert result["plain"]["largest_difference"] <= 0.01


def test_another_image_starts_from_a_copy_of_the_solution(study, tmp_path, monkeypatch):
    """The fit is not repeated, and an expensive Hessian is assembled once, in steps that are kept."""
    out, result = study
    monkeypatch.setattr(hessian, "_ANYWAY", 0)
    monkeypatch.setattr(hessian, "_AFFORDABLE", {"cpu": 1.0})
    monkeypatch.setattr(dif, "fit", None)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    shutil.copy(out / "solution.npz", first)
    again = cnn.reproduce(replace(SMALL, removals=2), first, paper_epsilon=False, show_progress=False)
    part, known = (numbers["compared"]["renormalised"] for numbers in (again, result))
    assert again["removed"] == result["removed"][:2]
    for name in ("DIF", "classical IF", "Newton", "DIF, re-evaluated"):
        np.testing.assert_allclose(part["predicted"][name], known["predicted"][name][:2], rtol=1e-5)
    np.testing.assert_allclose(part["actual"], known["actual"][:2], rtol=1e-5)
    second.mkdir()
    shutil.copy(first / "solution.npz", second)
    shutil.copytree(first / "hessian", second / "hessian")
    monkeypatch.setattr(assembly, "write_archive", None)  # the Hessian is not assembled again
    other = cnn.reproduce(replace(SMALL, removals=2, image=1), second, paper_epsilon=False, show_progress=False)
    assert other["test_image"]["index"] > again["test_image"]["index"]
    assert other["tangent_curvature"] == again["tangent_curvature"]


def test_study_by_layers(study, tmp_path, monkeypatch):
    """It has the numbers of the study with exact Hessians; its Hessian is kept."""
    out, result = study
    monkeypatch.setattr(cnn, "BY_LAYERS", 0)
    shutil.copy(out / "solution.npz", tmp_path)
    again = cnn.reproduce(SMALL, tmp_path, paper_epsilon=False, unconstrained=True, show_progress=False)
    part, known = (numbers["compared"]["renormalised"] for numbers in (again, result))
    assert again["removed"] == result["removed"]
    assert part["failed"] == {}
    assert max(part["residuals"]) <= again["tolerance"] == cnn.TOLERANCE
    for name in known["predicted"]:
        # by layers the Hessian is computed in single precision
        np.testing.assert_allclose(part["predicted"][name], known["predicted"][name], rtol=3e-3)
    np.testing.assert_allclose(part["actual"], known["actual"], rtol=1e-4)
    assert len(retrainings(tmp_path / "retrained")) == SMALL.removals
    assert (tmp_path / "hessian.npz").exists()
    assert again["unconstrained"]["slope"] <= cnn.FLAT
    assert abs(again["unconstrained"]["test_error"] - again["test_error"]) < 0.1


def test_retrainings_by_another_optimiser_are_kept(study, tmp_path, monkeypatch):
    out, result = study
    task = cnn.build_task(SMALL, None, "cpu")
    solution, image, keep = cnn.load_or_fit(task, SMALL, out, False), result["test_image"]["index"], tmp_path / "p.json"
    solved = []

    def retrain(rows, theta, lam, W):
        if len(solved) == 2:
            raise KeyboardInterrupt
        solved.append(float(rows(theta)[0]))
        return theta + 1e-3, lam, 1e-9

    monkeypatch.setattr(cnn, "retrain", retrain)
    arguments = result["removed"][:3], image, result["compared"]["renormalised"], keep
    with pytest.raises(KeyboardInterrupt):
        cnn.check_retraining(task, SMALL, solution, *arguments)
    first, second = solved
    solved[:] = []
    found = cnn.check_retraining(task, SMALL, solution, *arguments)
    assert len(solved) == 1
    assert len({first, second, *solved}) == 3
    assert found["removed"] == result["removed"][:3]
    assert found["residuals"] == [1e-9] * 3
    solved[:] = []
    with pytest.raises(KeyboardInterrupt):  # another target
        cnn.check_retraining(task, SMALL, solution, arguments[0], image + 1, *arguments[2:])
    assert len(solved) == 2


def test_no_misclassified_image(study):
    task = cnn.build_task(SMALL, None, "cpu")
    before = [p.clone() for p in task.start.parameters()]
    solution = cnn.load_or_fit(task, SMALL, study[0], show_progress=False)
    assert all(
        torch.equal(p, q) for p, q in zip(before, task.start.parameters(), strict=True)
    )  # loading does not change it
    right = solution.params(task.test).argmax(1)
    perfect = replace(task, test_labels=right)
    with pytest.raises(dif.InvalidInputError, match="0 of the 1000 test images are misclassified, and --image is 0"):
        cnn.find_target(perfect, solution)
    wrong = torch.nonzero(right != task.test_labels).reshape(-1).tolist()
    assert [cnn.find_target(task, solution, number)[0] for number in (0, 1)] == wrong[:2]
