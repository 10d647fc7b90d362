"""Small models that use tensors and parameters in less common ways: shared, tied, complex, drawn, made from Python values.

Texts of model files; see models_of_all_kinds.
"""

from __future__ import annotations

_MEAN_SQUARE = """
def loss(out):
    return out.square().mean()
"""

MODELS: dict[str, str] = {}

MODELS["one_layer_used_many_times"] = (
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        for _ in range(4):
            x = x + self.block(x)
        return x


def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 8),)
"""
    + _MEAN_SQUARE
)

MODELS["tied_transposed"] = (
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.back = nn.Linear(8, 8, bias=False)
        self.back.weight = self.layers[0].weight

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.back(x) @ self.layers[1].weight.t()


def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 8),)
"""
    + _MEAN_SQUARE
)

MODELS["several_inputs_of_all_types"] = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.fc = nn.Embedding(9, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, values, tokens, mask, nested, scale=1.0):
        x = self.fc(values) + self.table(tokens)
        x = torch.where(mask[:, None], x, torch.zeros_like(x))
        x = x.masked_fill(~mask[:, None], 0.5) * nested["gain"] + nested["shift"][0]
        for layer in self.layers:
            x = F.softplus(layer(x)) * scale
        return (x * (tokens > 3).to(x.dtype)[:, None], x.sum(-1))


def build_model():
    return Net()

def example_inputs(batch=1):
    nested = {"gain": torch.randn(8), "shift": [torch.randn(batch, 8)]}
    mask = torch.arange(batch) % 2 == 0
    return dict(values=torch.randn(batch, 8), tokens=torch.randint(9, (batch,)), mask=mask, nested=nested, scale=0.5)

def loss(out):
    return out[0].square().mean() + out[1].mean()
"""

MODELS["complex_numbers"] = (
    """
class Layer(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.filter, self.fc = nn.Parameter(torch.randn(d // 2 + 1, dtype=torch.cfloat)), nn.Linear(d, d)

    def forward(self, x, turn):
        spectrum = torch.fft.rfft(x, dim=-1) * self.filter
        y = torch.fft.irfft(spectrum * turn, n=x.shape[-1], dim=-1)
        return x + torch.tanh(self.fc(y)) + torch.view_as_real(spectrum).square().sum((-1, -2), keepdim=False)[..., None]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x, turn):
        for layer in self.layers:
            x = layer(x, turn)
        return x


def build_model():
    return Net()

def example_inputs(batch=1):
    return torch.randn(batch, 8), torch.polar(torch.ones(batch, 5), torch.rand(batch, 5))
"""
    + _MEAN_SQUARE
)

MODELS["draws_of_all_kinds"] = (
    """
class Layer(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.fc = nn.Linear(d, d)

    def forward(self, x):
        x = x + 0.1 * torch.randn_like(x)
        keep = torch.rand(x.shape[0], 1, device=x.device) < 0.8
        y = F.dropout(self.fc(x), 0.3, self.training) * keep
        y = F.rrelu(y, training=self.training) + torch.bernoulli(torch.full_like(y, 0.5))
        return F.alpha_dropout(y, 0.2, self.training)


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

MODELS["deep_supervision"] = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in range(4))

    def forward(self, x):
        results = []
        for layer, head in zip(self.layers, self.heads):
            x = torch.tanh(layer(x))
            results.append(head(x))
        return results


def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 8),)

def loss(out):
    return sum(weight * item.square().mean() for weight, item in zip((0.1, 0.2, 0.3, 0.4), out))
"""

MODELS["tensors_from_python_values"] = (
    """
class Layer(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.fc, self.gain = nn.Linear(d, d), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device).repeat(2)
        order = torch.tensor([7, 6, 5, 4, 3, 2, 1, 0], device=x.device)
        return torch.tanh(self.fc(x[:, order]) * weights * torch.tensor(0.25)) * self.gain


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

MODELS["a_parameter_used_directly"] = (
    """
class Layer(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.bias, self.scale, self.pair = nn.Parameter(torch.zeros(d)), nn.Parameter(torch.ones(d)), nn.Parameter(torch.randn(2, d, d) / 4)

    def forward(self, x):
        return torch.tanh(x @ self.pair[0] + x @ self.pair[1].t() + self.bias) * self.scale + self.bias.sum()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(2, 8))
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        x = torch.cat([self.prompt.expand(x.shape[0], -1, -1), x], dim=1)
        for layer in self.layers:
            x = layer(x)
        return x[:, 2:]


def build_model():
    return Net()

def example_inputs(batch=1):
    return (torch.randn(batch, 3, 8),)
"""
    + _MEAN_SQUARE
)
