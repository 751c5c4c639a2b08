"""The kernels of the gated delta rule on a CUDA device against float64 there."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.kernels.delta_rule import (
    EXTREMES,
    NAMES,
    VIEWS,
    as_lengths,
    assert_zero_at_padding,
    by_name,
    disturbed,
    draw_grads,
    draw_inputs,
    each,
    in_dtype,
    in_float64,
    judge,
    poison,
    poisoned,
    run_chunked,
    run_op,
)
from validate.tolerance import deviation
from zoo.kernels import gated_delta_rule
from zoo.kernels.gated_delta_rule import launch, parameters
from zoo.kernels.gated_delta_rule.parameters import HEAD_DIMS, LONGEST_STEP, Segments
from zoo.kernels.gated_delta_rule.reference import Inputs
from zoo.kernels.launch import capability

pytestmark = pytest.mark.gpu
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
DTYPES = [BRAIN, HALF, SINGLE]
WIDTHS = [*((dim, dim) for dim in HEAD_DIMS), (64, 128), (128, 32), (16, 64)]
LENGTHS = [777, 0, 1, 513]
CUT = Segments(4, 4)
"""Of the 13 chunks of the longest row; the last segment has one chunk, that of shorter rows none."""

OWN = capability(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else 90
OLDER = 80
"""Without tensor memory access."""


class Case(NamedTuple):
    """One configuration of all kernels: as the op launches them or those of a table, whole rows or segments."""

    table: int | None
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    cut: Segments | None = None
    normalize: bool = True
    with_state: bool = True

    def __str__(self):
        marks = [
            f"sm{self.table}" if self.table else "op",
            f"K{self.key_dim}",
            f"V{self.value_dim}",
            str(self.dtype).removeprefix("torch."),
        ]
        switches = {"cut": self.cut is not None, "raw": not self.normalize, "stateless": not self.with_state}
        return "-".join([*marks, *(name for name, on in switches.items() if on)])

    def configs(self):
        """Return parameters of the Triton kernels, which forbid the specialised ones; none without a table."""
        if self.table is None:
            return {}
        sizes = self.key_dim, self.value_dim, self.dtype, self.table
        return {
            "solve_with": parameters.solve_config(self.key_dim, self.dtype, self.table),
            "walk_with": parameters.walk_config(*sizes),
            "walk_back_with": parameters.walk_back_config(*sizes),
            "gradients_with": parameters.gradients_config(*sizes),
        }

    def draw(self):
        sizes = len(LENGTHS), max(LENGTHS), 3, self.key_dim, self.value_dim
        return draw(*sizes, self.dtype, with_state=self.with_state)

    def run(self, inputs, lengths, grads, *, normalize):
        """A twin of ``run_op`` with the launches of this case."""
        call = inputs, as_lengths(lengths, "cuda"), inputs.q.shape[3] ** -0.5, normalize
        configs = self.configs()
        forward = {name: x for name, x in configs.items() if name in ("solve_with", "walk_with")}
        gradients = launch.backward(*grads, *call, **configs, cut=self.cut)
        named = {name: x for name, x, given in zip(NAMES, gradients, inputs, strict=True) if given is not None}
        return launch.forward(*call, **forward, cut=self.cut), named


PLAIN = [
    Case(None, *widths, dtype) for widths in WIDTHS for dtype in DTYPES if parameters.has_gradients(widths[0], dtype)
]
TABLED = [case._replace(table=OWN) for case in PLAIN]
OLD = [case._replace(table=OLDER) for case in PLAIN]
CASES = [
    *PLAIN,
    *(case for case in TABLED if parameters.is_specialized(*case[1:4], OWN)),
    *(old for old, own in zip(OLD, TABLED, strict=True) if old.configs() != own.configs()),
    *(case._replace(cut=CUT) for case in PLAIN if case.key_dim <= 128),
    *(Case(OWN, 64, 64, dtype, cut=CUT) for dtype in DTYPES),
    *(Case(None, 64, 64, dtype, normalize=False) for dtype in DTYPES),
    *(Case(None, 64, 64, dtype, with_state=False) for dtype in DTYPES),
]
USUAL = [case for case in CASES if (case.key_dim, case.value_dim) == (64, 64) and case.with_state]
ACROSS_SEGMENTS = ["one repeated key", "nothing is forgotten", "strong decay in the middle of a chunk"]
"""All of a segment matters to the next ones; in the others of some segments a part, or the last chunk only."""
BASE = Case(None, 64, 64, BRAIN)
"""What all tests use that do not go through the cases."""

FAILED: dict[Case, str] = {}
"""Cases that failed in a process of their own: another try here might leave this process without a device."""


@pytest.fixture(scope="module", autouse=True)
def _compiled_by_many(request):
    """Compile in as many processes as there are cores, one a case: each fills Triton's cache, and dies alone."""
    parameters_of = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    selected = {params["case"] for params in parameters_of if isinstance(params.get("case"), Case)} | {BASE}
    slow_first = sorted(selected, key=lambda case: -case.key_dim * case.value_dim * case.dtype.itemsize)
    with ThreadPoolExecutor(max(1, min(16, os.cpu_count() or 1) - 1)) as pool:
        outcomes = list(pool.map(_launch_in_a_process, slow_first))
    FAILED.update({case: error for case, error in zip(slow_first, outcomes, strict=True) if error})


