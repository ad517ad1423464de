"""Training and decoding by two processes that share a mesh, against one device."""

import pathlib
import socket
import subprocess
import sys

import host_devices
import jax
import pytest

pytest.importorskip("optax", reason="the program trains, which needs the extra `train`")

import two_process_program

PROGRAM = pathlib.Path(two_process_program.__file__)


def test_two_processes_train_and_decode_as_one_device_does():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = host_devices.environment(2, "--xla_backend_optimization_level=0")
    arguments = [sys.executable, str(PROGRAM), str(port)]
    processes = [
        subprocess.Popen(
            [*arguments, str(i)], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for i in range(2)
    ]
    try:
        found = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()

    assert [process.returncode for process in processes] == [0, 0], [errors[-3000:] for _, errors in found]
    first, second = (output.splitlines()[-3:] for output, _ in found)  # behind what Gloo prints
    assert first == second
    losses, tokens, devices = first
    assert devices == "devices 4 2"
    with jax.enable_x64(True):
        expected, generated = two_process_program.train_and_decode(None, lambda rows: rows)
    assert [float(loss) for loss in losses.split()[1:]] == pytest.approx(expected, abs=1e-10)
    assert tokens == " ".join(["tokens", *map(str, generated)])
