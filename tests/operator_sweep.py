"""What becomes of TensorFlow's and Keras' operators in a layer of 16 bits: a table.

    python tests/operator_sweep.py results/operators

Of each public function of `tf.signal`, `tf.linalg`, `tf.math`, `tf.image`, `tf.nn`,
`tf.quantization` and `keras.ops` that float32 computes: forward and the gradient by its
input, in a graph, eagerly and compiled by XLA, in both 16-bit modes. A function is
called with the first of `FORMS` that float32 computes, or as `CALLS` says.
"""

import collections
import csv
import datetime
import inspect
import os
import pathlib
import platform
import subprocess
import sys

import keras
import tensorflow as tf

import tfamp

MODES = ("mixed_bfloat16", "mixed_float16")
HOW = ("graph", "eager", "XLA")
MODULES = {
    "tf.signal": tf.signal,
    "tf.linalg": tf.linalg,
    "tf.math": tf.math,
    "tf.image": tf.image,
    "tf.nn": tf.nn,
    "tf.quantization": tf.quantization,
    "keras.ops": keras.ops,
    "keras.ops.image": keras.ops.image,
    "keras.ops.linalg": keras.ops.linalg,
    "keras.ops.nn": keras.ops.nn,
}
K = keras.ops


def rows(x):  # (4, 16)
    return x


def vector(x):
    return tf.reshape(x, (-1,))


def matrices(x):  # Symmetric and positive.
    a = tf.reshape(x, (-1, 4, 4))
    eye = tf.eye(4, dtype=x.dtype)
    return (a + tf.transpose(a, (0, 2, 1))) * tf.cast(0.25, x.dtype) + 5 * eye


def images(x):
    return tf.reshape(x, (1, 4, 4, 4))[..., :3]


def volumes(x):
    return tf.reshape(x, (1, 4, 4, 4, 1))


def positive(x):
    return tf.nn.softplus(x) + 1


def sequences(x):
    return tf.reshape(x, (4, 4, 4))


def small(x):
    return tf.tanh(x) * tf.cast(0.9, x.dtype)


SHAPES = (matrices, images, rows, positive, small, vector, volumes, sequences)
FORMS = [lambda f, x, of=of: f(of(x)) for of in SHAPES]
FORMS += [lambda f, x, of=of: f(of(x), of(x)) for of in SHAPES]
FORMS += [lambda f, x, of=of: f(of(x), of(x), of(x)) for of in SHAPES]
FORMS += [lambda f, x, of=of: f([of(x), of(x)]) for of in (rows, matrices)]
FORMS += [lambda f, x, of=of: f(of(x), 1) for of in SHAPES]
FORMS += [lambda f, x, of=of: f(of(x), (2, 2)) for of in (images, matrices)]
FORMS += [lambda f, x: f(images(x), 0.5), lambda f, x: f(rows(x), (4, 16))]
FORMS += [lambda f, x: f(tf.complex(tf.cast(rows(x), "float32"), 0.0))]
FORMS += [lambda f, x: f((rows(x), rows(x)))]


MORPHOLOGY = ([1] * 4, "SAME", "NHWC", [1] * 4)


def boxes(x):
    corners = tf.sigmoid(x[:, :2])
    return tf.concat([corners, corners + tf.cast(0.3, x.dtype)], 1)