def _launch_in_a_process(case: Case) -> str:
    """Launch every kernel of a case once; return what went wrong."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_launch_once, args=(case, theirs))
    process.start()
    theirs.close()
    try:
        error = ours.recv()
    except EOFError:
        error = "it died"
    process.join()
    return error


def _launch_once(case: Case, outcome) -> None:
    try:
        torch.set_num_threads(1)
        inputs = case.draw()
        case.run(inputs, LENGTHS, draw_grads(inputs), normalize=case.normalize)
        torch.cuda.synchronize()
        outcome.send("")
    except Exception as error:
        outcome.send(f"{type(error).__name__}: {error}")


@pytest.fixture(autouse=True)
def _nan_in_new_memory():
    """Under deterministic algorithms ``torch.empty`` is filled with NaN, so what a kernel does not write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(*sizes, with_state=True, decay=0.1):
    *shape, dtype = sizes
    inputs = draw_inputs(*shape, with_state=with_state)
    return each(in_dtype(inputs._replace(log_decay=decay * inputs.log_decay), dtype), lambda x: x.cuda())


def assert_inside(inputs, lengths, *, run=run_op, normalize=True, narrow=False):
    """Judge outputs and gradients of the kernels, with poison in padding."""
    inputs = poisoned(inputs, lengths)
    grad_o, grad_state = draw_grads(inputs)
    grads = poison(grad_o, lengths), grad_state
    found = by_name(run(inputs, lengths, grads, normalize=normalize))
    exact, wide = in_float64(inputs), [x.double() for x in grads]
    ref64, *rounded = (
        by_name(run_chunked(x, lengths, wide, normalize=normalize)) for x in (exact, disturbed(exact), disturbed(exact))
    )
    low = by_name(run_chunked(inputs, lengths, grads, normalize=normalize, narrow=narrow))
    judge(found, ref64, low, inputs.q.dtype, rounded)
    assert_zero_at_padding(found, lengths)


def assert_equal(found, expected):
    for name, wanted in expected.items():
        assert torch.equal(found[name], wanted), name


def not_failed(case):
    if case in FAILED:
        pytest.fail(f"in a process of its own: {FAILED[case]}")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_configuration_is_inside_the_tolerance_rule(case):
    not_failed(case)
    assert_inside(case.draw(), LENGTHS, run=case.run, normalize=case.normalize)


