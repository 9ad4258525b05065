"""What evaluation refuses, and what it says then."""

import numpy as np
import pytest
import torch
from refusals import NAN, TRAIN, estimator, invalid, solution, table

import dif
from dif import evaluation

SCORES = torch.arange(8.0)
MEAN = TRAIN.mean()


def truth():
    return estimator(dif.Retraining)


def lds(methods=None, truth_=None, target=TRAIN, samples=TRAIN, **options):
    methods = {"mine": SCORES} if methods is None else methods
    options = {"show_progress": False, "subsets": 4, **options}
    return evaluation.linear_datamodelling_score(methods, truth_ or truth(), target, samples, **options)


def curve(methods=None, counts=(1, 2), target=MEAN, **options):
    methods = {"mine": SCORES} if methods is None else methods
    return evaluation.removal_curve(methods, truth(), target, TRAIN, counts, show_progress=False, **options)


def singles(**options):
    return evaluation.leave_one_out_agreement({"mine": SCORES}, truth(), MEAN, TRAIN, show_progress=False, **options)


def errors():
    return evaluation.label_error_auc({"mine": SCORES}, MASK)


def own(train=lambda kept, seed: 1.0, count=8, **options):
    return evaluation.OwnTraining(train, count, **options)


def traced(checkpoints=None, rates=1.0):
    return evaluation.TracIn(solution(), [solution().params] if checkpoints is None else checkpoints, rates)


def fickle(kept, seed):
    return np.ones(1 + len(kept) % 2)


MASK = torch.arange(8) < 3
NUMBERS = "There is one score for each sample, or one for each sample and target."
REMOVALS = "This method knows only which samples are there and which are not."

