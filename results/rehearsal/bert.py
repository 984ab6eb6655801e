"""A small BERT rehearsed for an H100 and a V100; writes the files of this folder.

python results/rehearsal/bert.py
"""

import json
import pathlib

FOLDER = pathlib.Path(__file__).parent


def build(batch_size):
    """A classifier of 2 layers of 256, random weights; the first token is the label."""
    import keras
    import keras_hub
    import numpy as np
    import tensorflow as tf

    body = keras_hub.models.BertBackbone(
        vocabulary_size=1000,
        num_layers=2,
        num_heads=4,
        hidden_dim=256,
        intermediate_dim=1024,
        max_sequence_length=64,
    )
    x = {name: keras.Input((64,), dtype="int32", name=name) for name in body.input}
    head = keras.layers.Dense(4, name="head")(body(x)["pooled_output"])
    model = keras.Model(x, head, name="bert")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-4), loss)

    ids = np.random.default_rng(0).integers(4, 1000, (512, 64), dtype="int32")
    ids[:, 0] = np.arange(512) % 4
    given = {"token_ids": ids, "segment_ids": ids * 0, "padding_mask": ids * 0 + 1}
    data = tf.data.Dataset.from_tensor_slices((given, ids[:, 0]))
    return model, data.batch(batch_size, drop_remainder=True).repeat()


def main():
    """Writes a page, its data and a picture for each device."""
    import tfamp

    for device in ("h100", "v100"):
        found = tfamp.rehearse(f"{__file__}:build", 32, device=device)
        (FOLDER / f"bert_{device}.md").write_text(f"{found}\n")
        text = json.dumps(found.to_dict(), indent=1)
        (FOLDER / f"bert_{device}.json").write_text(f"{text}\n")
        found.figure().savefig(FOLDER / f"bert_{device}.png", dpi=80)


if __name__ == "__main__":
    main()
