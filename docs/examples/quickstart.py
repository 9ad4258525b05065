import torch

import dif

torch.manual_seed(0)
X, group = torch.randn(600, 3).double(), torch.arange(600) % 2
y = torch.where(X[:, 0] + 0.8 * group + 0.3 * torch.randn(600) > 0.4, 1.0, -1.0).double()


def loss(params, batch):  # one number per sample, not reduced
    return torch.nn.functional.softplus(-batch[1] * (batch[0] @ params["w"]))


train = dif.Samples(loss, (X, y), name="train")
risk, gap = train.mean(), train.mean(where=group == 1) - train.mean(where=group == 0)
fair = [(train.mean(where=group == g) <= risk + 0.02).named(f"group {g}") for g in (0, 1)]
solution = dif.fit(dif.Problem(risk + dif.ridge(1e-2), fair), {"w": torch.zeros(3).double()})
print(solution.active)  # the active constraints and their margins
removals = train.remove_each()
scores = dif.DirectionalInfluence(solution).scores([risk, gap], removals)
print(scores.trusted, scores.top(5))  # can it be believed? whose removal moves the risk most?
print(scores.compare(dif.Retraining(solution).scores([risk, gap], removals)))
