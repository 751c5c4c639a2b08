"""The gated delta rule, forward, backward and by single steps, against fla-core and FlashQLA."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import gate, limits, peers, tables, timing
from benchmarks.shapes import numbers_of
from benchmarks.timing import Candidate
from validate.tolerance import deviation
from zoo.errors import ConfigError
from zoo.kernels import gated_delta_rule
from zoo.kernels.gated_delta_rule import launch
from zoo.kernels.gated_delta_rule.chunked import gated_delta_rule_chunked, gated_delta_rule_chunked_backward
from zoo.kernels.gated_delta_rule.reference import Inputs, normalized, normalized_backward
from zoo.kernels.ragged import accumulation_dtype

OURS, FLA, FLASH_QLA = "op", "fla", "flash_qla"
INSIDE, BEFORE = "inside", "before"
FORWARD, BACKWARD, STEP = "forward", "forward+backward", "step"
LABELS = {FLA: "fla", FLASH_QLA: "FlashQLA"}
FLASH_QLA_DIM = 128
_FLOOR = (
    "q, k, v, o moved once (forward), and q, k, v, do and three gradients (backward), or the state read and written "
    "(step), at {}."
)
SHAPES = "8x8192x16x64,32x2048x8x64,128x512x4x64,256x256x4x32,8x2048x16x128,1x32768x16x128,1024x1x8x64"


def measure(
    shapes: str = SHAPES, directions: str = f"{FORWARD},{BACKWARD}", normalize: str = INSIDE
) -> Iterator[dict[str, Any]]:
    """Yield a row a shape and direction: milliseconds in a CUDA graph and eager, bf16, full rows.

    Args:
        shapes: comma-separated BxTxHxD; T 1 is a step from a given state to the next, which has no backward.
        directions: comma-separated, of every other shape.
        normalize: q and k inside the measured time, or before it.
    """
    device = timing.require_cuda("gated_delta")
    chosen = [word.strip() for word in directions.split(",") if word.strip()]
    if unknown := set(chosen) - {FORWARD, BACKWARD}:
        raise ConfigError(f"gated_delta has no direction {sorted(unknown)[0]!r}; use {FORWARD} or {BACKWARD}")
    if normalize not in (INSIDE, BEFORE):
        raise ConfigError(f"gated_delta cannot normalise {normalize!r}; use {INSIDE} or {BEFORE}")
    sizes = [_size(shape) for shape in shapes.split(",") if shape.strip()]
    bandwidth = timing.copy_bandwidth(device)
    for size in sizes:
        for direction in [STEP] if size.length == 1 else chosen:
            row = _one_size(_Problem(size, direction, device, normalize=normalize == INSIDE), bandwidth)
            yield {**row, "copy_tb_s": bandwidth / 1e12}
            torch.cuda.empty_cache()


def _size(shape: str) -> limits.DeltaRuleSize:
    return limits.DeltaRuleSize(*numbers_of("gated_delta", shape, "BxTxHxD", "8x2048x16x128"))


class _Problem:
    """Input sets of one size and direction, and what runs on them."""

    def __init__(self, size: limits.DeltaRuleSize, direction: str, device: torch.device, *, normalize: bool) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.size, self.direction, self.normalize = size, direction, normalize
        moved = size.step_bytes() // 2 if direction == STEP else size.forward_bytes()
        self.sets = [self._draw(generator) for _ in range(timing.input_sets(moved))]
        for inputs in self.sets:
            for x in inputs[:5]:
                x.requires_grad_(direction == BACKWARD)
        self.grad = draw(size, generator).v
        self.lengths = torch.full((size.batch,), size.length, dtype=torch.int32, device=device)

    def _draw(self, generator: torch.Generator) -> Inputs:
        inputs = draw(self.size, generator, with_state=self.direction == STEP)
        if self.normalize:
            return inputs
        return inputs._replace(q=F.normalize(inputs.q, dim=-1), k=F.normalize(inputs.k, dim=-1))

    def op(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Call the registered op."""
        return gated_delta_rule(q, k, v, log_decay, beta, state, self.lengths, normalize=self.normalize)

    def on_set(self, function: peers.DeltaRule, index: int) -> dict[str, Tensor]:
        """Run a candidate on one input set; return what is compared."""
        inputs = self.sets[index]
        if self.direction != BACKWARD:
            with torch.no_grad():
                o, state = function(*inputs)
            return {"o": o, "state": state} if self.direction == STEP and state is not None else {"o": o}
        o, _ = function(*inputs)
        return {"o": o, **_named(torch.autograd.grad(o, inputs[:5], self.grad))}

    def ends(self, function: peers.DeltaRule) -> dict[str, Tensor]:
        """Return the first and the last row of a whole set. The gradient of log a is judged in the dtype of q."""
        found = {name: gate.end_rows(x.detach()) for name, x in self.on_set(function, 0).items()}
        return _judged(found, torch.bfloat16)

    def reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the same of the chunked form: in float64, or with normalised q and k and results in bfloat16."""
        inputs = _each(self.sets[0], lambda x: gate.end_rows(x.detach()))
        lengths, grad, scale = gate.end_rows(self.lengths), gate.end_rows(self.grad), inputs.q.shape[3] ** -0.5
        if dtype == torch.float64:
            inputs, grad = _each(inputs, torch.Tensor.double), grad.double()
        factors: list[tuple[Tensor, Tensor]] = []
        unit = inputs
        if self.normalize:
            factors = [normalized(x.to(accumulation_dtype(dtype))) for x in inputs[:2]]
            unit = inputs._replace(q=factors[0][0].to(dtype), k=factors[1][0].to(dtype))
        o, state = gated_delta_rule_chunked(unit, lengths, scale, False)
        if self.direction != BACKWARD:
            return {"o": o, "state": state} if self.direction == STEP else {"o": o}
        *found, _ = gated_delta_rule_chunked_backward(grad, None, unit, lengths, scale, False)
        for index, (x, factor) in enumerate(factors):
            found[index] = normalized_backward(found[index], x, factor).to(dtype)
        return _judged({"o": o, **_named(found)}, dtype)


def draw(size: limits.DeltaRuleSize, generator: torch.Generator, *, with_state: bool = False) -> Inputs:
    """Draw one input set. The generator is not torch's own, which a capture that failed leaves unusable."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device)

    batch, length, heads, dim = size.batch, size.length, size.num_heads, size.head_dim
    q, k, v = (normal(batch, length, heads, dim).bfloat16() for _ in range(3))
    log_decay = F.logsigmoid(normal(batch, length, heads) + 4)
    beta = normal(batch, length, heads).sigmoid().bfloat16()
    return Inputs(q, k, v, log_decay, beta, normal(batch, heads, dim, dim) if with_state else None)


