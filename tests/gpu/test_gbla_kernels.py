"""The kernels of gated bidirectional linear attention on a CUDA device against the float64 reference there."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from validate.tolerance import deviation
from zoo.kernels.gated_bidirectional_linear_attention import (
    PackedLayout,
    gated_bidirectional_linear_attention,
    launch,
    parameters,
)
from zoo.kernels.gated_bidirectional_linear_attention.reference import (
    gated_bidirectional_linear_attention_backward_reference,
    gated_bidirectional_linear_attention_reference,
)
from zoo.kernels.launch import capability
from zoo.layers import GatedBidirectionalLinearAttention

pytestmark = pytest.mark.gpu
EPS = 1e-6
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
DTYPES = [BRAIN, HALF, SINGLE]
LENGTHS = [777, 0, 1, 513]
KERNELS = ("reduce", "apply", "queries", "keys")


class Case(NamedTuple):
    """One configuration of all four kernels: the table of this GPU or the older one, without tensor memory access."""

    table: str
    dim: int
    dtype: torch.dtype
    key_gate: bool = True
    gated_norm: bool = True
    splits: int = 0

    def __str__(self):
        switches = f"{'+gate' if self.key_gate else ''}{'+norm' if self.gated_norm else ''}"
        return f"{self.table}-D{self.dim}-{str(self.dtype).removeprefix('torch.')}{switches}-splits{self.splits}"

    @property
    def layout(self):
        return PackedLayout(3, self.dim, self.key_gate, self.gated_norm)

    def configs(self):
        device = torch.device("cuda", torch.cuda.current_device())
        table = parameters.configs(capability(device) if self.table == "own" else 80)
        forward, backward = self.dtype.itemsize, launch.gradient_dot_dtype(self.dtype).itemsize
        entries = zip(KERNELS, (forward, forward, backward, backward), strict=True)
        return [dataclasses.replace(table[name][self.dim, size], splits=self.splits) for name, size in entries]


TABLES = ("own", "older")
SWITCHES = itertools.product([True, False], repeat=2)
CASES = [
    Case(table, dim, dtype, splits=splits)
    for table, dim, dtype, splits in itertools.product(TABLES, parameters.HEAD_DIMS, DTYPES, (0, 1, 3))
] + [
    Case(table, 64, dtype, *switches)
    for table, dtype, switches in itertools.product(TABLES, DTYPES, SWITCHES)
    if not all(switches)
]


@pytest.fixture(scope="module", autouse=True)
def _compiled_by_many(request):
    """Compile in as many processes as there are cores: each runs a share of the cases, which fills Triton's cache."""
    parameters_of = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    selected = {params["case"] for params in parameters_of if isinstance(params.get("case"), Case)}
    slow_first = sorted((case for case in selected if case.splits < 3), key=lambda case: -case.dim)
    workers = max(1, min(16, os.cpu_count() or 1) - 1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        list(pool.map(_launch_once, slow_first))


def _launch_once(case: Case) -> None:
    with contextlib.suppress(Exception):  # the tests themselves will say
        torch.set_num_threads(1)
        launched(case, *draw(case.layout, case.dtype, LENGTHS))
        torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def _nan_in_new_memory():
    """Under deterministic algorithms ``torch.empty`` is filled with NaN, so what a kernel does not write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(layout, dtype, lengths, length=None):
    """Return packed, norm weights, lengths and grad, with NaN at padding and in the spare columns."""
    shape = len(lengths), max(lengths) if length is None else length
    packed = torch.randn(*shape, layout.width, device="cuda").to(dtype)
    grad = torch.randn(*shape, layout.inner, device="cuda").to(dtype)
    for row, valid in enumerate(lengths):
        packed[row, valid:] = grad[row, valid:] = torch.nan
    packed[..., layout.used_width :] = torch.nan
    norm_weight = torch.rand(layout.num_heads, layout.head_dim, device="cuda") + 0.5
    return packed, norm_weight, torch.tensor(lengths, dtype=torch.int32, device="cuda"), grad


def launched(case, packed, norm_weight, lengths, grad, layout=None):
    """Return output and gradients of packed and norm weight, from the kernels launched as the case says."""
    layout = layout or case.layout
    reduce, apply, queries, keys = case.configs()
    state = launch.reduce_state(packed, lengths, layout, reduce)
    y = launch.apply_state(packed, norm_weight, lengths, state, layout, EPS, apply)
    return y, *launch.backward(grad, packed, norm_weight, lengths, state, layout, EPS, queries, keys)


def reference(layout, packed, norm_weight, lengths, grad):
    y = gated_bidirectional_linear_attention_reference(packed, norm_weight, lengths, layout, EPS)
    rest = gated_bidirectional_linear_attention_backward_reference(grad, packed, norm_weight, lengths, layout, EPS)
    return y, *rest


def attention(layout, norm_weight, lengths):
    return lambda packed, norm_weight=norm_weight: gated_bidirectional_linear_attention(
        packed,
        norm_weight,
        lengths,
        num_heads=layout.num_heads,
        head_dim=layout.head_dim,
        eps=EPS,
        key_gate=layout.key_gate,
        gated_norm=layout.gated_norm,
    )


def assert_inside(found, layout, packed, norm_weight, lengths, grad):
    """Judge output and gradients by the tolerance rule, and demand zeros at padding and in the spare columns."""
    exact = reference(layout, packed.double(), norm_weight.double(), lengths, grad.double())
    low = reference(layout, packed, norm_weight, lengths, grad)
    for name, out, ref64, ref_lo in zip(("y", "dpacked", "dweight"), found, exact, low, strict=True):
        # The norm weight and its gradient are float32, but their factors come in the dtype of the projection.
        judged = deviation(out, ref64, ref_lo, packed.dtype)
        assert judged.ok, (name, judged)
    for row, length in enumerate(lengths.tolist()):
        assert (found[0][row, max(length, 0) :] == 0).all()
        assert (found[1][row, max(length, 0) :] == 0).all()
    assert (found[1][..., layout.used_width :] == 0).all()


def test_no_kernel_of_the_table_is_left_out():
    device = torch.device("cuda", torch.cuda.current_device())
    for table in (capability(device), 80):
        assert set(parameters.configs(table)) == set(KERNELS)
        assert {dim for entries in parameters.configs(table).values() for dim, _ in entries} == set(
            parameters.HEAD_DIMS
        )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_configuration_is_inside_the_tolerance_rule(case):
    tensors = draw(case.layout, case.dtype, LENGTHS)
    assert_inside(launched(case, *tensors), case.layout, *tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[0], [1], [63, 64, 65], [300, 0, 1, 257], [99, -5]], ids=str)
def test_the_op_is_inside_the_tolerance_rule(dtype, lengths):
    layout = PackedLayout(3, 32)
    packed, norm_weight, counts, grad = draw(layout, dtype, [min(max(n, 0), 300) for n in lengths], 300)
    given = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    packed.requires_grad_(), norm_weight.requires_grad_()
    y = attention(layout, norm_weight, given)(packed)
    found = y.detach(), *torch.autograd.grad(y, [packed, norm_weight], grad)
    assert_inside(found, layout, packed.detach(), norm_weight.detach(), counts, grad)


def late_gates(by):
    def change(packed, layout):
        packed[:, 256:, layout.key_gate_logit : layout.used_width] += by

    return change


def columns(part, by, width=None):
    def change(packed, layout):
        start = getattr(layout, part)
        packed[..., start : start + (width or layout.inner)] += by

    return change


EXTREMES = {
    "late gates +200": late_gates(200.0),
    "late gates +1e4": late_gates(1e4),
    "a key column -30": columns("key", -30.0, 1),
    "keys -90": columns("key", -90.0),
    "keys -300": columns("key", -300.0),
    "keys -3000": columns("key", -3000.0),
    "queries -90": columns("query", -90.0),
    "queries -3000": columns("query", -3000.0),
    "keys and queries +100": lambda packed, layout: packed[..., : 2 * layout.inner].add_(100.0),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [0, 1])
@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_are_inside_the_tolerance_rule(name, splits, dtype):
    case = Case("own", 64, dtype, splits=splits)
    tensors = draw(case.layout, dtype, [700, 690])
    EXTREMES[name](tensors[0], case.layout)
    assert_inside(launched(case, *tensors), case.layout, *tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", ["query", "key", "value", "residual_gate", "key_gate_logit"])
@pytest.mark.parametrize("table", TABLES)
def test_a_nan_reaches_what_depends_on_it_and_nothing_else(table, part, dtype):
    case = Case(table, 64, dtype)
    layout = case.layout
    tensors = draw(layout, dtype, [641, 650])
    tensors[0][0, 640, getattr(layout, part)] = torch.nan
    found, expected = launched(case, *tensors), reference(layout, *tensors)
    assert torch.equal(found[0].isnan(), expected[0].isnan())
    assert found[1][0, 640].isnan().any()
    assert found[2][0].isnan().any()
    assert found[1][0, 0, layout.key : layout.key + layout.head_dim].isnan().all()
    if part not in ("query", "residual_gate"):
        assert found[1][0, 0, : layout.head_dim].isnan().all()
    for start in range(0, 4 * layout.inner, layout.inner):
        assert found[1][0, :, start + layout.head_dim : start + layout.inner].isfinite().all()
    assert found[1][1].isfinite().all()
    assert found[2][1:].isfinite().all()


VIEWS = {
    "odd offset and wider rows": lambda x: torch.cat([x[..., :1], x, x[..., :4]], 2)[..., 1:-4],
    "wider rows": lambda x: torch.cat([x, x[..., :8]], 2)[..., :-8],
    "rows apart": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "L before B": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "P before L": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "one position again and again": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dim", [16, 64])
def test_any_strides_are_read(name, dim):
    layout = PackedLayout(3, dim)
    packed, norm_weight, lengths, grad = draw(layout, BRAIN, [300, 257])
    view = VIEWS[name](packed).detach().requires_grad_()
    norm_weight = norm_weight.T.contiguous().T.requires_grad_()
    counts = torch.stack([lengths, lengths], 1)[:, 0]
    y = attention(layout, norm_weight, counts)(view)
    strided = grad.transpose(0, 1).contiguous().transpose(0, 1)
    found = y.detach(), *torch.autograd.grad(y, [view, norm_weight], strided)
    assert_inside(found, layout, view.detach(), norm_weight.detach(), lengths, grad)


def training_step(dim=64, lengths=LENGTHS):
    """Return a function that gives output and gradients, the op that it calls on two leaves, packed, and grad."""
    layout = PackedLayout(3, dim)
    packed, norm_weight, counts, grad = draw(layout, BRAIN, lengths)
    op = attention(layout, norm_weight, counts)

    def step(op=op):
        # Leaves of its own: a captured backward may not reach back to the stream on which older ones were made.
        packed_leaf, norm_leaf = (tensor.detach().requires_grad_() for tensor in (packed, norm_weight))
        y = op(packed_leaf, norm_leaf)
        return [y.detach(), *torch.autograd.grad(y, [packed_leaf, norm_leaf], grad)]

    return step, op, packed, grad


def all_equal(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("case", [case for case in CASES if case.dim == 64 and case.splits == 0], ids=str)
def test_results_are_the_same_bits_each_time(case):
    tensors = draw(case.layout, case.dtype, LENGTHS)
    first = launched(case, *tensors)
    assert all(all_equal(launched(case, *tensors), first) for _ in range(5))


def test_checkpointing_changes_no_bit():
    step, op, *_ = training_step()
    assert all_equal(step(lambda *leaves: checkpoint(op, *leaves, use_reentrant=False)), step())


def test_forward_and_backward_are_captured_in_cuda_graphs():
    step, op, packed, _ = training_step()
    inference = lambda: [op(packed.detach())]  # noqa: E731
    for run in (inference, step):
        expected = run()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        for _ in range(3):
            for tensor in captured:
                tensor.fill_(torch.nan)
            graph.replay()
            assert all_equal(captured, expected)


def test_forward_and_backward_compile_whole():
    step, op, *_ = training_step()
    compiled = torch.compile(lambda *leaves: op(*leaves) * 2, fullgraph=True)
    assert all_equal(step(compiled), step(lambda *leaves: op(*leaves) * 2))


def layer_of(d_model=128):
    torch.manual_seed(0)
    layer = GatedBidirectionalLinearAttention(d_model, 3, 32).cuda()
    x = torch.randn(3, 300, d_model, device="cuda")
    return layer, x, torch.tensor([300, 0, 129], dtype=torch.int32, device="cuda")


def test_the_layer_trains_under_autocast():
    layer, x, lengths = layer_of()
    x.requires_grad_()

    def gradients(layer, x):
        y = layer(x, lengths)
        loss = y.to(x.dtype).square().sum()
        return [y.detach(), *torch.autograd.grad(loss, [x, *layer.parameters()])]

    with torch.autocast("cuda", BRAIN):
        found = gradients(layer, x)
    assert found[0].dtype == BRAIN
    expected = gradients(layer.double(), x.detach().double().requires_grad_())
    for ours, exact in zip(found, expected, strict=True):
        assert (ours.double() - exact).norm() <= 0.03 * exact.norm()


def test_an_exported_layer_holds_the_op_once_and_runs():
    layer, x, lengths = layer_of()
    layer, x = layer.to(BRAIN), x.to(BRAIN)
    program = torch.export.export(layer, (x, lengths))
    op = torch.ops.zoo.gated_bidirectional_linear_attention.default
    assert sum(node.target == op for node in program.graph.nodes) == 1
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x, lengths), layer(x, lengths))


def test_grids_pass_65535_programs():
    case = Case("own", 16, BRAIN)
    layout = PackedLayout(1, 16)
    lengths = (torch.arange(70_000) % 4).tolist()
    packed, norm_weight, counts, grad = draw(layout, BRAIN, [3, 3])
    packed, grad = (torch.randn(70_000, 3, t.shape[2], device="cuda", dtype=BRAIN) for t in (packed, grad))
    counts = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    found = launched(case, packed, norm_weight, counts, grad, layout)
    exact = reference(layout, packed.double(), norm_weight.double(), counts, grad.double())
    low = reference(layout, packed, norm_weight, counts, grad)
    for out, ref64, ref_lo in zip(found, exact, low, strict=True):
        judged = deviation(out, ref64, ref_lo, BRAIN)
        assert judged.ok, judged


@pytest.mark.parametrize("table", TABLES)
def test_offsets_pass_two_to_the_31(table):
    torch.use_deterministic_algorithms(False)  # filling gigabytes with NaN takes long
    length, layout, one = 262_144, PackedLayout(16, 64), PackedLayout(1, 64)
    packed = torch.randn(2, length, layout.width, device="cuda", dtype=BRAIN)
    grad = torch.randn(2, length, layout.inner, device="cuda", dtype=BRAIN)
    assert packed.numel() > 2**31
    norm_weight = torch.rand(16, 64, device="cuda") + 0.5
    lengths = torch.tensor([length - 3, length], dtype=torch.int32, device="cuda")
    y, grad_packed, _ = launched(Case(table, 64, BRAIN), packed, norm_weight, lengths, grad, layout)

    def of_head(x, row, head):
        parts = [x[row : row + 1, :, part * 1024 + head * 64 :][..., :64] for part in range(4)]
        gate = x[row : row + 1, :, layout.key_gate_logit + head :][..., :1]
        return torch.cat([*parts, gate, torch.zeros_like(gate).expand(-1, -1, one.width - one.used_width)], 2)

    for row, head in ((0, 0), (1, 15)):
        at = slice(row, row + 1), slice(None), slice(64 * head, 64 * head + 64)
        small = of_head(packed, row, head), norm_weight[head : head + 1], lengths[row : row + 1], grad[at]
        wide = [t.double() if t.is_floating_point() else t for t in small]
        found = y[at], of_head(grad_packed, row, head)
        for out, exact, low in zip(found, reference(one, *wide)[:2], reference(one, *small)[:2], strict=True):
            judged = deviation(out, exact, low, BRAIN)
            assert judged.ok, (row, head, judged)


def test_two_threads_with_a_stream_each_do_not_disturb_each_other():
    steps = [training_step(64, LENGTHS)[0], training_step(64, [1000, 65, 0])[0]]
    expected = [step() for step in steps]
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(step, wanted):
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                results = [step() for _ in range(20)]
            stream.synchronize()
            wrong.extend("differs" for found in results if not all_equal(found, wanted))
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(steps, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
