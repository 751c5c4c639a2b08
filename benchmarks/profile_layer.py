"""One GBLA mixer layer, and one encoder layer under autocast, kernel by kernel: time, bytes, share of the limit."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import gate, limits, tables, timing
from zoo.errors import ConfigError
from zoo.kernels.gated_bidirectional_linear_attention import PackedLayout, parameters
from zoo.kernels.launch import capability, multiprocessors
from zoo.layers import GatedBidirectionalLinearAttention
from zoo.models import gbla
from zoo.models.gbla import EncoderLayer

PROFILED_CALLS = 5
SHOWN_FROM = 0.012
MATRIX_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
LAYERS = ("mixer", "encoder")


class KernelTime(NamedTuple):
    """One kernel of a call; the same kernel on other shapes is another one.

    Attributes:
        name: as the profiler gives it.
        product: rows, inner size and columns of the matrix product that launched it, else None.
        launches: in one call.
        microseconds: of all its launches in one call.
    """

    name: str
    product: tuple[int, int, int] | None
    launches: float
    microseconds: float


@dataclass(frozen=True)
class Cost:
    """What a kernel is and what it cannot do without: bytes moved, floating-point operations."""

    role: str
    bytes_moved: int
    operations: int = 0

    def limit(self, bandwidth: float, rate: float) -> float:
        """Return microseconds at the bandwidth and rate of the machine, whichever takes longer."""
        return 1e6 * max(self.bytes_moved / bandwidth, self.operations / rate)


def measure(
    batch: int = 8,
    d_model: int = 1024,
    heads: int = 16,
    head_dim: int = 64,
    mlp_width: int = 2816,
    lengths: str = "2048,8192",
    layers: str = ",".join(LAYERS),
) -> Iterator[dict[str, Any]]:
    """Yield a row a layer, length and direction, each with its kernels in the order in which they first run.

    Args:
        batch: B.
        d_model: width of the layer.
        heads: H.
        head_dim: D.
        mlp_width: of the encoder layer's MLP.
        lengths: comma-separated.
        layers: comma-separated: ``mixer`` (bf16 weights and input), ``encoder`` (fp32, under bf16 autocast).
    """
    device = timing.require_cuda("layer_profile")
    for name in layers.split(","):
        if name not in LAYERS:
            raise ConfigError(f"layers holds {name!r}; use mixer, encoder or both with a comma")
    bandwidth, rate = timing.copy_bandwidth(device), timing.matmul_rate(device)
    for name in layers.split(","):
        for length in tables.integers(lengths):
            size = limits.MixerSize(batch, length, d_model, heads, head_dim)
            for backward in (False, True):
                subject = _Subject(name, size, mlp_width, device, backward=backward)
                row = _one(subject, size, device, bandwidth, rate)
                yield {"layer": name, **row, "copy_tb_s": bandwidth / 1e12, "matmul_tflop_s": rate / 1e12}
                del subject
                torch.cuda.empty_cache()


class _Subject:
    """A layer with its input sets, and the function of them that is profiled."""

    def __init__(
        self, name: str, size: limits.MixerSize, mlp_width: int, device: torch.device, *, backward: bool
    ) -> None:
        torch.manual_seed(0)
        self.autocast = name == "encoder"
        dtype = torch.float32 if self.autocast else torch.bfloat16
        self.layer = _layer(name, size, mlp_width).to(device, dtype)
        shape = (size.batch, size.length, size.d_model)
        sets = timing.input_sets(dtype.itemsize * size.tokens * size.d_model)
        self.inputs = [torch.randn(shape, device=device, dtype=dtype).requires_grad_(backward) for _ in range(sets)]
        self.grad = torch.randn(shape, device=device, dtype=dtype)
        self.lengths = torch.full((size.batch,), size.length, dtype=torch.int32, device=device)
        self.backward = backward

    def run(self, layer: nn.Module, x: Tensor, lengths: Tensor, grad: Tensor) -> dict[str, Tensor]:
        """Return the output, and the gradients where they are asked for; float64 is never cast."""
        arguments = (x, lengths, None) if self.autocast else (x, lengths)
        casts = self.autocast and x.dtype == torch.float32
        with self._gradients(), torch.autocast(x.device.type, torch.bfloat16, enabled=casts):
            y = layer(*arguments)
        if not self.backward:
            return {"y": y}
        grad_x, *_ = torch.autograd.grad(y, [x, *layer.parameters()], grad.to(y.dtype))
        return {"y": y, "grad_x": grad_x}

    def on_set(self, index: int) -> dict[str, Tensor]:
        """Run on one input set."""
        return self.run(self.layer, self.inputs[index % len(self.inputs)], self.lengths, self.grad)

    def admit(self) -> dict[str, float]:
        """Check the first and the last row of the profiled size against the reference in float64."""
        found = {key: gate.end_rows(x).to(torch.bfloat16) for key, x in self.on_set(0).items()}
        x, lengths, grad = (gate.end_rows(t) for t in (self.inputs[0].detach(), self.lengths, self.grad))
        with gate.reference_kernels():
            low = self.run(self.layer, x.requires_grad_(self.backward), lengths, grad)
            wide_x = x.detach().double().requires_grad_(self.backward)
            ref64 = self.run(copy.deepcopy(self.layer).double(), wide_x, lengths, grad.double())
        return gate.admit("the layer", found, ref64, low)

    def _gradients(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.backward else torch.no_grad()


def _layer(name: str, size: limits.MixerSize, mlp_width: int) -> nn.Module:
    if name == "mixer":
        return GatedBidirectionalLinearAttention(size.d_model, size.num_heads, size.head_dim)
    sizes = {"d_model": size.d_model, "num_heads": size.num_heads, "head_dim": size.head_dim, "mlp_width": mlp_width}
    return EncoderLayer(gbla.PRESETS["gbla-yandex"].with_overrides(**sizes, dropout=0.0), "L")


def _one(
    subject: _Subject, size: limits.MixerSize, device: torch.device, bandwidth: float, rate: float
) -> dict[str, Any]:
    shares = subject.admit()
    torch.cuda.empty_cache()
    costs = kernel_costs(size, device, bytes_of_x=4 if subject.autocast else 2)
    kernels = []
    for found in profile(subject.on_set, PROFILED_CALLS):
        cost = product_cost(found, size) if found.product else costs.get(found.name)
        row: dict[str, Any] = {**found._asdict(), "name": short_name(found.name), "role": "", "limit_us": None}
        if cost is not None:
            row |= {"role": cost.role, "bytes": cost.bytes_moved, "operations": cost.operations}
            row["limit_us"] = cost.limit(bandwidth, rate)
            row["tb_s"] = cost.bytes_moved / found.microseconds / 1e6
            row["tflop_s"] = cost.operations / found.microseconds / 1e6 if cost.operations else None
            row["share_of_limit"] = row["limit_us"] / found.microseconds
        kernels.append(row)
    return {
        **vars(size),
        "packed_width": PackedLayout(size.num_heads, size.head_dim).width,
        "direction": "forward+backward" if subject.backward else "forward",
        "kernels": kernels,
        "kernels_us": sum(kernel["microseconds"] for kernel in kernels),
        "limit_us": sum(kernel["limit_us"] or 0.0 for kernel in kernels),
        "tolerance_used": shares,
    }


def kernel_costs(size: limits.MixerSize, device: torch.device, bytes_of_x: int) -> dict[str, Cost]:
    """Return what our kernels must move, by the names of their functions; each tensor once.

    The combining kernels move the partial sums of every chunk, whose number is the launch's choice.
    """
    tokens, inner, heads, dim = size.tokens, size.inner, size.num_heads, size.head_dim
    pairs = size.batch * heads
    column = 2 * tokens * inner
    gates = 2 * tokens * heads
    padding = 2 * tokens * (PackedLayout(heads, dim).width - PackedLayout(heads, dim).used_width)
    state = pairs * dim * (dim + 2)
    splits = {kernel: _splits(kernel, size, device) for kernel in ("reduce", "queries")}
    return {
        "forward_kernel": Cost("short convolution", size.conv_bytes(bytes_of_x)),
        "backward_kernel": Cost("short convolution, gradients", size.conv_backward_bytes(bytes_of_x)),
        "reduce_kernel": Cost("k, v, gates to a state", 2 * column + gates),
        "combine_kernel": Cost("states of chunks to one", 4 * splits["reduce"] * state + 2 * state),
        "apply_kernel": Cost("state to queries, gated norm", 3 * column),
        "backward_queries_kernel": Cost("gradients of q and r", 5 * column),
        "backward_combine_kernel": Cost("gradients of chunks' states", 4 * splits["queries"] * state + 2 * state),
        "backward_keys_kernel": Cost("gradients of k, v, gates", 4 * column + 2 * gates + padding),
    }


def _splits(kernel: str, size: limits.MixerSize, device: torch.device) -> int:
    table = parameters.forward_config if kernel == "reduce" else parameters.backward_config
    config = table(kernel, size.head_dim, torch.bfloat16, capability(device))
    pairs = size.batch * size.num_heads
    return parameters.best_split(pairs, size.length, config, multiprocessors(device), True)[0]


def product_cost(found: KernelTime, size: limits.MixerSize) -> Cost:
    """Return what a bf16 matrix product must do, and which product of the layer it is where that is clear."""
    assert found.product is not None
    rows, inner, columns = found.product
    width = PackedLayout(size.num_heads, size.head_dim).width
    roles = {
        (size.tokens, size.d_model, width): "packed projection",
        (size.tokens, width, size.d_model): "packed projection, gradient of its input",
        (size.tokens, size.inner, size.d_model): "output projection",
    }
    role = roles.get(found.product, "gradient of a weight" if inner == size.tokens else "")
    launches = max(1, round(found.launches))
    numbers = rows * inner + inner * columns + rows * columns
    shape = f"product {rows} x {inner} x {columns}"
    return Cost(f"{role}: {shape}" if role else shape, launches * 2 * numbers, launches * 2 * rows * inner * columns)


def profile(run: timing.Candidate, calls: int) -> list[KernelTime]:
    """Return the kernels of one call, averaged over some; a first, unused profile warms the profiler up."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for _ in range(2):
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
            for index in range(calls):
                run(index)
            torch.cuda.synchronize()
    return collect(profiler.events() or [], calls)


