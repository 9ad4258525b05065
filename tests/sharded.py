"""Run by torchrun in two processes: everything under `dif.sharded()` against one process alone."""

import os

import torch
import torch.distributed as processes
from problems import F64, fair_logistic, zeros
from torch.nn.functional import cross_entropy

import dif

seen = []  # samples that this process evaluated, sweep by sweep


def network(params, z):
    seen.append(len(z[0]))
    return cross_entropy(torch.tanh(z[0] @ params["A"]) @ params["B"], z[1], reduction="none")


def close(one, other, what):
    gap = float((one - other).abs().max() / other.abs().max())
    assert gap < 1e-10, (what, gap)
    print(f"{what} {gap:.1e}")


def main():
    torch.set_num_threads(1)
    processes.init_process_group("gloo")
    rank, world = processes.get_rank(), processes.get_world_size()

    # a network: curvature products and gradients; every process sees about half of the samples
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(301, 5, generator=generator, dtype=F64), torch.randint(0, 3, (301,), generator=generator))
    start = {k: torch.randn(s, generator=generator, dtype=F64) for k, s in {"A": (5, 4), "B": (4, 3)}.items()}
    train = dif.Samples(network, data, batch_size=64)
    group = torch.arange(301) % 2 == 0
    problem = dif.Problem(
        train.mean() + dif.ridge(0.1), [train.mean(where=group) <= 0.5, train.mean(where=~group) <= 0.5]
    )
    alone = dif.Solution(problem, start, [0.3, 0.2])
    V = torch.randn(32, 6, generator=generator, dtype=F64)
    products, hessian = alone.curvature.product(V), alone.hessian
    with dif.sharded():
        seen.clear()
        shared = dif.Solution(problem, start, [0.3, 0.2])
        assert max(seen) <= 64
        close(shared.J, alone.J, "gradients")
        seen.clear()
        close(shared.curvature.product(V), products, "products")
        assert sum(seen) < 1.2 * 301 / world, seen
        close(shared.hessian, hessian, "Hessian")

    # a certified solution, by its linear maps, with a binding constraint: fit and scores
    samples, fair, _ = fair_logistic()
    before = dif.fit(fair, zeros(), show_progress=False)
    expected = dif.DirectionalInfluence(before).scores(samples, samples.remove_each(), show_progress=False)
    with dif.sharded():
        after = dif.fit(fair, zeros(), show_progress=False)
        again = dif.Solution(fair, before.params, before.lam)
        found = dif.DirectionalInfluence(again).scores(samples, samples.remove_each(), show_progress=False)
    close(after.theta, before.theta, "fit")
    close(found.values, expected.values, "scores")

    # the same to the bit in all processes
    mine = torch.cat([found.values.reshape(-1), after.theta, hessian.reshape(-1)])
    others = [torch.empty_like(mine) for _ in range(world)]
    processes.all_gather(others, mine)
    assert all(torch.equal(mine, other) for other in others)

    with dif.sharded():
        try:
            dif.DirectionalInfluence(before).scores(samples, samples.remove_each(), out="scores.npy")
        except dif.InvalidInputError as error:
            assert "all processes would write the same file" in str(error)  # noqa: PT017

    # more processes than samples
    few = dif.Problem(dif.Samples(network, tuple(t[:1] for t in data)).mean() + dif.ridge(0.1))
    whole = dif.Solution(few, start)
    with dif.sharded():
        part = dif.Solution(few, start)
        close(part.J, whole.J, "one sample")
        close(part.hessian, whole.hessian, "Hessian of one sample")
    processes.destroy_process_group()
    print("all equal", rank, flush=True)
    os._exit(0)  # torch's own teardown aborts at times


if __name__ == "__main__":
    main()
