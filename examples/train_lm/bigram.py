"""The baseline: each byte predicted from the byte before it."""

import numpy as np

from examples.train_lm.settings import BYTES

PRIOR_STRENGTHS = (0.1, 1.0, 10.0, 100.0, 1000.0)


def bits_per_byte(training: np.ndarray, held_out: np.ndarray) -> float:
    """Cross entropy of `held_out` after its first byte, under counts of `training`.

    `p(b | a) = (count(ab) + s p(b)) / (count(a) + s)`, smoothed towards byte frequencies (add-one). The prior
    strength `s` is the best of a few on the held-out text itself, which can only favour the baseline.
    """
    pairs = training[:-1].astype(np.int64) * BYTES + training[1:]
    counts = np.bincount(pairs, minlength=BYTES**2).reshape(BYTES, BYTES)
    frequency = (np.bincount(training, minlength=BYTES) + 1) / (len(training) + BYTES)
    losses = []
    for strength in PRIOR_STRENGTHS:
        probability = (counts + strength * frequency) / (counts.sum(1, keepdims=True) + strength)
        losses.append(-np.log2(probability[held_out[:-1], held_out[1:]]).mean())
    return float(min(losses))