IDS = tf.constant([0, 0, 1, 2])
LABELS = tf.constant([[1], [2], [0], [3]], tf.int64)
CALLS = {
    "tf.signal.frame": lambda f, x: f(x, 4, 2),
    "tf.signal.overlap_and_add": lambda f, x: f(sequences(x), 2),
    "tf.signal.stft": lambda f, x: f(x, 8, 4),
    "tf.signal.inverse_stft": lambda f, x: f(tf.signal.stft(x, 8, 4), 8, 4),
    "tf.signal.irfft": lambda f, x: f(tf.signal.rfft(x)),
    "tf.signal.rfftnd": lambda f, x: f(x, [16], [1]),
    "tf.signal.mdct": lambda f, x: f(x, 8),
    "tf.signal.inverse_mdct": lambda f, x: f(tf.signal.mdct(x, 8)),
    "tf.signal.mfccs_from_log_mel_spectrograms": lambda f, x: f(x)[..., :4],
    "tf.linalg.band_part": lambda f, x: f(matrices(x), 1, 1),
    "tf.linalg.banded_triangular_solve": lambda f, x: f(
        positive(matrices(x))[:, :2], sequences(x)[..., :1]
    ),
    "tf.linalg.cholesky_solve": lambda f, x: f(
        tf.linalg.cholesky(matrices(x)), sequences(x)
    ),
    "tf.linalg.diag_part": lambda f, x: f(matrices(x)),
    "tf.linalg.eigh_tridiagonal": lambda f, x: f(x[0], x[0, 1:]),
    "tf.linalg.lu_matrix_inverse": lambda f, x: f(*tf.linalg.lu(matrices(x))),
    "tf.linalg.lu_reconstruct": lambda f, x: f(*tf.linalg.lu(matrices(x))),
    "tf.linalg.lu_solve": lambda f, x: f(*tf.linalg.lu(matrices(x)), sequences(x)),
    "tf.linalg.sqrtm": lambda f, x: f(matrices(x)),
    "tf.linalg.tridiagonal_matmul": lambda f, x: f(sequences(x)[:, :3], sequences(x)),
    "tf.linalg.tridiagonal_solve": lambda f, x: f(
        positive(sequences(x))[:, :3] * tf.constant([[0.1], [9.0], [0.1]], x.dtype),
        sequences(x),
    ),
    "tf.linalg.matvec": lambda f, x: f(matrices(x), x[:, :4]),
    "tf.linalg.set_diag": lambda f, x: f(matrices(x), x[:, :4]),
    "tf.linalg.experimental.conjugate_gradient": None,
    "tf.math.bincount": None,
    "tf.math.in_top_k": None,
    "tf.math.polyval": lambda f, x: f([x, x], x),
    "tf.math.segment_max": lambda f, x: f(x, IDS),
    "tf.math.segment_mean": lambda f, x: f(x, IDS),
    "tf.math.segment_min": lambda f, x: f(x, IDS),
    "tf.math.segment_prod": lambda f, x: f(x, IDS),
    "tf.math.segment_sum": lambda f, x: f(x, IDS),
    "tf.math.unsorted_segment_max": lambda f, x: f(x, IDS, 3),
    "tf.math.unsorted_segment_mean": lambda f, x: f(x, IDS, 3),
    "tf.math.unsorted_segment_min": lambda f, x: f(x, IDS, 3),
    "tf.math.unsorted_segment_prod": lambda f, x: f(x, IDS, 3),
    "tf.math.unsorted_segment_sqrt_n": lambda f, x: f(x, IDS, 3),
    "tf.math.unsorted_segment_sum": lambda f, x: f(x, IDS, 3),
    "tf.math.zeta": lambda f, x: f(positive(x) + 1, positive(x)),
    "tf.math.polygamma": lambda f, x: f(tf.ones_like(x), positive(x)),
    "tf.math.igamma": lambda f, x: f(positive(x), positive(x)),
    "tf.math.igammac": lambda f, x: f(positive(x), positive(x)),
    "tf.math.betainc": lambda f, x: f(positive(x), positive(x), tf.sigmoid(x)),
    "tf.math.confusion_matrix": None,
    "tf.math.approx_max_k": lambda f, x: f(x, 2),
    "tf.math.approx_min_k": lambda f, x: f(x, 2),
    "tf.image.crop_and_resize": lambda f, x: f(
        tf.tile(images(x), (4, 1, 1, 1)), boxes(x), tf.range(4), (2, 2)
    ),
    "tf.image.non_max_suppression": lambda f, x: tf.gather(x, f(boxes(x), x[:, 0], 2)),
    "tf.image.non_max_suppression_with_scores": lambda f, x: f(boxes(x), x[:, 0], 2)[1],
    "tf.image.combined_non_max_suppression": lambda f, x: f(
        boxes(x)[None, :, None], tf.sigmoid(x[None, :, :2]), 2, 2
    )[1],
    "tf.image.extract_glimpse": lambda f, x: f(images(x), (2, 2), tf.tanh(x[:1, :2])),
    "tf.image.extract_patches": lambda f, x: f(
        images(x), [1, 2, 2, 1], [1, 1, 1, 1], [1, 1, 1, 1], "SAME"
    ),
    "tf.image.crop_to_bounding_box": lambda f, x: f(images(x), 0, 0, 2, 2),
    "tf.image.pad_to_bounding_box": lambda f, x: f(images(x), 1, 1, 8, 8),
    "tf.image.resize_with_crop_or_pad": lambda f, x: f(images(x), 6, 6),
    "tf.image.resize_with_pad": lambda f, x: f(images(x), 6, 6),
    "tf.image.adjust_gamma": lambda f, x: f(tf.sigmoid(images(x)), 0.5),
    "tf.image.draw_bounding_boxes": lambda f, x: f(
        images(x), boxes(x)[None], tf.cast([[1.0, 0.0, 0.0]], x.dtype)
    ),
    "tf.image.random_crop": lambda f, x: f(images(x), (1, 2, 2, 3)),
    "tf.image.ssim": lambda f, x: f(
        tf.image.resize(images(x), (16, 16), "nearest"),
        tf.image.resize(tf.sigmoid(images(x)), (16, 16), "nearest"),
        1.0,
        filter_size=4,
    ),
    "tf.image.ssim_multiscale": lambda f, x: f(
        tf.image.resize(tf.sigmoid(images(x)), (64, 64), "nearest"),
        tf.image.resize(tf.sigmoid(images(x * 2)), (64, 64), "nearest"),
        1.0,
        filter_size=3,
    ),
    "tf.image.psnr": lambda f, x: f(images(x), tf.sigmoid(images(x)), 1.0),
    "tf.image.stateless_random_crop": lambda f, x: f(images(x), (1, 2, 2, 3), (1, 2)),
    "tf.image.stateless_random_brightness": lambda f, x: f(images(x), 0.2, (1, 2)),
    "tf.image.stateless_random_contrast": lambda f, x: f(images(x), 0.2, 0.5, (1, 2)),
    "tf.image.stateless_random_hue": lambda f, x: f(tf.sigmoid(images(x)), 0.2, (1, 2)),
    "tf.image.stateless_random_saturation": lambda f, x: f(
        tf.sigmoid(images(x)), 0.2, 0.5, (1, 2)
    ),
    "tf.image.random_contrast": lambda f, x: f(images(x), 0.2, 0.5),
    "tf.image.random_saturation": lambda f, x: f(tf.sigmoid(images(x)), 0.2, 0.5),
    "tf.nn.avg_pool1d": lambda f, x: f(sequences(x), 2, 2, "SAME"),
    "tf.nn.max_pool1d": lambda f, x: f(sequences(x), 2, 2, "SAME"),
    "tf.nn.avg_pool": lambda f, x: f(images(x), 2, 2, "SAME"),
    "tf.nn.max_pool": lambda f, x: f(images(x), 2, 2, "SAME"),
    "tf.nn.avg_pool2d": lambda f, x: f(images(x), 2, 2, "SAME"),
    "tf.nn.max_pool2d": lambda f, x: f(images(x), 2, 2, "SAME"),
    "tf.nn.avg_pool3d": lambda f, x: f(volumes(x), 2, 2, "SAME"),
    "tf.nn.max_pool3d": lambda f, x: f(volumes(x), 2, 2, "SAME"),
    "tf.nn.max_pool_with_argmax": lambda f, x: f(images(x), 2, 2, "SAME")[0],
    "tf.nn.pool": lambda f, x: f(images(x), (2, 2), "AVG", padding="SAME"),
    "tf.nn.fractional_avg_pool": lambda f, x: f(
        images(x), [1.0, 1.44, 1.44, 1.0], seed=1
    )[0],
    "tf.nn.fractional_max_pool": lambda f, x: f(
        images(x), [1.0, 1.44, 1.44, 1.0], seed=1
    )[0],
    "tf.nn.batch_normalization": lambda f, x: f(x, x[0], 1.0, x[1], x[2], 1e-3),
    "tf.nn.bias_add": lambda f, x: f(x, x[0]),
    "tf.nn.conv1d": lambda f, x: f(sequences(x), sequences(x), 1, "SAME"),
    "tf.nn.conv1d_transpose": lambda f, x: f(
        sequences(x), sequences(x), (4, 8, 4), 2, "SAME"
    ),
    "tf.nn.conv2d": lambda f, x: f(
        images(x), tf.reshape(vector(x)[:36], (2, 2, 3, 3)), 1, "SAME"
    ),
    "tf.nn.conv2d_transpose": lambda f, x: f(
        images(x), tf.reshape(vector(x)[:36], (2, 2, 3, 3)), (1, 8, 8, 3), 2, "SAME"
    ),
    "tf.nn.conv3d": lambda f, x: f(
        volumes(x), tf.reshape(vector(x)[:8], (2, 2, 2, 1, 1)), [1] * 5, "SAME"
    ),
    "tf.nn.conv3d_transpose": lambda f, x: f(
        volumes(x),
        tf.reshape(vector(x)[:8], (2, 2, 2, 1, 1)),
        (1, 8, 8, 8, 1),
        2,
        "SAME",
    ),
    "tf.nn.convolution": lambda f, x: f(
        images(x), tf.reshape(vector(x)[:36], (2, 2, 3, 3))
    ),
    "tf.nn.depthwise_conv2d": lambda f, x: f(
        images(x), tf.reshape(vector(x)[:12], (2, 2, 3, 1)), [1] * 4, "SAME"
    ),
    "tf.nn.separable_conv2d": lambda f, x: f(
        images(x),
        tf.reshape(vector(x)[:12], (2, 2, 3, 1)),
        tf.reshape(vector(x)[:9], (1, 1, 3, 3)),
        [1] * 4,
        "SAME",
    ),
    "tf.nn.dilation2d": lambda f, x: f(
        images(x), tf.reshape(vector(x)[:12], (2, 2, 3)), *MORPHOLOGY
    ),
    "tf.nn.erosion2d": lambda f, x: f(
        images(x), tf.reshape(vector(x)[:12], (2, 2, 3)), *MORPHOLOGY
    ),
    "tf.nn.ctc_loss": lambda f, x: f(
        tf.cast(LABELS, tf.int32),
        tf.transpose(sequences(x), (1, 0, 2)),
        [1] * 4,
        [4] * 4,
        blank_index=-1,
    ),
    "tf.nn.ctc_greedy_decoder": lambda f, x: f(
        tf.transpose(sequences(x), (1, 0, 2)), [4] * 4
    )[1],
    "tf.nn.ctc_beam_search_decoder": lambda f, x: f(
        tf.transpose(sequences(x), (1, 0, 2)), [4] * 4
    )[1],
    "tf.nn.dropout": lambda f, x: f(x, 0.5),
    "tf.nn.embedding_lookup": lambda f, x: f(x, IDS),
    "tf.nn.in_top_k": None,
    "tf.nn.local_response_normalization": lambda f, x: f(images(x)),
    "tf.nn.lrn": lambda f, x: f(images(x)),
    "tf.nn.moments": lambda f, x: f(x, [1]),
    "tf.nn.weighted_moments": lambda f, x: f(x, [1], positive(x)),
    "tf.nn.normalize_moments": lambda f, x: f(tf.cast(4.0, x.dtype), x[0], x[1], None),
    "tf.nn.nce_loss": lambda f, x: f(sequences(x)[0], x[0, :4], LABELS, x[:, :4], 2, 4),
    "tf.nn.sampled_softmax_loss": lambda f, x: f(
        sequences(x)[0], x[0, :4], LABELS, x[:, :4], 2, 4
    ),
    "tf.nn.softmax_cross_entropy_with_logits": lambda f, x: f(tf.nn.softmax(x), x),
    "tf.nn.sparse_softmax_cross_entropy_with_logits": lambda f, x: f(IDS, x),
    "tf.nn.space_to_depth": lambda f, x: f(images(x), 2),
    "tf.nn.depth_to_space": lambda f, x: f(tf.reshape(x, (1, 4, 4, 4)), 2),
    "tf.nn.space_to_batch": lambda f, x: f(images(x), (2, 2), [[0, 0], [0, 0]]),
    "tf.nn.batch_to_space": lambda f, x: f(
        tf.reshape(x, (4, 2, 2, 4)), (2, 2), [[0, 0], [0, 0]]
    ),
    "tf.nn.with_space_to_batch": None,
    "tf.nn.scale_regularization_loss": None,
    "tf.nn.safe_embedding_lookup_sparse": None,
    "tf.nn.embedding_lookup_sparse": None,
    "tf.nn.weighted_cross_entropy_with_logits": lambda f, x: f(
        tf.nn.softmax(x), x, 2.0
    ),
    "tf.quantization.quantize": None,
    "tf.quantization.fake_quant_with_min_max_vars": lambda f, x: f(
        x, tf.reduce_min(x), tf.reduce_max(x)
    ),
    "tf.quantization.fake_quant_with_min_max_vars_per_channel": lambda f, x: f(
        x, -positive(x)[0], positive(x)[0]
    ),
    "tf.quantization.quantize_and_dequantize_v2": lambda f, x: f(x, -1.0, 1.0),
    "keras.ops.arange": None,
    "keras.ops.fft": lambda f, x: f((x, x)),
    "keras.ops.fft2": lambda f, x: f((matrices(x), matrices(x))),
    "keras.ops.ifft2": lambda f, x: f((matrices(x), matrices(x))),
    "keras.ops.istft": lambda f, x: f(K.stft(x, 8, 4, 8), 8, 4, 8),
    "keras.ops.stft": lambda f, x: f(x, 8, 4, 8),
    "keras.ops.irfft": lambda f, x: f(K.rfft(x)),
    "keras.ops.extract_sequences": lambda f, x: f(x, 4, 2),
    "keras.ops.segment_max": lambda f, x: f(x, IDS, 3),
    "keras.ops.segment_sum": lambda f, x: f(x, IDS, 3),
    "keras.ops.batch_normalization": lambda f, x: f(x, x[0], positive(x)[0], 1),
    "keras.ops.cholesky_inverse": lambda f, x: f(K.cholesky(matrices(x))),
    "keras.ops.lu_factor": lambda f, x: f(matrices(x))[0],
    "keras.ops.solve_triangular": lambda f, x: f(matrices(x), sequences(x)),
    "keras.ops.image.affine_transform": lambda f, x: f(
        images(x), tf.cast([[1.0, 0.1, 0.0, 0.0, 1.0, 0.2, 0.0, 0.0]], x.dtype)
    ),
    "keras.ops.image.perspective_transform": lambda f, x: f(
        images(x),
        tf.constant([[[0, 0], [0, 4], [4, 0], [4, 4]]], x.dtype),
        tf.constant([[[0, 1], [0, 3], [4, 0], [4, 4]]], x.dtype),
    ),
    "keras.ops.image.map_coordinates": lambda f, x: f(
        sequences(x)[0], tf.stack([positive(x)[0], positive(x)[1]]), 1
    ),
    "keras.ops.image.elastic_transform": lambda f, x: f(images(x), seed=1),
    "keras.ops.image.gaussian_blur": lambda f, x: f(images(x)),
    "keras.ops.image.resize": lambda f, x: f(images(x), (6, 6), "bicubic"),
    "keras.ops.image.pad_images": lambda f, x: f(images(x), 1, 1, 1, 1),
    "keras.ops.image.crop_images": lambda f, x: f(images(x), 1, 1, 1, 1),
}
for name in ("bicubic", "lanczos3", "lanczos5", "gaussian", "mitchellcubic", "area"):
    CALLS[f"tf.image.resize {name}"] = lambda f, x, m=name: f(images(x), (6, 6), m)
