"""Checkpoints by Orbax: a model with its configuration, and what a training run needs to resume."""

import dataclasses
import os
import types
from typing import Any

import jax
import numpy as np
from flax import nnx

from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.model import restorable
from nsa_jax.model.config import TransformerConfig
from nsa_jax.model.transformer import Transformer
from nsa_jax.nn.parameters import by_path, sharding_of
from nsa_jax.nn.projections import Sharding
from nsa_jax.nn.rope_scaling import as_plain, from_plain
from nsa_jax.parallel import Order

# These fields change how a model computes, not which parameters it has or what they mean.
FREE_FIELDS = ("dtype", "remat", "dropout_rate")


def save(path: str | os.PathLike[str], model: Transformer, *, training: Any = None) -> None:
    """Writes a checkpoint to the directory `path` and then deletes the one before it.

    The new checkpoint becomes visible by one rename after all of it is on disk, and only then is the old one
    deleted. So a save that fails or is killed leaves the old checkpoint.

    Args:
      path: directory of the checkpoint; created if it does not exist.
      model: the model, whose configuration and parameters are written.
      training: any pytree of arrays and numbers that a resumed run needs, for example
        `{"optimizer": nnx.state(optimizer), "step": step}`. Convert random keys by `jax.random.key_data`.
        None to save the model only.

    Raises:
      TypeError: `model` is not a `Transformer`, or its configuration holds something that JSON cannot, such
        as your own `rotary`, `compressor` or `gate`. Nothing is written then.
      ValueError: `restore` could not rebuild the model, because its parameters, submodules or their settings
        are not those of its configuration; or `training` holds something other than arrays and numbers.
        Nothing is written then.
      ImportError: Orbax is not installed.

    Examples:
      >>> save("run/checkpoint", model, training={"optimizer": nnx.state(optimizer), "step": 100})
      >>> model = restore("run/checkpoint")
    """
    orbax = _orbax()
    restorable.check_model(model)
    items = {
        "config": orbax.args.JsonSave(_config_to_json(model.config)),
        "model": orbax.args.StandardSave(_parameters(model)),
    }
    if training is not None:
        named = _named_leaves(training)
        restorable.check_training(named)
        items["training"] = orbax.args.StandardSave(named)
    options = orbax.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
    with orbax.CheckpointManager(os.path.abspath(path), options=options) as manager:
        latest = manager.latest_step()
        manager.save(0 if latest is None else latest + 1, args=orbax.args.Composite(**items))


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
      config: configuration of the model, by default that of the checkpoint. Only `dtype`, `remat` and
        `dropout_rate` may differ from that.
      sharding: mesh axes of named dimensions, see `Transformer`. The parameters are read into this sharding
        of the mesh in context.
      context_axis: mesh axis over which the tokens of a row are spread, see `Transformer`.
      context_order: order of the tokens on the devices, see `Transformer`.
      implementation: "xla", "triton", "mosaic_gpu" or None, see `Transformer`.

    Returns:
      The model, in training mode: call its `eval()` if it has dropout and should not train. Dropout starts
      from seed 0; `nnx.reseed(model, default=seed)` sets another seed.

    Raises:
      FileNotFoundError: `path` holds no checkpoint.
      TypeError: `config` is something else than a `TransformerConfig`.
      ValueError: the checkpoint has another configuration, or `sharding` names an unknown dimension or has no
        mesh in context.
      ImportError: Orbax is not installed.
    """
    orbax = _orbax()
    newest = _newest(orbax, path)
    with _reader(orbax) as reader:
        args = orbax.args.Composite(config=orbax.args.JsonRestore())
        saved_config = _config_from_json(reader.restore(newest, args=args)["config"])
        config = saved_config if config is None else config
        _check_same(config, saved_config)
        make = lambda: Transformer(  # noqa: E731
            config, sharding=sharding, context_axis=context_axis, context_order=context_order,
            implementation=implementation, rngs=nnx.Rngs(0),
        )  # fmt: skip
        abstract = nnx.as_abstract(nnx.eval_shape(make)) if sharding else nnx.eval_shape(make)
        wanted = jax.tree.map(_placed, _parameters(abstract))
        args = orbax.args.Composite(model=orbax.args.StandardRestore(wanted))
        parameters = reader.restore(newest, args=args)["model"]
    state = nnx.state(abstract, nnx.Param)
    for name, variable in by_path(state).items():
        variable.set_value(parameters[name])
    nnx.update(abstract, state)
    nnx.reseed(abstract, default=0)
    return abstract


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
      ValueError: the checkpoint holds no `training` tree, or one of another structure, shape or dtype.
      ImportError: Orbax is not installed.
    """
    orbax = _orbax()
    newest = _newest(orbax, path)
    if not os.path.isdir(os.path.join(newest, "training")):
        raise ValueError(
            f"restore_training needs a checkpoint saved with training=..., got {os.fspath(path)!r}. "
            "Restore the model alone, or save again."
        )
    wanted = _named_leaves(like)
    with _reader(orbax) as reader:
        held = reader.metadata(newest).item_metadata["training"].tree
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
        args = orbax.args.Composite(training=orbax.args.StandardRestore(wanted))
        saved = reader.restore(newest, args=args)["training"]
    return jax.tree.unflatten(jax.tree.structure(like), [saved[name] for name in wanted])


