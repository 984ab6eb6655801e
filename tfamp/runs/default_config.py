"""The configuration that every task starts from; files in `configs/` are deltas.

Nothing here imports TensorFlow: a mistyped field on the command line is told at once.
"""

from ml_collections import config_dict


def get_config() -> config_dict.ConfigDict:
    """Returns the defaults shared by every task.

    Returns:
      A `ConfigDict`. Tasks fill in `task`, `data` and `model`; `tiny` holds what
      `apply_tiny` overrides so that one step runs in seconds.
    """
    return config_dict.ConfigDict(
        {
            "name": "",  # Names the run's folder.
            # A function that returns a `tfamp.training.Task`: a recipe's, such as
            # "tfamp.recipes.images:create", or a custom one, "module:function" or
            # "path/file.py:function".
            "task": "",
            "data_dir": "",  # Prepared (TFDS) or local data; "": the default folder.
            "manual_dir": "",  # Folder with a TFDS data set's original files.
            "seed": 0,
            "epochs": 3,
            "batch_size": 32,  # Of all replicas together, as is the next.
            "eval_batch_size": 256,
            # Share of the training data that selects the best checkpoint; 0: nothing is
            # split off, and the weights after the last epoch are what counts.
            "validation_fraction": 0.1,
            "limit_examples": 0,  # 0: all. Else the first so many of each split.
            # None: as Keras decides (XLA on a GPU, none on a CPU).
            "jit_compile": config_dict.placeholder(bool),
            # Batches in one call of the compiled function; callbacks, signals and
            # progress wait for its end. What an epoch's steps cannot be divided by is
            # lowered, see `environment.json`.
            "steps_per_execution": 1,
            # Data-parallel replicas: "none"; "mirrored", on all GPUs, or on all logical
            # CPU devices where there is none; "multi_worker_mirrored", on the devices
            # of all processes that the environment variable TF_CONFIG names.
            "strategy": "none",
            # Of the last: bytes of gradients that are sent together, while others are
            # still computed. 0: all at once, at the end.
            "bytes_per_pack": 0,
            "optimizer": _optimizer(),
            "precision": _precision(),
            # Cache: keep the examples in memory after the first epoch.
            "data": {"name": "", "cache": True},
            "model": {"name": ""},
            # What float32 has of its own in comparisons and benchmarks, say the batch
            # size that fits into memory. None: the same.
            "float32": {
                "batch_size": config_dict.placeholder(int),
                "learning_rate": config_dict.placeholder(float),
            },
            # Whether a comparison has runs of the mixed mode without loss scaling, too.
            "compare_unscaled": False,
            "tiny": {"epochs": 1, "batch_size": 8, "limit_examples": 40},
        }
    )


def _optimizer():
    """Adam with an optional warm-up and decay."""
    return {
        "name": "adam",  # "sgd", "adam" or "adamw".
        "learning_rate": 1e-3,
        "schedule": "constant",  # "constant", "linear" or "cosine" decay to 0.
        "warmup_fraction": 0.0,  # Share of all steps with linear warm-up.
        "epsilon": 1e-7,  # Of Adam and AdamW; Keras' default, BERT's is 1e-6.
        # Of AdamW and SGD, apart from the gradient and times the learning rate; none on
        # biases and normalization.
        "weight_decay": 0.0,
        "momentum": 0.9,  # Of SGD.
        "nesterov": False,  # Of SGD.
        "clip_global_norm": 0.0,  # 0: no clipping. Done after unscaling.
        # Batches whose gradients are averaged for one update of the weights.
        "accumulation_steps": 1,
    }


def _precision():
    """The mode and the loss scale's settings, as `LossScaleOptimizer` names them."""
    return {
        "mode": "auto",
        # Modes of single layers: pairs of (pattern of the layer's whole path, mode).
        "overrides": (),
        # True: the policy stays float32 and graphs are rewritten to the format that
        # `mode` names. None: as TF_ENABLE_AUTO_MIXED_PRECISION (environment) says.
        "graph_rewrite": config_dict.placeholder(bool),
        # Updates and small operators compiled into few programs; see `tfamp.enable`.
        # None: in every mode but float32; a comparison has them in all of its modes.
        "fused_kernels": config_dict.placeholder(bool),
        # Patterns of layers that are computed again in the backward pass, and how slots
        # of the optimizer, and weights, are stored; see `tfamp.enable`.
        "remat": (),
        "optimizer_state": "float32",
        "weights": "float32",
        # Of TensorFlow's kernels; None leaves each as it is. See `switches`.
        "deterministic": config_dict.placeholder(bool),
        "cudnn_autotune": config_dict.placeholder(bool),
        "float16_accumulation": config_dict.placeholder(str),  # "float32"/"float16"
        # Skip and count steps whose gradients are not finite in the modes without loss
        # scaling, too.
        "finite_guard": False,
        # Steps from one to the next of which a `NumericsMonitor` tells what 16 bits
        # lose; 0 for none.
        "numerics": 0,
        "loss_scale": {
            # False: float16 trains without loss scaling, to see what that does.
            "enabled": True,
            "initial_scale": 2.0**15,
            "growth_interval": 2000,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "hysteresis": 1,
            "min_scale": 2.0**-14,
            "max_scale": config_dict.placeholder(float),
            "dynamic": True,
            # What moves the growth interval: fields of `growth_interval`'s classes.
            "schedule": {
                # "constant" (`growth_interval` throughout), "piecewise" or "geometric".
                "name": "constant",
                "boundaries": (1,),  # Piecewise, which ignores `growth_interval`.
                "intervals": (100, 2000),
                # Geometric. None: `growth_interval`, brought within the two bounds.
                "initial": config_dict.placeholder(int),
                "lengthen": 2.0,
                "shorten": 0.75,
                "min_interval": 100,
                "max_interval": 2**14,
            },
        },
    }