CALLS["tf.image.resize antialias"] = lambda f, x: f(images(x), (2, 2), antialias=True)
CALLS["tf.math.special.fresnel_cos"] = lambda f, x: f(x)
CALLS["tf.random.gamma"] = lambda f, x: f([], positive(x))
CALLS["tf.complex"] = lambda f, x: f(x, x)
CALLS["tf.linalg.LinearOperatorFullMatrix"] = lambda f, x: f(matrices(x)).solve(
    sequences(x)
)
NOT_TRACED = "autograph with_space_to_batch while_loop cond custom_gradient map scan"
NOT_TRACED += " switch fori_loop vectorized_map vectorize associative_scan RNNCell"
NOT_TRACED += " collapse_repeated convert_to_numpy save load all_candidate"
NOT_TRACED += " sampler numpy_ops"


def functions():
    """Yields (name, function, what calls it or None)."""
    seen = set()
    for module, holder in MODULES.items():
        for name in sorted(vars(holder)):
            value = getattr(holder, name)
            plain = not name.startswith("_") and not inspect.isclass(value)
            if plain and callable(value) and id(value) not in seen:
                seen.add(id(value))
                full = f"{module}.{name}"
                if full in CALLS and CALLS[full] is None:
                    continue
                if not any(x in name for x in NOT_TRACED.split()):
                    yield full, by_name(holder, name), CALLS.get(full)
    for name in CALLS:
        owner, attribute = name.split(" ")[0].rsplit(".", 1)
        if " " in name or owner not in MODULES and CALLS[name]:
            holder = tf
            for part in owner.split(".")[1:]:
                holder = getattr(holder, part)
            yield name, by_name(holder, attribute), CALLS[name]


