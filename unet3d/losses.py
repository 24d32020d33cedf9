"""Loss and score: soft Dice plus cross entropy for training, hard Dice for evaluation."""
from __future__ import annotations

import torch
from torch.nn import functional

SMOOTHING = 1e-6


def _one_hot(label: torch.Tensor, classes: int) -> torch.Tensor:
    """[n, 1, z, y, x] integers -> float [n, classes, z, y, x]."""
    hot = functional.one_hot(label[:, 0].long(), classes)
    return hot.movedim(-1, 1).float()


def dice(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Dice per volume and class, without background: float [n, classes - 1].

    Both arguments are [n, classes, z, y, x] memberships. A class absent from both
    scores 1 because of the smoothing.
    """
    prediction, target = prediction[:, 1:], target[:, 1:]
    axes = (2, 3, 4)
    common = (prediction * target).sum(axes)
    total = prediction.sum(axes) + target.sum(axes)
    return (2.0 * common + SMOOTHING) / (total + SMOOTHING)


def dice_ce_loss(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """(mean of 1 - soft Dice + cross entropy) / 2, a scalar.

    `logits` [n, classes, z, y, x] float, `label` [n, 1, z, y, x] integers. Computed in
    float32 whatever the autocast type: sums over a patch lose precision in the 8-bit
    significand of bfloat16.
    """
    logits = logits.float()
    entropy = functional.cross_entropy(logits, label[:, 0].long())
    soft = dice(logits.softmax(1), _one_hot(label, logits.shape[1]))
    return ((1.0 - soft).mean() + entropy) / 2


def dice_score(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Dice of the most likely class, mean over volumes: float [classes - 1]."""
    classes = logits.shape[1]
    chosen = _one_hot(logits.argmax(1, keepdim=True), classes)
    return dice(chosen, _one_hot(label, classes)).mean(0)
