"""The file of a solution: θ̄, λ̄ and the fingerprint of the problem that they solve."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dif.derivatives.fingerprint import fingerprint_program
from dif.derivatives.program import Program
from dif.errors import InvalidInputError
from dif.problem.parameters import Parameters
from dif.problem.problem import Problem
from dif.runtime.atomic_file import open_atomically

_FORMAT = "dif solution 1"  # name and version of the file format
_MOST_ENTRIES = 3  # parameters that an error names


def write_solution(path: str | os.PathLike[str], program: Program, theta: Tensor, lam: Tensor, tol: float) -> None:
    """Write an npz file without pickle; an interrupted write leaves the old file as it is."""
    fingerprint = fingerprint_program(program).hex()
    if fingerprint != fingerprint_program(program).hex():
        raise InvalidInputError(
            "A loss or function of the problem refers to an object that cannot be inspected.",
            "Everything that a problem refers to must be code, tensors, or objects made of them.",
            "The file would name a problem that can never be recognised again.",
            "Take that object (an open file, a lock, a compiled function) out of the loss, or save solution.params "
            "with torch.save.",
        )
    about = json.dumps({**_describe(program), "problem": fingerprint, "tol": tol})
    with open_atomically(path) as file:
        np.savez(file, theta=theta.cpu().numpy(), lam=lam.cpu().numpy(), about=np.array(about))


def read_solution(
    path: str | os.PathLike[str], problem: Problem, parameters: Parameters, theta: Tensor
) -> tuple[Program, Tensor, Tensor, float]:
    """Return the compiled problem, and θ̄, λ̄ and the tolerance of a file, which must be a solution of this problem.

    The parameters are compared first: with others, the losses of the problem may fail.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"There is no solution file {os.fspath(path)!r}.")
    try:
        with np.load(path, allow_pickle=False) as file:
            solved, lam = (torch.as_tensor(file[name]) for name in ("theta", "lam"))
            about = json.loads(str(file["about"]))
        stored = {key: about[key] for key in ("format", "params", "dtype", "constraints")}
        layout = [_name_entry(name, shape) for name, shape in about["params"]]
        fingerprint, tol = about["problem"], float(about["tol"])
    except Exception as error:
        raise InvalidInputError(
            f"The solution file {os.fspath(path)!r} cannot be read ({type(error).__name__}: {error}).",
            f"It must have the format {_FORMAT!r}.",
            "It was not written by Solution.save, is damaged, or comes from a newer version.",
            "Save the solution again, or fit the problem.",
        ) from error
    _check_parameters(path, parameters, layout, about["dtype"])
    program = Program.of(problem, parameters, theta)
    wanted = _describe(program)
    different = [f"{key} {stored[key]}, not {wanted[key]}" for key in wanted if stored[key] != wanted[key]]
    if not different and fingerprint != fingerprint_program(program).hex():
        different = ["the same parameters and constraints, but other data, weights, bounds or code"]
    if different:
        raise InvalidInputError(
            f"The solution file {os.fspath(path)!r} belongs to another problem: it has {'; '.join(different)}.",
            "It must have been saved from a solution of this very problem.",
            "Parameters that solve one problem do not solve another.",
            "State the problem as when it was saved, or fit this one: dif.fit(problem, params).",
        )
    return program, solved.to(parameters.device, parameters.dtype), lam.to(parameters.device, parameters.dtype), tol


def _check_parameters(path: str | os.PathLike[str], parameters: Parameters, layout: list[str], dtype: str) -> None:
    """Refuse parameters of other names, shapes or dtype than those in the file."""
    given = [_name_entry(name, shape) for name, shape in zip(parameters.names, parameters.shapes, strict=True)]
    if (given, _name_dtype(parameters)) == (layout, dtype):
        return
    found, kept = ([entry for entry in one if entry not in other] for one, other in ((given, layout), (layout, given)))
    if found or kept:
        words = f"they have {_list(found)}, and the file has {_list(kept)}"
    elif given != layout:
        words = "they have the same entries in another order"
    else:
        words = f"they have dtype {_name_dtype(parameters)}, and the file has {dtype}"
    raise InvalidInputError(
        f"`params` differ from the parameters in the solution file {os.fspath(path)!r}: {words}.",
        "They must have the names, shapes and dtype of those that were saved.",
        "The file is about another model, or `params` are.",
        "Pass the parameters of the model that was saved; their values do not matter.",
    )


def _name_entry(name: str, shape: Iterable[int]) -> str:
    return f"{name} of shape {tuple(shape)}"


def _list(entries: list[str]) -> str:
    """Return the first entries as text."""
    more = len(entries) - _MOST_ENTRIES
    return (", ".join(entries[:_MOST_ENTRIES]) + (f" and {more} more" if more > 0 else "")) or "nothing else"


def _name_dtype(parameters: Parameters) -> str:
    return str(parameters.dtype).removeprefix("torch.")


def _describe(program: Program) -> dict[str, Any]:
    """Return what can be compared in words between a file and a program."""
    parameters = program.parameters
    layout = [[name, list(shape)] for name, shape in zip(parameters.names, parameters.shapes, strict=True)]
    names = list(program.names)
    return {"format": _FORMAT, "params": layout, "dtype": _name_dtype(parameters), "constraints": names}
