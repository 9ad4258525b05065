"""Terms (weighted sums of sample losses and smooth functions), and constraints, made by comparing them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from dif.errors import InvalidInputError
from dif.problem.perturbation import Perturbation, Shift
from dif.runtime.inputs import as_numbers, as_tensor, check_callable, check_number

Samples = Any  # a dif.Samples, which makes terms


class Kind(Enum):
    """The kind of one constraint."""

    EQUAL = "=="
    AT_MOST = "<="

    @property
    def symbol(self) -> str:
        """Return the kind as one character of a formula."""
        return {"==": "=", "<=": "≤"}[self.value]


class Kinds:
    """The kinds of all rows: f = τ with any λ on equal rows; f ≤ τ, λ ≥ 0 and λ(f − τ) = 0 on the others.

    In the methods, c is f − τ, slack is τ − f and force is λ; slack and force may be scaled by their caller.

    Attributes:
        equal: Which rows are equalities, (m,) bool.
        one_sided: Rows that can switch between binding and inactive, (m,) bool.
    """

    def __init__(self, equal: Tensor) -> None:
        self.equal, self.one_sided = equal, ~equal

    @classmethod
    def of(cls, rows: Iterable[tuple[Kind, int]], device: torch.device) -> Kinds:
        """Build from the kind and the number of rows of each constraint."""
        is_equal = {Kind.EQUAL: True, Kind.AT_MOST: False}  # a kind that is not listed here is refused
        equal = [is_equal[kind] for kind, count in rows for _ in range(count)]
        return cls(torch.tensor(equal, dtype=torch.bool, device=device))

    def take(self, rows: Tensor) -> Kinds:
        """Return the kinds of some rows."""
        return Kinds(self.equal[rows])

    def project(self, lam: Tensor) -> Tensor:
        """Return the admissible multipliers nearest to λ, (..., m)."""
        return torch.where(self.equal, lam, lam.clamp(min=0))

    def violation(self, c: Tensor) -> Tensor:
        """Measure how far each row is from being met, (..., m)."""
        return torch.where(self.equal, c.abs(), c.clamp(min=0))

    def complementarity(self, slack: Tensor, force: Tensor) -> Tensor:
        """Measure how far each row is from λ(f − τ) = 0: min(slack, force); a negative force counts in full."""
        gap = torch.where(force < 0, -force, torch.minimum(slack.clamp(min=0), force))
        return torch.where(self.equal, torch.zeros_like(gap), gap)

    def inadmissible(self, lam: Tensor) -> Tensor:
        """Return which rows have a multiplier of the wrong sign, (..., m) bool."""
        return self.one_sided & (lam < 0)

    def at_bound(self, slack: Tensor, tolerance: float) -> Tensor:
        """Return which rows are active, (m,) bool: equal rows, and those with a slack of at most the tolerance."""
        return self.equal | (slack <= tolerance)

    def has_force(self, force: Tensor, tolerance: float = 0.0) -> Tensor:
        """Return which rows act on the solution, (..., m) bool: equal rows, and those with a force above the tolerance.

        Dropping one of these constraints would move the solution.
        """
        return self.equal | (force > tolerance)

    def penalty(self, c: Tensor, rho: float, k: float) -> tuple[Tensor, Tensor]:
        """Return the first two derivatives of the paper's penalty of each row: ½ρc² if equal, else k·max(c, 0)³."""
        over = c.clamp(min=0)
        return torch.where(self.equal, rho * c, 3 * k * over**2), torch.where(self.equal, rho, 6 * k * over)


