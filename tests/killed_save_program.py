"""Saves over copies of a checkpoint, and is killed by SIGKILL at seeded moments of saving.

    python tests/killed_save_program.py CHECKPOINT FOLDER NUMBER

Each save has a process of its own, forked, so that JAX is imported once. It is killed before one of its
operations on files, which a hook of Python counts. Copy `i` in FOLDER is what the `i`-th left behind. Prints
the number of operations of a whole save, and at last the number of processes that were killed.
"""

import os
import pathlib
import shutil
import signal
import sys

import numpy as np
import orbax.checkpoint  # noqa: F401 (here, and not in each process)
from modules import abstract, randomised

from nsa_jax.model import Transformer, TransformerConfig, save

SIZES = dict(vocab_size=64, num_layers=1, model_dim=8, num_heads=2, num_kv_heads=1)
CONFIG = TransformerConfig(**SIZES, attention="dense")
OLD, NEW = 0, 1  # seeds
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")


def model(seed: int) -> Transformer:
    return randomised(abstract(Transformer, CONFIG), seed=seed)


def forked_save(folder: pathlib.Path, moment: int | None) -> tuple[int, bool]:
    """Saves until a kill before operation number `moment`: how many were done, and whether it was killed."""
    receive, send = os.pipe()
    if pid := os.fork():
        os.close(send)
        with open(receive) as pipe:
            done = pipe.read()
        _, status = os.waitpid(pid, 0)
        return len(done), os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL

    def count(event, arguments):
        nonlocal done
        if event in CHANGES or (event == "open" and str(folder) in str(arguments[0])):
            if done == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
            os.write(send, b".")

    os.close(receive)
    done, made = 0, model(NEW)
    sys.addaudithook(count)
    save(folder, made)
    os._exit(0)


if __name__ == "__main__":
    checkpoint, folder, number = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
    whole, _ = forked_save(shutil.copytree(checkpoint, folder / "whole"), None)
    print(whole)
    # One in each part of the save, so that some are before the rename and some behind it.
    moments = (np.arange(number) + np.random.default_rng(0).random(number)) * whole / number
    killed = [
        forked_save(shutil.copytree(checkpoint, folder / str(i)), int(moment))[1]
        for i, moment in enumerate(moments)
    ]
    print(sum(killed))
