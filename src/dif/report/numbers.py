"""Numbers as text: one format for the whole report, here and in report.js."""

from __future__ import annotations

import math

_DIGITS = 4  # significant digits
_SMALLEST, _LARGEST = 1e-4, 1e6  # sizes between which a number is written without an exponent


def format_number(x: float | None, *, signed: bool = False) -> str:
    """Return a number with four significant digits, "−" as minus sign; "—" for no number.

    >>> [format_number(x) for x in (0.02, -12345.6, 1.5e-7, None)]
    ['0.02', '−12346', '1.5e−7', '—']
    """
    if x is None or not math.isfinite(x):
        return "—"
    size = abs(x)
    if size == 0:
        return "0"
    if _SMALLEST <= size < _LARGEST:
        text = f"{size:.0f}" if size >= 10 ** (_DIGITS - 1) else f"{float(f'{size:.{_DIGITS}g}'):f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
        if size < 0.1:  # :f has six decimals, too few for small numbers
            text = f"{size:.{_DIGITS - 1 - math.floor(math.log10(size))}f}".rstrip("0")
    else:
        mantissa, exponent = f"{size:.{_DIGITS - 1}e}".split("e")
        text = f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    sign = "-" if x < 0 else "+" if signed else ""
    return (sign + text).replace("-", "−")


def format_percent(share: float) -> str:
    """Return a share in per cent: two significant digits below 10 %, a whole number above.

    >>> [format_percent(share) for share in (0.0312, 0.5, 2e-7)]
    ['3.1 %', '50 %', 'less than 0.001 %']
    """
    size = abs(100 * share)
    if 0 < size < 0.001:
        return "less than 0.001 %"
    text = f"{size:.0f}" if size >= 10 else f"{float(f'{size:.2g}'):.6f}".rstrip("0").rstrip(".")
    return f"{'−' if share < 0 and size else ''}{text} %"
