"""Checkpoints by Orbax: a model with its configuration, and what a training run needs to resume."""

import dataclasses
import os
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from nsa_jax.dispatch import Implementation
from nsa_jax.model import checkpoint_folder, checksums, restorable
from nsa_jax.model.abstract import abstract_transformer, fill, parameters
from nsa_jax.model.checkpoint_reader import Reader
from nsa_jax.model.config import TransformerConfig
from nsa_jax.model.orbax_errors import Failure, attempt
from nsa_jax.model.stored_config import config_as_plain, config_from_plain
from nsa_jax.model.transformer import Transformer
from nsa_jax.nn.parameters import sharding_of
from nsa_jax.nn.projections import Sharding
from nsa_jax.parallel import Order

# These fields change how a model computes, not which parameters it has or what they mean.
FREE_FIELDS = ("dtype", "remat", "scan_layers", "dropout_rate")


def save(path: str | os.PathLike[str], model: Transformer, *, training: Any = None) -> None:
    """Writes a checkpoint to the directory `path` and then deletes the one before it.

    The new checkpoint becomes visible by one rename after all of it is on disk, and only then is the old one
    deleted. So a save that fails or is killed leaves the old checkpoint. With the arrays it writes their
    checksums, so that `restore` notices when they were damaged since.

    Args:
      path: directory of the checkpoint; created if it does not exist.
      model: the model, whose configuration and parameters are written.
      training: any pytree of arrays and numbers that a resumed run needs, for example
        `{"optimizer": nnx.state(optimizer), "step": step}`. Convert random keys by `jax.random.key_data`.
        None to save the model only.

    Raises:
      TypeError: `path` is not a path; `model` is not a `Transformer`, or its configuration holds something
        that JSON cannot, such as your own `rotary`, `compressor`, `gate` or `selector` function. Nothing is
        written then.
      ValueError: `path` is a file, or another save writes there; `restore` could not rebuild the model,
        because its parameters, submodules or their settings are not those of its configuration; or `training`
        holds something other than arrays and numbers. Nothing is written then.
      OSError: the checkpoint cannot be written, for example because the disk is full.
      ImportError: Orbax is not installed.

    Examples:
      >>> save("run/checkpoint", model, training={"optimizer": nnx.state(optimizer), "step": 100})
      >>> model = restore("run/checkpoint")
    """
    orbax = _orbax()
    path = checkpoint_folder.absolute(path)
    if os.path.isfile(path):
        raise ValueError(f"path must be a folder or new, got the file {path!r}. Name another path.")
    restorable.check_model(model)
    config, arrays = config_as_plain(model.config), parameters(model)
    sums = {"config": checksums.of_json(config), "model": checksums.of_arrays(arrays)}
    items = {
        "config": orbax.args.JsonSave(config),
        "model": orbax.args.StandardSave(arrays),
        "checksums": orbax.args.JsonSave(sums),
    }
    if training is not None:
        named = _named_leaves(training=training)
        restorable.check_training(named)
        items["training"] = orbax.args.StandardSave(named)
        sums["training"] = checksums.of_arrays(named)
    options = orbax.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)

    def write() -> None:
        with orbax.CheckpointManager(path, options=options) as manager:
            latest = manager.latest_step()
            manager.save(0 if latest is None else latest + 1, args=orbax.args.Composite(**items))

    _write(path, lambda: os.makedirs(path, exist_ok=True))
    with checkpoint_folder.only_writer(path):
        _write(path, write)


def restore(
    path: str | os.PathLike[str],
    config: TransformerConfig | None = None,
    *,
    sharding: Sharding | None = None,
    context_axis: str | None = None,
    context_order: Order = "zigzag",
    implementation: Implementation | None = None,
) -> Transformer:
    """Reads a model that `save` wrote.

    Args:
      path: directory of the checkpoint.
      config: configuration of the model, by default that of the checkpoint. Only `dtype`, `remat`,
        `scan_layers` and `dropout_rate` may differ from that.
      sharding: mesh axes of named dimensions, see `Transformer`. The parameters are read into this sharding
        of the mesh in context.
      context_axis: mesh axis over which the tokens of a row are spread, see `Transformer`.
      context_order: order of the tokens on the devices, see `Transformer`.
      implementation: one of `nsa_jax.dispatch.IMPLEMENTATIONS` or None, see `Transformer`.

    Returns:
      The model, in training mode: call its `eval()` if it has dropout and should not train. Dropout starts
      from seed 0; `nnx.reseed(model, default=seed)` sets another seed.

    Raises:
      FileNotFoundError: `path` holds no checkpoint.
      TypeError: `path` is not a path, or `config` is something else than a `TransformerConfig`.
      ValueError: the checkpoint was damaged after it was saved, or has another configuration; or `sharding`
        names an unknown dimension or has no mesh in context.
      ImportError: Orbax is not installed.

    Warns:
      UserWarning: the checkpoint is of an earlier version and has no checksums, so that damage to its arrays
        would not be noticed.
    """
    _orbax()
    reader = Reader(path)
    values = reader.json("config")
    saved_config = reader.understand("config", lambda: config_from_plain(values))
    config = saved_config if config is None else config
    _check_same(config, saved_config)
    model = abstract_transformer(
        config, sharding=sharding, context_axis=context_axis, context_order=context_order,
        implementation=implementation,
    )  # fmt: skip
    fill(model, reader.arrays("model", jax.tree.map(_placed, parameters(model))))
    return model


