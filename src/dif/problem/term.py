"""Terms (weighted sums of sample losses and smooth functions) and the constraints made by comparing them."""

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
    everyone: bool  # whether it is over all samples, so that an added sample belongs to it
    words: str  # description, such as "mean of train"


class Expression(ABC):
    """The algebra of Terms and Functions: sums, differences, scaling, and comparisons that make Constraints."""

    __array_ufunc__ = None  # numpy arrays on the left use our reflected operators
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let `tensor + term` and `tensor >= term` reach our reflected operators."""
        return NotImplemented

    @abstractmethod
    def as_term(self) -> Term:
        """Return this expression as a Term."""

    def named(self, name: str) -> Term:
        """Return the same Term with a name, which results and reports show where the Term is a target."""
        return replace(self.as_term(), name=name)

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
                f"A Term can be multiplied by one number, not by {type(factor).__name__}. Products of Terms are not "
                "sums over samples. For a smooth function of θ use dif.Function."
            )
        return _combine(Term(), float(number), self.as_term())

    __rmul__ = __mul__

    def __truediv__(self, factor: object) -> Term:
        number = _number(factor)
        if number is None or number.dim() > 0:
            return NotImplemented
        if float(number) == 0:
            raise InvalidInputError(
                "A Term was divided by 0.",
                "The divisor must not be 0.",
                "A Term divided by 0 is not defined.",
                "Divide by the number of samples or groups.",
            )
        return self * (1.0 / float(number))

    def __le__(self, other: object) -> Constraint:
        return _constraint(self, other, Kind.AT_MOST)

    def __ge__(self, other: object) -> Constraint:
        return _constraint(self, other, Kind.AT_MOST, negated=True)

    def __eq__(self, other: object) -> Constraint:  # type: ignore[override]
        return _constraint(self, other, Kind.EQUAL)

    def __lt__(self, other: object) -> Constraint:
        raise TypeError("Strict inequalities have no minimiser on the boundary. Write <= or >= instead.")

    __gt__ = __lt__


@dataclass(frozen=True, eq=False, repr=False)
class Term(Expression):
    """Σ c·(sum over samples) + Σ c·(function of θ) + constant; one row, or several where a Function has several."""

    sums: tuple[tuple[float, SampleSum], ...] = ()
    functions: tuple[tuple[float, Function], ...] = ()
    constant: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    name: str | None = None  # lost where the Term becomes part of another

    def as_term(self) -> Term:
        """Return itself."""
        return self

    @property
    def label(self) -> str:
        """Its name; without one, what it consists of."""
        return self._formula() if self.name is None else self.name

    def __repr__(self) -> str:
        return f"Term({self._formula()})" if self.name is None else f"Term({self.name}: {self._formula()})"

    def _formula(self) -> str:
        summands = [(c, s.words) for c, s in self.sums] + [(c, f.name) for c, f in self.functions]
        text = " + ".join(name if c == 1.0 else f"{c:g}·{name}" for c, name in summands)
        shown = f"{float(self.constant):g}" if self.constant.dim() == 0 else f"<{self.constant.numel()} constants>"
        if text and bool((self.constant != 0).any()):
            text += f" + {shown}"
        return text or shown


@dataclass(frozen=True, eq=False, repr=False)
class Function(Expression):
    """A smooth function of the parameters only: `fn(params)` → a scalar, or a vector for several rows."""

    fn: Callable[[Any], Tensor]
    name: str = "function"
    ridge: float | None = None  # c of ½c‖θ‖², or None; a ridge does not count as a use of a parameter
    matrix: Tensor | None = None  # the constant derivative of a linear function
    of: str | None = None  # name of the tensor that the matrix multiplies; None means flat θ
    fallbacks: set[str] = field(default_factory=set, init=False)  # what torch could not do with it; see `Samples`

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise InvalidInputError(
                f"`fn` of Function {self.name!r} is of type {type(self.fn).__name__}.",
                "It must be a callable fn(params).",
                "A Function is evaluated at many parameters.",
                "Pass a function of the params; numbers can be added to Terms directly.",
            )

    def as_term(self) -> Term:
        """Return a Term of one summand."""
        return Term(functions=((1.0, self),))

    def __repr__(self) -> str:
        return f"Function({self.name})"


@dataclass(frozen=True, eq=False)
class Constraint:
    """One constraint, with one or several rows; made by comparing Terms, `a <= b`, `a >= b`, `a == b`.

    `>=` is stored negated, so that every multiplier of an inequality is ≥ 0 with L = f₀ + Σ λⱼ(fⱼ − τⱼ).
    """

    term: Term  # f, without constant
    tau: Tensor  # () or (rows,)
    kind: Kind
    negated: bool = False
    name: str | None = None

    @property
    def known_rows(self) -> int | None:
        """Number of rows, where it does not depend on the parameters' layout; None where it does."""
        rows = [self.tau.numel()] if self.tau.dim() else []
        for _, f in self.term.functions:
            if f.matrix is None and f.ridge is None:
                return None
            rows.append(1 if f.matrix is None or f.matrix.dim() == 1 else len(f.matrix))
        return max(rows, default=1)

    def named(self, name: str) -> Constraint:
        """Return the same constraint with a name, which is shown by `active`, Δλ and reports."""
        return replace(self, name=name)

    def shift(self, dtau: float | Tensor) -> Perturbation:
        """Return a perturbation that adds dtau (one number, or one per row) to the right-hand side as written.

        For `a <= b` a positive dtau loosens the constraint, for `a >= b` it tightens it.
        """
        shift = as_numbers(dtau, "the shift of a bound").clone()
        if not bool(torch.isfinite(shift).all()) or shift.dim() > 1:
            raise InvalidInputError(
                f"The shift of a bound is {dtau!r}.",
                "It must be one finite number, or one per row.",
                "The bound moves by this much at ε = 1.",
                "Pass a number in the constraint's own units.",
            )
        written = f"{float(shift):+g}" if shift.dim() == 0 else f"{shift.numel()} values"
        return Perturbation(((1.0, Shift(self, -shift if self.negated else shift, written)),))

    def __bool__(self) -> bool:
        raise TypeError(
            "A Constraint has no truth value, because it states a condition on θ. Write 0 <= t <= 1 as two "
            "constraints, and compare Terms by `is`."
        )

    def __repr__(self) -> str:
        bound = f"{float(self.tau):g}" if self.tau.dim() == 0 else f"<{self.tau.numel()} bounds>"
        title = f"{self.name}: " if self.name else ""
        return f"Constraint({title}{self.term!r} {self.kind.value} {bound}{', written >=' if self.negated else ''})"


