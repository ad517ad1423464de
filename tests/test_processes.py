"""Training and decoding by two processes that share a mesh, against one device."""

import pathlib
import socket
import subprocess
import sys

import host_devices
import jax
import pytest

pytest.importorskip("optax", reason="the programs train, which needs the extra `train`")
pytest.importorskip("orbax.checkpoint", reason="the example needs the extra `train`")
pytest.importorskip("tqdm", reason="the example needs the extra `train`")
pytest.importorskip("matplotlib", reason="the example needs the extra `train`")

import two_process_program

from examples.train_lm import text, training
from examples.train_lm.run_folder import RunFolder, read_rows
from examples.train_lm.settings import Settings
from nsa_jax.model import restore

ROOT = pathlib.Path(__file__).parent.parent


def run_two(*arguments: str) -> list[str]:
    """What two processes of two devices each printed, which run the program as SLURM starts them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    job = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "1"}
    job |= {"SLURM_NTASKS": "2", "JAX_COORDINATOR_ADDRESS": f"localhost:{port}"}
    environment = host_devices.environment(2) | job
    processes = [
        subprocess.Popen(
            [sys.executable, two_process_program.__file__, *arguments],
            env=environment | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)},
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for i in range(2)
    ]
    try:
        found = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], [errors[-3000:] for _, errors in found]
    return [output for output, _ in found]


@pytest.mark.slow
def test_two_processes_do_what_one_device_does(tmp_path):
    """They train the example, and one process reads their checkpoint; then they decode.

    A dense model: that NSA's gradients are right on a mesh is what train_mesh_program shows.
    """
    sizes = dict(attention="dense", steps=2, batch=2, length=64, layers=1, width=16, heads=4, kv_heads=2)
    sizes |= dict(warmup=1)
    options = [f"--{name.replace('_', '-')}={size}" for name, size in sizes.items()]
    data, folder = tmp_path / "data.txt", RunFolder(tmp_path / "run")
    data.write_text(" ".join(map(str, range(400))))

    paths = f"--data={data}", f"--output={folder.path}"
    mesh = "--distributed", "--mesh=fsdp=2,tensor=2"
    first, second = run_two(*mesh, *options, *paths)

    assert "--resume, in one process" in first
    assert "trained" not in second
    last = first.splitlines()[-2:]  # behind what Gloo prints
    assert second.splitlines()[-2:] == last
    tokens, devices = last
    assert devices == "devices 4 2"
    with jax.enable_x64(True):
        generated = two_process_program.decode(None, lambda rows: rows)
    assert tokens == " ".join(["tokens", *map(str, generated)])

    settings, curve = Settings(**sizes), read_rows(folder.curve)
    corpus = text.load(data, settings.length)
    one = training.train(settings, corpus, RunFolder(tmp_path / "one"), evaluations=0)
    # Losses of about 8 bits are means of float32 sums in another order: 100 eps.
    bits = [row["bits_per_byte"] for row in curve]
    assert bits == pytest.approx([row["bits_per_byte"] for row in one.curve], abs=1e-4)
    held_out = training.evaluate(restore(folder.checkpoint), corpus.held_out_rows(settings.length))
    assert held_out == pytest.approx(curve[-1]["held_out"], abs=1e-4)
