"""The scores of many perturbations, their names and their file."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dif.derivatives.program import Targets
from dif.errors import InvalidInputError, count_words, few
from dif.optimality.solution import Solution
from dif.problem.perturbation import Perturbation
from dif.problem.term import Term
from dif.results.change import Agreement
from dif.results.selection import find_column, find_rows, match_labels, pick_diagnostics
from dif.results.text import MOST_TARGETS, Ranked, format_html, format_summary
from dif.runtime.archive import read_archive, write_archive
from dif.runtime.inputs import check_count, check_instance, expect_path
from dif.runtime.score_array import is_filled_in_chunks, read_values

_TIMES = ("datetime64", "timedelta64", "period")  # kinds of labels that JSON holds as text


def describe_index(index: Any) -> dict[str, Any]:
    """Return the labels of an index, and the name and dtype of each of its levels, as JSON can hold them."""
    labels = index.tolist() if hasattr(index, "tolist") else list(index)
    dtypes = list(index.dtypes) if hasattr(index, "levels") else [getattr(index, "dtype", "object")]
    levels = zip(getattr(index, "names", [None]), dtypes, strict=True)
    about = {"index": labels, "levels": [[name, str(dtype)] for name, dtype in levels]}
    return json.loads(json.dumps(about, default=str))  # dates become text


def restore_index(about: dict[str, Any]) -> Any:
    """Return the index that `describe_index` described; a tuple of labels without pandas, None where there is none."""
    if about.get("index") is None:
        return None
    labels = tuple(tuple(label) if isinstance(label, list) else label for label in about["index"])  # of a MultiIndex
    try:
        import pandas
    except ImportError:
        return labels
    columns = [labels] if len(about["levels"]) == 1 else zip(*labels, strict=True)
    levels = []
    for column, (name, dtype) in zip(columns, about["levels"], strict=True):
        level = pandas.Index(list(column), tupleize_cols=False, name=name)
        levels.append(level.astype(dtype) if dtype.startswith(_TIMES) else level)  # read from their text
    return levels[0] if len(levels) == 1 else pandas.MultiIndex.from_arrays(levels)


_LISTED = 3  # samples of a sum, or coefficients of a linear function, that a name lists


def distinguish_targets(names: Sequence[str], terms: Sequence[Term]) -> tuple[str, ...]:
    """Return the names of targets, those that are the same made different.

    A name that dif made up gets the samples or coefficients of its term. Names that are still the same are refused.

    Args:
        names: Name of each target.
        terms: The targets; where some have several rows, there are fewer terms than names.
    """
    count = Counter(names)
    if len(names) == len(terms):
        names = [
            f"{name} ({parts})" if count[name] > 1 and term.name is None and (parts := _list_parts(term)) else name
            for name, term in zip(names, terms, strict=True)
        ]
    name, most = Counter(names).most_common(1)[0]
    if most > 1:
        raise InvalidInputError(
            f"Each target must have a name of its own, but {most} are called {name!r}; pass a dict of targets by name, "
            'such as {"group a": term, "group b": other}.'
        )
    return tuple(names)


def _list_parts(term: Term) -> str:
    """Return the first samples of each sum in a term, and the first coefficients of each linear function."""
    lists = [[str(i) for i in torch.nonzero(part.weights).reshape(-1).tolist()] for _, part in term.sums]
    for _, function in term.functions:
        if function.matrix is not None:
            row = function.matrix.reshape(-1)
            used = torch.nonzero(row).reshape(-1).tolist()
            lists.append([f"{float(row[i]):g}·{function.of or 'θ'}[{i}]" for i in used])
    return "; ".join(", ".join(each[:_LISTED]) + (", …" if len(each) > _LISTED else "") for each in lists)


_LABELS = 4096  # labels in one part of a description, to save memory
TRUSTED = 0.25  # estimated relative error of all predictions together up to which they count as trusted


@dataclass(frozen=True, eq=False)
class Origin:
    """What scores were computed from, and by which estimator."""

    solution: Solution
    targets: Targets
    estimator: Any = None


@dataclass(frozen=True, eq=False)
class Influence:
    """The change of T targets under P perturbations, each carried out in full, in the target's own units.

    A score of +0.02 on a test loss says that the perturbation raises that loss by about 0.02.

    Select some of the perturbations by position, label or mask: `influence[3:10]`, `influence["train[17]"]`,
    `influence[mask]`. If the data were a pandas DataFrame, its index is shown, and text in it is a label, too.
    """

    stored: Tensor  # (P, T), on the CPU or on disk
    carried_out: Perturbation | tuple[str, ...]  # the perturbations; their labels where read from a file
    targets: tuple[str, ...]
    estimator: str
    diagnostics: dict[str, Any] = field(default_factory=dict)
    saved_index: Any = None  # the index where read from a file
    origin: Origin | None = None  # None where read from a file, and for scores that belong to no solution

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def values(self) -> Tensor:
        """All scores, (P, T). A .npy file is read as needed."""
        return self.stored[:]

    def rows(self, begin: int, end: int) -> Tensor:
        """Return the scores of consecutive perturbations, (end − begin, T)."""
        return self.stored[begin:end]

    def __getitem__(self, key: Any) -> Influence:
        """Select perturbations by an integer, a slice, a mask, a label, or a list of integers or labels.

        The result keeps targets, labels and diagnostics; what these say of the whole computation, such as `trusted`,
        stays as it is.
        """
        rows = find_rows(key, self.perturbations, self.index)
        labels, index = tuple(self.perturbations[row] for row in rows), self.saved_index
        given = self.carried_out.pick(rows) if isinstance(self.carried_out, Perturbation) else labels
        if index is not None:
            index = tuple(index[row] for row in rows) if isinstance(index, tuple) else index[rows]
        about = pick_diagnostics(self.diagnostics, rows, labels)
        return replace(self, stored=self.stored[rows], carried_out=given, diagnostics=about, saved_index=index)

    @property
    def expected_error(self) -> Tensor:
        """Estimated relative error of each perturbation's scores, (P,); NaN where it was not assessed."""
        errors = torch.full((len(self),), float("nan"), dtype=torch.float64)
        assessment = self.diagnostics.get("assessment")
        if assessment is not None:
            errors[assessment["rows"]] = torch.tensor(assessment["errors"], dtype=torch.float64)
        return errors

    @property
    def trusted(self) -> bool | None:
        """Whether the scores on every target that moves can be trusted, see `trusted_by_target`; None if unassessed.

        A target that does not move to first order, such as a loss at its minimum, counts only if no other moves.
        """
        assessment = self.diagnostics.get("assessment")
        return None if assessment is None else assessment["pooled"] is not None and assessment["pooled"] <= TRUSTED

    @property
    def trusted_by_target(self) -> dict[str, bool | None]:
        """Whether the estimated relative error of the assessed scores is at most 25 %, by target.

        None if none was assessed. The targets of Samples are in one unit, and are judged together.
        """
        assessment = self.diagnostics.get("assessment")
        if assessment is None:
            return dict.fromkeys(self.targets)
        pooled = assessment["by_target"] or [float("inf")] * len(self.targets)
        return {name: error <= TRUSTED for name, error in zip(self.targets, pooled, strict=True)}

    @property
    def unanswered(self) -> tuple[int, str] | None:
        """Number of perturbations without an answer, and the reason of the first; None where all have one."""
        reasons = self.diagnostics.get("unanswered")
        return (len(reasons), next(iter(reasons.values()))) if reasons else None

    @cached_property
    def perturbations(self) -> tuple[str, ...]:
        """Label of each perturbation."""
        return tuple(self.carried_out.labels) if isinstance(self.carried_out, Perturbation) else self.carried_out

    @cached_property
    def index(self) -> Any:
        """Label of each removed sample in the index of the user's DataFrame; None without a DataFrame."""
        return self.carried_out.index if isinstance(self.carried_out, Perturbation) else self.saved_index

    def top(self, k: int = 10, target: int | str = 0) -> list[Ranked]:
        """Return the k perturbations that change a target most, in absolute value, largest first.

        Those without an answer (NaN) come before them: what they change is not known to be small.
        """
        return self._rank(k, target)

    def proponents(self, k: int = 10, target: int | str = 0) -> list[Ranked]:
        """Return the k perturbations that raise a target most, those that do not raise it left out.

        Of a loss, these removals are of the samples that helped most: the loss is higher without them.
        """
        return self._rank(k, target, sign=1)

    def opponents(self, k: int = 10, target: int | str = 0) -> list[Ranked]:
        """Return the k perturbations that lower a target most, those that do not lower it left out.

        Of a loss, these removals are of the samples that harmed most: the loss is lower without them.
        """
        return self._rank(k, target, sign=-1)

    def _rank(self, k: int, target: int | str, sign: int = 0) -> list[Ranked]:
        """Return the k largest scores on a target: of this sign only, or by absolute value, where NaN come first."""
        check_count(k, "k")
        position = find_column(target, self.targets)
        if position is None:
            raise InvalidInputError(
                f"`target` must be a number from 0 to {len(self.targets) - 1} or one of the names "
                f"{few(self.targets)}, not {target!r}."
            )
        column = self.stored[:, position]
        size = sign * column if sign else column.abs()
        order = torch.argsort(size, descending=True, stable=True)  # NaN count as largest
        order = (order[size[order] > 0] if sign else order)[:k].tolist()
        names = [None] * len(order) if self.index is None else [self.index[i] for i in order]
        return [Ranked(i, self.perturbations[i], float(column[i]), name) for i, name in zip(order, names, strict=True)]

    def compare(self, other: Influence) -> Agreement:
        """Measure the agreement with the scores of another estimator (for example `Retraining`).

        Perturbations and targets are matched by label. One of the two may have scored fewer perturbations, such as the
        top of the ranking, or fewer targets; these are then compared.
        """
        check_instance(other, Influence, "other", cure="score the same perturbations and targets with both estimators")
        pairs = (self.perturbations, other.perturbations), (self.targets, other.targets)
        rows, columns = (match_labels(*pair) for pair in pairs)
        if self.perturbations == other.perturbations:
            rows = list(range(len(self))), list(range(len(other)))  # even where two of them have one label
        if rows is None or columns is None:
            shared, both = (len(set(mine) & set(others)) for mine, others in pairs)
            alike = any(len(set(names)) < len(names) for names in (self.targets, other.targets))
            reason = f"they share {count_words(shared, 'perturbation')} and {count_words(both, 'target')}"
            reason = "two targets have the same name" if alike else reason
            raise InvalidInputError(
                "The perturbations of one Influence must be among those of the other, and likewise the targets, but of "
                f"{len(self)} × {len(self.targets)} and {len(other)} × {len(other.targets)} scores {reason}; score the "
                "same perturbations and targets with both estimators."
            )
        return Agreement.of(self.values[rows[0]][:, columns[0]], other.values[rows[1]][:, columns[1]])

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with one row per perturbation and one column per target.

        Its index is that of the user's data, where these were a DataFrame and single samples are removed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError('to_frame needs pandas: pip install "directional-influence[pandas]"') from error
        index = pandas.Index(self.perturbations, name="perturbation") if self.index is None else self.index
        return pandas.DataFrame(self.values.numpy(), index=index, columns=list(self.targets))

    def metrics(self) -> dict[str, float]:
        """Return a few numbers about the scores and the solution, for experiment trackers such as MLflow."""
        values = self.values
        sizes = values[torch.isfinite(values)].abs()
        numbers = {
            "perturbations": float(len(self)),
            "unanswered": float(values.numel() - len(sizes)),
            "largest": float(sizes.max()) if len(sizes) else 0.0,
            "mean_size": float(sizes.mean()) if len(sizes) else 0.0,
            "kkt_residual": max(self.diagnostics.get("kkt", {"": 0.0}).values()),
        }
        for name in ("curvature", "licq", "smallest_margin", "damping", "solver_residual"):
            value = self.diagnostics.get(name)
            if isinstance(value, int | float) and np.isfinite(value):
                numbers[name] = float(value)
        return numbers

    def summary(self, k: int = 5) -> str:
        """Return a readable summary: whether to trust the scores, their size, and the k largest for each target."""
        check_count(k, "k")
        tops = [self.top(k, t) for t in range(min(len(self.targets), MOST_TARGETS))]
        return format_summary(repr(self), self._trust(), self.targets, self.values, tops)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: whether to trust the scores, and the largest on the first target."""
        return format_html(repr(self), self._trust(), self.targets, self.values, self.top() if self.targets else [])

    def _trust(self) -> str:
        """Return one sentence about how far the scores can be trusted; empty if none was assessed."""
        assessment, text = self.diagnostics.get("assessment"), ""
        if assessment is not None and assessment["pooled"] is None:
            text = f"NOT trusted: no error could be estimated ({assessment['failed']})."
        elif assessment is not None:
            moves = assessment.get("moves", [True] * len(self.targets))
            verdicts = list(zip(self.trusted_by_target.items(), moves, strict=True))
            still = [name for (name, good), moved in verdicts if not good and not moved and any(moves)]
            bad = [name for (name, good), _ in verdicts if not good and name not in still]
            some = f" ({few(bad)}; the other targets are trusted)" if len(bad) < len(self.targets) else ""
            verdict = f"NOT trusted{some}" if bad else "Trusted"
            text = f"{verdict}: the estimated relative error is {assessment['pooled']:.2g}."
            text += f" To first order {few(still)} does not move; its scores are not trusted." if still else ""
        if self.unanswered:
            text = f"{self.unanswered[0]} without an answer (NaN): {self.unanswered[1].rstrip('.')}. {text}"
        return text.strip()

    def plot(self, ax: Any = None, k: int = 15, target: int | str = 0, names: Sequence[str] | None = None) -> Any:
        """Draw the k largest scores on a target as bars, on new axes if `ax` is None; return the axes."""
        from dif.report.plots import ranking

        return ranking(self, ax, k, target, names)

    def report(
        self, path: str | os.PathLike[str], *, features: Any = None, names: Any = None, groups: Any = None,
        images: Any = None, title: str = "Influence", retrained: Influence | None = None,
    ) -> None:  # fmt: skip
        """Write one HTML file about these scores; it works offline. `dif.report.write_report` explains the arguments.

        Raises:
            InvalidInputError: Where the scores were read from a file; `write_report` takes the solution, too.
        """
        from dif.report.builder import write_report

        write_report(
            path, self, features=features, names=names, groups=groups, images=images, title=title, retrained=retrained
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all to one file (npz, no pickle); an interrupted write leaves the old file as it is."""
        head, *parts = self.describe()
        labels = [label for part in parts for label in part["perturbations"]]
        write_archive(path, "influence", {"values": self.values}, {**head, "perturbations": labels})

    def describe(self) -> Iterator[dict[str, Any]]:
        """Yield everything but the values in parts that JSON can hold, so that a million labels need little memory."""
        about = {"estimator": self.estimator, "diagnostics": self.diagnostics, "targets": list(self.targets)}
        yield about if self.index is None else about | describe_index(self.index)
        given = self.carried_out
        for begin in range(0, len(given), _LABELS):
            chunk = given[begin : min(begin + _LABELS, len(given))]
            yield {"perturbations": list(chunk.labels if isinstance(chunk, Perturbation) else chunk)}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Influence:
        """Read a file that `save` or `scores(..., out=path)` wrote.

        The latter stays on disk and is read as needed. It may be read while scoring still fills it: rows to come are
        NaN, and `diagnostics["rows"]` is the number of finished rows.
        """
        if is_filled_in_chunks(expect_path(path)):
            values, (about, *parts), rows = read_values(path)
            labels, more = [label for part in parts for label in part["perturbations"]], {"rows": rows}
        else:
            arrays, about = read_archive(path, "influence")
            values, labels, more = torch.from_numpy(arrays["values"]), about["perturbations"], {}
        diagnostics, index = {**about["diagnostics"], **more}, restore_index(about)
        return cls(values, tuple(labels), tuple(about["targets"]), about["estimator"], diagnostics, index)

    def __repr__(self) -> str:
        size = f"{count_words(len(self), 'perturbation')} × {count_words(len(self.targets), 'target')}"
        return f"Influence({self.estimator}: {size})"
