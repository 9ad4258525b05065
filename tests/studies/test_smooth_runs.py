"""Fine-tunings of different kinds on a GPU: smooth ones are accepted, a chaotic one is refused."""

from dataclasses import replace

import pytest
import torch

import dif
from studies.finetune import STUDIES, build_task, build_training

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
BASE = replace(STUDIES["paper"], pretraining=10)
WIDE = replace(BASE, channels=32)
RUNS = {
    "momentum": (BASE, {}),
    "nesterov": (BASE, {"optimizer": dif.SGD(0.02, momentum=0.9, nesterov=True)}),
    "plain SGD": (BASE, {"optimizer": dif.SGD(0.05)}),
    "32 channels": (WIDE, {}),
    "Adam": (WIDE, {"optimizer": dif.Adam(0.0005, eps_root=1e-5)}),
    "AdamW": (WIDE, {"optimizer": dif.AdamW(0.0005, eps_root=1e-5)}),
    "batches of 500": (replace(BASE, batch_size=500), {}),
    "no constraint": (BASE, {"constrained": False}),
    "equality": (BASE, {"equality": True}),
    "transformer": (STUDIES["transformer"], {}),
}


def probe(folder, setting, optimizer=None, constrained=True, equality=False):
    """The agreement of predicted and actual changes."""
    torch.backends.cudnn.allow_tf32 = False  # it rounds to three digits, differently for other batches
    task = build_task(setting, folder, None, "cuda", show_progress=False)
    training = build_training(task, setting)
    targets, problem = list(task.targets.values()), task.problem
    if not constrained:
        problem = dif.Problem(problem.objective)
    if equality:
        problem = dif.Problem(problem.objective, [targets[1] == 0.0])
    training = replace(training, problem=problem, optimizer=optimizer or training.optimizer)
    estimator = dif.UnrolledInfluence(training.run(show_progress=False))
    scores = estimator.scores(targets, task.train.remove_each(), show_progress=False)
    return scores.diagnostics["probe"]["agreement"]


@pytest.mark.parametrize("kind", RUNS)
def test_smooth_runs_are_accepted(kind, tmp_path):
    setting, options = RUNS[kind]
    assert probe(tmp_path, setting, **options) > 0.9


def test_a_run_from_a_random_start_with_large_steps_is_refused(tmp_path):
    with pytest.raises(dif.DegenerateError, match="its derivative predicts nothing"):
        probe(tmp_path, replace(BASE, pretraining=0, lr=0.1, epochs=20))
