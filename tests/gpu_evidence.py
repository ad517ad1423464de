"""Evidence that the GPU tests passed on the kernels as they are: what ran, where, and a hash of the code."""

import ast
import hashlib
import json
import pathlib
from importlib import metadata

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "gpu_evidence.json"
CODE = ("nsa_jax/kernels/triton", "nsa_jax/dispatch.py", "nsa_jax/attention.py")


def code_hash() -> str:
    """SHA-256 of the syntax of what decides which kernel runs and what it does, without docstrings."""
    total = hashlib.sha256()
    for part in CODE:
        path = ROOT / part
        for file in [path] if path.is_file() else sorted(path.glob("*.py")):
            code = _without_docstrings(file.read_text())
            if code != "pass":  # a file of documentation only
                total.update(f"{file.relative_to(ROOT)}\n{code}\n".encode())
    return total.hexdigest()


def _without_docstrings(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def write(path: pathlib.Path, durations: dict[str, float]) -> None:
    """Adds the tests that passed to the evidence in `path`; starts anew where the code has changed since."""
    import jax

    evidence = json.loads(path.read_text()) if path.exists() else {}
    if evidence.get("code_sha256") != code_hash():
        evidence = {"code_sha256": code_hash(), "passed": {}}
    packages = ("jax", "jaxlib", "jax-triton", "triton", "torch", "flax")
    evidence["device"] = jax.local_devices()[0].device_kind
    evidence["versions"] = {name: metadata.version(name) for name in packages}
    evidence["passed"] |= {name: round(seconds, 2) for name, seconds in durations.items()}
    evidence["passed"] = dict(sorted(evidence["passed"].items()))
    path.write_text(json.dumps(evidence, indent=1) + "\n")
