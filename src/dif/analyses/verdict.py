"""The verdict: whether the predictions for a model can be trusted, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dif.errors import count_words
from dif.estimators.influence import TRUSTED
from dif.optimality.certificate import BAD, GOOD, NOTE

# Beginning of the verdict where predictions can be trusted, and where they cannot
_ACCEPTED = "Predictions for this model can be trusted"
_REFUSED = "Predictions for this model cannot be trusted"
# What to do about a target with kinks
_SMOOTH = "Derivatives do not see jumps or kinks: use a smooth target (a probability, for example), or retrain."
# What to do about perturbations that are too large
_TOO_LARGE = (
    "These removals are too large for a first-order prediction: ask for an accuracy (--accuracy 0.05, or "
    "dif.AdaptiveInfluence), retrain, or use a larger ridge or more samples."
)


@dataclass(frozen=True)
class Verdict:
    """One sentence on the predictions for a model, and what to do where they cannot be trusted."""

    sign: str  # good, note or bad
    words: str
    cure: str = ""

    @classmethod
    def of(
        cls, certificate: Mapping[str, Any], assessment: Mapping[str, Any] | None, retrained: Mapping[str, Any] | None,
        unanswered: tuple[int, str] | None = None, kinked: str = "",
    ) -> Verdict:  # fmt: skip
        """Judge by the strongest evidence: a failed certificate, then retrainings, then expected errors.

        Args:
            certificate: `Certificate.to_dict()`.
            assessment: `Influence.diagnostics["assessment"]`; None where nothing was assessed.
            retrained: Results of retraining: `n`, `relative_error`, `wrong_signs`; None where nothing was retrained.
            unanswered: How many removals have no answer, and the reason for the first of them.
            kinked: What is not smooth about the target; empty where it is smooth.
        """
        verdict = _judge(certificate, assessment, retrained)
        if kinked and verdict.sign == BAD:
            verdict = cls(BAD, f"{_REFUSED}: the target is not smooth ({kinked}).", _SMOOTH)
        if unanswered is not None and verdict.sign != BAD:
            count, reason = unanswered
            have = "has" if count == 1 else "have"
            words = f"{verdict.words} {count_words(count, 'removal')} {have} no answer: {reason.rstrip('.')}."
            verdict = cls(NOTE, words, verdict.cure)
        return verdict


def _judge(
    certificate: Mapping[str, Any], assessment: Mapping[str, Any] | None, retrained: Mapping[str, Any] | None
) -> Verdict:
    """Return the verdict on smooth targets with an answer for every removal."""
    bad = [finding for finding in certificate["findings"] if finding["verdict"] == BAD]
    if bad:
        return Verdict(BAD, f"{_REFUSED}. {bad[0]['meaning']}", bad[0]["cure"])
    if retrained is not None:
        return _judge_retraining(retrained, assessment)
    if assessment is None:
        return Verdict(NOTE, "No prediction was checked.", "Leave out assess=0, or retrain.")
    if assessment["pooled"] is None:
        return Verdict(BAD, f"{_REFUSED}: they could not be checked ({assessment['failed']}).", _TOO_LARGE)
    removals = count_words(len(assessment["rows"]), "removal")
    method = f"estimated for {removals} by two more steps of Newton's method each"
    error = _percent(assessment["pooled"])
    if assessment["pooled"] <= TRUSTED:
        words = f"{_ACCEPTED}: they are off by about {error} ({method})."
        return Verdict(GOOD, words, "`dif retrain` verifies the strongest.")
    return Verdict(BAD, f"{_REFUSED}: they are off by about {error} ({method}).", _TOO_LARGE)


def _judge_retraining(retrained: Mapping[str, Any], assessment: Mapping[str, Any] | None) -> Verdict:
    """Return the verdict on predictions that were compared with retraining."""
    n, error, wrong = retrained["n"], retrained["relative_error"], retrained["wrong_signs"]
    removed = "1 sample was removed" if n == 1 else f"{n} samples were removed, one at a time,"
    done = f"{removed} and the model was trained again"
    signs = "all in the right direction" if wrong == 0 else f"{wrong} of {n} in the wrong direction"
    estimate = None if assessment is None else assessment["pooled"]
    expected = "" if estimate is None else f" ({_percent(estimate)} was expected)"
    comparison = f"the predictions were off by {_percent(error)} overall, {signs}{expected}"
    if error <= TRUSTED:
        return Verdict(GOOD, f"{_ACCEPTED}: {done}, and {comparison}.")
    return Verdict(BAD, f"{_REFUSED}: {done}, and {comparison}.", _TOO_LARGE)


def _percent(share: float) -> str:
    """Format a share in per cent, with two digits below ten per cent and as a whole number above."""
    if not share < 1:
        return "100 % or more"
    if share < 0.001:
        return "less than 0.1 %"
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"
