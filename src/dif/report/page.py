"""The HTML page of one or several reports: one file that works offline and shows all data as text."""

from __future__ import annotations

import base64
import csv
import hashlib
import html
import io
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any

from dif.optimality.judgement import BAD, GOOD
from dif.report.words import format_number, format_percent

MAX_SAMPLES = 1000  # samples that a report lists, if no more are asked for, and its page at most
_MAX_BYTES = 4_000_000  # size of the samples of all reports on the page, in bytes
_MAX_CSV = 400_000  # size of the CSV files of all reports on the page, in bytes; larger ones have no features
# How the page calls the state of a constraint; the words of experts are folded away
_STATE = {"binding": "limit reached", "weak": "limit just reached", "inactive": "limit not reached"}
_SIGN = {GOOD: "✓", BAD: "✗"}  # symbol of a verdict; "!" for the others
_HASH = 16  # characters of a hash that the head of the page shows
# What identifies a model, and how the page calls it
_MODEL = {"file": "model file", "file hash": "SHA-256 of the model file", "data": "SHA-256 of the data"}
_IDENTITY = ("file hash", "data", "solution")  # of these a model that is still the same has the same
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # beginnings of a cell that spreadsheets take for a formula


class Markup(str):
    """Text that is HTML already. All other text is escaped on its way into a page."""

    __slots__ = ()


def join(*parts: object) -> Markup:
    """Return parts one after the other as HTML: markup as it is, everything else escaped.

    >>> join("a < b", element("b", "&", title='"'))
    'a &lt; b<b title="&quot;">&amp;</b>'
    """
    return Markup("".join(part if isinstance(part, Markup) else html.escape(str(part)) for part in parts))


def element(tag: str, *parts: object, **attributes: object) -> Markup:
    """Return an element; "_" in the name of an attribute stands for "-", and `class_` for "class"."""
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"' for name, value in attributes.items()
    )
    return Markup(f"<{tag}{written}>{join(*parts)}</{tag}>")