@dataclass(frozen=True, eq=False)
class SampleSum:
    """Σᵢ wᵢ ℓ(zᵢ, θ) over the samples of one `Samples`; `normalised` marks a mean, which a removal renormalises."""

    samples: Samples
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
        return (-self).__add__(other)

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
            raise InvalidInputError("A Term cannot be divided by 0.")
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

    def __repr__(self) -> str:
        formula = replace(self, name=None).label
        return f"Term({formula})" if self.name is None else f"Term({self.name}: {formula})"

    @property
    def label(self) -> str:
        """Its name; without one, what it consists of."""
        if self.name is not None:
            return self.name
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
    kinks: dict[int, Any] = field(default_factory=dict, init=False)  # the last search for kinks; see `Samples`

    def __post_init__(self) -> None:
        check_callable(self.fn, "fn(params)", f"Function {self.name!r}")

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
    share: float | None = None  # of one of two groups, where the constraint is `of_smaller_group`

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

    def of_smaller_group(self) -> Constraint:
        """Return this constraint, mean of one group ≤ mean of two groups + bound, for whichever of them is smaller.

        With sizes N₁ and N₂, and N in all, the means differ by m₁ − m = N₂/N·(m₁ − m₂) and m₂ − m = −N₁/N·(m₁ − m₂).
        Where a perturbation makes group 1 the larger one, the bound is multiplied by N₂/N₁, so that it limits |m₂ − m|.
        """
        (_, group), (_, both) = self.term.sums
        return replace(self, share=float(both.weights[group.weights != 0].sum() / both.weights.sum()))

    def shift(self, dtau: float | Tensor) -> Perturbation:
        """Return a perturbation that adds dtau (one number, or one per row) to the right-hand side as written.

        For `a <= b` a positive dtau loosens the constraint, for `a >= b` it tightens it.
        """
        shift = as_numbers(dtau, "the shift of a bound").clone()
        if not bool(torch.isfinite(shift).all()) or shift.dim() > 1:
            raise InvalidInputError(f"The shift of a bound must be one finite number, or one per row, not {dtau!r}.")
        written = f"{float(shift):+g}" if shift.dim() == 0 else f"{shift.numel()} values"
        return Perturbation.of(Shift(self, -shift if self.negated else shift, written))

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

    Examples:
        >>> budget = linear([[1.0, 1.0, 1.0]]) == 1.0
    """
    matrix = as_tensor(A, "`A` of linear(A)", torch.float64).clone()
    if matrix.dim() not in (1, 2) or matrix.numel() == 0 or not bool(torch.isfinite(matrix).all()):
        infinite = int((~torch.isfinite(matrix)).sum())
        raise InvalidInputError(
            f"`A` of linear(A) must be finite, with shape (d,) or (rows, d); it has shape {tuple(matrix.shape)}, and "
            f"{infinite} of {matrix.numel()} entries are not finite."
        )

    def value(params: Mapping[str, Tensor]) -> Tensor:
        if of is not None and of not in params:
            raise InvalidInputError(f"`of` of linear(A, of={of!r}) must be one of {', '.join(params)}.")
        tensors = list(params.values()) if of is None else [params[of]]
        sizes = [t.numel() for t in tensors]
        if sum(sizes) != matrix.shape[-1]:
            raise InvalidInputError(
                f"`A` of linear(A) must have {sum(sizes)} columns, the number of scalars in {of or 'the params'}, "
                f"not {matrix.shape[-1]}."
            )
        A_here = matrix.to(tensors[0])
        blocks = zip(torch.split(A_here, sizes, dim=-1), tensors, strict=True)
        products = [block @ t.reshape(-1) for block, t in blocks if bool((block != 0).any())]
        return sum(products[1:], products[0]) if products else A_here @ torch.cat([t.reshape(-1) for t in tensors])

    return Function(value, name=name, matrix=matrix, of=of)


def ridge(c: float) -> Function:
    """Return the function ½ c ‖θ‖²; c must be a finite number ≥ 0."""
    c = check_number(c, "the coefficient c of ridge(c)", zero=True)

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
            f"The number in a Term must be finite, or a vector of finite numbers, not {values}; leave a constraint "
            "out instead of giving it an infinite bound."
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
    difference = -(left - right) if negated else left - right
    return Constraint(Term(difference.sums, difference.functions), -difference.constant, kind, negated)
