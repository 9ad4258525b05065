"""The HTML page of one or several reports: one file that works offline and shows all data as text."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any

from dif.optimality.certificate import BAD, GOOD
from dif.report.numbers import format_number, format_percent
from dif.report.table import write_csv

_MAX_SAMPLES = 1000  # samples of a report that the page lists
_MAX_BYTES = 4_000_000  # size of the samples of all reports on the page, in bytes
_MAX_CSV = 400_000  # size of the CSV files of all reports on the page, in bytes; larger ones have no features
# How the page calls the state of a constraint; the words of experts are folded away
_STATE = {"binding": "limit reached", "weak": "limit just reached", "inactive": "limit not reached"}
_SIGN = {GOOD: "✓", BAD: "✗"}  # symbol of a verdict; "!" for the others
_HASH = 16  # characters of a hash that the head of the page shows
# What identifies a model, and how the page calls it
_MODEL = {"file": "model file", "file hash": "SHA-256 of the model file", "data": "SHA-256 of the data"}
# Words that a reader may not know, each with one sentence
_GLOSSARY = {
    "score": "The predicted change of the target if the model were trained again without this sample.",
    "DIF": "Directional influence function: predicts the score from the optimality conditions, with the constraints.",
    "retrained change": "The actual change of the target, found by training again without this sample.",
    "expected error": "How far the predictions are probably off, estimated from further steps of Newton's method.",
    "relative error": "The size of all errors together, divided by the size of all changes together.",
    "r (correlation)": "1 if predicted and retrained changes lie on a line, 0 if one says nothing about the other.",
    "slope": "By which factor predictions are too large (above 1) or too small (below 1).",
    "objective": "What training minimises: usually the mean loss, plus a penalty.",
    "constraint": "A condition that training must meet, such as a limit on the loss of a group.",
    "binding": "A constraint whose limit is reached and which shapes the model.",
    "weak": "A constraint whose limit is just reached, without shaping the model.",
    "inactive": "A constraint whose limit is not reached; it does not shape the model.",
    "slack": "How far the value of a constraint is from its limit.",
    "multiplier λ": "The price of a constraint: how much the objective falls per unit by which the limit is loosened.",
    "KKT residual": "How far the model is from the optimum under its constraints; 0 at the optimum.",
    "active set": "The constraints whose limit is reached.",
    "curvature": "How sharply the objective rises around the model; it must be positive for predictions to exist.",
    "SHA-256": "A fingerprint of a file or of data: if it is the same, so are they.",
}  # fmt: skip


def render(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return the page about reports, given as plain data, oldest first; the newest is shown first."""
    answers = [dict(report) for report in reversed(reports)]
    page = files("dif") / "report" / "page"
    newest = answers[0]
    shown = _list_samples(answers)
    return Template((page / "report.html").read_text("utf-8")).substitute(
        style=(page / "report.css").read_text("utf-8"),
        script=(page / "report.js").read_text("utf-8"),
        data=_escape_json([answer | {"samples": samples} for answer, samples in zip(answers, shown, strict=True)]),
        title=html.escape(f"{newest['title']}: influence on {', '.join(answer['target'] for answer in answers)}"),
        heading=html.escape(f"{newest['title']}: what each training sample does"),
        made=_format_made(newest),
        choices=_format_choices(answers),
        answers="".join(
            _format_answer(k, answer, not _is_same_model(answer, newest), len(samples), shortened)
            for k, (answer, samples, shortened) in enumerate(
                zip(answers, shown, map(_count_shortened, answers, shown), strict=True)
            )
        ),
        downloads="".join(
            _format_download(k, answer | {"samples": samples}, _MAX_CSV // len(answers))
            for k, (answer, samples) in enumerate(zip(answers, shown, strict=True))
        ),
        glossary=_format_list(_GLOSSARY),
        runs="".join(_wrap(k, f"<dl>{_format_run(answer)}</dl>") for k, answer in enumerate(answers)),
    )


def _list_samples(answers: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the samples of each report that the page lists; beyond _MAX_BYTES, without features and image."""
    lists = []
    for answer in answers:
        listed, room = [], _MAX_BYTES / len(answers)
        for sample in answer["samples"][:_MAX_SAMPLES]:
            size = len(json.dumps(sample, ensure_ascii=False).encode())
            fits = size <= room
            listed.append(sample if fits else sample | {"features": {}, "image": None})
            room -= size if fits else 0
        lists.append(listed)
    return lists


def _count_shortened(answer: Mapping[str, Any], listed: Sequence[Mapping[str, Any]]) -> int:
    return sum(shown != full for shown, full in zip(listed, answer["samples"], strict=False))


def _is_same_model(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one["model"].get(key) == other["model"].get(key) for key in ("file hash", "data", "solution"))


def _wrap(k: int, content: str, tag: str = "div") -> str:
    """Return an element that is shown while report k is open; without scripts all of them are shown."""
    return f'<{tag} class=answer data-answer="{k}">{content}</{tag}>'


def _format_made(answer: Mapping[str, Any]) -> str:
    """Return when and with what the newest report was made, in one line."""
    model = answer["model"]
    parts = [answer["run"]["when"], f"dif {answer['run']['dif']}"]
    if "file" in model:
        parts.append(f"model file {model['file']} ({model['file hash'][:_HASH]}…)")
    parts.append(f"data {model['data'][:_HASH]}…")
    return " · ".join(html.escape(part) for part in parts)


def _format_choices(answers: Sequence[Mapping[str, Any]]) -> str:
    """Return a button for each report, newest first; none if there is only one."""
    if len(answers) == 1:
        return ""
    buttons = "".join(
        f'<button type=button data-choice="{k}" aria-pressed={"true" if k == 0 else "false"}>'
        f"<span class=sign aria-hidden=true>{'!' if old else _SIGN.get(answer['verdict']['sign'], '!')}</span> "
        f"{html.escape(answer['target'])} <small>{html.escape(answer['estimator'])}{', earlier version' if old else ''}"
        "</small></button>"
        for k, (answer, old) in enumerate((answer, not _is_same_model(answer, answers[0])) for answer in answers)
    )
    return f'<nav class=choices aria-label="Targets"><span>What would change?</span>{buttons}</nav>'


def _format_answer(k: int, answer: Mapping[str, Any], outdated: bool, listed: int, shortened: int) -> str:
    """Return verdict, summary, constraints and checks of one report."""
    holds = answer["certificate"]["holds"]
    remarks = list(answer["remarks"])
    if shortened or listed < len(answer["samples"]):
        remarks.append(
            f"The page lists {listed} of {len(answer['samples'])} samples, {shortened} of them without features and "
            "images, to keep the file small; report.json has all of them."
        )
    old = (
        '<p class="verdict note"><span class=sign aria-hidden=true>!</span> <strong>This answer is about an earlier '
        "version of the model file or of the data.</strong> <span class=cure>Ask again to bring it up to date.</span>"
        "</p>"
    )
    content = (
        f"<h2>Can the predictions for {html.escape(answer['target'])} be trusted?</h2>"
        f"{old if outdated else ''}{_format_verdict(answer['verdict'])}<p>{_format_summary(answer)}</p>"
        + "".join(f"<p>{_format_text(remark)}</p>" for remark in remarks)
        + f"<h2>Constraints</h2>{_format_constraints(answer['certificate'])}"
        f"<details{'' if holds else ' open'}><summary>Checks of the solution, for experts</summary>"
        f"<ul class=findings>{_format_findings(answer['certificate'])}</ul>"
        f"{_format_margins(answer['certificate'])}</details>"
    )
    return _wrap(k, content, "section")


def _format_verdict(verdict: Mapping[str, str]) -> str:
    sign, cure = verdict["sign"], verdict["cure"]
    more = f" <span class=cure>{_format_text(cure)}</span>" if cure else ""
    return (
        f'<p class="verdict {html.escape(sign)}"><span class=sign aria-hidden=true>{_SIGN.get(sign, "!")}</span> '
        f"<strong>{_format_text(verdict['words']).replace(' %', '&nbsp;%')}</strong>{more}</p>"
    )


def _format_text(text: str) -> str:
    """Return sentences as HTML, with what stands in backquotes as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _format_summary(answer: Mapping[str, Any]) -> str:
    now = "" if answer["value"] is None else f" Its value now is {format_number(answer['value'])}."
    target = html.escape(answer["target"])
    text = (
        f"For each of {answer['total']} training samples, the score predicts how <b>{target}</b> would change if the "
        f"model were trained without it (method: {html.escape(answer['estimator'])}).{now}"
    )
    agreement = answer["agreement"]
    if agreement is not None and None not in agreement.values():
        text += (
            f" For {agreement['n']} samples this was done: correlation r = {format_number(agreement['pearson'])}, "
            f"slope {format_number(agreement['slope'])}, relative error {format_percent(agreement['relative_error'])}."
        )
    return text


def _format_constraints(certificate: Mapping[str, Any]) -> str:
    """Return the constraints with formula, value, limit and words."""
    if not certificate["constraints"]:
        return "<p>None: this is an unconstrained problem.</p>"
    rows = [
        {
            "constraint": f"{html.escape(row['name'])}"
            f'<span class="state {html.escape(row["state"])}">{html.escape(_describe_state(row))}</span>',
            "rule": html.escape(row["formula"]),
            "value": format_number(row["value"]),
            "limit": f"{html.escape(row['relation'])} {format_number(row['limit'])}",
            "in words": html.escape(row["words"]).replace(" %", "&nbsp;%"),
        }
        for row in certificate["constraints"]
    ]
    return _format_cards(rows, numbers=("value", "limit"))


def _describe_state(row: Mapping[str, Any]) -> str:
    if row["relation"] == "=":
        return "must be met exactly"
    return "violated" if row["slack"] < 0 else _STATE[row["state"]]


def _format_cards(rows: Sequence[Mapping[str, str]], numbers: Sequence[str]) -> str:
    """Return a table of cells by heading, the first of each row a name; on a phone each row becomes a card."""
    headings = list(rows[0])
    cell_of = {h: " class=number" if h in numbers else "" for h in headings}
    head = "".join(f"<th scope=col{cell_of[h]}>{h}</th>" for h in headings)
    body = "".join(
        f"<tr><th scope=row>{row[headings[0]]}</th>"
        + "".join(f'<td{cell_of[h]} data-label="{h}">{row[h]}</td>' for h in headings[1:])
        + "</tr>"
        for row in rows
    )
    return f"<table class=cards><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _format_findings(certificate: Mapping[str, Any]) -> str:
    items = []
    for finding in certificate["findings"]:
        cure = f" <span class=cure>{_format_text(finding['cure'])}</span>" if finding["cure"] else ""
        items.append(
            f'<li class="{html.escape(finding["verdict"])}"><span class=sign aria-hidden=true>'
            f"{_SIGN.get(finding['verdict'], '!')}</span><div><b>{html.escape(finding['what'])}</b> "
            f"{_format_text(finding['meaning'])}{cure}"
            f"<div class=measured>{html.escape(_unify(finding['measured']))}</div></div></li>"
        )
    return "".join(items)


def _unify(text: str) -> str:
    """Return a text with its numbers in scientific notation in the format of the report."""
    return re.sub(r"(?<![\w.])-?\d+(?:\.\d+)?e[+-]\d+", lambda found: format_number(float(found[0])), text)


def _format_margins(certificate: Mapping[str, Any]) -> str:
    """Return slack and multiplier of each constraint, and how much one removal changes them."""
    if not certificate["constraints"]:
        return ""
    rows = [
        {
            "constraint": html.escape(row["name"]),
            "state": f"{html.escape(row['state'])}{' (uncertain)' if row['uncertain'] else ''}",
            "slack": format_number(row["slack"]),
            "multiplier λ": format_number(row["multiplier"]),
            "largest change": format_number(row["largest"]),
            "median change": format_number(row["median"]),
        }
        for row in certificate["constraints"]
    ]
    words = "Change: by one removal, of the multiplier λ where the constraint binds, of the slack elsewhere."
    return f"<p>{words}</p>{_format_cards(rows, numbers=list(rows[0])[2:])}"


def _format_download(k: int, answer: Mapping[str, Any], room: int) -> str:
    """Return a link that downloads the listed samples of a report as CSV, without features if they take more room."""
    text = write_csv(answer)
    if len(text.encode()) > room:
        text = write_csv({**answer, "samples": [sample | {"features": {}} for sample in answer["samples"]]})
    data = base64.b64encode(("\ufeff" + text).encode()).decode()  # spreadsheets need the byte order mark
    name = html.escape(f"{answer['title']}-{answer['target']}.csv")
    link = f'<a class=csv download="{name}" href="data:text/csv;charset=utf-8;base64,{data}">Download as CSV</a>'
    return _wrap(k, link, "span")


def _format_run(answer: Mapping[str, Any]) -> str:
    model = {words: answer["model"][key] for key, words in _MODEL.items() if key in answer["model"]}
    return _format_list({**answer["run"], **model})


def _format_list(entries: Mapping[str, str]) -> str:
    return "".join(f"<dt>{html.escape(key)}</dt><dd>{html.escape(text)}</dd>" for key, text in entries.items())


def _escape_json(content: Any) -> str:
    """Return JSON for a script element, escaped so that it cannot end the element or start another."""
    text = json.dumps(content, allow_nan=False, ensure_ascii=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
