"""A save that is killed, at whatever moment, leaves the checkpoint before it or the new one, whole."""

import subprocess
import sys

import jax
import numpy as np
import pytest

pytest.importorskip("orbax.checkpoint", reason="checkpoints are in the extra `train`")

import killed_save_program
from flax import nnx
from killed_save_program import NEW, OLD

from nsa_jax.model import restore, save

NUMBER = 8


def parameters(model):
    return jax.tree.leaves(nnx.state(model, nnx.Param))


@pytest.mark.slow
def test_a_save_that_is_killed_leaves_the_old_or_the_new_checkpoint(tmp_path):
    expected = {seed: parameters(killed_save_program.model(seed)) for seed in (OLD, NEW)}
    save(tmp_path / "old", killed_save_program.model(OLD))

    program = [sys.executable, killed_save_program.__file__, tmp_path / "old", tmp_path, str(NUMBER)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-3000:]
    operations, killed = map(int, done.stdout.splitlines())
    assert killed == NUMBER
    assert operations > 4 * NUMBER
    left = []
    for i in range(NUMBER):
        found = parameters(restore(tmp_path / str(i)))
        same = [seed for seed in (OLD, NEW) if all(map(np.array_equal, found, expected[seed]))]
        assert len(same) == 1, f"kill {i}"
        left += same
    assert left == sorted(left)
    assert {*left} == {OLD, NEW}
    # The next save succeeds beside what was left.
    for i in (left.index(NEW) - 1, left.index(NEW)):
        save(tmp_path / str(i), killed_save_program.model(NEW))
        assert all(map(np.array_equal, parameters(restore(tmp_path / str(i))), expected[NEW]))
        assert len(list((tmp_path / str(i)).iterdir())) == 1
