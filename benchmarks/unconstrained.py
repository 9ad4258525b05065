"""Compare dif with other libraries without constraints: influence of all training digits on 50 test points.

Each measurement runs in its own process. Every round measures all libraries once, so that other load on the machine
affects all of them alike.
"""

from __future__ import annotations

import statistics

from common import HERE, OURS, PEERS, run_alone, table

ROUNDS = 3  # each measures every library once
WORDS = {  # rows of the table
    "dif_": "**dif**, default settings",
    "func_": "torch.func by hand, 20 lines",
    "pydvl_": "pyDVL, DirectInfluence",
    "captum_": "Captum, NaiveInfluenceFunction",
    "dattri_": "dattri, IFAttributorExplicit",
    "kronfluence_": "Kronfluence, EKFAC (approximate by design)",
    "kronfluence_frozen_": "Kronfluence, loaded modules hidden from its garbage collections",
    "numpy_": "NumPy by hand, the closed form of this model alone",
}
LIBRARIES = ("pydvl_", "captum_", "dattri_")  # other libraries with exact answers


def python(name: str):
    """Return the Python interpreter of the environment in which a library is installed."""
    return OURS if name == "dif_" else PEERS


def section() -> str:
    """Measure all libraries and return the table as Markdown."""
    folder = HERE / "peers"
    rounds = []
    for _ in range(ROUNDS):
        rounds.append({name: run_alone(python(name), "measure.py", name, "time", folder=folder) for name in WORDS})
    seconds = {name: statistics.median(s for r in rounds for s in r[name]["seconds"]) for name in WORDS}
    peaks = {name: run_alone(python(name), "measure.py", name, "memory", folder=folder)["peak"] for name in WORDS}
    binary = run_alone(PEERS, "measure.py", "pyinfluence_", "time", folder=folder)
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

The task is the influence of every sample on each of 50 test points in a multinomial logistic regression on
scikit-learn's digits, N = 1500, d = 650, float64, L2 0.01. The time starts with the trained model and includes the
Hessian, its factors, the scores, and dif's check that the point is a solution. It is the median of {5 * ROUNDS} runs in
{ROUNDS} processes each; the peak is the memory that one call adds to the process. The exact answer is computed from its
definition by separate code.

{table(headings, rows)}
The fastest library with exact answers ({WORDS[fastest]}) takes {seconds[fastest] / seconds["dif_"]:.1f} times as
long as dif. The one with the smallest memory use ({WORDS[lightest]}) uses {peaks[lightest] / peaks["dif_"]:.1f} times
as much. pyinfluence supports only two classes, so it is not in the table: on
digits ≥ 5 against the others (d = 65) it takes {1e3 * statistics.median(binary["seconds"]):.1f} ms, with an error of
{binary["error"]:.0e}.
"""


if __name__ == "__main__":
    print(section())
