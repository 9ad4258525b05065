"""What was found about a model, to keep, to show and to send: one JSON file, and one HTML file that stands alone."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dif
from dif.analyses.verdict import Verdict
from dif.errors import InvalidInputError
from dif.estimators.agreement import Agreement
from dif.estimators.influence import Influence
from dif.optimality.active_set import Margin
from dif.optimality.certificate import BAD, GOOD, NOTE, Certificate
from dif.optimality.targets import Targets
from dif.report.description import Description
from dif.runtime.atomic_file import written

_FORMAT = "dif report 2"
_MOST = 1000  # samples listed
_PICTURED = 300  # of them with their images
_LARGEST = 4_000_000  # bytes of what the page says about samples
_BARS = 41  # of the histogram
_ROUNDING = 1e-13  # relative to the target, or to the losses
_SIGN = {GOOD: "✓", BAD: "✗"}


@dataclass(frozen=True)
class Report:
    """Everything as plain numbers and words; `save` and `load` as JSON, `write_html` for reading."""

    title: str
    target: str
    value: float  # of the target at the solution
    estimator: str
    certificate: dict[str, Any]
    total: int  # samples scored
    histogram: dict[str, list[float]]
    by_group: list[dict[str, Any]]
    terms: list[str]
    samples: list[dict[str, Any]]  # the most influential ones
    run: dict[str, str]
    mark: str  # of the solution and the target
    loss: bool  # whether the target is a loss, so that to raise it is to harm
    assessment: dict[str, Any] | None  # what error is to be expected of the scores
    unanswered: tuple[int, str] | None  # how many removals have no answer, and why the first has none
    kinked: str  # what is not smooth about the target
    verdict: dict[str, str]  # whether they can be trusted
    agreement: dict[str, Any] | None = None

    @classmethod
    def of(
        cls, told: Description, target: str, scores: Influence, parts: Influence, listed: Sequence[int], command: str,
        margins: Sequence[Margin | None] | None = None,
    ) -> Report:  # fmt: skip
        """From the scores of all samples, and for those listed the parts by term.

        Args:
            told: The user's description.
            target: Its name.
            scores: (n, 1), one row per sample.
            parts: One row per sample listed, one column per term.
            listed: Which samples are shown.
            command: What was run.
            margins: What removals move the constraints by, for the certificate.
        """
        solution = told.solution
        column = scores.values[:, 0].double()
        why = scores.diagnostics.get("unanswered", {})
        features, errors = told.feature(listed), scores.expected_error
        samples = [
            {
                "index": i,
                "name": told.name(i),
                "group": told.group(i),
                "score": _number(column[i]),
                "loss": _number(told.losses[told.train.name][i]),
                "losses": {name: _number(values[i]) for name, values in told.losses.items()},
                "expected_error": _number(errors[i]),
                "why": why.get(scores.perturbations[i], ""),  # there is no score
                "parts": [_number(x) for x in parts.values[k]] if k < len(parts) else [],
                "features": features[k],
                "image": _picture(told.image(i)) if k < _PICTURED else None,
            }
            for k, i in enumerate(listed)
        ]
        made = cls(
            title=told.path.stem,
            target=target,
            value=float(Targets(told.targets[target], solution).values(solution.theta)[0]),
            estimator=scores.estimator,
            certificate=Certificate.of(solution, margins).to_dict(),
            total=len(column),
            histogram=_histogram(column),
            by_group=_by_group(told, column),
            terms=list(parts.targets),
            samples=samples,
            run=_circumstances(command),
            mark=fingerprint(told, target),
            loss=told.is_loss(told.targets[target]),
            assessment=_assessment(scores),
            unanswered=scores.unanswered,
            kinked="; ".join(map(str, Targets(told.targets[target], solution).kinks(solution.theta))),
            verdict={},
        )
        return replace(made, verdict=made._judged())

    def with_actual(self, indices: Sequence[int], actual: Influence, command: str) -> Report:
        """With the changes found by retraining without some of the samples."""
        failed = actual.diagnostics["failed"]
        found = zip(indices, actual.perturbations, actual.values[:, 0].tolist(), strict=True)
        moved = {i: {"actual": _number(value), "failed": failed.get(label, "")} for i, label, value in found}
        samples = [one | moved.get(one["index"], {}) for one in self.samples]
        known = [one for one in samples if one.get("actual") is not None and one["score"] is not None]
        both = [torch.tensor([one[key] for one in known], dtype=torch.float64) for key in ("score", "actual")]
        agreement = None
        if len(known) > 1 and not self.negligible:
            agreement = {key: _number(value) for key, value in asdict(Agreement.of(*both)).items()} | {"n": len(known)}
        run = self.run | {"retrained by": command}
        made = replace(self, samples=samples, agreement=agreement, run=run)
        return replace(made, verdict=made._judged())

    def _judged(self) -> dict[str, str]:
        """The verdict on what is known."""
        known = [one for one in self.samples if one.get("actual") is not None and one["score"] is not None]
        retrained = None
        if known:
            predicted, actual = (np.array([one[key] for one in known]) for key in ("score", "actual"))
            size, off = (float(np.linalg.norm(x)) for x in (actual, predicted - actual))
            wrong = int((np.sign(predicted) != np.sign(actual)).sum())
            error = off / size if size else float(off > 0)
            retrained = {"n": len(known), "relative_error": error, "wrong_signs": wrong}
        found = Verdict.of(self.certificate, self.assessment, retrained, self.unanswered, self.kinked)
        if self.certificate["holds"] and self.negligible and not self.kinked:
            found = Verdict(NOTE, f"No sample changes {self.target} by more than rounding does: nothing is ranked.")
        return asdict(found)

    @property
    def negligible(self) -> bool:
        """Whether no score is larger than what rounding makes of the target."""
        largest = max((abs(one["score"]) for one in self.samples if one["score"] is not None), default=0.0)
        losses = [abs(one["loss"]) for one in self.samples if one["loss"] is not None]
        return largest <= _ROUNDING * max(abs(self.value), float(np.mean(losses)) if losses else 0.0)

    @property
    def remarks(self) -> list[str]:
        """What a reader of the ranking must know."""
        said = []
        if self.negligible:
            said.append(
                f"No sample changes {self.target} by more than rounding does (relative {_ROUNDING:g}): the order of "
                "the ranking means nothing."
            )
        bare = sum(short != full for short, full in zip(self._paged, self.samples, strict=False))
        if bare or len(self.samples) > _MOST:
            said.append(
                f"The page lists {min(len(self.samples), _MOST)} of {len(self.samples)} samples, {bare} of them "
                "without features and images, to stay small; report.json has all."
            )
        for key, words in (("why", "could not be answered"), ("failed", "could not be retrained")):
            missing = [one for one in self.samples if one.get(key)]
            if missing:
                said.append(f"{len(missing)} {words}, first {missing[0]['name']}: {missing[0][key]}")
        return said

    def save(self, path: str | os.PathLike[str]) -> None:
        """As JSON, complete or not at all."""
        with written(path) as file:
            file.write((json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, allow_nan=False) + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """What `save` wrote."""
        try:
            said = json.loads(Path(path).read_text("utf-8"))
            if said.pop("format") != _FORMAT:
                raise ValueError("another format")
            made = cls(**said)
            made._page()  # whatever is missing shows here
            return made
        except FileNotFoundError:
            raise
        except Exception as error:
            raise InvalidInputError(
                f"report file {os.fspath(path)!r}",
                measured=f"{type(error).__name__}: {error}",
                threshold=f"a file of format {_FORMAT!r}",
                meaning="It was not written by `dif score`, is damaged, or comes from another version.",
                cure="Score again.",
            ) from error

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """One file that needs nothing beside it."""
        with written(path) as file:
            file.write(self._page().encode())

    def _page(self) -> str:
        page = files("dif") / "report" / "page"
        return Template((page / "report.html").read_text("utf-8")).substitute(
            style=(page / "report.css").read_text("utf-8"),
            script=(page / "report.js").read_text("utf-8"),
            data=_harmless(json.dumps(asdict(self) | {"samples": self._paged}, allow_nan=False, ensure_ascii=False)),
            title=html.escape(f"{self.title}: influence on {self.target}"),
            heading=html.escape(self.title),
            verdict=self._verdict(),
            summary=self._summary(),
            findings=self._findings(),
            constraints=self._constraints(),
            run="".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in self.run.items()),
        )

    @cached_property
    def _paged(self) -> list[dict[str, Any]]:
        """The samples that the page lists, the first ones with all that is known of them, as many as it can carry."""
        listed, left = [], _LARGEST
        for one in self.samples[:_MOST]:
            size = len(json.dumps(one, ensure_ascii=False).encode())
            bare = one | {"features": {}, "image": None}
            listed.append(one if size <= left else bare)
            left -= size if size <= left else 0
        return listed

    def _verdict(self) -> str:
        sign, cure = self.verdict["sign"], self.verdict["cure"]
        more = f" <span class=cure>{html.escape(cure)}</span>" if cure else ""
        return (
            f'<p class="verdict {html.escape(sign)}"><span class=sign aria-hidden=true>{_SIGN.get(sign, "!")}</span> '
            f"<strong>{html.escape(self.verdict['words']).replace(' %', '&nbsp;%')}</strong>{more}</p>"
        )

    def _summary(self) -> str:
        target = f"<b>{html.escape(self.target)}</b>"
        words = f"{self.total} training samples, each scored by how {target} would change without it "
        words += f"({html.escape(self.estimator)}). Now it is {self.value:.6g}. "
        if self.agreement is not None and None not in self.agreement.values():
            words += (
                f"{self.agreement['n']} removals were also retrained: r = {self.agreement['pearson']:.4f}, "
                f"slope {self.agreement['slope']:.3f}."
            )
        return words + "".join(f"</p><p>{html.escape(one)}" for one in self.remarks)

    def _findings(self) -> str:
        pieces = []
        for one in self.certificate["findings"]:
            cure = f" <span class=cure>{html.escape(one['cure'])}</span>" if one["cure"] else ""
            pieces.append(
                f'<li class="{html.escape(one["verdict"])}"><span class=sign aria-hidden=true>'
                f"{_SIGN.get(one['verdict'], '!')}</span><div><b>{html.escape(one['what'])}</b> "
                f"{html.escape(one['meaning'])}{cure}"
                f"<div class=measured>{html.escape(one['measured'])}</div></div></li>"
            )
        return "".join(pieces)

    def _constraints(self) -> str:
        rows = self.certificate["constraints"]
        if not rows:
            return "<p>None: this is an unconstrained problem.</p>"
        body = "".join(
            f'<tr><th scope=row>{html.escape(one["name"])}</th><td><span class="state {html.escape(one["state"])}">'
            f"{html.escape(one['state'])}</span>{' (uncertain)' if one['uncertain'] else ''}</td>"
            f"<td class=number>{one['slack']:.3g}</td><td class=number>{one['multiplier']:.4g}</td>"
            f"<td class=number>{_move(one['largest'])}</td><td class=number>{_move(one['median'])}</td></tr>"
            for one in rows
        )
        words = ("constraint", "state", "slack", "multiplier λ", "one removal moves it by at most", "in the median")
        head = "".join(f"<th scope=col>{word}</th>" for word in words)
        head = f"<tr>{head}</tr>"
        return f"<div class=wide><table class=plain><thead>{head}</thead><tbody>{body}</tbody></table></div>"


def fingerprint(told: Description, target: str) -> str:
    """Of what a report is about and what it shows: where it differs, scores are of another model or question."""
    at, program = told.solution, told.solution.program
    targets = Targets(told.targets[target], at)
    numbers = (
        at.theta,
        at.lam,
        at.f,
        program.tau,
        program.kinds.equal,
        targets.values(at.theta),
        *told.losses.values(),
    )
    shown = (target, targets.names, told.train.name, told.names, told.groups, told.features)
    seen = hashlib.sha256(repr(shown).encode())
    for part in numbers:
        seen.update(part.detach().cpu().contiguous().numpy().tobytes())
    return seen.hexdigest()[:32]


def shown(scores: Influence, top: int) -> list[int]:
    """Which samples a report lists: the most influential, at least `top` and as many as are quickly looked through."""
    return [one.index for one in scores.top(max(top, min(_MOST, len(scores))))]


def _number(x: Any) -> float | None:
    value = float(x)
    return value if np.isfinite(value) else None  # JSON knows no NaN


def _move(size: float | None) -> str:
    return "—" if size is None else f"{size:.2g}"


def _assessment(scores: Influence) -> dict[str, Any] | None:
    found = scores.diagnostics.get("assessment")
    if found is None:
        return None
    pooled = found["pooled"]
    return found | {"errors": [_number(x) for x in found["errors"]], "pooled": pooled and min(pooled, 1e300)}


def _picture(pixels: Tensor | None) -> dict[str, Any] | None:
    if pixels is None:
        return None
    grey = pixels.dim() == 2
    data = base64.b64encode(pixels.contiguous().numpy().tobytes()).decode()
    return {"height": pixels.shape[0], "width": pixels.shape[1], "channels": 1 if grey else 3, "data": data}


def _histogram(column: Tensor) -> dict[str, list[float]]:
    finite = column[torch.isfinite(column)].numpy()
    counts, edges = np.histogram(finite, bins=_BARS) if len(finite) else (np.zeros(0), np.zeros(0))
    return {"counts": [float(c) for c in counts], "edges": [float(e) for e in edges]}


def _by_group(told: Description, column: Tensor) -> list[dict[str, Any]]:
    if told.groups is None:
        return []
    found: dict[str, list[float]] = {}
    for i, value in enumerate(column.tolist()):
        if np.isfinite(value):
            found.setdefault(str(told.group(i)), []).append(value)
    return [
        {"group": name, "samples": len(values), "sum": float(np.sum(values)), "size": float(np.mean(np.abs(values)))}
        for name, values in sorted(found.items())
    ]


def _circumstances(command: str) -> dict[str, str]:
    return {
        "command": command,
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "dif": dif.__version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "seed": str(torch.initial_seed()),
    }


def _harmless(text: str) -> str:
    """JSON inside a script element: nothing in it can end the element or begin another."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
