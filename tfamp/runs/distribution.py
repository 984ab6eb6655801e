"""Data-parallel training: the strategy of a run, its model, and its workers."""

import contextlib
import functools
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfamp import errors
from tfamp.facts import xla_cache
from tfamp.keras_patches import replicas
from tfamp.runs import pipeline

_TF_CONFIG = (
    '{"cluster": {"worker": ["HOST:PORT", "HOST:PORT"]}, '
    '"task": {"type": "worker", "index": 0}}'
)


def create(config) -> tf.distribute.Strategy | None:
    """Creates the strategy of a run and checks the settings that it bears on.

    "mirrored" has a replica on each visible GPU, or on each logical CPU device where
    there is no GPU. "multi_worker_mirrored" joins the cluster of `TF_CONFIG`, else of
    the SLURM step that the process is a task of; the process must not have used
    TensorFlow before, so call this first.

    Args:
      config: The resolved configuration.

    Returns:
      A strategy; None for "none".

    Raises:
      ValueError: If the batch does not divide evenly, or XLA is requested.
      RunError: If there is no such cluster, or TensorFlow has started already.
    """
    xla_cache.start()  # Data and devices would be too early for `enable`'s.
    if config.strategy == "none":
        return None
    if config.strategy == "mirrored":
        gpus = tf.config.list_logical_devices("GPU")
        devices = gpus or tf.config.list_logical_devices("CPU")
        strategy = _mirror(tuple(device.name for device in devices))
    else:
        strategy = _join_cluster(config.bytes_per_pack)
    _check(config, strategy)
    return strategy


@functools.cache
def _mirror(devices):
    """Returns the process' one strategy over these devices.

    TensorFlow 2.21 gives the collectives of two mirrored strategies the same numbers,
    and on CPUs mistakes one for the other.
    """
    return tf.distribute.MirroredStrategy(list(devices))


@functools.cache
def _join_cluster(bytes_per_pack):
    """Returns the process' one strategy of its cluster."""
    text = os.environ.get("TF_CONFIG", "")
    try:
        if not text and int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
            return tf.distribute.MultiWorkerMirroredStrategy(_slurm())
        # Without one TensorFlow would train alone, and say nothing.
        if not {"worker"} <= set(json.loads(text)["cluster"]) <= {"chief", "worker"}:
            raise ValueError("no cluster of workers")
        kind = tf.distribute.experimental.CommunicationOptions
        return tf.distribute.MultiWorkerMirroredStrategy(
            communication_options=kind(bytes_per_pack=bytes_per_pack)
        )
    except (KeyError, TypeError, ValueError) as e:
        raise errors.RunError(
            "config.strategy='multi_worker_mirrored' needs the environment variable "
            f"TF_CONFIG, with a cluster and this process in it, or a step of SLURM "
            f"with two tasks or more (srun). Received: {text!r}: {e}. Expected, with "
            f"the index of each process: {_TF_CONFIG}."
        ) from e
    except RuntimeError as e:
        raise errors.RunError(
            "config.strategy='multi_worker_mirrored' must be set up before anything "
            "else in the process uses TensorFlow. Call "
            "`tfamp.training.distribution.create(config)` at the start of the program. "
            f"Received: {e}"
        ) from e


def _slurm():
    """Returns the cluster of this process' SLURM step; SLURM deals out the GPUs."""
    resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
        # Two jobs on a node must not meet.
        port_base=20_000 + int(os.environ.get("SLURM_JOB_ID", 0)) % 10_000,
        # It fails where `nvidia-smi` is not there, and where a task sees its own GPU
        # alone; so it is told of GPUs that nobody looks at.
        **{"gpus_per_node": 1024, "gpus_per_task": 1, "auto_set_gpu": False},
    )
    address = resolver.cluster_spec().task_address(*resolver.get_task_info())
    host, here = address.rpartition(":")[0], os.environ.get("SLURMD_NODENAME")
    if here not in (None, host):
        raise errors.RunError(
            "TensorFlow orders SLURM's nodes by name, SLURM does not: this task runs "
            f"on {here}, and would be {host}. Set TF_CONFIG in each task, or request "
            "nodes with names of equal length."
        )
    return resolver


def _check(config, strategy):
    count = strategy.num_replicas_in_sync
    if config.batch_size % count:
        raise ValueError(
            "config.batch_size is the batch of all replicas together and must be "
            f"divisible by their number. Received: batch_size={config.batch_size}, "
            f"{count} replicas."
        )
    gpus = all("GPU" in name for name in strategy.extended.worker_devices)
    if config.jit_compile and count > 1 and not gpus:
        raise ValueError(
            "XLA cannot compile a step over several replicas on CPUs. Received: "
            f"config.jit_compile=True, {count} replicas. Leave it unset or False."
        )


