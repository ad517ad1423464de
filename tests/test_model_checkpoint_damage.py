"""Damaged checkpoints, and saves that cannot be done: each is one sentence, and never other weights."""

import gc
import json
import resource
import shutil
import sys
import threading
import warnings

import garbage
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("orbax.checkpoint", reason="checkpoints are in the extra `train`")

from flax import nnx
from messages import has_form, refused
from modules import abstract, randomised

from nsa_jax.model import Transformer, checkpoint_folder, orbax_errors, restore, restore_training, save
from nsa_jax.model.checkpoint_reader import Reader
from nsa_jax.model.config import TransformerConfig

SIZES = dict(vocab_size=64, num_layers=1, model_dim=8, num_heads=2, num_kv_heads=1)
CONFIG = TransformerConfig(**SIZES, attention="dense")
# Both hold an array of more than 1024 bytes. Smaller ones lie in files with which Orbax writes checksums.
MODEL = randomised(abstract(Transformer, CONFIG))
TRAINING = {"moments": [jnp.arange(400.0) + i for i in range(8)], "order": np.arange(300.0), "step": 7}
WHOLE = "path must hold an undamaged checkpoint, got one at "


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "run"
    save(path, MODEL, training=TRAINING)
    return path


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


@pytest.fixture(autouse=True)
def _garbage_of_this_test():
    """A read that fails collects garbage."""
    with garbage.of_this_test():
        yield


@pytest.fixture
def no_wait(monkeypatch):
    """Waits once for what failed calls leave behind, and not after each of them."""
    settle = orbax_errors._settle
    monkeypatch.setattr(orbax_errors, "_settle", lambda _: None)
    with orbax_errors._silence() as records:
        yield
        settle(records)


@pytest.fixture
def printed(monkeypatch, capfd, caplog):
    """What was printed or logged, also by other threads and by what is collected later."""
    monkeypatch.setattr(orbax_errors, "WAIT_FOR_OTHERS_S", 0.3)  # machines of CI are busy
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", lambda each: unraisable.append(str(each.exc_value)))

    def everything():
        gc.collect()
        return [*unraisable, *(record.getMessage() for record in caplog.records), *capfd.readouterr()]

    return everything


