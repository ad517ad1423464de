"""Run by test_adopt with four host devices: the stages of adopt on a mesh, in float32.

Arguments: the dense model, a file of text, an empty folder. Prints one line for each check that passed.
"""

import contextlib
import io
import json
import pathlib
import shutil
import sys

import fewer_collections  # noqa: F401
import jax
import numpy as np
from flax import nnx

from nsa_jax.adopt import __main__ as command
from nsa_jax.adopt import training
from nsa_jax.adopt.run_folder import RunFolder

OPTIONS = dict(l=8, d=4, block=8, n=6, w=8, length=64, dtype="float32", selector="indexer", branches="slc")
OPTIONS |= {
    "batch": 4,
    "distil-steps": 1,
    "sparse-steps": 2,
    "warmup": 0,
    "logit-weight": 0.5,
    "remat": "none",
}
MESH = "--mesh=fsdp=2,tensor=2"


class Copied(RunFolder):
    """A folder that is copied once the first step of `sparse` is saved: a run that was stopped there."""

    def save(self, stage, model, moments, step, rows):
        super().save(stage, model, moments, step, rows)
        if self.path.name == "whole" and (stage, step) == ("sparse", 1):
            shutil.copytree(self.path, self.path.with_name("stopped"))
            for tree in (nnx.state(model), moments):
                divided = {axis for leaf in jax.tree.leaves(tree) for axis in leaf.sharding.spec}
                assert divided == {"fsdp", "tensor", None}


def measure(_, name: str, model, dense) -> None:
    for leaf in jax.tree.leaves(nnx.state((model, dense))):
        assert leaf.devices() == {jax.devices()[0]}
        assert jax.typeof(leaf).sharding.mesh.empty  # else it cannot compute there


def losses(output: pathlib.Path, stage: str) -> list[dict[str, float]]:
    steps = [json.loads(line) for line in (output / f"{stage}.jsonl").read_text().splitlines()]
    return [{name: value for name, value in step.items() if name != "ms"} for step in steps]


def main(source: str, text: str, root: pathlib.Path) -> None:
    def run(name: str, *mesh: str, status: int = 0) -> pathlib.Path:
        given = [source, "--text", text, "--output", str(root / name), *mesh]
        assert command.main([*given, *(f"--{name}={value}" for name, value in OPTIONS.items())]) == status
        return root / name

    training.SAVE_EVERY, command.RunFolder = 1, Copied
    command.Measurements.measure, command.write_report = measure, lambda *_: None
    one, whole = run("one"), run("whole", MESH)
    for stage in ("distil", "sparse"):
        for alone, spread in zip(losses(one, stage), losses(whole, stage), strict=True):
            assert alone.keys() == spread.keys()
            np.testing.assert_allclose([*spread.values()], [*alone.values()], rtol=2e-6, atol=1e-7)
    print("equal to one device")

    stopped = run("stopped", MESH)
    assert losses(stopped, "sparse") == losses(whole, "sparse")
    weights = [(each / "model" / "model.safetensors").read_bytes() for each in (stopped, whole)]
    assert weights[0] == weights[1]
    print("resumed bit for bit")

    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert not run("refused", "--mesh=tensor=4", status=2).exists()
    (line,) = said.getvalue().splitlines()
    assert "--mesh must divide the model, got tensor=4 for 2 KV heads. Pass a divisor." in line
    print("a mesh that does not divide the model is refused")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]))