@pytest.mark.parametrize("lengths", [[0], [1], [63, 64, 65], [300, 0, 1, 257], [99, -5]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_op_is_inside_the_tolerance_rule(dtype, lengths):
    assert_inside(draw(len(lengths), max(300, *lengths), 3, 64, 64, dtype), lengths)


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_widths_with_no_kernel_of_gradients_take_those_of_the_reference(dtype):
    inputs = draw(2, 150, 2, 256, 256, dtype)
    assert launch.choose(inputs).ok and "would not fit" in launch.choose_backward(inputs).reason
    assert_inside(inputs, [150, 77])


@pytest.mark.parametrize("length", [1, LONGEST_STEP])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_few_positions_are_inside_the_tolerance_rule(dtype, widths, length):
    inputs, lengths = poisoned(draw(4, length, 3, *widths, dtype), [length, 0, 1, 1]), [length, 0, 1, 1]
    with torch.no_grad():
        found = outputs_by_name(normalized_op(inputs, lengths))
    exact = in_float64(inputs)
    ref64, low, *rounded = (
        outputs_by_name(chunked_forward(x, lengths)) for x in (exact, inputs, disturbed(exact), disturbed(exact))
    )
    judge(found, ref64, low, dtype, rounded)
    assert_zero_at_padding(found, lengths)


def normalized_op(inputs, lengths):
    return run_op(inputs, lengths, normalize=True)


def outputs_by_name(outputs):
    return dict(zip(("o", "state"), outputs, strict=True))


def chunked_forward(inputs, lengths):
    return run_chunked(inputs, lengths, normalize=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prefill_and_steps_are_the_whole(dtype):
    lengths, inputs = [140, 135], draw(2, 140, 3, 64, 64, dtype)
    exact = chunked_forward(in_float64(inputs), lengths)
    low = chunked_forward(inputs, lengths)
    outputs, state = [], inputs.initial_state
    for start, end in ((0, 130), *((t, t + 1) for t in range(130, 140))):
        part = Inputs(*(x[:, start:end] for x in inputs[:5]), state)
        o, state = normalized_op(part, [n - start for n in lengths])
        outputs.append(o)
    judge(*map(outputs_by_name, ((torch.cat(outputs, 1), state), exact, low)), dtype)


@pytest.mark.parametrize("case", [case for case in USUAL if case.cut is None], ids=str)
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extremes_are_inside_the_tolerance_rule(extreme, case):
    not_failed(case)
    inputs = in_dtype(EXTREMES[extreme](draw_inputs(2, 130, 3, 64, 64)), case.dtype)
    assert_inside(each(inputs, lambda x: x.cuda()), [130, 101], run=case.run, normalize=case.normalize, narrow=True)


@pytest.mark.parametrize("extreme", [*ACROSS_SEGMENTS, "everything is written", "everything is forgotten at each step"])
@pytest.mark.parametrize("case", [case for case in USUAL if case.cut], ids=str)
def test_extremes_are_inside_the_tolerance_rule_across_segments(case, extreme):
    not_failed(case)
    inputs = in_dtype(EXTREMES[extreme](draw_inputs(2, 777, 3, 64, 64)), case.dtype)
    assert_inside(each(inputs, lambda x: x.cuda()), [777, 400], run=case.run, normalize=case.normalize, narrow=True)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dim", [16, 64])
def test_any_strides_are_read(dim, view):
    inputs = draw(2, 300, 3, dim, dim, BRAIN)

    def run(inputs, lengths, grads, *, normalize):
        leaves = each(inputs, lambda x: x.detach().requires_grad_())
        lengths = torch.stack([as_lengths(lengths, "cuda")] * 2, 1)[:, 0]
        outputs = gated_delta_rule(*VIEWS[view](leaves), lengths, normalize=normalize)
        strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in grads]
        gradients = torch.autograd.grad(outputs, leaves, strided)
        return [y.detach() for y in outputs], dict(zip(NAMES, gradients, strict=True))

    assert_inside(inputs._replace(beta=inputs.beta.float()), [300, 257], run=run)


@pytest.mark.parametrize("case", USUAL, ids=str)
def test_results_are_the_same_bits_each_time(case):
    not_failed(case)
    inputs = poisoned(case.draw(), LENGTHS)
    grads = draw_grads(inputs)
    first = by_name(case.run(inputs, LENGTHS, grads, normalize=case.normalize))
    for _ in range(5):
        assert_equal(by_name(case.run(inputs, LENGTHS, grads, normalize=case.normalize)), first)


def training_step(lengths=LENGTHS):
    """Return a function that gives outputs and gradients, the op that it calls on six leaves, and the leaves."""
    not_failed(BASE)
    inputs = draw(len(lengths), max(lengths), 3, 64, 64, BRAIN)
    grads, counts = draw_grads(inputs), as_lengths(lengths, "cuda")

    def op(*leaves):
        return gated_delta_rule(*leaves, counts, normalize=True)

    def step(op=op):
        # Leaves of its own: a captured backward may not reach back to the stream on which older ones were made.
        leaves = [x.detach().requires_grad_() for x in inputs]
        outputs = op(*leaves)
        return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, grads)]

    return step, op, inputs


def all_equal(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_checkpointing_changes_no_bit():
    step, op, _ = training_step()
    assert all_equal(step(lambda *leaves: checkpoint(op, *leaves, use_reentrant=False)), step())


@pytest.mark.parametrize("lengths", [LENGTHS, [1, 1, 0]], ids=str)
def test_forward_and_backward_are_captured_in_cuda_graphs(lengths):
    step, op, inputs = training_step(lengths)

    def inference():
        with torch.no_grad():
            return list(op(*inputs))

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
    step, op, _ = training_step()

    def scaled(*leaves):
        o, state = op(*leaves)
        return o * 2, state * 2

    assert all_equal(step(torch.compile(scaled, fullgraph=True)), step(scaled))


def test_autocast_changes_no_bit():
    step, op, _ = training_step()

    def cast(*leaves):
        with torch.autocast("cuda", BRAIN):
            return op(*leaves)

    assert all_equal(step(cast), step())


class Memory(torch.nn.Module):
    def forward(self, q, k, v, log_decay, beta, state, lengths):
        return gated_delta_rule(q, k, v, log_decay, beta, state, lengths, normalize=True)


def test_an_exported_module_holds_the_op_once_and_runs():
    inputs, lengths = draw(3, 300, 3, 64, 64, BRAIN), as_lengths([300, 0, 129], "cuda")
    program = torch.export.export(Memory(), (*inputs, lengths))
    op = torch.ops.zoo.gated_delta_rule.default
    assert sum(node.target == op for node in program.graph.nodes) == 1
    with torch.no_grad():
        assert all_equal(program.module()(*inputs, lengths), Memory()(*inputs, lengths))


def compiled_kernels():
    """Return how many compiled kernels of the op this device holds."""
    from zoo.kernels.gated_delta_rule import (
        gluon_backward,
        gluon_gradients,
        gluon_solve,
        gluon_walk,
        triton_backward,
        triton_solve,
        triton_step,
        triton_walk,
    )

    modules = (
        gluon_backward,
        gluon_gradients,
        gluon_solve,
        gluon_walk,
        triton_backward,
        triton_solve,
        triton_step,
        triton_walk,
    )
    kernels = {id(x): x for module in modules for name, x in vars(module).items() if name.endswith("_kernel")}
    return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels.values())


