"""The report on a model: saved as one JSON file, shown as one HTML file that works offline."""

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
from dif.errors import InvalidInputError, count_words
from dif.estimators.agreement import Agreement
from dif.estimators.influence import Influence
from dif.optimality.active_set import Margin
from dif.optimality.certificate import BAD, GOOD, NOTE, Certificate
from dif.optimality.targets import Targets
from dif.report.description import Description
from dif.runtime.atomic_file import open_atomically

_FORMAT = "dif report 2"  # written to and expected in every report.json
_MAX_LISTED = 1000  # samples listed on the page
_MAX_IMAGES = 300  # listed samples with an image
_MAX_BYTES = 4_000_000  # size of the sample data on the page, in bytes
_BINS = 41  # bins of the histogram
_ROUNDING = 1e-13  # scores below this are rounding errors, relative to the target or to the mean loss
_SIGN = {GOOD: "✓", BAD: "✗"}  # symbol of a verdict; "!" for the others


@dataclass(frozen=True)
class Report:
    """Scores, certificate and verdict as plain numbers and text, saved as JSON and shown as HTML."""

    title: str
    target: str
    value: float  # value of the target at the solution
    estimator: str
    certificate: dict[str, Any]
    total: int  # number of samples that were scored
    histogram: dict[str, list[float]]
    by_group: list[dict[str, Any]]
    terms: list[str]
    samples: list[dict[str, Any]]  # the most influential samples, in order
    run: dict[str, str]
    mark: str  # fingerprint of the solution, the target and the displayed data
    loss: bool  # whether the target is a loss, so that a higher value is worse
    assessment: dict[str, Any] | None  # error estimate of the scores
    unanswered: tuple[int, str] | None  # how many removals have no score, and why the first has none
    kinked: str  # where the target is not smooth; empty if it is smooth
    verdict: dict[str, str]  # whether the scores can be trusted
    agreement: dict[str, Any] | None = None  # agreement of scores and retraining

    @classmethod
    def of(
        cls, description: Description, target: str, scores: Influence, parts: Influence, listed: Sequence[int],
        command: str, margins: Sequence[Margin | None] | None = None,
    ) -> Report:  # fmt: skip
        """Build the report from the scores of all samples.

        Args:
            description: What the user's file defines.
            target: Name of the target.
            scores: Scores of all samples, (n, 1).
            parts: Scores of the listed samples split by term, one column per term.
            listed: Indices of the samples that the report lists.
            command: The command line that was run.
            margins: How much removals change each constraint, for the certificate.
        """
        solution = description.solution
        column = scores.values[:, 0].double()
        reasons = scores.diagnostics.get("unanswered", {})
        features, errors = description.feature(listed), scores.expected_error
        samples = [
            {
                "index": i,
                "name": description.name(i),
                "group": description.group(i),
                "score": _number(column[i]),
                "loss": _number(description.losses[description.train.name][i]),
                "losses": {name: _number(values[i]) for name, values in description.losses.items()},
                "expected_error": _number(errors[i]),
                "why": reasons.get(scores.perturbations[i], ""),  # why it has no score
                "parts": [_number(x) for x in parts.values[k]] if k < len(parts) else [],
                "features": features[k],
                "image": _encode_image(description.image(i)) if k < _MAX_IMAGES else None,
            }
            for k, i in enumerate(listed)
        ]
        report = cls(
            title=description.path.stem,
            target=target,
            value=float(Targets(description.targets[target], solution).values(solution.theta)[0]),
            estimator=scores.estimator,
            certificate=Certificate.of(solution, margins).to_dict(),
            total=len(column),
            histogram=_bin_scores(column),
            by_group=_summarize_groups(description, column),
            terms=list(parts.targets),
            samples=samples,
            run=_describe_run(command),
            mark=fingerprint(description, target),
            loss=description.is_loss(description.targets[target]),
            assessment=_clean_assessment(scores),
            unanswered=scores.unanswered,
            kinked="; ".join(map(str, Targets(description.targets[target], solution).kinks(solution.theta))),
            verdict={},
        )
        return replace(report, verdict=report._judge())

    def with_actual(self, indices: Sequence[int], actual: Influence, command: str) -> Report:
        """Return the report with the changes that retraining without some of the samples gave."""
        failed = actual.diagnostics["failed"]
        rows = zip(indices, actual.perturbations, actual.values[:, 0].tolist(), strict=True)
        retrained = {i: {"actual": _number(value), "failed": failed.get(label, "")} for i, label, value in rows}
        samples = [sample | retrained.get(sample["index"], {}) for sample in self.samples]
        predicted, changes = _retrained_pairs(samples)
        agreement = None
        if len(predicted) > 1 and not self.negligible:
            measured = asdict(Agreement.of(torch.from_numpy(predicted), torch.from_numpy(changes)))
            agreement = {key: _number(value) for key, value in measured.items()} | {"n": len(predicted)}
        run = self.run | {"retraining command": command}
        report = replace(self, samples=samples, agreement=agreement, run=run)
        return replace(report, verdict=report._judge())

    def _judge(self) -> dict[str, str]:
        """Return the verdict on the scores, using the retrainings if there are any."""
        predicted, actual = _retrained_pairs(self.samples)
        retrained = None
        if len(predicted):
            size, off = (float(np.linalg.norm(x)) for x in (actual, predicted - actual))
            wrong = int((np.sign(predicted) != np.sign(actual)).sum())
            error = off / size if size else float(off > 0)
            retrained = {"n": len(predicted), "relative_error": error, "wrong_signs": wrong}
        verdict = Verdict.of(self.certificate, self.assessment, retrained, self.unanswered, self.kinked)
        if self.certificate["holds"] and self.negligible and not self.kinked:
            text = f"No sample changes {self.target} by more than rounding error, so the samples cannot be ranked."
            verdict = Verdict(NOTE, text)
        return asdict(verdict)

    @property
    def negligible(self) -> bool:
        """Whether all scores are as small as rounding errors of the target."""
        largest = max((abs(sample["score"]) for sample in self.samples if sample["score"] is not None), default=0.0)
        losses = [abs(sample["loss"]) for sample in self.samples if sample["loss"] is not None]
        return largest <= _ROUNDING * max(abs(self.value), float(np.mean(losses)) if losses else 0.0)

    @property
    def remarks(self) -> list[str]:
        """Notes that a reader of the ranking needs."""
        remarks = []
        if self.negligible:
            remarks.append(
                f"No sample changes {self.target} by more than rounding error (relative {_ROUNDING:g}), so the order "
                "of the ranking means nothing."
            )
        shortened = sum(shown != full for shown, full in zip(self._listed, self.samples, strict=False))
        if shortened or len(self.samples) > _MAX_LISTED:
            remarks.append(
                f"The page lists {min(len(self.samples), _MAX_LISTED)} of {len(self.samples)} samples, {shortened} of "
                "them without features and images, to keep the file small; report.json has all of them."
            )
        for key, problem in (("why", "cannot be scored"), ("failed", "could not be retrained")):
            missing = [sample for sample in self.samples if sample.get(key)]
            if missing:
                first, number = missing[0], count_words(len(missing), "sample")
                remarks.append(f"{number} {problem}. The first is {first['name']}: {first[key]}")
        return remarks

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON; the file is complete or not written at all."""
        with open_atomically(path) as file:
            file.write((json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, allow_nan=False) + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read a report that `save` wrote."""
        if not os.path.exists(path):
            raise FileNotFoundError(f"There is no report file {os.fspath(path)!r}. Write one with `dif score FILE`.")
        try:
            content = json.loads(Path(path).read_text("utf-8"))
            if content.pop("format") != _FORMAT:
                raise ValueError("another format")
            report = cls(**content)
            report._render()  # fails if anything is missing
            return report
        except Exception as error:
            raise InvalidInputError(
                f"Report file {os.fspath(path)!r} cannot be read ({type(error).__name__}: {error}).",
                f"It must be a file of format {_FORMAT!r}.",
                "It is damaged, was not written by `dif score`, or comes from another version.",
                "Run `dif score` again.",
            ) from error

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one HTML file that works offline."""
        with open_atomically(path) as file:
            file.write(self._render().encode())

    def _render(self) -> str:
        page = files("dif") / "report" / "page"
        return Template((page / "report.html").read_text("utf-8")).substitute(
            style=(page / "report.css").read_text("utf-8"),
            script=(page / "report.js").read_text("utf-8"),
            data=_escape_json(asdict(self) | {"samples": self._listed}),
            title=html.escape(f"{self.title}: influence on {self.target}"),
            heading=html.escape(self.title),
            verdict=self._format_verdict(),
            summary=self._format_summary(),
            findings=self._format_findings(),
            constraints=self._format_constraints(),
            run="".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in self.run.items()),
        )

    @cached_property
    def _listed(self) -> list[dict[str, Any]]:
        """Samples that the page lists; once _MAX_BYTES are used up, without features and image."""
        listed, room = [], _MAX_BYTES
        for sample in self.samples[:_MAX_LISTED]:
            size = len(json.dumps(sample, ensure_ascii=False).encode())
            fits = size <= room
            listed.append(sample if fits else sample | {"features": {}, "image": None})
            room -= size if fits else 0
        return listed

    def _format_verdict(self) -> str:
        sign, cure = self.verdict["sign"], self.verdict["cure"]
        more = f" <span class=cure>{html.escape(cure)}</span>" if cure else ""
        return (
            f'<p class="verdict {html.escape(sign)}"><span class=sign aria-hidden=true>{_SIGN.get(sign, "!")}</span> '
            f"<strong>{html.escape(self.verdict['words']).replace(' %', '&nbsp;%')}</strong>{more}</p>"
        )

    def _format_summary(self) -> str:
        text = (
            f"For each of {self.total} training samples, the score predicts how <b>{html.escape(self.target)}</b> "
            f"would change without it ({html.escape(self.estimator)}). Its value now is {self.value:.6g}. "
        )
        if self.agreement is not None and None not in self.agreement.values():
            text += (
                f"{self.agreement['n']} removals were also retrained: r = {self.agreement['pearson']:.4f}, "
                f"slope {self.agreement['slope']:.3f}."
            )
        return text + "".join(f"</p><p>{html.escape(remark)}" for remark in self.remarks)

    def _format_findings(self) -> str:
        items = []
        for finding in self.certificate["findings"]:
            cure = f" <span class=cure>{html.escape(finding['cure'])}</span>" if finding["cure"] else ""
            items.append(
                f'<li class="{html.escape(finding["verdict"])}"><span class=sign aria-hidden=true>'
                f"{_SIGN.get(finding['verdict'], '!')}</span><div><b>{html.escape(finding['what'])}</b> "
                f"{html.escape(finding['meaning'])}{cure}"
                f"<div class=measured>{html.escape(finding['measured'])}</div></div></li>"
            )
        return "".join(items)

    def _format_constraints(self) -> str:
        rows = self.certificate["constraints"]
        if not rows:
            return "<p>None: this is an unconstrained problem.</p>"
        body = "".join(
            f'<tr><th scope=row>{html.escape(row["name"])}</th><td><span class="state {html.escape(row["state"])}">'
            f"{html.escape(row['state'])}</span>{' (uncertain)' if row['uncertain'] else ''}</td>"
            f"<td class=number>{row['slack']:.3g}</td><td class=number>{row['multiplier']:.4g}</td>"
            f"<td class=number>{_format_change(row['largest'])}</td>"
            f"<td class=number>{_format_change(row['median'])}</td></tr>"
            for row in rows
        )
        headings = ("constraint", "state", "slack", "multiplier λ", "largest change by one removal", "median change")
        head = "".join(f"<th scope=col>{heading}</th>" for heading in headings)
        return (
            "<p>Change: of the multiplier λ where the constraint binds, of the slack elsewhere.</p>"
            f"<div class=wide><table class=plain><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )


def fingerprint(description: Description, target: str) -> str:
    """Return a hash of the solution, the target and the displayed data; if it differs, the report is out of date."""
    solution, program = description.solution, description.solution.program
    targets = Targets(description.targets[target], solution)
    numbers = (
        solution.theta,
        solution.lam,
        solution.f,
        program.tau,
        program.kinds.equal,
        targets.values(solution.theta),
        *description.losses.values(),
    )
    shown = (target, targets.names, description.train.name, description.names, description.groups, description.features)
    digest = hashlib.sha256(repr(shown).encode())
    for part in numbers:
        digest.update(part.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def select_samples(scores: Influence, top: int) -> list[int]:
    """Return the indices of the samples that a report lists: the most influential, `top` or _MAX_LISTED if larger."""
    return [entry.index for entry in scores.top(max(top, min(_MAX_LISTED, len(scores))))]


def _retrained_pairs(samples: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Return predicted and actual changes of the samples that have both."""
    known = [sample for sample in samples if sample.get("actual") is not None and sample["score"] is not None]
    predicted, actual = (np.array([sample[key] for sample in known], dtype=float) for key in ("score", "actual"))
    return predicted, actual