def _each(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    q, k, v, log_decay, beta = (change(x) for x in inputs[:5])
    state = inputs.initial_state
    return Inputs(q, k, v, log_decay, beta, None if state is None else change(state))


def _named(gradients: Any) -> dict[str, Tensor]:
    return {f"grad_{name}": x for name, x in zip(Inputs._fields, gradients, strict=False)}


def _judged(found: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    name = "grad_log_decay"
    return {**found, name: found[name].to(dtype)} if name in found else found


def _one_size(problem: _Problem, bandwidth: float) -> dict[str, Any]:
    size, direction = problem.size, problem.direction
    ref64, low = problem.reference(torch.float64), problem.reference(torch.bfloat16)
    others, notes = _peers(problem)
    functions: dict[str, peers.DeltaRule] = {OURS: problem.op, **others}
    choice = launch.choose(problem.sets[0])
    if not choice.ok:
        notes.append(f"op ran its reference in PyTorch: {choice.reason}.")
    errors: dict[str, dict[str, float]] = {}
    found = problem.ends(problem.op)
    errors[OURS] = _errors(found, ref64)
    shares = {OURS: gate.admit(OURS, found, ref64, low)}
    running = {name: partial(_with_errors, problem, name, peer, ref64, errors) for name, peer in others.items()}
    admitted, refusals = gate.admit_peers(running, ref64, low)
    shares |= admitted
    notes += refusals
    del found, ref64, low
    torch.cuda.empty_cache()
    candidates: dict[str, Candidate] = {name: partial(problem.on_set, functions[name]) for name in shares}
    eager = timing.time_eager(candidates, len(problem.sets))
    captured, refusals = _capturable(candidates)
    graph = timing.time_graphs(captured, len(problem.sets))
    bytes_moved = _floor_bytes(size, direction)
    floor = limits.milliseconds(bytes_moved, bandwidth)
    medians = {name: taken.median for name, taken in graph.items()}
    return {
        **vars(size),
        "direction": direction,
        "dtype": "bf16",
        "normalize": INSIDE if problem.normalize else BEFORE,
        "graph_ms": {name: taken._asdict() for name, taken in graph.items()},
        "eager_ms": {name: taken._asdict() for name, taken in eager.items()},
        "floor_bytes": bytes_moved,
        "floor_ms": floor,
        "share_of_floor": floor / graph[OURS].median,
        "peer_over_ours": {name: limits.ratio(medians.get(name), medians[OURS]) for name in (FLA, FLASH_QLA)},
        "rms_error": errors,
        "tolerance_used": shares,
        "notes": [*notes, *refusals],
    }


def _peers(problem: _Problem) -> tuple[dict[str, peers.DeltaRule], list[str]]:
    """Return the peers that can be had for a problem, and a sentence for each."""
    if problem.direction == STEP:
        offers = {FLA: peers.fla_delta_rule_step()}
    else:
        offers = {FLA: peers.fla_delta_rule(normalize=problem.normalize)}
        if problem.size.head_dim == FLASH_QLA_DIM:
            offers[FLASH_QLA] = peers.flash_qla_delta_rule(normalize=problem.normalize)
    found = {name: peer for name, (peer, _) in offers.items() if peer is not None}
    return found, [f"{reason}." for _, reason in offers.values()]


def _with_errors(
    problem: _Problem,
    name: str,
    peer: peers.DeltaRule,
    ref64: Mapping[str, Tensor],
    errors: dict[str, dict[str, float]],
) -> dict[str, Tensor]:
    """Run a peer and keep its errors even where they are too large. Whatever it raises, the others are timed."""
    try:
        found = problem.ends(peer)
    except Exception as error:
        raise RuntimeError(f"{problem.direction}: {peers.first_line(error)}") from error
    errors[name] = _errors(found, ref64)
    return found


def _errors(found: Mapping[str, Tensor], ref64: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the root mean square of each tensor's error, relative to that of the float64 reference."""
    return {name: deviation(found[name], wanted, wanted, found[name].dtype).rms for name, wanted in ref64.items()}


def _capturable(candidates: Mapping[str, Candidate]) -> tuple[dict[str, Candidate], list[str]]:
    """Return the candidates that a CUDA graph can hold, and a sentence for each other; the op must be one that can."""
    captured, notes = {}, []
    for name, run in candidates.items():
        try:
            timing.time_graphs({name: run}, 1, rounds=1, seconds=0)
        except Exception as error:
            if name == OURS:
                raise
            notes.append(f"{name} is timed eager only, no CUDA graph can hold it: {peers.first_line(error)}.")
            continue
        captured[name] = run
    return captured, notes


def _floor_bytes(size: limits.DeltaRuleSize, direction: str) -> int:
    if direction == STEP:
        return size.step_bytes()
    return size.forward_bytes() + (size.backward_bytes() if direction == BACKWARD else 0)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    headers = ["B x T x H x D", "direction"]
    headers += [f"{name} {mode}" for name in (OURS, *LABELS.values()) for mode in ("graph ms", "eager ms")]
    headers += [f"{label} / op" for label in LABELS.values()]
    headers += ["floor ms", "share of floor", *(f"{name} error" for name in (OURS, *LABELS.values()))]
    lines = [
        [
            _shape(row),
            row["direction"],
            *(tables.median(row[mode], name) for name in (OURS, *LABELS) for mode in ("graph_ms", "eager_ms")),
            *(tables.times(row["peer_over_ours"][name]) for name in LABELS),
            row["floor_ms"],
            tables.share(row["share_of_floor"]),
            *(_worst(row, name) for name in (OURS, *LABELS)),
        ]
        for row in rows
    ]
    notes = [
        f"bf16, log decay float32, q and k normalised {rows[0]['normalize']} the measured time, medians. "
        f"Floor: {_FLOOR.format(_speed(rows))} Error: "
        "root mean square against float64, relative, of the output or gradient where it is largest.",
        *tables.distinct(rows),
    ]
    return tables.render(headers, lines, notes)


def short_table(rows: list[dict[str, Any]]) -> str:
    """Return the columns that a reader in a hurry wants."""
    headers = ["B x T x H x D", "direction", OURS + " ms", *(f"{label} ms" for label in LABELS.values())]
    headers += ["floor ms", "share of floor"]
    lines = [
        [
            _shape(row),
            row["direction"],
            *(tables.median(row["graph_ms"], name) for name in (OURS, *LABELS)),
            row["floor_ms"],
            tables.share(row["share_of_floor"]),
        ]
        for row in rows
    ]
    return tables.render(headers, lines, [f"bf16, CUDA graph, median. Floor: {_FLOOR.format(_speed(rows))}"])


def _shape(row: Mapping[str, Any]) -> str:
    return " x ".join(str(row[name]) for name in ("batch", "length", "num_heads", "head_dim"))


def _speed(rows: list[dict[str, Any]]) -> str:
    return f"{rows[0]['copy_tb_s']:.2f} TB/s (a kernel that copies)"


def _worst(row: Mapping[str, Any], name: str) -> str | None:
    errors = row["rms_error"].get(name)
    return f"{max(errors.values()):.1e}" if errors else None
