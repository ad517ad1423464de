"""`examples.train_lm --mesh`: its losses and checkpoints on sixteen devices, and what it refuses."""

import re

import host_devices
import pytest

pytest.importorskip("optax", reason="the example needs the extra `train`")
pytest.importorskip("orbax.checkpoint", reason="the example needs the extra `train`")
pytest.importorskip("tqdm", reason="the example needs the extra `train`")
pytest.importorskip("matplotlib", reason="the example needs the extra `train`")

from benchmarks.command_line import InputError
from examples.train_lm import __main__ as command
from examples.train_lm.mesh import ONE_DEVICE, MeshSizes
from examples.train_lm.settings import Settings


@pytest.mark.slow
def test_meshes_train_as_one_device_does_and_exchange_checkpoints(tmp_path):
    printed = host_devices.run("train_mesh_program.py", str(tmp_path), devices=16)

    checks = "resumed bit for bit", "resumed on one device", "equal to one device", "the command to its end"
    assert tuple(line for line in printed.splitlines() if line in checks) == checks


def test_sizes_that_are_left_out_are_one():
    assert MeshSizes.parse("context=4,data=2") == MeshSizes(data=2, context=4)
    assert MeshSizes.parse("data=1") == ONE_DEVICE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "rows=2"], "must be AXIS=SIZE pairs of different axes among data, fsdp, tensor, context"),
        (["--mesh", "data=2,data=2"], "got 'data=2,data=2'. Pass for example"),
        (["--mesh", "data=0"], "got 'data=0'"),
        (["--mesh", "data"], "got 'data'"),
        (["--mesh", "data=512", "--batch", "512"], "must not have more devices than there are, got 512 for"),
    ],
)
def test_wrong_meshes_are_one_line(arguments, message, capsys, tmp_path):
    try:
        status = command.main([*arguments, "--output", str(tmp_path / "run")])
    except SystemExit as stop:
        status = stop.code

    assert status == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mesh", "changes", "message"),
    [
        ("data=2,fsdp=3", dict(batch=8), "--batch must be a multiple of data x fsdp = 6, got 8"),
        ("tensor=2", dict(kv_heads=3), "--kv-heads must be a multiple of tensor = 2, got 3"),
        ("context=2", dict(length=100), "--length must be whole chunks for context = 2, got 100. Pass 256"),
        ("fsdp=4", dict(batch=8, width=126), "--width must be a multiple of fsdp = 4"),
        ("tensor=5", dict(heads=5, kv_heads=5, width=125), "inner width of tensor = 5, got 125 and 336"),
    ],
)
def test_what_does_not_divide_is_named(monkeypatch, mesh, changes, message):
    monkeypatch.setattr("jax.devices", lambda: [None] * 8)
    settings = Settings(**{"batch": 6, "heads": 6, "kv_heads": 2, "width": 192} | changes)
    with pytest.raises(InputError, match=re.escape(message)):
        MeshSizes.parse(mesh).check(batch=settings.batch, length=settings.length, model=settings.model)
