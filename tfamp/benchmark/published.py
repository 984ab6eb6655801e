"""Published speed-ups of mixed precision, to stand beside measured ones; not ours.

Sources: NVIDIA DeepLearningExamples, the READMEs of TensorFlow2/LanguageModeling/BERT
(21.02), TensorFlow2/Classification/ConvNets (21.09) and
TensorFlow/Classification/ConvNets (20.06), https://github.com/NVIDIA/DeepLearningExamples.
The CIFAR-10 experiment was seen quoted, without its address.
"""

HEAD = ("what", "hardware", "baseline", "mixed precision", "ratio", "remarks")
_BERT = "BERT-Large, SQuAD 1.1, length 384, training"
_RESNET = "ResNet-50 v1.5, training, XLA"
_EFFICIENTNET = "EfficientNet v1-B0, training, XLA"
_CIFAR = "EfficientNet of unstated size, CIFAR-10, 50 epochs, PyTorch"
_NVIDIA = "NVIDIA"
_SIZES = "batches of different sizes"
ROWS = (
    (
        *(_BERT, "V100 32 GB", "11.11 sequences/s, float32, batch 8"),
        *("47.06, float16, batch 12", "4.24x", f"{_NVIDIA}; {_SIZES}"),
    ),
    (
        *(_BERT, "A100 80 GB", "43.9 sequences/s, TF32, batch 38"),
        *("134.22, float16, batch 76", "3.06x", f"{_NVIDIA}; {_SIZES}"),
    ),
    (
        *(_RESNET, "V100 16 GB", "412 images/s, float32, batch 128"),
        *("1270, float16, batch 256", "3.08x", f"{_NVIDIA}; {_SIZES}"),
    ),
    (
        *(_RESNET, "A100 40 GB", "909 images/s, TF32, batch 256"),
        *("2375, float16, batch 256", "2.61x", _NVIDIA),
    ),
    (
        *(_EFFICIENTNET, "V100 32 GB", "752 images/s, float32"),
        *("868, float16", "1.15x", _NVIDIA),
    ),
    (
        *(_EFFICIENTNET, "A100 80 GB", "1209 images/s, TF32"),
        *("3454, float16, batch 1024", "2.86x", _NVIDIA),
    ),
    (
        *(_CIFAR, "A100", "811 s, float32 with TF32 convolutions"),
        *("486 s, float16", "1.67x", "51 % accuracy in all; address not known"),
    ),
    (
        *(_CIFAR, "A100", "811 s, float32 with TF32 convolutions"),
        *("754 s, bfloat16", "1.08x", "51 % accuracy in all; address not known"),
    ),
)
_RATIOS = sorted(float(row[HEAD.index("ratio")].rstrip("x")) for row in ROWS)
SUMMARY = (
    f"Published ratios, of others and on GPUs, are {_RATIOS[0]:.2f}x to "
    f"{_RATIOS[-1]:.2f}x; most are of steps, not of the time to an accuracy."
)
