"""The Hessian of each part of the rows at one θ, assembled some columns at a time and kept in a folder."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dif.derivatives.fingerprint import encode_tensor, fingerprint_program, hash_all
from dif.derivatives.program import Program
from dif.runtime.atomic_file import open_atomically
from dif.runtime.progress import progress

_COLUMNS = 128  # columns per file: seconds of work, where all columns take minutes


def assemble_parts(
    program: Program, theta: Tensor, keep: str | os.PathLike[str] | None = None, show_progress: bool = True
) -> Tensor:
    """Return ∇²pₖ(θ) of the parts of the rows f = C·p, (K, d, d).

    Any Σⱼ μⱼ∇²fⱼ(θ) is a sum of these. Each costs as many Hessian-vector products as there are parameters, over the
    samples of that part. With `keep`, a folder, finished columns are written there; a later call reads them.
    """
    rows, d = program.rows, theta.numel()
    folder = None if keep is None else Path(keep)
    name = ""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        name = hash_all((encode_tensor(theta), fingerprint_program(program))).hex()[:16]
    count, samples = rows.C.shape[1], sum(len(table.U) for table in rows.tables)
    parts, identity = theta.new_zeros((count, d, d)), torch.eye(d).to(theta)
    with progress("Hessian", count * d, show_progress) as report:
        for k, unit in enumerate(torch.eye(count).to(theta)):
            for begin in range(0, d, _COLUMNS):
                columns = slice(begin, begin + _COLUMNS)
                file = None if folder is None or k >= samples else folder / f"{name}-{k}-{begin}.npy"
                if file is not None and file.exists():
                    parts[k, :, columns] = torch.as_tensor(np.load(file, allow_pickle=False)).to(theta)
                else:
                    parts[k, :, columns] = rows.hessian_products(theta, unit, identity[:, columns])
                    if file is not None:
                        with open_atomically(file) as target:
                            np.save(target, parts[k, :, columns].cpu().numpy())
                report(k * d + min(d, begin + _COLUMNS))
    return 0.5 * (parts + parts.mT)
