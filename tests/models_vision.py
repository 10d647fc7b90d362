"""Small convolutional models: residual with batch norm, U-Net, in-place blocks.

Texts of model files; see models_of_all_kinds.
"""

from __future__ import annotations

_MEAN_SQUARE = """
def loss(out):
    return out.square().mean()
"""

MODELS: dict[str, str] = {}

MODELS["convolutions_batch_norm"] = """
class Block(nn.Module):
    def __init__(self, c, stride=1):
        super().__init__()
        self.a, self.bn_a = nn.Conv2d(c, c, 3, stride, 1, bias=False), nn.BatchNorm2d(c)
        self.b, self.bn_b = nn.Conv2d(c, c, 3, 1, 1, bias=False), nn.BatchNorm2d(c)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Sequential(nn.Conv2d(c, c, 1, stride, bias=False), nn.BatchNorm2d(c)) if stride > 1 else None

    def forward(self, x):
        y = self.bn_b(self.b(self.act(self.bn_a(self.a(x)))))
        y += x if self.down is None else self.down(x)
        return self.act(y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.blocks = nn.ModuleList([Block(8), Block(8, 2), Block(8)])
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.flatten(self.pool(x), 1))


def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 3, 12, 12),)

def loss(out):
    return F.cross_entropy(out, torch.arange(out.shape[0], device=out.device) % 5)
"""

MODELS["group_norm_and_strange_pools"] = (
    """
class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm, self.conv, self.mix = nn.GroupNorm(2, c), nn.Conv1d(c, c, 3, padding=1, groups=2), nn.Conv1d(c, c, 1)

    def forward(self, x):
        return x + self.mix(F.silu(self.conv(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Conv1d(2, 8, 5, padding=2), nn.Sequential(*[Block(8) for _ in range(3)])
        self.up = nn.ConvTranspose1d(8, 4, 2, stride=2)

    def forward(self, x):
        x = F.avg_pool1d(self.blocks(self.stem(x)), 2)
        return F.interpolate(F.leaky_relu(self.up(x), 0.2), scale_factor=2, mode="linear").amax(-1)


def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 2, 16),)
"""
    + _MEAN_SQUARE
)

MODELS["unet"] = """
class Double(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.SiLU(), nn.Conv2d(b, b, 3, padding=1), nn.SiLU())

    def forward(self, x):
        return self.body(x)


class Net(nn.Module):
    def __init__(self, c=4):
        super().__init__()
        self.down = nn.ModuleList([Double(3, c), Double(c, 2 * c)])
        self.middle = Double(2 * c, 4 * c)
        self.rise = nn.ModuleList([nn.ConvTranspose2d(4 * c, 2 * c, 2, 2), nn.ConvTranspose2d(2 * c, c, 2, 2)])
        self.up = nn.ModuleList([Double(4 * c, 2 * c), Double(2 * c, c)])
        self.head = nn.Conv2d(c, 1, 1)

    def forward(self, x):
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for rise, block in zip(self.rise, self.up):
            x = block(torch.cat([skips.pop(), rise(x)], dim=1))
        return self.head(x)


def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 3, 8, 8),)

def loss(out):
    return F.binary_cross_entropy_with_logits(out, torch.ones_like(out))
"""

MODELS["in_place_and_views"] = (
    """
class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a, self.b, self.act = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1), nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.b(self.act(self.a(x)))
        y += x
        return y.relu_()


class Net(nn.Module):
    def __init__(self, c=4):
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, c, 3, padding=1), nn.ModuleList(Block(c) for _ in range(3))
        self.qkv, self.head = nn.Linear(c, 3 * c), nn.Linear(c, 5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        t = x.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(t).chunk(3, -1)
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.head(y[:, 0])


def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 3, 6, 6),)
"""
    + _MEAN_SQUARE
)