def render(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return the page about reports, given as plain data, oldest first; the newest is shown first."""
    answers = [dict(report) for report in reversed(reports)]
    newest, page = answers[0], files("dif") / "report" / "page"
    shown = [answer | {"samples": _list_samples(answer, _MAX_BYTES / len(answers))} for answer in answers]
    outdated = [any(answer["model"].get(key) != newest["model"].get(key) for key in _IDENTITY) for answer in answers]
    parts: dict[str, object] = {
        "title": f"{newest['title']}: influence on {', '.join(answer['target'] for answer in answers)}",
        "heading": f"{newest['title']}: what each training sample does",
        "made": _describe_origin(newest),
        "choices": _format_choices(answers, outdated),
        "answers": join(*(_format_answer(k, *row) for k, row in enumerate(zip(answers, shown, outdated, strict=True)))),
        "downloads": join(*(_format_download(k, answer, _MAX_CSV // len(shown)) for k, answer in enumerate(shown))),
        "runs": join(*(_wrap(k, "div", _format_run(answer)) for k, answer in enumerate(answers))),
    }
    template, style, script = (Markup((page / f"report.{name}").read_text("utf-8")) for name in ("html", "css", "js"))
    parts |= {"style": style, "script": script, "data": _escape_json(shown)}
    parts |= {"style_hash": _hash_source(style), "script_hash": _hash_source(script)}
    return Template(template).substitute({name: join(part) for name, part in parts.items()})


def _hash_source(text: str) -> str:
    """Return the hash by which the policy of the page allows a script or a style, and no other."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _list_samples(answer: Mapping[str, Any], room: float) -> list[dict[str, Any]]:
    """Return the samples of a report that the page lists; beyond `room` bytes, without features and image."""
    listed = []
    for sample in answer["samples"][:MAX_SAMPLES]:
        size = len(json.dumps(sample, ensure_ascii=False).encode())
        listed.append(sample if size <= room else sample | {"features": {}, "image": None})
        room -= size if size <= room else 0
    return listed


def _wrap(k: int, tag: str, *parts: object) -> Markup:
    """Return an element that is shown while report k is open; without scripts all of them are shown."""
    return element(tag, *parts, class_="answer", data_answer=k)


def _format_sign(verdict: str) -> Markup:
    return element("span", _SIGN.get(verdict, "!"), class_="sign", aria_hidden="true")


def _format_text(text: str) -> Markup:
    """Return sentences as HTML, with what stands in backquotes as code, and no line break before "%"."""
    parts = re.split("`([^`]+)`", text.replace(" %", "\xa0%"))
    return join(*(element("code", part) if k % 2 else part for k, part in enumerate(parts)))


def _format_cure(cure: str) -> Markup:
    return join(" ", element("span", _format_text(cure), class_="cure")) if cure else join()


def _describe_origin(answer: Mapping[str, Any]) -> str:
    """Return when and with what the newest report was made, in one line."""
    model = answer["model"]
    parts = [answer["run"]["when"], f"dif {answer['run']['dif']}"]
    if "file" in model:
        parts.append(f"model file {model['file']} ({model['file hash'][:_HASH]}…)")
    return " · ".join([*parts, f"data {model['data'][:_HASH]}…"])


def _format_choices(answers: Sequence[Mapping[str, Any]], outdated: Sequence[bool]) -> Markup:
    """Return a button for each report, newest first; none if there is only one."""
    if len(answers) == 1:
        return join()
    buttons = [
        element(
            "button",
            _format_sign("old" if old else answer["verdict"]["sign"]),
            f" {answer['target']} ",
            element("small", answer["estimator"], ", earlier version" if old else ""),
            type="button",
            data_choice=k,
            aria_pressed="false" if k else "true",
        )
        for k, (answer, old) in enumerate(zip(answers, outdated, strict=True))
    ]
    return element("nav", element("span", "What would change?"), *buttons, class_="choices", aria_label="Targets")


def _format_answer(k: int, answer: Mapping[str, Any], shown: Mapping[str, Any], outdated: bool) -> Markup:
    """Return verdict, summary, constraints and checks of one report."""
    listed, everyone, certificate = shown["samples"], answer["samples"], answer["certificate"]
    shortened = sum(one != full for one, full in zip(listed, everyone, strict=False))
    remarks = list(answer["remarks"])
    if shortened or len(listed) < len(everyone):
        remarks.append(
            f"The page lists {len(listed)} of {len(everyone)} samples, {shortened} of them without features and "
            "images, to keep the file small; report.json has all of them."
        )
    old = {
        "sign": "note",
        "words": "This answer is about an earlier version of the model file or of the data.",
        "cure": "Ask again to bring it up to date.",
    }
    return _wrap(
        k,
        "section",
        element("h2", f"Can the predictions for {answer['target']} be trusted?"),
        _format_verdict(old) if outdated else "",
        _format_verdict(answer["verdict"]),
        element("p", *_summarize(answer)),
        *(element("p", _format_text(remark)) for remark in remarks),
        element("h2", "Constraints"),
        _format_constraints(certificate),
        element(
            "details",
            element("summary", "Checks of the solution, for experts"),
            element("ul", *map(_format_finding, certificate["findings"]), class_="findings"),
            _format_margins(certificate),
            **({} if certificate["holds"] else {"open": ""}),
        ),
    )


def _format_verdict(verdict: Mapping[str, str]) -> Markup:
    words = element("strong", _format_text(verdict["words"]))
    sign = verdict["sign"]
    return element("p", _format_sign(sign), " ", words, _format_cure(verdict["cure"]), class_=f"verdict {sign}")


def _summarize(answer: Mapping[str, Any]) -> list[object]:
    """Return what was predicted, by which method, and how it agrees with retraining; text and markup."""
    parts: list[object] = [
        f"For each of {answer['total']} training samples, the score predicts how ",
        element("b", answer["target"]),
        f" would change if the model were trained without it (method: {answer['estimator']}).",
    ]
    if answer["value"] is not None:
        parts.append(f" Its value now is {format_number(answer['value'])}.")
    agreement = answer["agreement"]
    if agreement is not None and None not in agreement.values():
        parts.append(
            f" For {agreement['n']} samples this was done: correlation r = {format_number(agreement['pearson'])}, "
            f"slope {format_number(agreement['slope'])}, relative error {format_percent(agreement['relative_error'])}."
        )
    return parts


def _format_constraints(certificate: Mapping[str, Any]) -> Markup:
    """Return the constraints with formula, value, limit and words."""
    if not certificate["constraints"]:
        return element("p", "None: this is an unconstrained problem.")
    rows = [
        {
            "constraint": join(row["name"], element("span", _describe_state(row), class_=f"state {row['state']}")),
            "rule": row["formula"],
            "value": format_number(row["value"]),
            "limit": f"{row['relation']} {format_number(row['limit'])}",
            "in words": _format_text(row["words"]),
        }
        for row in certificate["constraints"]
    ]
    return _format_cards(rows, numbers=("value", "limit"))


def _describe_state(row: Mapping[str, Any]) -> str:
    if row["relation"] == "=" and row["state"] != "violated":
        return "must be met exactly"
    return _STATE.get(row["state"], "violated")


def _format_cards(rows: Sequence[Mapping[str, str]], numbers: Sequence[str]) -> Markup:
    """Return a table of cells by heading, the first of each row a name; on a phone each row becomes a card."""
    first, *others = rows[0]
    cell_of = {h: {"class_": "number"} if h in numbers else {} for h in (first, *others)}
    head = element("tr", *(element("th", h, scope="col", **cell_of[h]) for h in (first, *others)))
    body = [
        element(
            "tr",
            element("th", row[first], scope="row"),
            *(element("td", row[h], data_label=h, **cell_of[h]) for h in others),
        )
        for row in rows
    ]
    return element("table", element("thead", head), element("tbody", *body), class_="cards")


def _format_finding(finding: Mapping[str, str]) -> Markup:
    words = element("b", finding["what"]), " ", _format_text(finding["meaning"]), _format_cure(finding["cure"])
    measured = element("div", _unify(finding["measured"]), class_="measured")
    return element("li", _format_sign(finding["verdict"]), element("div", *words, measured), class_=finding["verdict"])


def _unify(text: str) -> str:
    """Return a text with its numbers in scientific notation in the format of the report."""
    return re.sub(r"(?<![\w.])-?\d+(?:\.\d+)?e[+-]\d+", lambda found: format_number(float(found[0])), text)


def _format_margins(certificate: Mapping[str, Any]) -> Markup:
    """Return slack and multiplier of each constraint, and how much one removal changes them."""
    if not certificate["constraints"]:
        return join()
    numbers = {"slack": "slack", "multiplier λ": "multiplier", "largest change": "largest", "median change": "median"}
    rows = [
        {"constraint": row["name"], "state": f"{row['state']}{' (uncertain)' if row['uncertain'] else ''}"}
        | {heading: format_number(row[key]) for heading, key in numbers.items()}
        for row in certificate["constraints"]
    ]
    words = "Change: by one removal, of the multiplier λ where the constraint binds, of the slack elsewhere."
    return join(element("p", words), _format_cards(rows, numbers=list(numbers)))


def _format_download(k: int, answer: Mapping[str, Any], room: int) -> Markup:
    """Return a link that downloads the listed samples of a report as CSV, without features if they take more room."""
    text = write_csv(answer)
    if len(text.encode()) > room:
        text = write_csv({**answer, "samples": [sample | {"features": {}} for sample in answer["samples"]]})
    data = base64.b64encode(("\ufeff" + text).encode()).decode()  # spreadsheets need the byte order mark
    href, name = f"data:text/csv;charset=utf-8;base64,{data}", f"{answer['title']}-{answer['target']}.csv"
    return _wrap(k, "span", element("a", "Download as CSV", class_="csv", download=name, href=href))


def _format_run(answer: Mapping[str, Any]) -> Markup:
    """Return what was run and what identifies the model, as a list."""
    model = {words: answer["model"][key] for key, words in _MODEL.items() if key in answer["model"]}
    entries = {**answer["run"], **model}.items()
    return element("dl", *(join(element("dt", key), element("dd", text)) for key, text in entries))


def _escape_json(content: Any) -> Markup:
    """Return JSON for a script element, escaped so that it cannot end the element or start another."""
    text = json.dumps(content, allow_nan=False, ensure_ascii=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def write_csv(report: Mapping[str, Any]) -> str:
    """Return the listed samples of a report as CSV, one line each, with numbers in full precision."""
    samples = report["samples"]
    losses, features = (list(dict.fromkeys(key for s in samples for key in s[part])) for part in ("losses", "features"))
    fixed = ["sample", "group", "predicted change", "retrained change", "expected relative error"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    headings = [*fixed, *(f"loss {name}" for name in losses), *(f"feature {name}" for name in features)]
    writer.writerow(map(_defuse, headings))
    for sample in samples:
        numbers = sample["score"], sample.get("actual"), sample["expected_error"], *map(sample["losses"].get, losses)
        words = map(_defuse, (sample["name"], sample["group"] or ""))
        texts = (_defuse(sample["features"].get(name, "")) for name in features)
        writer.writerow([*words, *("" if x is None else repr(x) for x in numbers), *texts])
    return text.getvalue()


def _defuse(text: str) -> str:
    """Return a cell as it is; with an apostrophe before it if a spreadsheet would run it as a formula.

    >>> [_defuse(text) for text in ("=1+1", "+a", "-a", "@a", "-0.5", "a=1")]
    ["'=1+1", "'+a", "'-a", "'@a", '-0.5', 'a=1']
    """
    if not text.startswith(_FORMULA):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text