def _number(x: Any) -> float | None:
    value = float(x)
    return value if np.isfinite(value) else None  # JSON has no NaN


def _format_change(change: float | None) -> str:
    return "—" if change is None else f"{change:.2g}"


def _clean_assessment(scores: Influence) -> dict[str, Any] | None:
    """Return the error estimate of the scores with numbers that JSON can hold."""
    assessment = scores.diagnostics.get("assessment")
    if assessment is None:
        return None
    errors, pooled = [_number(x) for x in assessment["errors"]], assessment["pooled"]
    return assessment | {"errors": errors, "pooled": pooled and min(pooled, 1e300)}


def _encode_image(pixels: Tensor | None) -> dict[str, Any] | None:
    if pixels is None:
        return None
    grey = pixels.dim() == 2
    data = base64.b64encode(pixels.contiguous().numpy().tobytes()).decode()
    return {"height": pixels.shape[0], "width": pixels.shape[1], "channels": 1 if grey else 3, "data": data}


def _bin_scores(column: Tensor) -> dict[str, list[float]]:
    finite = column[torch.isfinite(column)].numpy()
    counts, edges = np.histogram(finite, bins=_BINS) if len(finite) else (np.zeros(0), np.zeros(0))
    return {"counts": [float(c) for c in counts], "edges": [float(e) for e in edges]}


def _summarize_groups(description: Description, column: Tensor) -> list[dict[str, Any]]:
    if description.groups is None:
        return []
    scores: dict[str, list[float]] = {}
    for i, value in enumerate(column.tolist()):
        if np.isfinite(value):
            scores.setdefault(str(description.group(i)), []).append(value)
    return [
        {"group": name, "samples": len(values), "sum": float(np.sum(values)), "size": float(np.mean(np.abs(values)))}
        for name, values in sorted(scores.items())
    ]


def _describe_run(command: str) -> dict[str, str]:
    return {
        "command": command,
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "dif": dif.__version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "seed": str(torch.initial_seed()),
    }


def _escape_json(content: dict[str, Any]) -> str:
    """Return JSON for a script element, escaped so that it cannot end the element or start another."""
    text = json.dumps(content, allow_nan=False, ensure_ascii=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
