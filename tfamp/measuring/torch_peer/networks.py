"""Twins in PyTorch of tfamp's networks; a part of `cell`, imports no tfamp."""

import collections
from typing import Any

import torch  # pyright: ignore[reportMissingImports]


class Float32Linear(torch.nn.Linear):
    """A dense layer that autocast leaves in float32, as the logits of tfamp are."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns float32 [batch, units]."""
        with torch.autocast(input.device.type, enabled=False):
            return super().forward(input.float())


class _Rescaling(torch.nn.Module):
    def forward(self, image):
        # [batch, height, width, channels] seen as channels_last, without a copy.
        return image.permute(0, 3, 1, 2).float() * (1 / 127.5) - 1.0


class _Flatten(torch.nn.Module):
    def forward(self, x):
        return x.permute(0, 2, 3, 1).flatten(1)


def image_classifier(network: dict[str, Any]) -> torch.nn.Module:
    """Returns the twin of tfamp's plain CNN; its layers have Keras' names.

    Args:
      network: {"image_shape", "classes", "blocks", "batch_norm", "dense", "dropout"}.
    """
    height, width, channels = network["image_shape"]
    layers = collections.OrderedDict(rescaling=_Rescaling())
    for i, block in enumerate(network["blocks"], 1):
        for j, filters in enumerate(block, 1):
            name = f"conv{i}_{j}"
            layers |= _convolution(name, channels, filters, network["batch_norm"])
            channels = filters
        layers[f"pool{i}"] = torch.nn.MaxPool2d(2)
        height, width = height // 2, width // 2
    layers["flatten"] = _Flatten()
    features = height * width * channels
    if network["dense"]:
        layers["dense"] = torch.nn.Linear(features, network["dense"])
        layers["dense_relu"] = torch.nn.ReLU(inplace=True)
        features = network["dense"]
    layers["dropout"] = torch.nn.Dropout(network["dropout"])
    layers["logits"] = Float32Linear(features, network["classes"])
    return torch.nn.Sequential(layers)


def _convolution(name, channels, filters, batch_norm):
    layers = {
        name: torch.nn.Conv2d(channels, filters, 3, padding=1, bias=not batch_norm)
    }
    if batch_norm:  # With Keras' defaults; PyTorch's momentum is 1 minus Keras'.
        layers[f"{name}_norm"] = torch.nn.BatchNorm2d(filters, eps=1e-3, momentum=0.01)
    layers[f"{name}_relu"] = torch.nn.ReLU(inplace=True)
    return layers


class TextClassifier(torch.nn.Module):
    """An encoder, pooling, dropout and logits.

    Args:
      encoder: A `transformers.BertModel`.
      pooling: "cls" or "mean".
      dropout: Rate of the dropout before the logits.
      classes: Width of the logits.
    """

    def __init__(
        self, encoder: torch.nn.Module, pooling: str, dropout: float, classes: int
    ):
        super().__init__()
        self.encoder, self.pooling = encoder, pooling
        self.dropout = torch.nn.Dropout(dropout)
        self.logits = Float32Linear(encoder.config.hidden_size, classes)

    def forward(
        self,
        token_ids: torch.Tensor,
        segment_ids: torch.Tensor,
        padding_mask: torch.Tensor,
    ) -> torch.Tensor:
        """Returns float32 logits [batch, classes] of integers [batch, length]."""
        output = self.encoder(
            input_ids=token_ids,
            token_type_ids=segment_ids,
            attention_mask=padding_mask,
        )
        return self.logits(self.dropout(self._pool(output, padding_mask)))

    def _pool(self, output, mask):
        if self.pooling == "cls":
            return output.pooler_output
        mask = mask.unsqueeze(-1).float()
        return (output.last_hidden_state.float() * mask).sum(1) / mask.sum(1)


def text_classifier(network: dict[str, Any]) -> torch.nn.Module:
    """Returns the twin of tfamp's text classifier with a new encoder.

    Args:
      network: {"encoder": keywords of `BertConfig`, "pooling", "dropout", "classes"}.
    """
    import transformers  # pyright: ignore[reportMissingImports]

    config = transformers.BertConfig(**network["encoder"], attn_implementation="sdpa")
    cls = network["pooling"] == "cls"
    encoder = transformers.BertModel(config, add_pooling_layer=cls)
    head = (network[name] for name in ("pooling", "dropout", "classes"))
    return TextClassifier(encoder, *head)


# Kind -> function of the network's description, and what the note says of it.
NETWORKS = {
    "cnn": (image_classifier, "channels_last"),
    "bert": (text_classifier, "scaled_dot_product_attention"),
}