def by_name(holder, name):
    """Returns what calls a function as users do: by its name, when it is called."""
    return lambda *args, **kwargs: getattr(holder, name)(*args, **kwargs)


class Calls(keras.layers.Layer):
    """Calls a function on its input, in the format of the layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


X = tf.random.stateless_normal((4, 16), (1, 2))


def total(outputs):
    flat = keras.tree.flatten(outputs)
    parts = [x for x in flat if isinstance(x, tf.Tensor)]
    parts = [tf.abs(x) if x.dtype.is_complex else x for x in parts]
    parts = [tf.cast(x, "float32") for x in parts if x.dtype.is_floating]
    if not parts:
        raise TypeError("no floating outputs")
    return tf.add_n([tf.reduce_sum(x) for x in parts])


def run(function, how):
    """Returns (formats of outputs, the error, whether there is a gradient)."""
    made = []

    def step(x):
        layer = Calls(function)
        first = keras.layers.Activation("linear")  # Casts, as a Dense before does.
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = layer(first(x))
            value = total(outputs)
        flat = keras.tree.flatten(outputs)
        made[:] = {x.dtype.name for x in flat if hasattr(x, "dtype")}
        return value, tape.gradient(value, x)

    call = step
    if how != "eager":
        call = tf.function(step, jit_compile=how == "XLA", autograph=False)
    value, gradient = call(X)
    float(value)
    return sorted(made), gradient is not None


def attempt(function, how):
    try:
        return (*run(function, how), "")
    except Exception as error:
        text = " ".join(str(error).split())
        return [], False, f"{type(error).__name__}: {text[:200]}"


def chosen(function, call):
    """Returns what calls a function in float32, and what came of it in each way."""
    for form in [call] if call else FORMS:
        bound = lambda x, form=form: form(function, x)  # noqa: E731
        made, gradient, error = attempt(bound, "graph")
        if not error:
            rest = {how: attempt(bound, how) for how in HOW[1:]}
            return bound, {"graph": (made, gradient, error), **rest}
    return None, {}


def sweep(only=""):
    """Yields a row for each function, mode and way that float32 computes."""
    known = [x for x in functions() if only in x[0]]
    exact = {}
    for name, function, call in known:
        bound, expected = chosen(function, call)
        if bound is not None:
            exact[name] = bound, expected
    print(f"{len(known)} functions, of which float32 computes {len(exact)}", flush=True)
    for mode in MODES:
        tfamp.enable(mode, on_unsupported="warn")
        for name, (bound, expected) in exact.items():
            for how in HOW:
                if expected[how][2]:
                    continue
                made, gradient, error = attempt(bound, how)
                if not error and expected[how][1] and not gradient:
                    error = "no gradient"
                low = set(made) <= {"bfloat16", "float16"} | set(expected[how][0])
                low = low and "float32" not in made
                kind = "fails" if error else "16 bits" if low else "float32"
                yield dict(mode=mode, name=name, how=how, computed=kind, error=error)
        tfamp.disable()


def module_of(name):
    return name.split(" ")[0].rsplit(".", 1)[0]


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    made = [*sweep(*sys.argv[2:])]
    with open(folder / "operators.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, made[0])
        writer.writeheader()
        writer.writerows(made)
    asked = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    lines = [
        "# Operators in a layer of 16 bits",
        "",
        f"`python tests/operator_sweep.py {folder}`, {datetime.date.today()}, commit "
        f"{commit}; TensorFlow {tf.__version__}, Keras {keras.__version__}, a CPU "
        f"({platform.processor() or platform.machine()}).",
        "",
        "| mode | module | functions | in 16 bits | in float32 | fail |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    worst = {}
    order = ("16 bits", "float32", "fails")
    for row in made:
        key = row["mode"], row["name"]
        worst[key] = max(worst.get(key, "16 bits"), row["computed"], key=order.index)
    for mode in MODES:
        for module in [*MODULES, "tf", "all"]:
            names = [x for m, x in worst if m == mode]
            if module != "all":
                names = [x for x in names if module_of(x) == module]
            count = collections.Counter(worst[mode, x] for x in names)
            if names:
                cells = [mode, module, len(names), *(count[x] for x in order)]
                lines.append(f"| {' | '.join(map(str, cells))} |")
    failing = [x for x in made if x["error"]]
    lines += ["", "What fails:", ""] if failing else []
    for row in failing:
        lines.append("- {mode}, {how}: `{name}`: {error}".format(**row))
    (folder / "README.md").write_text("\n".join([*lines, ""]))
    print("\n".join(lines))


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main(pathlib.Path(sys.argv[1]))
