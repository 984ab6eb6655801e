"""Prints what a training step of a model asks of a GPU, as JSON; runs on the stand-in.

    python tests/gpu/stand_in.py tests/gpu/measure.py --model=mlp,cnn --tfamp

Stock Keras without `--tfamp`, in the policy of the mode. Counts are those of a step of
`fit`: twenty steps after two, and the end of the epoch with them. The peak is that of
all: it differs from step to step, as TensorFlow takes what is ready in any order.
"""

import argparse
import json
import os
import pathlib
import resource

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import stand_in
import tensorflow as tf

layers = keras.layers
STEPS, WARM = 20, 2
CLASSES = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def bert(depth):
    """BERT-Base of so many layers, 32 x 384, fine-tuned; (model, x, y, loss)."""
    import keras_hub

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=30522,
        num_layers=depth,
        num_heads=12,
        hidden_dim=768,
        intermediate_dim=3072,
        max_sequence_length=512,
    )
    x = layers.Dropout(0.1)(backbone.output["pooled_output"])
    model = keras.Model(backbone.input, layers.Dense(2, dtype="float32")(x))
    ones = np.ones((32, 384), "int32")
    x = {"token_ids": ones, "segment_ids": 0 * ones, "padding_mask": ones}
    return model, x, np.zeros(32, "int32"), CLASSES


def application(make):
    """A classifier of keras.applications, 16 images of 64 x 64."""
    shape = (64, 64, 3)
    model = make(
        weights=None, classes=10, classifier_activation=None, input_shape=shape
    )
    return model, np.zeros((16, *shape), "float32"), np.zeros(16, "int32"), CLASSES


def unet(width=32):
    """A U-Net of 82 variables, 8 images of 128 x 128."""

    def block(x, filters):
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same")(x)
            x = layers.Activation("relu")(layers.BatchNormalization()(x))
        return x

    shape = (128, 128, 3)
    inputs = x = keras.Input(shape)
    skips = []
    for power in range(4):
        x = block(x, width * 2**power)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = block(x, width * 16)
    for power in reversed(range(4)):
        x = layers.Conv2DTranspose(width * 2**power, 2, 2)(x)
        x = block(layers.Concatenate()([x, skips[power]]), width * 2**power)
    model = keras.Model(inputs, layers.Conv2D(1, 1, dtype="float32")(x))
    x = np.zeros((8, *shape), "float32")
    return model, x, x[..., :1], "mse"


def lstm():
    """A language model of two LSTM layers of 512, 16 x 64."""
    inputs = keras.Input((64,), dtype="int32")
    x = layers.Embedding(8192, 256)(inputs)
    for _ in range(2):
        x = layers.LSTM(512, return_sequences=True)(x)
    model = keras.Model(inputs, layers.Dense(8192, dtype="float32")(x))
    tokens = np.zeros((16, 64), "int32")
    return model, tokens, tokens, CLASSES


def mlp():
    """Five dense layers, 128 rows."""
    hidden = [layers.Dense(1024, "relu") for _ in range(4)]
    last = layers.Dense(10, dtype="float32")
    model = keras.Sequential([keras.Input((256,)), *hidden, last])
    return model, np.zeros((128, 256), "float32"), np.zeros(128, "int32"), CLASSES


def cnn():
    """A small convolutional network, 32 images of 16 x 16."""
    shape = (16, 16, 3)
    blocks = []
    for filters in (16, 32):
        blocks += [layers.Conv2D(filters, 3), layers.BatchNormalization()]
        blocks += [layers.Activation("relu"), layers.MaxPooling2D()]
    head = [layers.Flatten(), layers.Dropout(0.2), layers.Dense(10, dtype="float32")]
    model = keras.Sequential([keras.Input(shape), *blocks, *head])
    return model, np.zeros((32, *shape), "float32"), np.zeros(32, "int32"), CLASSES


MODELS = {
    "bert": bert,
    "resnet50": lambda depth: application(keras.applications.ResNet50),
    "efficientnet": lambda depth: application(keras.applications.EfficientNetB0),
    "unet": lambda depth: unet(),
    "lstm": lambda depth: lstm(),
    "mlp": lambda depth: mlp(),
    "cnn": lambda depth: cnn(),
}