def _orbax() -> types.ModuleType:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            f"checkpoints need orbax-checkpoint, got {error}. Install it with: pip install 'nsa_jax[train]'."
        ) from error
    return orbax.checkpoint


def _newest(orbax: types.ModuleType, path: str | os.PathLike[str]) -> str:
    """Directory of the newest complete checkpoint under `path`."""
    path = os.path.abspath(path)
    steps = orbax.utils.checkpoint_steps(path) if os.path.isdir(path) else []
    # A folder with a number for a name may be somebody else's.
    steps = [step for step in steps if os.path.isdir(os.path.join(path, str(step), "model"))]
    if not steps:
        raise FileNotFoundError(
            f"path must hold a checkpoint that save wrote, got {path!r}. Check it, or save one first."
        )
    return os.path.join(path, str(max(steps)))


def _reader(orbax: types.ModuleType) -> Any:
    handlers = dict(
        config=orbax.JsonCheckpointHandler(),
        model=orbax.StandardCheckpointHandler(),
        training=orbax.StandardCheckpointHandler(),
    )
    return orbax.Checkpointer(orbax.CompositeCheckpointHandler(**handlers))


def _fits(leaf: Any, held: Any) -> bool:
    return np.shape(leaf) == tuple(held.shape) and getattr(leaf, "dtype", held.dtype) == held.dtype


def _parameters(model: Transformer) -> dict[str, Any]:
    """Parameters by their names in the checkpoint: their paths, joined by dots."""
    named = by_path(nnx.state(model, nnx.Param))
    return {name: variable.get_value() for name, variable in named.items()}


def _named_leaves(tree: Any) -> dict[str, Any]:
    named = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float):
            raise ValueError(
                f"training must hold arrays and numbers, got {type(leaf).__name__} at {name!r}. "
                "Convert or drop it."
            )
        if name in named:
            raise ValueError(
                f"the paths of training must differ, got {name!r} twice. Rename a key with a dot."
            )
        # Orbax can write a NumPy scalar but cannot read it again.
        named[name] = np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
    return named


def _placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The leaf with a sharding to read arrays into: that of the mesh in context, or the first device."""
    where = sharding_of(leaf) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def _config_to_json(config: TransformerConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    return dataclasses.asdict(config) | {"rope_scaling": None if scaling is None else as_plain(scaling)}


def _config_from_json(values: dict[str, Any]) -> TransformerConfig:
    scaling = values.get("rope_scaling")  # checkpoints of version 0.1.0 do not have it
    values |= {"rope_scaling": None if scaling is None else from_plain(scaling)}
    return TransformerConfig(**(values | {"nsa": NSAConfig(**values["nsa"])}))


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
