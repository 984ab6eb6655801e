"""Times the two models in PyTorch, eager and compiled; imports nothing of tfamp.

    python torch_steps.py bert_base tf32 compiled '{"batch": 32, ...}' 3 10

"eager" or "compiled". A line of JSON for each figure; it goes on after a line on
standard input.
"""

import json
import sys
import time
import types

import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]

WARMUP = 4
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


class Bert(nn.Module):
    """The encoder of `networks`, by PyTorch's own fused layer."""

    def __init__(self, o):
        super().__init__()
        self.tokens = nn.Embedding(o.vocabulary, o.width)
        self.positions = nn.Parameter(0.02 * torch.randn(o.length, o.width))
        self.norm, self.drop = nn.LayerNorm(o.width), nn.Dropout(0.1)
        block = nn.TransformerEncoderLayer(
            o.width, o.heads, 4 * o.width, 0.1, "gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(block, o.depth, enable_nested_tensor=False)
        self.pooled, self.logits = nn.Linear(o.width, o.width), nn.Linear(o.width, 2)

    def forward(self, ids):
        """Returns logits [batch, 2]."""
        x = self.encoder(self.drop(self.norm(self.tokens(ids) + self.positions)))
        return self.logits(self.drop(torch.tanh(self.pooled(x[:, 0]))))


class Scaled(nn.Module):
    """Bytes as -1..1."""

    def forward(self, x):
        """Returns float32."""
        return x.float() / 127.5 - 1


def build(name, sizes):
    """Returns a model, its input, and its optimizer."""
    if name == "bert_base":
        model = Bert(sizes).to(DEVICE)
        shape = sizes.batch, sizes.length
        x = torch.randint(0, sizes.vocabulary, shape, device=DEVICE)
        kind, options = torch.optim.AdamW, {"lr": 2e-5, "weight_decay": 0.01}
    else:
        from torchvision import models  # pyright: ignore[reportMissingImports]

        last = torch.channels_last
        model = nn.Sequential(Scaled(), models.resnet50(num_classes=sizes.classes))
        model = model.to(DEVICE, memory_format=last)
        shape = sizes.images, 3, sizes.side, sizes.side
        x = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)
        x = x.to(memory_format=last)
        kind, options = torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}
    return model, x, kind(model.parameters(), fused=True, **options)


def measure(name, sizes, mode, compiled, rounds, count):
    """Yields the figures of a variant, as `steps.steps` does."""
    torch.manual_seed(0)
    model, x, optimizer = build(name, sizes)
    labels = torch.zeros(len(x), dtype=torch.long, device=DEVICE)
    call = torch.compile(model) if compiled else model
    low = {"mixed_bfloat16": torch.bfloat16, "mixed_float16": torch.float16}.get(mode)
    scaler = torch.amp.GradScaler(DEVICE, enabled=low is torch.float16)

    def step():
        begun = time.perf_counter()
        with torch.autocast(DEVICE, low, enabled=low is not None):
            loss = nn.functional.cross_entropy(call(x).float(), labels)
        scaler.scale(loss).backward()
        if name == "bert_base":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        value = float(loss.detach())
        return time.perf_counter() - begun, value

    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    first = [step() for _ in range(WARMUP)]
    yield {
        "first_step_seconds": first[0][0],
        "device_bytes": torch.cuda.max_memory_allocated() if ON_GPU else None,
        "status": f"PyTorch {torch.__version__}",
    }
    for _ in range(rounds):
        results = [step() for _ in range(count)]
        yield {"seconds": [each[0] for each in results], "loss": results[-1][1]}
    yield {}  # No profile.


def main():
    """Prints each figure, and waits for a line before the next."""
    name, mode, how, sizes, rounds, count = sys.argv[1:]
    sizes = types.SimpleNamespace(**json.loads(sizes))
    torch.backends.cuda.matmul.allow_tf32 = mode != "float32"
    torch.backends.cudnn.allow_tf32 = mode != "float32"
    torch.backends.cudnn.benchmark = True
    arguments = mode, how == "compiled", int(rounds), int(count)
    for figures in measure(name, sizes, *arguments):
        print("FIGURES " + json.dumps(figures), flush=True)
        if not sys.stdin.readline():
            return


if __name__ == "__main__":
    main()