def linear(A: Any, of: str | None = None, name: str = "linear") -> Function:
    """Return the function A·θ, with one row for each row of A.

    Args:
        A: Coefficients, (d,) or (rows, d).
        of: Name of the tensor that A multiplies; None means flat θ, in the order of the params.
        name: Shown in labels and reports.

    Raises:
        InvalidInputError: Where A is not a finite vector or matrix.

    >>> budget = linear([[1.0, 1.0, 1.0]]) == 1.0
    """
    matrix = as_tensor(A, "`A` of linear(A)", torch.float64).clone()
    if matrix.dim() not in (1, 2) or matrix.numel() == 0 or not bool(torch.isfinite(matrix).all()):
        infinite = int((~torch.isfinite(matrix)).sum())
        raise InvalidInputError(
            f"`A` of linear(A) has shape {tuple(matrix.shape)}; {infinite} of {matrix.numel()} entries are not finite.",
            "It must be finite, with shape (d,) or (rows, d).",
            "A·θ must be a number or a vector of rows.",
            "Pass one row of coefficients per constraint.",
        )

    def value(params: Mapping[str, Tensor]) -> Tensor:
        if of is not None and of not in params:
            raise InvalidInputError(
                f"In linear(A, of={of!r}) there is no parameter {of!r}.",
                f"`of` must be one of {', '.join(params)}.",
                "The tensor that A multiplies is not among the params.",
                "Use one of those names, or of=None for flat θ.",
            )
        tensors = list(params.values()) if of is None else [params[of]]
        sizes = [t.numel() for t in tensors]
        if sum(sizes) != matrix.shape[-1]:
            raise InvalidInputError(
                f"`A` of linear(A) has {matrix.shape[-1]} columns.",
                f"It must have {sum(sizes)}, the number of scalars in {of or 'the params'}.",
                "Each column multiplies one entry of θ.",
                "Give A one column per parameter, or name a tensor with of=.",
            )
        A_here = matrix.to(tensors[0])
        blocks = zip(torch.split(A_here, sizes, dim=-1), tensors, strict=True)
        products = [block @ t.reshape(-1) for block, t in blocks if bool((block != 0).any())]
        return sum(products[1:], products[0]) if products else A_here @ torch.cat([t.reshape(-1) for t in tensors])

    return Function(value, name=name, matrix=matrix, of=of)