CASES = {
    "no methods": (lambda: lds({}), "is empty", "There is nothing to evaluate."),
    "a number as methods": (lambda: lds(3), "of type int", "There is nothing to evaluate."),
    "scores without a name": (lambda: lds([SCORES]), "without a name", "Tables and pictures name each method."),
    "two of a name": (
        lambda: lds([estimator(dif.ClassicalInfluence)] * 2),
        "two methods named",
        "Tables and pictures name each method.",
    ),
    "scores of another length": (lambda: lds({"mine": SCORES[:5]}), "(5, 1)", NUMBERS),
    "scores of other targets": (lambda: lds({"mine": torch.ones(8, 3)}), "(8, 3)", "(8,) or (8, 8)", NUMBERS),
    "NaN": (lambda: lds({"mine": SCORES * NAN}), "8 of them are not finite", NUMBERS),
    "an influence of other removals": (
        lambda: lds({"mine": estimator(dif.ClassicalInfluence).scores(TRAIN, TRAIN.remove_each([2, 1]), assess=0)}),
        "2 perturbations, the first of them 'remove train[2]'",
        "Scores are matched by the number of their sample.",
    ),
    "a function as truth": (
        lambda: lds(truth_=len),
        "`truth` is of type",
        "It says what removing samples really changes.",
    ),
    "one sample": (lambda: lds(samples=1), "`samples` is 1", "Evaluation removes some samples and keeps the others."),
    "no subsets": (lambda: lds(subsets=0), "`subsets` is 0", "The model is trained once for each subset."),
    "two subsets": (
        lambda: lds(subsets=2),
        "2 subsets of 4 of 8 samples",
        "The score ranks models that were trained on different parts of the data.",
    ),
    "everything removed": (lambda: lds(share=1.0), "4 subsets of 8", "trained on different parts of the data."),
    "a negative share": (
        lambda: lds(share=-0.5),
        "`share` is -0.5",
        "It is the share of the samples that each subset removes.",
    ),
    "all trainings fail": (
        lambda: lds(truth_=own(lambda kept, seed: NAN if len(kept) < 8 else 1.0), target=None),
        "0 of 4 trainings gave an answer",
        "There are too few models to rank.",
    ),
    "no counts": (lambda: curve(counts=[]), "`counts` is empty", "Each is a number of samples to remove at once."),
    "all samples": (
        lambda: curve(counts=[3, 8]),
        "`counts` includes 8",
        "So many samples are removed at once, and at least one must remain.",
    ),
    "a negative number of orders": (
        lambda: curve(random=-1),
        "`random` is -1",
        "It says how many random orders are removed for comparison.",
    ),
    "scores of several targets in a curve": (
        lambda: curve({"mine": torch.ones(8, 2)}),
        "have shape (8, 2)",
        "The shape must be (8,) or (8, 1), and all must be finite.",
        NUMBERS,
    ),
    "several targets in a curve": (lambda: curve(target=TRAIN), "There are 8 targets", "how one number moves."),
    "nothing to leave out": (
        lambda: singles(strongest=0, random=1),
        "`strongest` is 0 and `random` is 1",
        "They say how many samples are removed, one at a time.",
    ),
    "half a sample": (lambda: singles(strongest=0.5), "`strongest` is 0.5", "one at a time."),
    "panels": (
        lambda: singles(random=4).plot([1, 2]),
        "`axes` has 2 axes, one of them of type int.",
        "It must have 1 axes of matplotlib.",
        "Leave the axes out, or pass pyplot.subplots(1, 1)[1].",
        "Each method is drawn in a panel of its own.",
    ),
    "a mask of numbers": (
        lambda: evaluation.label_error_auc({"mine": SCORES}, SCORES),
        "dtype torch.float32",
        "A ranking is judged by how it separates wrong labels from right ones.",
    ),
    "nothing wrong": (
        lambda: evaluation.label_error_auc({"mine": SCORES}, MASK & False),
        "0 true entries",
        "separates wrong labels from right ones.",
    ),
    "a short mask": (
        lambda: evaluation.label_error_auc({"mine": SCORES}, MASK[:5], TRAIN),
        "`wrong` has 5 entries",
        "It says of each sample whether its label is wrong.",
    ),
    "an estimator without samples": (
        lambda: evaluation.label_error_auc({"DIF": estimator(dif.DirectionalInfluence)}, MASK),
        "'DIF' is an estimator",
        "The suspicion of an estimator is the self-influence of each sample.",
    ),
    "one label": (
        lambda: evaluation.flip_labels(torch.ones(4), 0.5),
        "4 labels of shape (4,) with 1 different values",
        "A wrong label is one of the others.",
    ),
    "a share above one": (
        lambda: evaluation.flip_labels(SCORES, 1.5),
        "`share` is 1.5",
        "A wrong label is one of the others.",
    ),
    "no share": (
        lambda: evaluation.flip_labels(SCORES, "half"),
        "`share` is 'half'",
        "It is the share of the labels that are made wrong.",
    ),
    "a class as truth": (lambda: lds(truth_=dif.Retraining), "`truth` is the class Retraining", "really changes."),
    "a class as method": (
        lambda: lds({"DIF": dif.DirectionalInfluence}),
        "The method 'DIF' is the class DirectionalInfluence",
        "A class has not seen the solution yet.",
        "Pass DirectionalInfluence(solution).",
    ),
    "a seed of text": (
        lambda: singles(seed="a"),
        "`seed` is 'a'",
        "It must be an integer ≥ 0, or a torch.Generator.",
        "The same seed makes the same random choices.",
    ),
    "a negative seed": (lambda: evaluation.flip_labels(MASK, 0.5, seed=-1), "`seed` is -1", "Use seed=0."),
    "a number as axes": (
        lambda: curve().plot(3),
        "`ax` is of type int",
        "It must be axes of matplotlib, or None for a new figure.",
        "The plot is drawn on them.",
        "Leave it out, or pass pyplot.subplots()[1].",
    ),
    "a number as path": (
        lambda: curve().save(3),
        "`path` is of type int",
        "It must be the path of a file.",
        "The result is one file.",
        'Pass a path such as "results/scores.npz".',
    ),
    "a folder to load": (lambda: evaluation.RemovalCurve.load("."), "`path` is '.', which is no file", "one file."),
    "an unknown ranking": (
        lambda: errors().share_found("yours", 0.1),
        "There is no method 'yours'",
        "The methods are 'mine'.",
        "Each method ranks the samples by its own suspicion.",
    ),
    "a share of text": (
        lambda: errors().share_found("mine", "all"),
        "`share` is 'all'",
        "It is the share of the samples that are inspected.",
    ),
    "a training function of one argument": (
        lambda: own(lambda kept: 1.0),
        "`train` does not take two arguments",
        "It must be a function train(kept, seed).",
        "It is called with the numbers of the samples to train on, and a seed.",
    ),
    "seeds of text": (
        lambda: own(seeds=["a"]),
        "`seeds` is ['a']",
        "Targets are averaged over trainings with these seeds.",
    ),
    "a single seed in an array": (lambda: own(seeds=np.array(3)), "`seeds` is of type ndarray", "averaged over"),
    "a file to keep trainings in": (
        lambda: own(keep=__file__),
        "test_evaluation_errors.py', which is a file",
        "It must be a folder; it is created if it is missing.",
        "What is finished is kept there, in several files.",
        "Choose another name.",
    ),
    "no perturbation": (
        lambda: own().scores(None, 3, show_progress=False),
        "`perturbation` is of type int",
        "For one sample write train.remove([i]).",
    ),
    "no training function": (
        lambda: own(3),
        "`train` is of type int",
        "It is called with the numbers of the samples to train on, and a seed.",
    ),
    "no samples to train on": (lambda: own(count=0), "`count` is 0", "It is the number of samples of your training."),
    "no seeds": (lambda: own(seeds=[]), "`seeds` is empty", "Targets are averaged over trainings with these seeds."),
    "another number of samples": (
        lambda: lds(truth_=own(count=9), target=None),
        "8 samples can be removed, but `count` is 9",
        "The numbers of the samples are those that your function trains on.",
    ),
    "other targets each time": (
        lambda: own(fickle).scores(None, TRAIN.remove([3]), show_progress=False),
        "`train` returned 1 number and 2 numbers",
        "Each number is a target, which is compared between trainings.",
    ),
    "a reweighting": (
        lambda: own().scores(None, TRAIN.reweight(torch.ones(8)), show_progress=False),
        "'reweight 8 of train'",
        REMOVALS,
    ),
    "a number as file of scores": (
        lambda: traced().scores(MEAN, TRAIN.remove_each(), out=3),
        "`out` is 3",
        "It must be a name ending in .npy or .zarr.",
    ),
    "half a removal": (lambda: traced().scores(MEAN, 0.5 * TRAIN.remove([1])), "'0.5 × remove train[1]'", REMOVALS),
    "no checkpoints": (lambda: traced([]), "`checkpoints` is empty", "TracIn sums over the checkpoints of a training."),
    "a checkpoint of another model": (
        lambda: traced([{"v": torch.ones(2)}]),
        "v (2,)",
        "Gradients at a checkpoint are those of the same model.",
    ),
    "rates": (
        lambda: traced(rates=[1.0, -2.0]),
        "`rates` is [1.0, -2.0]",
        "Each checkpoint counts with its learning rate.",
    ),
    "no run": (lambda: evaluation.TracIn.of_run(3), "`run` is of type int", "Its epochs are the checkpoints."),
}


@table(CASES)
def test_refused(case):
    action, found, *texts = case
    invalid(action, found, *texts)


def test_files_of_another_kind_are_refused(tmp_path):
    singles(random=4).save(tmp_path / "singles.npz")
    (tmp_path / "noise.npz").write_bytes(b"noise")
    meaning = "It holds another kind of result, is damaged, or comes from a newer version."
    for name, found in (("singles", "format 'dif leave-one-out agreement 1'"), ("noise", "cannot be read")):
        invalid(lambda name=name: evaluation.RemovalCurve.load(tmp_path / f"{name}.npz"), found, meaning)
    with pytest.raises(FileNotFoundError, match="There is no file"):
        evaluation.DatamodellingScore.load(tmp_path / "missing.npz")
