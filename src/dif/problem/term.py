"""Terms (weighted sums of sample losses and smooth functions), and the constraints that comparing them makes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from dif.errors import InvalidInputError
from dif.problem.kinds import Kind
from dif.problem.perturbation import Perturbation, Shift
from dif.problem.sample_losses import SampleLosses
from dif.runtime.inputs import as_numbers, as_tensor, check_number


@dataclass(frozen=True, eq=False)
class SampleSum:
    """Σᵢ wᵢ ℓ(zᵢ, θ) over the samples of one `Samples`; `normalised` marks a mean, which a removal renormalises."""

    samples: SampleLosses
    weights: Tensor  # (n,) float64, on the CPU
    normalised: bool
    everyone: bool  # made over all samples, so an added one belongs to it
    words: str


class Expression(ABC):
    """The algebra that Terms and Functions share: + − scaling, and comparisons that make Constraints."""

    __array_ufunc__ = None  # numpy arrays on the left hand over to us
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let `tensor + term` and `tensor >= term` reach our reflected operators."""
        return NotImplemented

    @abstractmethod
    def as_term(self) -> Term:
        """This expression as a Term."""

    def __add__(self, other: object) -> Term:
        right = _as_term(other)
        return NotImplemented if right is None else _combine(self.as_term(), 1.0, right)

    __radd__ = __add__

    def __neg__(self) -> Term:
        return _combine(Term(), -1.0, self.as_term())

    def __sub__(self, other: object) -> Term:
        right = _as_term(other)
        return NotImplemented if right is None else _combine(self.as_term(), -1.0, right)

    def __rsub__(self, other: object) -> Term:
        left = _as_term(other)
        return NotImplemented if left is None else _combine(left, -1.0, self.as_term())

    def __mul__(self, factor: object) -> Term:
        number = _number(factor)
        if isinstance(factor, Expression) or number is None or number.dim() > 0:
            raise TypeError(
                f"a Term scales by one number, not by {type(factor).__name__}: products of Terms are not sums over "
                "samples. For a smooth function of θ use dif.Function."
            )
        return _combine(Term(), float(number), self.as_term())

    __rmul__ = __mul__

    def __truediv__(self, factor: object) -> Term:
        number = _number(factor)
        if number is None or number.dim() > 0:
            return NotImplemented
        if float(number) == 0:
            raise InvalidInputError(
                "divisor of a Term",
                measured=0,
                threshold="not 0",
                meaning="A Term divided by 0 is not defined.",
                cure="Divide by the number of samples or groups.",
            )
        return self * (1.0 / float(number))

    def __le__(self, other: object) -> Constraint:
        return _constraint(self, other, Kind.AT_MOST)

    def __ge__(self, other: object) -> Constraint:
        return _constraint(self, other, Kind.AT_MOST, negated=True)

    def __eq__(self, other: object) -> Constraint:  # type: ignore[override]
        return _constraint(self, other, Kind.EQUAL)

    def __lt__(self, other: object) -> Constraint:
        raise TypeError("strict inequalities have no minimiser on the boundary: write <= (or >=)")

    __gt__ = __lt__


@dataclass(frozen=True, eq=False, repr=False)
class Term(Expression):
    """Σ c·(sum over samples) + Σ c·(function of θ) + constant; one row, or several where a Function has several."""

    sums: tuple[tuple[float, SampleSum], ...] = ()
    functions: tuple[tuple[float, Function], ...] = ()
    constant: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def as_term(self) -> Term:
        """Itself."""
        return self

    def __repr__(self) -> str:
        spoken = [(c, s.words) for c, s in self.sums] + [(c, f.name) for c, f in self.functions]
        text = " + ".join(name if c == 1.0 else f"{c:g}·{name}" for c, name in spoken)
        shown = f"{float(self.constant):g}" if self.constant.dim() == 0 else f"<{self.constant.numel()} constants>"
        if text and bool((self.constant != 0).any()):
            text += f" + {shown}"
        return f"Term({text or shown})"


@dataclass(frozen=True, eq=False, repr=False)
class Function(Expression):
    """A smooth function of the parameters alone: `fn(params)` → a scalar, or a vector for several rows."""

    fn: Callable[[Any], Tensor]
    name: str = "function"
    ridge: float | None = None  # c of ½c‖θ‖²: touches every parameter, so it does not show that the model uses one
    matrix: Tensor | None = None  # of a linear function: its derivative, known in closed form
    of: str | None = None  # the tensor that the matrix multiplies; None: flat θ

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise InvalidInputError(
                f"fn of Function {self.name!r}",
                measured=type(self.fn).__name__,
                threshold="a callable fn(params)",
                meaning="A Function is evaluated at many parameters.",
                cure="Pass a function of the params; numbers can be added to Terms as they are.",
            )

    def as_term(self) -> Term:
        """As a Term of one summand."""
        return Term(functions=((1.0, self),))

    def __repr__(self) -> str:
        return f"Function({self.name})"