def compiled(name, depth, xla):
    """Returns a compiled model, its x and its y."""
    model, x, y, loss = MODELS[name](depth)
    optimizer, metrics = keras.optimizers.Adam(1e-3), None
    if name == "bert":
        options = {"weight_decay": 0.01, "global_clipnorm": 1.0}
        optimizer, metrics = keras.optimizers.AdamW(2e-5, **options), ["accuracy"]
    model.compile(optimizer, loss, metrics=metrics, jit_compile=xla)
    if hasattr(model.optimizer, "retried_steps"):
        # As after the first steps: on the stand-in, no scale that is sought would fit.
        model.optimizer.retried_steps, model.optimizer.diagnoses = 16, 3
    return model, x, y


def cpu_seconds():
    """Returns those of this process and of what it has started."""
    kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    used = [resource.getrusage(kind) for kind in kinds]
    return sum(each.ru_utime + each.ru_stime for each in used)


class Watch(keras.callbacks.Callback):
    """Takes the figures of the first step, and has the rest counted from there."""

    def on_train_begin(self, logs=None):
        """Starts the clock: `fit` traces and compiles after this."""
        self.first = {"start": cpu_seconds()}

    def on_train_batch_end(self, batch, logs=None):
        """Resets the counts once the step is warm."""
        if batch == 0:
            seconds = cpu_seconds() - self.first.pop("start")
            self.first = {"first_step_cpu_s": round(seconds, 1), "ptxas": ptxas_calls()}
        if batch == WARM - 1:
            stand_in.reset()


def ptxas_calls():
    """Returns how often ptxas was started for a module."""
    path = pathlib.Path(os.environ.get("STAND_IN_PTXAS", "/dev/null"))
    return path.read_text().count("\n") if path.exists() else 0


def figures_of_a_step(model, x, y):
    """Trains, and returns the figures of a step by name."""
    watch, batches = Watch(), tf.data.Dataset.from_tensors((x, y)).cache().repeat()
    steps = STEPS + WARM
    model.fit(batches, steps_per_epoch=steps, verbose=0, callbacks=[watch])
    found = stand_in.counts()

    def a_step(kind):
        total = sum(times for what, times in found.items() if what.startswith(kind))
        return total / STEPS

    work = {"kernels": a_step("kernel "), "library_calls": a_step("library ")}
    graphs, nodes = a_step("graph"), a_step("node of a graph")
    return {
        **work,
        "graphs": graphs,
        "nodes": nodes,
        "launches": sum(work.values()) + graphs,
        "work": sum(work.values()) + nodes,
        "copies_to_host": a_step("copy DtoH"),
        "waits": a_step("wait"),
        "peak_mib": tf.config.experimental.get_memory_info("GPU:0")["peak"] / 2**20,
        **watch.first,
    }


def fit_with_partial_batches(model, x, y):
    """Trains and validates, each with a last batch of its own size."""

    def rows(size):
        def resized(values):
            return np.resize(values, (size, *values.shape[1:]))

        return keras.tree.map_structure(resized, x), resized(y)

    batch = len(y)
    data, validation = rows(batch + batch // 2), rows(batch + batch // 4)
    model.fit(*data, batch, validation_data=validation, verbose=0)
    return {}


def main():
    """Prints the figures of each model by name, on the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help=f"of {', '.join(MODELS)}", required=True)
    parser.add_argument("--mode", default="mixed_bfloat16")
    parser.add_argument("--layers", type=int, default=12, help="of BERT")
    parser.add_argument("--xla", action="store_true")
    parser.add_argument("--tfamp", action="store_true")
    parser.add_argument("--fit", action="store_true", help="a `fit` to compile for")
    options = parser.parse_args()
    if options.tfamp:
        import tfamp

        tfamp.enable(options.mode)
    else:
        policy = "float32" if options.mode == "tf32" else options.mode
        keras.config.set_dtype_policy(policy)
    found = {}
    for name in options.model.split(","):
        model, x, y = compiled(name, options.layers, options.xla)
        run = fit_with_partial_batches if options.fit else figures_of_a_step
        found[name] = run(model, x, y)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