def collect(events: Iterable[Any], calls: int) -> list[KernelTime]:
    """Sum the profiler's events by kernel; kernels of a matrix product by its shapes, all of them together."""
    events = list(events)
    found: dict[Any, list[float]] = {}
    of_products: Counter[tuple[str, float]] = Counter()
    product_of: dict[tuple[str, float], list[tuple[int, int, int]]] = {}
    for event in events:
        if event.name in MATRIX_PRODUCTS and event.kernels:
            product = _product(event.input_shapes)
            for number, kernel in enumerate(event.kernels):
                key = (kernel.name, round(kernel.duration, 3))
                of_products[key] += 1
                product_of.setdefault(key, []).append((*product, number))  # type: ignore[arg-type]
    on_device = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    for event in sorted(on_device, key=lambda event: event.time_range.start):
        duration = event.time_range.end - event.time_range.start
        key = (event.name, round(duration, 3))
        if of_products[key] > 0:
            of_products[key] -= 1
            *shape, number = product_of[key].pop(0)
            total = found.setdefault(("matrix product", event.name, tuple(shape)), [0.0, 0.0])
            total[0] += number == 0  # a product in two launches is one
        else:
            total = found.setdefault(("kernel", event.name, None), [0.0, 0.0])
            total[0] += 1
        total[1] += duration
    return [
        KernelTime(name, product, launches / calls, microseconds / calls)
        for (_, name, product), (launches, microseconds) in found.items()
    ]