@dataclass(frozen=True, eq=False)
class Constraint:
    """One constraint, of one row or of several; made by comparing Terms, `a <= b`, `a >= b`, `a == b`.

    `>=` is stored negated, so that every multiplier of an inequality is ≥ 0 with L = f₀ + Σ λⱼ(fⱼ − τⱼ).
    """

    term: Term  # f, without constant
    tau: Tensor  # () or (rows,)
    kind: Kind
    negated: bool = False
    name: str | None = None

    def named(self, name: str) -> Constraint:
        """The same constraint under a name, shown by `active`, Δλ and reports."""
        return replace(self, name=name)

    def shift(self, dtau: float | Tensor) -> Perturbation:
        """Move the right-hand side as it was written by dtau (one number, or one per row).

        For `a <= b` a positive dtau loosens, for `a >= b` it tightens.
        """
        moved = as_numbers(dtau, "shift of a bound").clone()
        if not bool(torch.isfinite(moved).all()) or moved.dim() > 1:
            raise InvalidInputError(
                "shift of a bound",
                measured=dtau,
                threshold="one finite number, or one per row",
                meaning="The bound moves by this much at ε = 1.",
                cure="Pass a number in the constraint's own units.",
            )
        written = f"{float(moved):+g}" if moved.dim() == 0 else f"{moved.numel()} values"
        return Perturbation(((1.0, Shift(self, -moved if self.negated else moved, written)),))

    def __bool__(self) -> bool:
        raise TypeError(
            "a Constraint has no truth value: it states a condition on θ. Write 0 <= t <= 1 as two constraints, "
            "and compare Terms by `is`."
        )

    def __repr__(self) -> str:
        bound = f"{float(self.tau):g}" if self.tau.dim() == 0 else f"<{self.tau.numel()} bounds>"
        title = f"{self.name}: " if self.name else ""
        return f"Constraint({title}{self.term!r} {self.kind.value} {bound}{', written >=' if self.negated else ''})"


def linear(A: Any, of: str | None = None, name: str = "linear") -> Function:
    """A·θ, one row for each row of A; on flat θ in the params' order, or on the one tensor named `of`.

    >>> budget = linear([[1.0, 1.0, 1.0]]) == 1.0
    """
    matrix = as_tensor(A, "A of linear(A)", torch.float64).clone()
    if matrix.dim() not in (1, 2) or matrix.numel() == 0 or not bool(torch.isfinite(matrix).all()):
        raise InvalidInputError(
            "A of linear(A)",
            measured=f"shape {tuple(matrix.shape)}, {int((~torch.isfinite(matrix)).sum())} entries not finite",
            threshold="finite, (d,) or (rows, d)",
            meaning="A·θ must be a number or a vector of rows.",
            cure="Pass one row of coefficients per constraint.",
        )

    def value(params: Mapping[str, Tensor]) -> Tensor:
        if of is not None and of not in params:
            raise InvalidInputError(
                f"linear(A, of={of!r})",
                measured=f"no parameter {of!r}",
                threshold=f"one of {', '.join(params)}",
                meaning="The tensor that A multiplies is not among the params.",
                cure="Use one of those names, or of=None for flat θ.",
            )
        chosen = list(params.values()) if of is None else [params[of]]
        sizes = [t.numel() for t in chosen]
        if sum(sizes) != matrix.shape[-1]:
            raise InvalidInputError(
                "columns of A in linear(A)",
                measured=matrix.shape[-1],
                threshold=f"{sum(sizes)}, the number of scalars in {of or 'the params'}",
                meaning="Each column multiplies one entry of θ.",
                cure="Give A one column per parameter, or name a tensor with of=.",
            )
        A_here = matrix.to(chosen[0])
        pieces = zip(torch.split(A_here, sizes, dim=-1), chosen, strict=True)
        products = [block @ t.reshape(-1) for block, t in pieces if bool((block != 0).any())]
        return sum(products[1:], products[0]) if products else A_here @ torch.cat([t.reshape(-1) for t in chosen])

    return Function(value, name=name, matrix=matrix, of=of)


def ridge(c: float) -> Function:
    """½ c ‖θ‖²."""
    c = check_number(c, "c of ridge(c)", zero=True, meaning="½c‖θ‖² with c < 0 has no minimum.", cure="Choose c ≥ 0.")

    def value(params: Mapping[str, Tensor]) -> Tensor:
        return 0.5 * c * torch.stack([(t * t).sum() for t in params.values()]).sum()

    return Function(value, name=f"ridge({c:g})", ridge=c)


def _number(value: object) -> Tensor | None:
    """A finite number or vector as a float64 tensor, None for anything else."""
    if isinstance(value, Expression | str) or not (isinstance(value, Real | Tensor) or hasattr(value, "__len__")):
        return None
    number = as_numbers(value, "number in a Term").clone()
    if number.dim() > 1 or not bool(torch.isfinite(number).all()):
        raise InvalidInputError(
            "number in a Term",
            measured=number.tolist() if number.numel() < 8 else f"shape {tuple(number.shape)}",
            threshold="one finite number, or a vector of them",
            meaning="Bounds and factors must be finite.",
            cure="Leave a constraint out instead of giving it an infinite bound.",
        )
    return number


def _as_term(value: object) -> Term | None:
    if isinstance(value, Expression):
        return value.as_term()
    number = _number(value)
    return None if number is None else Term(constant=number)


def _combine(left: Term, sign: float, right: Term) -> Term:
    """Left + sign · right, equal summands merged; what cancels to rounding is 0."""

    def merged(mine: Any, others: Any) -> dict[int, Any]:
        total = {id(part): (c, part) for c, part in mine}
        for c, part in others:
            old = total.get(id(part), (0.0, part))[0]
            new = old + sign * c
            total[id(part)] = (0.0 if old and abs(new) < 1e-14 * abs(old) else new, part)
        return total

    sums, functions = merged(left.sums, right.sums), merged(left.functions, right.functions)
    return Term(tuple(sums.values()), tuple(functions.values()), left.constant + sign * right.constant)


def _constraint(left: Expression, other: object, kind: Kind, *, negated: bool = False) -> Constraint:
    right = _as_term(other)
    if right is None:
        raise TypeError(f"a Term compares with a Term or a number, not with {type(other).__name__}")
    difference = left - right
    if negated:
        difference = -difference
    return Constraint(Term(difference.sums, difference.functions), -difference.constant, kind, negated)