def files_of(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


def damaged(data):
    half = len(data) // 2
    yield "removed", None
    yield "emptied", b""
    yield "cut in half", data[:half]
    yield "one byte", data[:half] + bytes([data[half] ^ 0xFF]) + data[half + 1 :]


def outcome(path, call, expected):
    """Whether a call refused the checkpoint or returned what was saved. Anything else fails."""
    try:
        found = call(path)
    except ValueError as error:
        said = str(error)
    else:
        for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(leaf, other)
        return "the same"
    assert said.startswith(f"{WHOLE}{str(path)!r} whose ")
    assert has_form(said)
    return "refused"


def parameters(model):
    return nnx.state(model, nnx.Param)


def test_every_damage_of_every_file_is_refused_or_changes_nothing(copy, no_wait):
    calls = {
        "model": (lambda path: parameters(restore(path)), parameters(MODEL)),
        "training": (lambda path: restore_training(path, TRAINING), TRAINING),
    }
    found = {}
    for file in files_of(copy):
        item, data = file.relative_to(copy / "0").parts[0], file.read_bytes()
        for damage, content in damaged(data):
            file.unlink() if content is None else file.write_bytes(content)
            for name, (call, expected) in calls.items():
                if item in (name, "checksums") or (name, item) == ("model", "config"):
                    found[file, damage, name] = outcome(copy, call, expected)
            file.write_bytes(data)

    refused = [(file, damage) for (file, damage, _), what in found.items() if what == "refused"]
    # The rest is read by nobody: copies that Orbax merged, and what it notes beside the arrays.
    for name in ("checksums/metadata", "config/metadata", "model/manifest.ocdbt", "training/manifest.ocdbt"):
        seen = {damage for file, damage in refused if file == copy / "0" / name}
        assert seen == {"removed", "emptied", "cut in half", "one byte"}
    for item in ("model", "training"):
        data = list((copy / "0" / item).rglob("d/*"))
        assert any((file, "one byte") in refused for file in data)


def test_other_numbers_than_were_saved_are_refused_by_name(copy):
    """A flipped byte in a data file gave other weights in silence."""
    file = copy / "0" / "checksums" / "metadata"
    sums = json.loads(file.read_text())
    for item, name, restored in (
        ("config", "rope_base", lambda: restore(copy)),
        ("model", "embed.embedding", lambda: restore(copy)),
        ("training", "order", lambda: restore_training(copy, TRAINING)),
    ):
        file.write_text(json.dumps(sums | {item: sums[item] | {name: "0"}}))

        changed = rf"whose {item} has other checksums than were saved at \['{name}'\]\. Restore another"
        with refused(ValueError, WHOLE + ".*" + changed):
            restored()


def test_a_save_replaces_a_damaged_checkpoint(copy):
    (copy / "0" / "config" / "metadata").write_text("{")

    save(copy, MODEL)

    assert outcome(copy, lambda path: parameters(restore(path)), parameters(MODEL)) == "the same"


def test_checkpoints_of_earlier_versions_load_with_a_warning(copy):
    """They have no checksums, and those of 0.1.0 no `rope_scaling`."""
    shutil.rmtree(copy / "0" / "checksums")
    file = copy / "0" / "config" / "metadata"
    config = json.loads(file.read_text())
    del config["rope_scaling"]
    file.write_text(json.dumps(config))

    with pytest.warns(
        UserWarning, match=r"the checkpoint at .* has no checksums, .* Save it again"
    ) as warned:
        model = restore(copy)
    assert [warning.filename for warning in warned] == [__file__]
    assert outcome(copy, lambda _: parameters(model), parameters(MODEL)) == "the same"
    with pytest.warns(UserWarning, match="has no checksums"):
        assert restore_training(copy, TRAINING)["step"] == 7
    file.write_text(json.dumps(config | {"num_heads": "2"}))
    with (
        pytest.warns(UserWarning, match="has no checksums"),
        refused(ValueError, f"{WHOLE}.* whose config cannot be read"),
    ):
        restore(copy)


def test_a_whole_checkpoint_loads_without_a_warning(saved):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restore(saved)


def test_a_checkpoint_that_is_replaced_while_it_is_read(copy):
    reader = Reader(copy)
    save(copy, MODEL)

    with refused(ValueError, r"path must keep its checkpoint while .*, got a newer one .* Restore"):
        reader.json("config")


def test_a_read_that_fails_prints_nothing(copy, printed):
    """Orbax leaves tasks and coroutines behind, which print later: in threads, and when collected."""
    data = max((copy / "0" / "training" / "d").iterdir(), key=lambda file: file.stat().st_size)

    for file in (data, copy / "0" / "training" / "manifest.ocdbt"):
        for content in (b"", None):
            file.unlink() if content is None else file.write_bytes(content)
            with refused(ValueError, r"whose \w+ cannot be read \(.*\)\. Restore another copy"):
                restore_training(copy, TRAINING)

    assert printed() == ["", ""]


def test_what_orbax_logs_of_a_read_that_succeeds_is_logged(copy, caplog):
    (copy / "0" / "_CHECKPOINT_METADATA").write_text("{")

    restore_training(copy, TRAINING)

    assert "Failed to json parse" in caplog.text


def test_errors_of_the_machine_are_raised_as_they_are(saved, monkeypatch):
    def fails(*_, **__):
        raise MemoryError

    monkeypatch.setattr("orbax.checkpoint.Checkpointer.restore", fails)

    with pytest.raises(MemoryError):
        restore(saved)


def test_a_full_disk_is_one_sentence_and_the_next_save_succeeds(copy, printed):
    """A limit on the size of files stands for the disk: it fails the same writes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    larger = TRAINING | {"order": np.random.default_rng(0).normal(size=30_000)}

    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        with refused(OSError, r"^path must take a whole checkpoint, got 'File too large' at .* Make room"):
            save(copy, MODEL, training=larger)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert printed() == ["", ""]
    assert restore_training(copy, TRAINING)["step"] == 7
    save(copy, MODEL, training=larger)
    assert len(list(copy.iterdir())) == 1


def test_one_save_at_a_time(copy, printed):
    path = str(copy)

    with (
        checkpoint_folder.only_writer(path),
        refused(ValueError, r"path must be written by one save at a time, got '.*' while another .* Save"),
    ):
        save(copy, MODEL)

    assert printed() == ["", ""]
    assert outcome(copy, lambda path: parameters(restore(path)), parameters(MODEL)) == "the same"
    save(copy, MODEL)


def test_several_savers_at_once_leave_a_whole_checkpoint(copy, printed):
    errors, start = [], threading.Barrier(3)

    def saves():
        start.wait()
        for _ in range(3):
            try:
                save(copy, MODEL)
            except ValueError as error:
                errors.append(str(error))

    threads = [threading.Thread(target=saves) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert 0 < len(errors) < 9
    assert all(error.startswith("path must be written by one save at a time") for error in errors)
    assert printed() == ["", ""]
    assert outcome(copy, lambda path: parameters(restore(path)), parameters(MODEL)) == "the same"


@pytest.mark.parametrize("path", [None, 3, b"run", ["run"]], ids=repr)
def test_a_path_that_is_none(path):
    for call in (lambda: save(path, MODEL), lambda: restore(path), lambda: restore_training(path, TRAINING)):
        with refused(TypeError, r"path must be a str or os.PathLike, got \w+\. Name"):
            call()


def test_a_file_in_the_way_of_a_save(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")

    with refused(ValueError, r"path must be a folder or new, got the file '.*file'\. Name another"):
        save(file, MODEL)
    with refused(OSError, r"path must take a whole checkpoint, got 'Not a directory' at .* Make room"):
        save(file / "run", MODEL)

    assert file.read_text() == "mine"