def ridge(c: float) -> Function:
    """Return the function ½ c ‖θ‖²; c must be a finite number ≥ 0."""
    meaning = "½c‖θ‖² with c < 0 has no minimum."
    c = check_number(c, "the coefficient c of ridge(c)", zero=True, meaning=meaning, cure="Choose c ≥ 0.")

    def value(params: Mapping[str, Tensor]) -> Tensor:
        return 0.5 * c * torch.stack([(t * t).sum() for t in params.values()]).sum()

    return Function(value, name=f"ridge({c:g})", ridge=c)


def _number(value: object) -> Tensor | None:
    """Return a finite number or vector as a float64 tensor, or None for anything else."""
    if isinstance(value, Expression | str) or not (isinstance(value, Real | Tensor) or hasattr(value, "__len__")):
        return None
    number = as_numbers(value, "a number in a Term").clone()
    if number.dim() > 1 or not bool(torch.isfinite(number).all()):
        values = number.tolist() if number.numel() < 8 else f"an array of shape {tuple(number.shape)}"
        raise InvalidInputError(
            f"The number in a Term is {values}.",
            "It must be one finite number, or a vector of them.",
            "Bounds and factors must be finite.",
            "Leave a constraint out instead of giving it an infinite bound.",
        )
    return number


def _as_term(value: object) -> Term | None:
    """Return an expression or a number as a Term, or None for anything else."""
    if isinstance(value, Expression):
        return value.as_term()
    number = _number(value)
    return None if number is None else Term(constant=number)


def _combine(left: Term, sign: float, right: Term) -> Term:
    """Return left + sign · right with equal summands merged; coefficients that cancel up to rounding become 0."""

    def merge(left_parts: Any, right_parts: Any) -> dict[int, Any]:
        total = {id(part): (c, part) for c, part in left_parts}
        for c, part in right_parts:
            old = total.get(id(part), (0.0, part))[0]
            new = old + sign * c
            total[id(part)] = (0.0 if old and abs(new) < 1e-14 * abs(old) else new, part)
        return total

    sums, functions = merge(left.sums, right.sums), merge(left.functions, right.functions)
    return Term(tuple(sums.values()), tuple(functions.values()), left.constant + sign * right.constant)


def _constraint(left: Expression, other: object, kind: Kind, *, negated: bool = False) -> Constraint:
    """Build the constraint that compares two expressions; `negated` marks left >= other."""
    right = _as_term(other)
    if right is None:
        raise TypeError(f"A Term can be compared with a Term or a number, not with {type(other).__name__}.")
    difference = left - right
    if negated:
        difference = -difference
    return Constraint(Term(difference.sums, difference.functions), -difference.constant, kind, negated)