@pytest.mark.parametrize(
    ("batch", "lengths"), [(100, (100, 128, 1000, 1024)), (1, (8192, 10_000, 4096)), (4, (1, 2, 5))], ids=str
)
def test_a_new_length_compiles_nothing(batch, lengths):
    torch.use_deterministic_algorithms(False)
    counts = []
    for length in lengths:
        inputs = draw(batch, length, 4, 64, 64, BRAIN)
        run_op(inputs, [length] * (batch - 1) + [length // 2], draw_grads(inputs), normalize=True)
        counts.append(compiled_kernels())
    assert counts[0] > 0 and len(set(counts)) == 1, counts


@pytest.mark.parametrize("length", [3, LONGEST_STEP + 1], ids=["steps", "chunks"])
def test_grids_pass_65535_programs(length):
    batch = 70_000
    inputs = draw(batch, length, 1, 16, 16, BRAIN)
    grads = draw_grads(inputs)
    lengths = (torch.arange(batch) % (length + 1)).tolist()
    found = by_name(run_op(inputs, lengths, grads, normalize=True))
    rows = [*range(0, batch, 701), batch - 1]
    inputs, grads = each(inputs, lambda x: x[rows]), [x[rows] for x in grads]
    lengths = [lengths[row] for row in rows]
    wide = [x.double() for x in grads]
    ref64 = by_name(run_chunked(in_float64(inputs), lengths, wide, normalize=True))
    low = by_name(run_chunked(inputs, lengths, grads, normalize=True))
    judge({name: x[rows] for name, x in found.items()}, ref64, low, BRAIN)


@pytest.mark.parametrize("table", [None, OWN, OLDER])
@pytest.mark.parametrize("cut", [True, False], ids=["segments", "whole rows"])
def test_offsets_pass_two_to_the_31(cut, table):
    """A row of more than 2^31 elements. It forgets fast, so its last positions can be computed alone."""
    torch.use_deterministic_algorithms(False)  # filling gigabytes with NaN takes long
    heads, length, window = 16, 2**21 + 100, 1024
    shape = 1, length, heads
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*last):
        return torch.randn(*shape, *last, device="cuda", dtype=BRAIN, generator=generator)

    inputs = Inputs(
        normal(64),
        normal(64),
        normal(64),
        -0.5 - torch.rand(shape, device="cuda", generator=generator),
        normal().sigmoid(),
        None,
    )
    grad_o = normal(64)
    assert inputs.q.numel() > 2**31
    chunks = -(-length // parameters.CHUNK)
    case = BASE._replace(
        table=table, with_state=False, cut=Segments(8, -(-chunks // 8)) if cut else Segments(1, chunks)
    )
    found = by_name(case.run(inputs, [length - 3], (grad_o, None), normalize=True))
    start = (length - window) // parameters.CHUNK * parameters.CHUNK
    for head in (0, heads - 1):
        part = slice(None), slice(start, None), slice(head, head + 1)
        small, grads, lengths = each(inputs, lambda x, part=part: x[part]), (grad_o[part], None), [length - 3 - start]
        wide = in_float64(small), lengths, (grads[0].double(), None)
        ref64 = by_name(run_chunked(*wide, normalize=True))
        low = by_name(run_chunked(small, lengths, grads, normalize=True))
        for name, x in found.items():
            ours = x[:, head : head + 1] if name == "state" else x[part][:, window // 2 :]
            exact, narrow = (y if name == "state" else y[:, window // 2 :] for y in (ref64[name], low[name]))
            judged = deviation(ours, exact, narrow.to(BRAIN), BRAIN)
            assert judged.ok, (head, name, judged)


def test_two_threads_with_a_stream_each_do_not_disturb_each_other():
    steps = [training_step(LENGTHS)[0], training_step([1000, 65, 0])[0]]
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
