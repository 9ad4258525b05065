"""The Hessian of a solution, assembled where it is too expensive to be assembled by default."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

import dif
from dif.derivatives.fingerprint import encode_tensor, fingerprint_program, hash_all
from dif.runtime.archive import read_archive, write_archive
from dif.runtime.inputs import expect_folder
from dif.runtime.work import progress

_COLUMNS = 128  # columns per file: seconds of work, where all columns take minutes
_KIND = "columns of a Hessian"  # of file


def assemble(solution: dif.Solution, keep: Path | None = None, *, show_progress: bool = True) -> dif.Solution:
    """Return the solution with its Hessian assembled, however long that takes; every solve is then quick.

    What is assembled are ∇²pₖ(θ̄) of the parts of the rows f = C·p, of which any Σⱼ μⱼ∇²fⱼ is a sum. Each costs as many
    Hessian-vector products as there are parameters, over the samples of that part. In `keep`, a folder, finished
    columns are kept: a later call for the same solution continues from there.
    """
    other = dif.Solution.of_program(solution.program, solution.theta, solution.lam, solution.tol)
    rows, theta, d = solution.program.rows, solution.theta, solution.theta.numel()
    folder = None if keep is None else expect_folder(keep, "keep")
    name = "" if folder is None else hash_all((encode_tensor(theta), fingerprint_program(solution.program))).hex()[:16]
    count, samples = rows.C.shape[1], sum(len(table.U) for table in rows.tables)
    parts, identity = theta.new_zeros((count, d, d)), torch.eye(d).to(theta)
    with progress("Hessian", count * d, show_progress) as report:
        for k, unit in enumerate(torch.eye(count).to(theta)):
            for begin in range(0, d, _COLUMNS):
                columns = slice(begin, begin + _COLUMNS)
                file = None if folder is None or k >= samples else folder / f"{name}-{k}-{begin}.npz"
                found = None if file is None else _read_columns(file)
                if found is None:
                    found = rows.hessian_products(theta, unit, identity[:, columns])
                    if file is not None:
                        write_archive(file, _KIND, {"columns": found}, {"name": file.name})
                parts[k, :, columns] = found.to(theta)
                report(k * d + min(d, begin + _COLUMNS))
    other.part_hessians = 0.5 * (parts + parts.mT)
    return other


def _read_columns(file: Path) -> Tensor | None:
    """Return the columns of a Hessian in a file; None if it is missing or damaged."""
    with suppress(FileNotFoundError, dif.InvalidInputError):
        return torch.from_numpy(read_archive(file, _KIND, name=file.name)[0]["columns"])