def _product(shapes: list[list[int]]) -> tuple[int, int, int]:
    first, second = [shape for shape in shapes if len(shape) >= 2][-2:]
    return first[-2], first[-1], second[-1]


def short_name(name: str) -> str:
    """Return a kernel's name without return type, namespaces and arguments, with the functor of an elementwise one."""
    functors = re.findall(r"(\w*(?:[Ff]unctor|_kernel_cuda|_kernel_impl)\w*)", name)
    base = re.sub(r"<.*|\(.*", "", name.removeprefix("void ")).split("::")[-1]
    base = base[:48]
    if functors and functors[-1] not in base:
        return f"{base} ({functors[-1][:32]})"
    return base


def table(rows: list[dict[str, Any]]) -> str:
    """Return one table for all rows: the kernels that take time, one line for all others, then the sum of the row."""
    headers = ["layer", "L", "direction", "kernel", "what", "launches", "us", "MB", "TB/s", "TFLOP/s", "of limit"]
    lines: list[list[Any]] = []
    for row in rows:
        where = [row["layer"], row["length"], row["direction"]]
        shown = [kernel for kernel in row["kernels"] if kernel["microseconds"] >= SHOWN_FROM * row["kernels_us"]]
        for kernel in shown:
            megabytes = None if kernel["limit_us"] is None else f"{kernel['bytes'] / 1e6:.1f}"
            numbers = [_short(max(1, kernel["launches"])), f"{kernel['microseconds']:.1f}", megabytes]
            rates = [_rounded(kernel.get("tb_s"), 2), _rounded(kernel.get("tflop_s"), 0)]
            share = tables.share(kernel.get("share_of_limit"))
            lines.append([*where, kernel["name"] or "(no name)", kernel["role"] or None, *numbers, *rates, share])
        others = [kernel for kernel in row["kernels"] if kernel not in shown]
        rest = [_short(sum(k["launches"] for k in others)), f"{sum(k['microseconds'] for k in others):.1f}"]
        lines.append([*where, "all others", None, *rest, None, None, None, None])
        total = [None, f"{row['kernels_us']:.1f}", None, None, None, tables.share(row["limit_us"] / row["kernels_us"])]
        lines.append([*where, "all", None, *total])
    first = rows[0]
    notes = [
        f"B {first['batch']}, d {first['d_model']}, H {first['num_heads']}, D {first['head_dim']}, packed projection "
        f"{first['packed_width']} wide; torch.profiler, eager, mean of {PROFILED_CALLS} calls. MB: each tensor once, "
        "by hand from the shapes, - where nothing was counted (such kernels count as no work in the last column).",
        f"Limit: the bytes at {first['copy_tb_s']:.2f} TB/s (a kernel that copies) or the operations at "
        f"{first['matmul_tflop_s']:.0f} TFLOP/s (8192^3 bf16), whichever takes longer.",
        f"All others: kernels that take less than {SHOWN_FROM:.1%} of a row. A kernel launched while the one before it "
        "still runs waits for it, and the wait counts in its time: the combine kernels, above all.",
    ]
    return tables.render(headers, lines, notes)


def _short(value: float) -> str:
    return f"{value:.0f}" if value == round(value) else f"{value:.1f}"


def _rounded(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"
