"""A thousand credits of a German bank, and whether they were paid back: real data for a fairness example."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from importlib.resources import files

import torch
from torch import Tensor

_NUMBERS = {"months": 1, "amount (DM)": 4, "instalment (% of income)": 7, "age": 12, "credits here": 15}
_WORDS: dict[str, tuple[int, dict[str, str]]] = {  # column, codes in words
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
    """The credits, as numbers for a model and as words for people."""

    X: Tensor  # (1000, k) standardised numbers, 0/1 for words, a column of ones last
    paid: Tensor  # (1000,) +1 paid back, −1 not
    age: Tensor  # (1000,) years
    columns: tuple[str, ...]  # of X
    features: dict[str, list[str]]


def german_credit() -> Credit:
    """The Statlog data set (Hofmann, UCI, CC BY 4.0), without the attributes whose codes are in doubt.

    >>> credit = german_credit()
    >>> tuple(credit.X.shape), int((credit.paid > 0).sum()), int((credit.age <= 25).sum())
    ((1000, 28), 700, 190)
    """
    raw = gzip.decompress((files("dif.data") / "german.data.gz").read_bytes())
    lines = [line.split() for line in raw.decode().splitlines() if line]
    pieces, columns, features = [], [], {}
    for name, place in _NUMBERS.items():
        numbers = torch.tensor([float(line[place]) for line in lines], dtype=torch.float64)
        pieces.append((numbers - numbers.mean()) / numbers.std())
        columns.append(name)
        features[name] = [line[place] for line in lines]
    for name, (place, words) in _WORDS.items():
        for code, word in words.items():
            pieces.append(torch.tensor([float(line[place] == code) for line in lines], dtype=torch.float64))
            columns.append(f"{name}: {word}")
        features[name] = [words[line[place]] for line in lines]
    pieces.append(torch.ones(len(lines), dtype=torch.float64))
    paid = torch.tensor([1.0 if line[20] == "1" else -1.0 for line in lines], dtype=torch.float64)
    features["paid back"] = ["yes" if p > 0 else "no" for p in paid.tolist()]
    age = torch.tensor([int(line[12]) for line in lines])
    return Credit(torch.stack(pieces, 1), paid, age, (*columns, "constant"), features)
