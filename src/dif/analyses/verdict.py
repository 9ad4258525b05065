"""Whether the predictions for a model can be trusted, in one plain sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dif.estimators.influence import TRUSTED
from dif.optimality.certificate import BAD, GOOD, NOTE

_REFUSED = "Predictions for this model cannot be trusted"


@dataclass(frozen=True)
class Verdict:
    """The sentence, and what to do where it is bad."""

    sign: str  # good, note or bad
    words: str
    cure: str = ""

    @classmethod
    def of(
        cls, certificate: Mapping[str, Any], assessment: Mapping[str, Any] | None, retrained: Mapping[str, Any] | None,
        unanswered: tuple[int, str] | None = None, kinked: str = "",
    ) -> Verdict:  # fmt: skip
        """The strongest evidence there is: a point that is refused, then retrainings, then expected errors.

        Args:
            certificate: `Certificate.to_dict()`.
            assessment: `Influence.diagnostics["assessment"]`; None where nothing was assessed.
            retrained: What retraining found: `n`, `relative_error`, `wrong_signs`; None where nothing was retrained.
            unanswered: How many removals have no answer, and why the first has none.
            kinked: What is not smooth about the target; empty where it is.
        """
        found = cls._of(certificate, assessment, retrained)
        if kinked and found.sign == BAD:
            found = cls(BAD, f"{_REFUSED}: the target is not smooth ({kinked}).", _SMOOTH)
        if unanswered is not None and found.sign != BAD:
            count, why = unanswered
            words = f"{found.words} {_counted(count)} {'has' if count == 1 else 'have'} no answer: {why.rstrip('.')}."
            found = cls(NOTE, words, found.cure)
        return found

    @classmethod
    def _of(
        cls, certificate: Mapping[str, Any], assessment: Mapping[str, Any] | None, retrained: Mapping[str, Any] | None
    ) -> Verdict:
        bad = [one for one in certificate["findings"] if one["verdict"] == BAD]
        if bad:
            return cls(BAD, f"{_REFUSED}. {bad[0]['what']} {bad[0]['meaning']}", bad[0]["cure"])
        if retrained is not None:
            return _of_retraining(retrained, assessment)
        if assessment is None:
            return cls(NOTE, "No prediction was checked.", "Leave out assess=0, or retrain.")
        if assessment["pooled"] is None:
            return cls(BAD, f"{_REFUSED}: they could not be checked ({assessment['failed']}).", _CURE)
        looked = f"checked on {_counted(len(assessment['rows']))} by two further Newton steps each"
        off = _percent(assessment["pooled"])
        if assessment["pooled"] <= TRUSTED:
            words = f"Predictions should be off by {off} ({looked})."
            return cls(GOOD, words, "`dif retrain` verifies the strongest.")
        return cls(BAD, f"{_REFUSED}: they should be off by {off} ({looked}).", _CURE)


_SMOOTH = "No derivative sees a jump or a kink: ask about a smooth version of it (a probability, say), or retrain."
_CURE = (
    "The first order does not reach as far as these removals go: ask for an accuracy (--accuracy 0.05, or "
    "dif.AdaptiveInfluence), retrain, or use a larger ridge or more samples."
)


def _of_retraining(retrained: Mapping[str, Any], assessment: Mapping[str, Any] | None) -> Verdict:
    n, error, wrong = retrained["n"], retrained["relative_error"], retrained["wrong_signs"]
    gone = "1 sample was removed" if n == 1 else f"{n} samples were removed, one at a time,"
    done = f"{gone} and the model retrained"
    signs = "all signs right" if wrong == 0 else f"{wrong} of {n} signs wrong"
    promised = None if assessment is None else assessment["pooled"]
    expected = "" if promised is None else f" ({_percent(promised)} was to be expected)"
    off = f"predictions were off by {_percent(error)} overall, {signs}{expected}"
    if error <= TRUSTED:
        return Verdict(GOOD, f"{done}: {off}.")
    return Verdict(BAD, f"{_REFUSED}: {done}, and {off}.", _CURE)


def _counted(n: int) -> str:
    return "1 removal" if n == 1 else f"{n} removals"


def _percent(share: float) -> str:
    """Two digits below ten per cent, whole numbers above."""
    if not share < 1:
        return "100 % or more"
    if share < 0.001:
        return "less than 0.1 %"
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"
