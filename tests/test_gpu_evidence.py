"""The kernels have passed the GPU tests as they are: the committed evidence is of this very code."""

import json
import pathlib
import subprocess
import sys

import gpu_evidence
import pytest


def test_evidence_is_of_this_code():
    """If not: run `python -m pytest -m gpu --evidence tests/gpu_evidence.json` on a GPU and commit it."""
    evidence = json.loads(gpu_evidence.FILE.read_text())

    assert evidence["code_sha256"] == gpu_evidence.code_hash()


def test_evidence_has_every_test_of_the_kernels():
    pytest.importorskip("torch", reason="the cases of parity are GPU tests, too, and need the extra `torch`")
    root = pathlib.Path(__file__).parent.parent
    files = [str(file.relative_to(root)) for file in sorted(root.glob("tests/test_gpu_*.py"))]
    options = ["--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout
    expected = {line for line in listed.splitlines() if "::" in line}
    evidence = json.loads(gpu_evidence.FILE.read_text())

    assert len(expected) > 20, listed
    assert expected <= set(evidence["passed"])


def test_docstrings_and_comments_do_not_count_but_code_does():
    plain = gpu_evidence._without_docstrings("def f():\n    return 1\n")
    assert gpu_evidence._without_docstrings('"""A."""\ndef f():\n    """B."""\n    return 1  # C\n') == plain
    assert gpu_evidence._without_docstrings("def f():\n    return 2\n") != plain