def restore_training(path: str | os.PathLike[str], like: Any) -> Any:
    """Reads the `training` tree that `save` wrote.

    Args:
      path: directory of the checkpoint.
      like: a tree with the structure, shapes and dtypes that were saved, for example that of a run that has
        not started yet.

    Returns:
      The saved tree. Its arrays have the placement of the arrays in `like`.

    Raises:
      FileNotFoundError: `path` holds no checkpoint.
      TypeError: `path` is not a path.
      ValueError: the checkpoint was damaged after it was saved, or holds no `training` tree, or one of
        another structure, shape or dtype; or `like` holds something other than arrays and numbers.
      ImportError: Orbax is not installed.

    Warns:
      UserWarning: the checkpoint has no checksums, as in `restore`.
    """
    _orbax()
    reader = Reader(path)
    if not reader.has("training"):
        raise ValueError(
            f"restore_training needs a checkpoint saved with training=..., got {reader.path!r}. "
            "Restore the model alone, or save again."
        )
    wanted = _named_leaves(like=like)
    held = reader.shapes("training")
    changed = [
        name
        for name in sorted(wanted.keys() | set(held))
        if name not in wanted or name not in held or not _fits(wanted[name], held[name])
    ]
    if changed:
        raise ValueError(
            f"like must have the structure, shapes and dtypes that were saved, got others at "
            f"{changed[:3]}. Build it as the run that was saved did."
        )
    saved = reader.arrays("training", wanted)
    return jax.tree.unflatten(jax.tree.structure(like), [saved[name] for name in wanted])


def _orbax() -> types.ModuleType:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            f"checkpoints need orbax-checkpoint, got {error}. Install it with: pip install 'nsa_jax[train]'."
        ) from error
    return orbax.checkpoint


def _write(path: str, call: Callable[[], object]) -> None:
    found = attempt(call)
    if isinstance(found, Failure):
        raise OSError(
            f"path must take a whole checkpoint, got {found.said!r} at {path!r}. Make room or name another "
            "path. What was saved there before still is."
        )


def _fits(leaf: Any, held: Any) -> bool:
    return np.shape(leaf) == tuple(held.shape) and getattr(leaf, "dtype", held.dtype) == held.dtype


def _named_leaves(**trees: Any) -> dict[str, Any]:
    ((argument, tree),) = trees.items()
    named = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float):
            raise ValueError(
                f"{argument} must hold arrays and numbers, got {type(leaf).__name__} at {name!r}. "
                "Convert or drop it."
            )
        if name in named:
            raise ValueError(
                f"the paths of {argument} must differ, got {name!r} twice. Rename a key with a dot."
            )
        # Orbax can write a NumPy scalar but cannot read it again.
        named[name] = np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
    return named


def _placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The leaf with a sharding to read arrays into: that of the mesh in context, or the first device."""
    where = sharding_of(leaf) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def _check_same(config: TransformerConfig, saved: TransformerConfig) -> None:
    if not isinstance(config, TransformerConfig):
        raise TypeError(
            f"config must be a TransformerConfig, got {type(config).__name__}. Pass None to take it from the "
            "checkpoint."
        )
    names = [field.name for field in dataclasses.fields(saved) if field.name not in FREE_FIELDS]
    differing = [name for name in names if getattr(config, name) != getattr(saved, name)]
    if differing:
        got = ", ".join(f"{name}={getattr(config, name)!r}" for name in differing)
        has = ", ".join(f"{name}={getattr(saved, name)!r}" for name in differing)
        raise ValueError(
            f"config must be that of the checkpoint, got {got} where it has {has}. "
            "Pass the configuration that was saved, or None to take it from the checkpoint."
        )
