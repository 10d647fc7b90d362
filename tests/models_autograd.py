"""Small models that use autograd's less common parts: checkpoints, custom functions, hooks, buffers written in the forward, casts.

Texts of model files; see models_of_all_kinds.
"""

from __future__ import annotations

_MEAN_SQUARE = """
def loss(out):
    return out.square().mean()
"""

MODELS: dict[str, str] = {}

MODELS["writes_into_a_view"] = (
    """
class Layer(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.a, self.b = nn.Linear(d, d), nn.Linear(d // 2, d // 2)

    def forward(self, x):
        y = self.a(x).clone()
        left = y[:, : y.shape[1] // 2]
        left.mul_(self.b(left.clone())).add_(1.0)
        y[:, -1] = x[:, 0]
        y.transpose(0, 1)[0].sigmoid_()
        return y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 8),)
"""
    + _MEAN_SQUARE
)

_CHECKPOINTED = (
    """
class Block(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(torch.sigmoid(self.up(self.norm(x))))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(12, 12), nn.ModuleList(Block() for _ in range(4)), nn.Linear(12, 3)

    def forward(self, x):
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=REENTRANT) if index % 2 == 0 else block(x)
        return self.head(x)


def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 12),)
"""
    + _MEAN_SQUARE
)

MODELS["checkpoint"] = "REENTRANT = False\n" + _CHECKPOINTED

MODELS["checkpoint_reentrant"] = "REENTRANT = True\n" + _CHECKPOINTED

MODELS["custom_function"] = (
    """
class PackedRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slope):
        keep = x > 0
        ctx.save_for_backward(keep)
        ctx.slope = slope
        return torch.where(keep, x, x * slope)

    @staticmethod
    def backward(ctx, g):
        (keep,) = ctx.saved_tensors
        return torch.where(keep, g, g * ctx.slope), None


class RoundThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx, g):
        return g


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for fc in self.fc:
            x = RoundThrough.apply(PackedRelu.apply(fc(x), 0.1))
        return x


def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 8),)
"""
    + _MEAN_SQUARE
)

MODELS["custom_function_of_two_results"] = (
    """
class SplitNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        scale = x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        y = x * scale
        ctx.save_for_backward(y, scale, weight)
        a, b = (y * weight).chunk(2, -1)
        return a.contiguous(), b.contiguous()

    @staticmethod
    def backward(ctx, ga, gb):
        y, scale, weight = ctx.saved_tensors
        g = torch.cat([ga, gb], -1)
        gy = g * weight
        return (gy - y * (gy * y).mean(-1, keepdim=True)) * scale, (g * y).flatten(0, -2).sum(0)


class Layer(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.weight, self.fc = nn.Parameter(torch.ones(d)), nn.Linear(d // 2, d)

    def forward(self, x):
        a, b = SplitNorm.apply(x, self.weight)
        return x + self.fc(a * torch.sigmoid(b))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 3, 8),)
"""
    + _MEAN_SQUARE
)

MODELS["buffers_written_in_the_forward"] = (
    """
class Layer(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.fc = nn.Linear(d, d)
        self.register_buffer("mean", torch.zeros(d))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("frequency", 1.0 / 100 ** (torch.arange(0, d, 2) / d), persistent=False)

    def forward(self, x):
        y = self.fc(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            self.calls += 1
        angle = x[:, :1] * self.frequency
        return (y - self.mean) * torch.cat([angle.sin(), angle.cos()], -1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 8),)
"""
    + _MEAN_SQUARE
)

MODELS["spectral_norm"] = (
    """
def build_model():
    wrap = torch.nn.utils.parametrizations.spectral_norm
    return nn.Sequential(wrap(nn.Linear(6, 8)), nn.Tanh(), wrap(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 3))

def example_inputs(batch=1):
    return (torch.randn(batch, 6),)
"""
    + _MEAN_SQUARE
)

MODELS["weight_norm"] = (
    """
def build_model():
    wrap = torch.nn.utils.parametrizations.weight_norm
    return nn.Sequential(wrap(nn.Linear(6, 8)), nn.ELU(), wrap(nn.Linear(8, 8)), nn.Softplus(), nn.Linear(8, 3))

def example_inputs(batch=1):
    return (torch.randn(batch, 6),)
"""
    + _MEAN_SQUARE
)

MODELS["hooks"] = (
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.layers[0].register_forward_hook(lambda module, args, out: out * 2.0)
        self.layers[1].register_forward_pre_hook(lambda module, args: (args[0] + 1.0,))
        self.layers[1].register_full_backward_hook(lambda module, gin, gout: (gin[0] * 0.5,))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if x.requires_grad:
            x.register_hook(lambda g: g.clamp(-1.0, 1.0))
        return x


def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 8),)
"""
    + _MEAN_SQUARE
)

MODELS["autocast"] = (
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for norm, layer in zip(self.norms, self.layers):
                x = x + F.gelu(layer(norm(x)))
            y = self.head(x)
        return y.float()


def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 8),)
"""
    + _MEAN_SQUARE
)

MODELS["no_gradient_part"] = (
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        with torch.no_grad():
            target = x
            for layer in self.layers:
                target = torch.tanh(layer(target))
        for layer in self.layers:
            x = torch.relu(layer(x)) + layer(x).detach()
        return ((x - target) * (x.detach() > 0)).abs()


def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 8),)
"""
    + _MEAN_SQUARE
)
