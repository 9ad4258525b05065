"""All samples × 50 test points of digits, without constraints, which every library can do: dif and the others.

Each measurement runs in a process of its own, all of them once per round, so that whatever else the machine does
meets all alike.
"""

from __future__ import annotations

import statistics

from common import HERE, OURS, PEERS, alone, table

ROUNDS = 3
WORDS = {
    "dif_": "**dif**, default settings",
    "func_": "torch.func by hand, 20 lines",
    "pydvl_": "pyDVL, DirectInfluence",
    "captum_": "Captum, NaiveInfluenceFunction",
    "dattri_": "dattri, IFAttributorExplicit",
    "kronfluence_": "Kronfluence, EKFAC (approximate by design)",
    "kronfluence_frozen_": "Kronfluence, loaded modules hidden from its garbage collections",
    "numpy_": "NumPy by hand, the closed form of this model alone",
}
LIBRARIES = ("pydvl_", "captum_", "dattri_")


def python(name: str):
    """Whose environment a script belongs to."""
    return OURS if name == "dif_" else PEERS


def section() -> str:
    """The table, and what it shows."""
    folder = HERE / "peers"
    rounds = []
    for _ in range(ROUNDS):
        rounds.append({name: alone(python(name), "measure.py", name, "time", folder=folder) for name in WORDS})
    seconds = {name: statistics.median(s for r in rounds for s in r[name]["seconds"]) for name in WORDS}
    peaks = {name: alone(python(name), "measure.py", name, "memory", folder=folder)["peak"] for name in WORDS}
    binary = alone(PEERS, "measure.py", "pyinfluence_", "time", folder=folder)
    last = rounds[-1]
    rows = [
        [
            WORDS[name],
            f"{seconds[name]:.3f}",
            f"{seconds[name] / seconds['dif_']:.2f}",
            f"{peaks[name] / 1e6:.0f}",
            f"{last[name]['error']:.0e}",
            f"{last[name]['r']:.3f}",
        ]
        for name in sorted(WORDS, key=seconds.__getitem__)
    ]
    fastest = min(LIBRARIES, key=seconds.__getitem__)
    lightest = min(LIBRARIES, key=peaks.__getitem__)
    headings = ["", "median s", "its time / dif's", "peak MB", "largest error / largest score", "r"]
    return f"""## Without constraints

Multinomial logistic regression on scikit-learn's digits, N = 1500, d = 650, float64, L2 0.01; influence of every
sample on each of 50 test points; from the trained model on (Hessian, factors, scores, and dif's proof that the point
is a solution). Median of {5 * ROUNDS} runs in {ROUNDS} processes each; the peak is what one call adds to the process.
The exact answer is computed from its definition by other code.

{table(headings, rows)}
The fastest library with exact answers ({WORDS[fastest]}) takes {seconds[fastest] / seconds["dif_"]:.1f} times as
long as dif; the one with the least memory ({WORDS[lightest]}) takes {peaks[lightest] / peaks["dif_"]:.1f} times as
much. pyinfluence knows two classes only, so it is not in the table: on
digits ≥ 5 against the others (d = 65) it takes {1e3 * statistics.median(binary["seconds"]):.1f} ms, with an error of
{binary["error"]:.0e}.
"""


if __name__ == "__main__":
    print(section())
