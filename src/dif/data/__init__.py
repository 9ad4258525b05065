"""Data that come with dif, for the demo and the examples. Only data belong here."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from importlib.resources import files

import torch
from torch import Tensor

# Name of each numeric attribute: its column in the file
_NUMERIC = {"months": 1, "amount (DM)": 4, "instalment (% of income)": 7, "age": 12, "credits here": 15}
# Name of each categorical attribute: its column in the file, and the meaning of each code
_CATEGORICAL: dict[str, tuple[int, dict[str, str]]] = {
    "account": (0, {"A11": "overdrawn", "A12": "below 200 DM", "A13": "200 DM or more", "A14": "none"}),
    "history": (2, {"A30": "no credits", "A31": "all paid here", "A32": "paid so far", "A33": "late before",
                    "A34": "critical"}),
    "savings": (5, {"A61": "below 100 DM", "A62": "below 500 DM", "A63": "below 1000 DM", "A64": "1000 DM or more",
                    "A65": "unknown"}),
    "employed": (6, {"A71": "no", "A72": "below 1 year", "A73": "below 4 years", "A74": "below 7 years",
                     "A75": "7 years or more"}),
    "housing": (14, {"A151": "rent", "A152": "own", "A153": "free"}),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Credit:
    """The loans as numbers for a model, and in words for readers."""

    X: Tensor  # (1000, k) standardised numeric attributes, one 0/1 column per category, a column of ones last
    paid: Tensor  # (1000,) +1 if paid back, −1 if not
    age: Tensor  # (1000,) years
    columns: tuple[str, ...]  # names of the columns of X
    features: dict[str, list[str]]  # attribute → its value for every loan, in words


def german_credit() -> Credit:
    """Return the Statlog data set (Hofmann, UCI, CC BY 4.0), without the attributes whose codes are in doubt.

    Examples:
        >>> credit = german_credit()
        >>> tuple(credit.X.shape), int((credit.paid > 0).sum()), int((credit.age <= 25).sum())
        ((1000, 28), 700, 190)
    """
    raw = gzip.decompress((files("dif.data") / "german.data.gz").read_bytes())
    lines = [line.split() for line in raw.decode().splitlines() if line]
    values, columns, features = [], [], {}
    for name, column in _NUMERIC.items():
        numbers = torch.tensor([float(line[column]) for line in lines], dtype=torch.float64)
        values.append((numbers - numbers.mean()) / numbers.std())
        columns.append(name)
        features[name] = [line[column] for line in lines]
    for name, (column, meanings) in _CATEGORICAL.items():
        for code, meaning in meanings.items():
            values.append(torch.tensor([float(line[column] == code) for line in lines], dtype=torch.float64))
            columns.append(f"{name}: {meaning}")
        features[name] = [meanings[line[column]] for line in lines]
    values.append(torch.ones(len(lines), dtype=torch.float64))
    paid = torch.tensor([1.0 if line[20] == "1" else -1.0 for line in lines], dtype=torch.float64)
    features["paid back"] = ["yes" if p > 0 else "no" for p in paid.tolist()]
    age = torch.tensor([int(line[12]) for line in lines])
    return Credit(torch.stack(values, 1), paid, age, (*columns, "constant"), features)
