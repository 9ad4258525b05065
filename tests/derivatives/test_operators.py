"""Every operator of torch's test database is differentiated correctly, or refused.

The loss is a weighted sum of an operator's outputs; its first input is the parameter. The oracle is plain autograd,
one sample at a time, and central differences.
"""

from __future__ import annotations

import warnings
from collections import Counter
from itertools import islice

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

import dif
from dif.derivatives.losses import sample_gradients, sample_slopes, stacked_losses
from dif.optimality.judgement import judge_derivatives

pytest.importorskip("expecttest")  # required by torch's database
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

F64 = torch.float64
SAMPLES, LARGEST, PARTS = 7, 400, 8  # samples per loss, largest number of parameters, parts of the test
FIRST, EVERY = 1, 10**6  # number of inputs per operator


def outputs(result) -> Tensor | None:
    """Return all real outputs as one vector, or None if there are none."""
    vectors = [t.reshape(-1) for t in tree_flatten(result)[0] if isinstance(t, Tensor) and t.is_floating_point()]
    return torch.cat(vectors) if vectors else None


def as_function(op, sample):
    """Return the operator as a function of its first tensor, and that tensor; None if it has no real input."""
    many = isinstance(sample.input, list | tuple)
    first = sample.input[0] if many and len(sample.input) else sample.input
    if not isinstance(first, Tensor) or first.dtype != F64 or first.layout != torch.strided:
        return None

    def function(t: Tensor) -> Tensor | None:
        given = type(sample.input)([t, *sample.input[1:]]) if many else t
        return outputs(op(given, *sample.args, **sample.kwargs))

    return function, first.detach().clone()


def plain(function, C: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Return C·f(t), (n,), and its Jacobian, (n, d), by one backward pass per row."""
    leaf = t.clone().requires_grad_()
    values = C @ function(leaf)
    zero = torch.zeros_like(leaf)
    if not values.requires_grad:
        return values, torch.stack([zero.reshape(-1)] * len(C))
    slopes = [torch.autograd.grad(v, leaf, retain_graph=True, allow_unused=True)[0] for v in values]
    return values.detach(), torch.stack([(zero if s is None else s).reshape(-1) for s in slopes])


def judge(op, sample) -> str:
    """Return the outcome for one input of an operator: right, refused, WRONG, or why nothing is differentiated."""
    made = as_function(op, sample)
    if made is None or not 0 < made[1].numel() <= LARGEST:
        return "no parameters"
    function, at = made
    try:
        value = function(at)
    except Exception:
        return "operator fails"
    if value is None or value.numel() == 0:
        return "no real outputs"
    generator = torch.Generator().manual_seed(0)
    C = torch.randn(SAMPLES, value.numel(), generator=generator, dtype=F64)
    V = torch.randn(at.numel(), 3, generator=generator, dtype=F64)
    train = dif.Samples(lambda p, z: z @ function(p["t"]), C)
    try:
        solution = dif.Solution(dif.Problem(train.mean() + dif.ridge(1.0)), {"t": at})
        layout, theta = solution.program.parameters, solution.theta
        HV, alone = solution.curvature.product(V) - V, solution.curvature.product(V[:, :1]) - V[:, :1]
        H, gradient = solution.hessian @ V - V, solution.J[0] - theta
        each, slopes = sample_gradients(train, layout, theta), sample_slopes(train, layout, theta, V)[1]
        stacked = stacked_losses(train, layout, torch.stack([theta, theta + 1e-3 * V[:, 0]]))
        if judge_derivatives(solution).verdict == "bad":
            return "refused"
    except dif.DifError:
        return "refused"
    losses, G = plain(function, C, at)
    size, bend = max(float(G.abs().max()), 1e-7 * float(losses.abs().max()), 1e-30), float(HV.abs().max())

    def by_differences(step: float) -> tuple[float, float]:
        (before, G0), (after, G1) = (plain(function, C, at + s * step * V[:, 0].reshape(at.shape)) for s in (-1, 1))
        slope, bent = (after - before) / (2 * step), (G1 - G0).mean(0) / (2 * step)
        scale = max(size, float(slope.abs().max()), 0.1 * step * bend)
        return (
            float((slope - G @ V[:, 0]).abs().max()) / scale,
            float((HV[:, 0] - bent).abs().max()) / max(1.0, float(bent.abs().max())),
        )

    gaps = {
        "gradient": float((gradient - G.mean(0)).abs().max()) / max(size, 1e-7 * float(theta.abs().max())),
        "each": float((each - G).abs().max()) / size,
        "slopes": float((slopes - G @ V).abs().max()) / size,
        "stacked": float((stacked[0] - losses).abs().max()) / float(losses.abs().max() + 1e-30),
        "one column": float((alone[:, 0] - HV[:, 0]).abs().max()) / max(1.0, bend),
        "assembled": float((H - HV).abs().max()) / max(1.0, bend),
    }
    apart = [by_differences(step) for step in (1e-4, 1e-5, 1e-6)]
    bad = [f"{name} {gap:.1e}" for name, gap in gaps.items() if not gap <= 1e-5]
    bad += [f"{name} {min(gap):.1e}" for name, gap in zip(("loss", "curvature"), zip(*apart, strict=True), strict=True)
            if not min(gap) <= 1e-4]  # fmt: skip
    return f"WRONG: {', '.join(bad)}" if bad else "right"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("inputs", "part"),
    [(FIRST, k) for k in range(PARTS)] + [pytest.param(EVERY, k, marks=pytest.mark.slow) for k in range(PARTS)],
)
def test_operators(inputs, part, capsys):
    outcomes: Counter[str] = Counter()
    wrong, right, refused = [], set(), set()  # the last two: names of operators, which have different numbers of inputs
    for op in op_db[part::PARTS]:
        if not op.supports_dtype(F64, "cpu"):
            continue
        torch.manual_seed(0)
        samples = op.sample_inputs_func(op, "cpu", F64, False)  # op.sample_inputs inspects the stack, which is slow
        for number, sample in enumerate(islice(samples, inputs)):
            outcome = judge(op, sample)
            outcomes[outcome.partition(":")[0]] += 1
            if outcome.startswith("WRONG"):
                wrong.append(f"{op.name} {op.variant_test_name} [{number}] {outcome}")
            right |= {op.name} if outcome == "right" else set()
            refused |= {op.name} if outcome == "refused" else set()
    with capsys.disabled():
        print(f"\noperators: {dict(outcomes)}")
    assert wrong == []
    assert len(right) > 2 * len(refused - right)