def scope(strategy: tf.distribute.Strategy | None) -> Any:
    """Returns a context manager in which to build and compile the model."""
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def share_out(strategy: tf.distribute.Strategy | None, batches: Callable) -> Any:
    """Returns the batches of this worker's replicas, as `fit` takes them.

    Args:
      strategy: The run's strategy.
      batches: `pipeline.training_batches` with all arguments but `share`.
    """
    if strategy is None:
        return batches()
    return strategy.distribute_datasets_from_function(lambda at: batches(share=at))


def describe(strategy: tf.distribute.Strategy | None) -> dict[str, Any]:
    """Returns what a strategy came to be.

    Returns:
      {"replicas": how many, "workers": how many, and of several workers "cluster":
      what has named them}.
    """
    if strategy is None:
        return {"replicas": 1, "workers": 1}
    count, local = strategy.num_replicas_in_sync, strategy.extended.worker_devices
    description = {"replicas": count, "workers": count // len(local)}
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        description["cluster"] = type(strategy.cluster_resolver).__name__
    return description


def bytes_per_pack(strategy: tf.distribute.Strategy | None) -> int | None:
    """Returns what gradients are packed to in a cluster; None without one."""
    options = strategy and replicas.communication_options(strategy)
    return options.bytes_per_pack if options else None


def is_chief(strategy: tf.distribute.Strategy | None) -> bool:
    """Whether this process writes the run's files: the chief, or else worker 0."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return True
    resolver = strategy.cluster_resolver
    if "chief" in resolver.cluster_spec().jobs:
        return resolver.task_type == "chief"
    return resolver.task_id == 0


def worker_index(strategy: tf.distribute.Strategy | None) -> int:
    """Returns which worker of the cluster this process is, from 0; 0 without one."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return 0
    return strategy.cluster_resolver.task_id or 0


def exchange(strategy: tf.distribute.Strategy | None, number: int) -> list[int]:
    """Waits for all workers; returns the number that each replica's has brought."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return [number]
    return _gather(strategy)(tf.constant([number])).numpy().tolist()


@functools.cache
def _gather(strategy):
    """Traced once: TensorFlow warns each time that a cluster works eagerly."""

    def gather(local):
        return strategy.gather(strategy.run(tf.identity, (local,)), axis=0)

    return tf.function(gather, autograph=False)


def wait(strategy: tf.distribute.Strategy | None) -> None:
    """Waits for all workers of the cluster; every worker must call."""
    exchange(strategy, 0)


def check_same(strategy: tf.distribute.Strategy | None, what: str, count: int) -> None:
    """Raises RunError unless all workers have found the same in the run's folder.

    Args:
      strategy: The run's strategy; every worker must call.
      what: What was counted, as text.
      count: How many this worker has found.
    """
    numbers = exchange(strategy, count)
    if len(set(numbers)) > 1:
        raise errors.RunError(
            "The workers do not see the same working directory. Received: "
            f"{what} {numbers}, by replica. Pass all workers the same --workdir, on a "
            "file system that they share."
        )


@contextlib.contextmanager
def worker_folder(
    strategy: tf.distribute.Strategy | None, folder: pathlib.Path
) -> Iterator[pathlib.Path]:
    """Scopes the folder that this worker writes to.

    All workers save alike, since reading a variable may need all of them. Only the
    chief's files are kept: the others write to a temporary folder, with a copy of
    what the run resumes from. Nobody writes before all have copied, or goes on
    before the chief has written all.

    Yields:
      The run's folder for the chief, else the temporary one.

    Raises:
      RunError: If a worker has ended meanwhile.
    """
    with tempfile.TemporaryDirectory() as temporary:
        own = folder if is_chief(strategy) else pathlib.Path(temporary)
        if own != folder:
            shutil.copytree(folder, own, dirs_exist_ok=True)
        try:
            wait(strategy)
            yield own
            wait(strategy)
        except (tf.errors.AbortedError, tf.errors.UnavailableError) as e:
            raise errors.RunError(
                "Another worker of the cluster has ended. Start all workers again: "
                "they resume after the last epoch that all had finished. Received: "
                f"{type(e).__name__}."
            ) from e


def prepare(strategy: tf.distribute.Strategy, model: keras.Model, task) -> None:
    """Does beforehand what Keras' `fit` and `evaluate` fail to do over replicas.

    Args:
      strategy: The run's strategy.
      model: A compiled model; changed in place.
      task: The run's `tasks.Task`.
    """
    example = next(iter(pipeline.augmented(task.train, task.augment).batch(1)))
    replicas.prepare_fit(strategy, model, example, describe(strategy)["workers"])
