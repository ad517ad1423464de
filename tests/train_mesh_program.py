"""Run by test_train_mesh with sixteen host devices: the example's training on meshes, in float64.

Argument: an empty folder. Prints one line for each check that passed.
"""

import dataclasses
import functools
import json
import pathlib
import shutil
import sys
import types
from unittest import mock

import fewer_collections  # noqa: F401
import jax
import numpy as np
from flax import nnx
from sharded_modules import drawn

from examples.train_lm import __main__ as command
from examples.train_lm import text, training
from examples.train_lm.mesh import ONE_DEVICE, MeshSizes
from examples.train_lm.run_folder import RunFolder
from examples.train_lm.settings import Settings
from nsa_jax.config import NSAConfig

STEPS = 8
SMALL = NSAConfig(
    compression_block_size=8,
    compression_stride=4,
    selection_block_size=8,
    num_selected_blocks=4,
    window_size=8,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings64(Settings):
    """Settings whose model computes in float64, and begins with NumPy's numbers."""

    nsa: NSAConfig = SMALL

    @property
    def model(self):
        return dataclasses.replace(super().model, dtype="float64", param_dtype="float64")

    def new_model(self, mesh=ONE_DEVICE):
        return drawn(lambda: self._make(mesh))


SIZES = dict(steps=STEPS, batch=4, length=64, layers=1, width=16, heads=4, kv_heads=2, warmup=2)
SETTINGS = Settings64(**SIZES)
MESH = "data=2,fsdp=2,tensor=2,context=2"


class Copied(RunFolder):
    """A folder that is copied to others when half of the steps are saved: runs that were stopped there."""

    def save(self, model, moments, step, curve):
        super().save(model, moments, step, curve)
        if step == STEPS // 2:
            for name in ("half", "elsewhere"):
                shutil.copytree(self.path, self.path.parent / name)


def train(folder: RunFolder, mesh: MeshSizes, **options) -> tuple[list[float], list[np.ndarray]]:
    """Losses of all steps in bits, and the parameters at the end."""
    corpus = text.load(None, SETTINGS.length)
    with mesh.in_context():
        trained = training.train(
            SETTINGS, corpus, folder, mesh=mesh, evaluations=0, checkpoint_every=STEPS // 2, **options
        )
    losses = [row["bits_per_byte"] for row in trained.curve]
    return losses, [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(trained.model, nnx.Param))]


def gets_a_whole_model(model: nnx.Module, *_) -> types.SimpleNamespace:
    """In the place of what writes text. sharded_decoding_program writes with a model that lies so."""
    assert jax.sharding.get_abstract_mesh().empty
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(nnx.state(model)))
    return types.SimpleNamespace(text=("a", "b"))


def main(root: pathlib.Path) -> None:
    jax.config.update("jax_enable_x64", True)
    training._compile_update = functools.cache(training._compile_update)  # runs on one mesh share a program
    mesh = MeshSizes.parse(MESH)
    whole = train(Copied(root / "whole"), mesh)

    resumed = train(RunFolder(root / "half"), mesh, resume=True)
    assert resumed[0] == whole[0]
    assert all((x == y).all() for x, y in zip(resumed[1], whole[1], strict=True))
    print("resumed bit for bit")

    elsewhere = train(RunFolder(root / "elsewhere"), ONE_DEVICE, resume=True)
    np.testing.assert_allclose(elsewhere[0], whole[0], rtol=0, atol=1e-10)
    for x, y in zip(elsewhere[1], whole[1], strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-9)
    # The embedding of tokens was once divided like its table, by features, and then sent to its rows.
    assert "all-to-all" not in training._compile_update(SETTINGS, mesh)[1].as_text()
    print("resumed on one device")

    one = train(RunFolder(root / "one"), ONE_DEVICE)
    np.testing.assert_allclose(whole[0], one[0], rtol=0, atol=1e-10)
    assert one[0][-1] < one[0][0] - 0.1
    print("equal to one device")

    (root / "data.txt").write_text(" ".join(map(str, range(2000))))
    sizes = [f"--{name.replace('_', '-')}={size}" for name, size in SIZES.items()]
    paths = f"--data={root / 'data.txt'}", f"--output={root / 'command'}"
    others = dict(_write_and_draw=gets_a_whole_model, Settings=Settings64)  # its program is that of `whole`
    with mock.patch.multiple(command, **others):
        assert command.main([*sizes, *paths, f"--mesh={MESH}"]) == 0
    assert json.loads((root / "command" / "result.jsonl").read_text())["sample"] == "b"
    print("the command to its end")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
