"""The benchmarks themselves: what they refuse, what they compute, what they print. Kernels are timed on a GPU only."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import (
    conv,
    delta_schedule,
    docs,
    gate,
    gbla_core,
    gbla_layer,
    limits,
    machine,
    peers,
    plain,
    plot,
    profile_layer,
    run,
    tables,
    timing,
    train_step,
)
from benchmarks.shapes import numbers_of
from zoo.errors import ConfigError, DataError, ParityError
from zoo.layers import GatedBidirectionalLinearAttention

GPU_BENCHMARKS = [
    "delta_schedule", "conv", "gated_delta", "gbla_core", "gbla_layer", "layer_profile", "sinkrec_cost", "train_step",
]  # fmt: skip
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")


def test_the_registry_lists_every_benchmark_with_its_options(capsys):
    assert sorted(run.REGISTRY) == sorted([*GPU_BENCHMARKS, "export_build", "planted_repetition", "sinkrec_step"])
    with pytest.raises(SystemExit):
        run.main(["--help"])
    listed = capsys.readouterr().out
    assert all(name in listed for name in run.REGISTRY)
    with pytest.raises(SystemExit):
        run.main(["gbla_layer", "--help"])
    assert "--lengths" in capsys.readouterr().out


@no_gpu
@pytest.mark.parametrize("name", GPU_BENCHMARKS)
def test_a_gpu_benchmark_without_a_gpu_ends_in_one_sentence(name, tmp_path, capsys):
    assert run.main([name, "--folder", str(tmp_path)]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"ConfigError: {name} times kernels of a CUDA device") and "\n" not in error
    assert not list(tmp_path.iterdir())


def test_rows_are_on_disk_as_they_come_and_only_a_whole_run_takes_the_results_name(tmp_path, monkeypatch, capsys):
    def measure(rows: int = 2, fails: int = 0):
        for row in range(rows):
            yield {"row": row}
            assert json.loads((tmp_path / "played.partial.json").read_text())["rows"][-1] == {"row": row}
        if fails:
            raise ConfigError("cut off")

    monkeypatch.setattr(run, "REGISTRY", {"played": (measure, lambda rows: f"{len(rows)} rows")})
    assert run.main(["played", "--folder", str(tmp_path), "--fails", "1"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["played.partial.json"]
    assert run.main(["played", "--folder", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["played.json"]
    written = json.loads((tmp_path / "played.json").read_text())
    assert written["benchmark"] == "played" and len(written["rows"]) == 2 and written["machine"]["cpu"]
    assert "2 rows" in capsys.readouterr().out
    assert run.main(["played", "--folder", str(tmp_path), "--rows", "0"]) == 2


def test_the_gate_admits_what_the_rule_allows_and_refuses_what_is_wrong():
    ref64 = {"y": torch.randn(100, dtype=torch.float64)}
    low = {"y": ref64["y"].bfloat16()}
    assert gate.admit("op", {"y": ref64["y"].bfloat16()}, ref64, low)["y"] <= 1
    wrong = {"y": (ref64["y"] + 0.1).bfloat16()}
    with pytest.raises(ParityError, match=r"^op is not timed because its y is wrong: rms error"):
        gate.admit("op", wrong, ref64, low)
    with pytest.raises(ParityError, match="gave no y"):
        gate.admit("op", {}, ref64, low)
    with pytest.raises(ParityError):
        gate.admit("op", {"y": torch.full_like(low["y"], torch.nan)}, ref64, low)


def test_a_peer_that_is_wrong_or_fails_is_left_out_with_a_note():
    ref64 = {"y": torch.ones(3, dtype=torch.float64)}
    low = {"y": ref64["y"].bfloat16()}

    def failing():
        raise RuntimeError("no kernel for this\nmore")

    shares, notes = gate.admit_peers(
        {"good": lambda: low, "wrong": lambda: {"y": low["y"] * 2}, "failing": failing}, ref64, low
    )
    assert list(shares) == ["good"]
    assert notes[0].startswith("wrong is not timed because its y is wrong")
    assert notes[1] == "failing is not timed because it failed: no kernel for this."


def test_the_ends_of_a_batch_are_its_first_and_last_row():
    x = torch.arange(10).reshape(5, 2)
    assert gate.end_rows(x).tolist() == [[0, 1], [8, 9]]
    assert gate.end_rows(x[:1]).tolist() == [[0, 1]]


def test_the_limit_of_the_layer_is_the_arithmetic_of_the_notes():
    size = limits.MixerSize(batch=8, length=32768, d_model=1024, num_heads=16, head_dim=64)
    token_bytes = 2 * 8 * 32768
    assert size.conv_bytes() == 2 * 1024 * token_bytes
    assert size.core_bytes() == (5 * 1024 + 16) * token_bytes
    assert size.layer_bytes() == size.conv_bytes() + size.core_bytes()
    assert size.core_backward_bytes() == (9 * 1024 + 32) * token_bytes
    assert size.conv_backward_bytes() == 3 * 1024 * token_bytes
    assert (size.conv_bytes(4), size.conv_backward_bytes(4)) == (3 * 1024 * token_bytes, 5 * 1024 * token_bytes)
    # kernels.md: a floor of 0.63 ms at 4.3 TB/s.
    assert limits.milliseconds(size.core_bytes(), 4.3e12) == pytest.approx(0.63, abs=0.01)
    assert limits.ratio(6.0, 1.5) == 4 and limits.ratio(None, 1.5) is None and limits.ratio(6.0, None) is None


def test_a_table_is_aligned_and_says_what_was_not_measured():
    text = tables.render(["L", "ms"], [[512, 0.1234], [32768, None]], ["A note."])
    assert text.split("\n") == [
        "|     L |    ms |",
        "|------:|------:|",
        "|   512 | 0.123 |",
        "| 32768 |     - |",
        "",
        "A note.",
    ]
    assert (tables.times(3.888), tables.times(None), tables.share(0.85)) == ("3.89x", None, "85%")
    assert tables.median({"op": {"median": 1.0}}, "op") == 1 and tables.median({}, "op") is None
    assert tables.distinct([{"notes": ["a", "b"]}, {"notes": ["b", "c"]}]) == ["a", "b", "c"]


def test_a_timing_holds_median_and_spread():
    assert timing.summary([float(x) for x in range(1, 12)]) == (6.0, 2.0, 10.0, 11)
    assert timing.summary([2.0]) == (2.0, 2.0, 2.0, 1)
    assert timing.input_sets(2**30) == 2 and timing.input_sets(2**20) == 16 and timing.input_sets(64 * 2**20) == 4


def test_the_commit_can_be_named_where_there_is_no_repository(monkeypatch):
    monkeypatch.setattr(machine, "_run", lambda *_: "")
    monkeypatch.setenv(machine.COMMIT_VARIABLE, "abc1234")
    assert machine.describe_machine()["commit"] == "abc1234"


LAYER_PEERS = {"gbla", "fa3", "cudnn", "torch_compile", "torch_compile default"}


def test_the_layer_benchmark_runs_to_its_table(played):
    rows = list(gbla_layer.measure(batch=3, d_model=16, heads=2, head_dim=16, lengths="5,8", flash_lengths="5"))
    assert [row["length"] for row in rows] == [5, 8]
    assert set(rows[0]["graph_ms"]) == {*LAYER_PEERS, "torch_flash"} and set(rows[1]["graph_ms"]) == LAYER_PEERS
    assert set(rows[0]["eager_ms"]) == {"gbla", "fa3"} and rows[0]["compile_mode"] == "default"
    assert rows[0]["packed_width"] == 136
    assert rows[0]["fa3_over_ours"] == 1 and rows[0]["limit_ms"] > 1
    text = gbla_layer.table(json.loads(json.dumps(rows)))
    assert "FA3 / GBLA" in text and "all causal" in text


def test_the_layer_benchmark_goes_on_without_flash_attention_3(played, monkeypatch):
    monkeypatch.setattr(peers, "flash_attention_3", lambda: (None, "no FlashAttention-3: not installed"))
    rows = list(gbla_layer.measure(batch=1, d_model=16, heads=2, head_dim=16, lengths="5"))
    assert rows[0]["fa3_over_ours"] is None
    assert "no FlashAttention-3: not installed" in gbla_layer.table(rows)


def test_the_core_and_the_convolution_run_to_their_tables(played):
    sizes = {"batch": 3, "heads": 2, "head_dim": 16}
    rows = list(gbla_core.measure(**sizes, lengths="5", backward_lengths="7", autotune="7"))
    assert [row["direction"] for row in rows] == ["forward", "forward+backward"]
    assert set(rows[1]["tolerance_used"]["op"]) == {"y", "grad_packed", "grad_norm_weight"}
    assert rows[1]["compiled_over_ours"] == 1 and "torch_compile max-autotune-no-cudagraphs" in rows[1]["graph_ms"]
    assert "torch_compile max-autotune-no-cudagraphs" not in rows[0]["graph_ms"]
    assert "share of floor" in gbla_core.table(json.loads(json.dumps(rows)))
    rows = list(conv.measure(batch=3, channels=8, lengths="6", compiled_lengths="6"))
    assert [row["case"] for row in rows[::2]] == list(conv.CASES)
    assert [row["direction"] for row in rows[:2]] == ["forward", "forward+backward"]
    assert set(rows[-1]["tolerance_used"]["op"]) == {"y", "grad_x", "grad_weight", "grad_norm_weight"}
    assert all(set(row["graph_ms"]) == {"op", "torch_compile_reference", "unfused"} for row in rows), rows[0]["notes"]
    assert "share of copy speed" in conv.table(json.loads(json.dumps(rows)))


def test_the_training_step_compares_a_preset_with_its_twin(played, monkeypatch):
    monkeypatch.setattr(train_step, "GATE_SHAPE", (2, 9))
    rows = list(train_step.measure(preset="gbla-tiny", shapes="2x6", hash_rows=64, flash_shapes="2x6"))
    assert [row["compile"] for row in rows] == ["no", "layers"]
    assert rows[0]["twin_over_ours"] == 1 and rows[0]["ours"]["attention"] in train_step.BACKENDS
    assert len(rows[0]["ours"]["all_runs"]) == 2 and len(rows[1]["ours"]["all_runs"]) == 1
    assert "twin / ours" in train_step.table(json.loads(json.dumps(rows)))
    with pytest.raises(ConfigError, match="'maybe'"):
        list(train_step.measure(compile="maybe"))


def test_a_wrong_op_is_refused_before_it_is_timed(played, monkeypatch):
    right = gbla_core.gated_bidirectional_linear_attention
    monkeypatch.setattr(
        gbla_core, "gated_bidirectional_linear_attention", lambda *args, **options: right(*args, **options) * 1.1
    )
    monkeypatch.setattr(timing, "time_graphs", lambda *_, **__: pytest.fail("it was timed"))
    with pytest.raises(ParityError, match="op is not timed because its y is wrong"):
        list(gbla_core.measure(batch=2, heads=2, head_dim=16, lengths="5", backward_lengths=""))


def test_a_wrong_compiled_peer_is_not_timed(played, monkeypatch):
    monkeypatch.setattr(plain, "core", lambda packed, *_: packed[..., :32] * 1.0)
    (row,) = gbla_core.measure(batch=2, heads=2, head_dim=16, lengths="5", backward_lengths="")
    assert set(row["graph_ms"]) == {"op"} and row["compiled_over_ours"] is None
    assert "torch_compile default is not timed because its y is wrong" in gbla_core.table([row])


@pytest.mark.parametrize("length", [1, 100, 1500])
def test_the_plain_layer_is_the_layer(length):
    torch.manual_seed(0)
    mixer = GatedBidirectionalLinearAttention(32, 2, 16)
    x = torch.randn(2, length, 32)
    lengths = torch.full((2,), length, dtype=torch.int32)
    torch.testing.assert_close(plain.layer(mixer, x), mixer(x, lengths), rtol=1e-4, atol=1e-5)


def test_the_fastest_compiled_mode_is_the_peer():
    slow, fast, ours = (timing.Timing(ms, ms, ms, 1) for ms in (3.0, 2.0, 1.0))
    timings = {"op": ours, "torch_compile default": slow, "torch_compile max-autotune-no-cudagraphs": fast}
    found, mode = plain.with_fastest(timings)
    assert found["torch_compile"] is fast and mode == "max-autotune-no-cudagraphs"
    assert plain.with_fastest({"op": ours}) == ({"op": ours}, None)


def event(name, start, microseconds, *, kernels=(), shapes=(), cuda=True):
    kernels = [SimpleNamespace(name=kernel, duration=duration) for kernel, duration in kernels]
    device = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    span = SimpleNamespace(start=start, end=start + microseconds)
    return SimpleNamespace(name=name, device_type=device, time_range=span, kernels=kernels, input_shapes=shapes)


def test_the_profile_tells_products_of_different_shapes_apart_though_one_kernel_makes_them():
    events = [
        event("aten::mm", 0, 9, kernels=[("gemm", 30.0)], shapes=[[4, 8], [8, 6]], cuda=False),
        event("aten::mm", 10, 9, kernels=[("gemm", 50.0), ("sum_of_parts", 5.0)], shapes=[[4, 6], [6, 8]], cuda=False),
        event("aten::mm", 11, 9, shapes=[[1, 1], [1, 1]], cuda=False),
        event("gemm", 200, 50.0),
        event("gemm", 100, 30.0),
        event("reduce_kernel", 140, 20.0),
        event("sum_of_parts", 260, 5.0),
        event("gemm", 300, 7.0),
    ]
    assert profile_layer.collect(events, 1) == [
        ("gemm", (4, 8, 6), 1, 30.0),
        ("reduce_kernel", None, 1, 20.0),
        ("gemm", (4, 6, 8), 1, 50.0),
        ("sum_of_parts", (4, 6, 8), 0, 5.0),
        ("gemm", None, 1, 7.0),
    ]


def test_the_costs_of_the_kernels_are_those_of_the_limits():
    size = limits.MixerSize(batch=8, length=8192, d_model=1024, num_heads=16, head_dim=64)
    costs = profile_layer.kernel_costs(size, torch.device("cpu"), bytes_of_x=2)
    moved = {name: cost.bytes_moved for name, cost in costs.items()}
    assert moved["forward_kernel"] == size.conv_bytes()
    assert moved["reduce_kernel"] + moved["apply_kernel"] == size.core_bytes()
    padding = 2 * size.tokens * (4224 - 4112)
    both = moved["backward_queries_kernel"] + moved["backward_keys_kernel"]
    assert both == size.core_backward_bytes() + padding
    product = profile_layer.KernelTime("nvjet", (size.tokens, 1024, 4224), 1, 900.0)
    cost = profile_layer.product_cost(product, size)
    assert cost.role.startswith("packed projection: ") and cost.operations == 2 * size.tokens * 1024 * 4224
    assert cost.limit(4e12, 8e14) == pytest.approx(1e6 * cost.operations / 8e14)


def test_a_kernels_name_is_cut_to_what_a_reader_needs():
    long = (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3> >"
    )
    assert profile_layer.short_name(long) == "vectorized_elementwise_kernel (CUDAFunctor_add)"
    assert profile_layer.short_name("reduce_kernel") == "reduce_kernel"


@pytest.mark.parametrize("layer", profile_layer.LAYERS)
def test_the_profile_of_a_layer_runs_to_its_table(layer, played, monkeypatch):
    def once(call, _):
        call(0)
        found = [("forward_kernel", None, 1.0, 20.0), ("gemm", (3 * 7, 16, 136), 1.0, 50.0), ("other", None, 2.0, 5.0)]
        return [profile_layer.KernelTime(*kernel) for kernel in found]

    monkeypatch.setattr(profile_layer, "profile", once)
    sizes = {"batch": 3, "d_model": 16, "heads": 2, "head_dim": 16, "mlp_width": 24, "lengths": "7"}
    rows = list(profile_layer.measure(**sizes, layers=layer))
    assert [row["direction"] for row in rows] == ["forward", "forward+backward"]
    assert set(rows[1]["tolerance_used"]) == {"y", "grad_x"} and rows[0]["kernels_us"] == 75
    text = profile_layer.table(json.loads(json.dumps(rows)))
    assert "short convolution" in text and "packed projection: product 21 x 16 x 136" in text
    with pytest.raises(ConfigError, match="'decoder'"):
        list(profile_layer.measure(layers="decoder"))


def test_pages_are_filled_from_results_as_often_as_one_likes(tmp_path):
    rows = [{"verb": "init", "seconds": 1.0, "peak_gib": 2.0, "files": {}}]
    tools = {"torch": "2.13.0", "triton": None, "cuda": "13.0"}
    told = {"gpu": "NVIDIA H200, 580.1", "cpu": "", "tools": tools, "commit": "abc", "time": "2026-12-01T10:00:00"}
    command = ["run.py", "export_build", "--length", "64"]
    result = {"benchmark": "export_build", "machine": {**told, "command": command}, "rows": rows}
    (tmp_path / "export.json").write_text(json.dumps(result))
    page = (
        "Before.\n\n<!-- table: export -->\nold\n<!-- end of table -->\n\n<!-- table: none -->\n<!-- end of table -->\n"
    )
    filled = docs.fill(page, tmp_path)
    assert "peak GiB" in filled and "old" not in filled and filled.startswith("Before.") and "table: none" in filled
    assert "NVIDIA H200, driver 580.1; torch 2.13.0, cuda 13.0; commit abc; 2026-12-01" in filled
    assert "`python -m benchmarks.run export_build --length 64`" in filled
    assert docs.fill(filled, tmp_path) == filled
    for damage in ({}, [], {**result, "machine": {**result["machine"], "tools": []}}, {**result, "rows": [[1]]}):
        (tmp_path / "export.json").write_text(json.dumps(damage))
        with pytest.raises(DataError, match="measure it again"):
            docs.fill(page, tmp_path)


def test_the_pages_show_the_results_that_are_committed(capsys):
    assert docs.main(["--check"]) == 0, capsys.readouterr().out


def timed(**medians):
    return {name: {"median": median} for name, median in medians.items()}


LAYER_ROWS = [
    {
        "length": length, "batch": 8, "d_model": 1024, "num_heads": 16, "head_dim": 64, "dtype": "bf16",
        "graph_ms": timed(gbla=1e-4 * length, fa3=1e-7 * length**2, cudnn=2e-7 * length**2),
        "limit_ms": 9e-5 * length,
    }
    for length in (2048, 512, 8192)
]  # fmt: skip
SCHEDULE_ROWS = [
    {
        "head_dim": dim, "num_heads": pairs, "length": length, "chosen": 1,
        "capability": 90, "multiprocessors": 132,
        "graph_ms": timed(**{"1": 1e-5 * length, **{str(number): 5e-7 * length * pairs for number in range(2, 9)}}),
    }
    for dim in (64, 128) for pairs in (1, 8, 32) for length in (1024, 4096) if pairs * length < 2**17
]  # fmt: skip


COST_ROWS = [
    {
        "length": length, "batch": 2**15 // length, "preset": "sinkrec-base",
        "ours": {work: {"ms": {"median": 40.0}, "peak_gib": 3.0} for work in ("training", "prefill")},
        "sasrec": {"training": {"failed": "runs out of memory"}, "prefill": {"ms": {"median": 9.0}, "peak_gib": 1.0}},
    }
    for length in (4096, 1024)
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "rows"),
    [("gbla_layer", LAYER_ROWS), ("delta_schedule", SCHEDULE_ROWS), ("sinkrec_cost", COST_ROWS)],
    ids=["layer", "schedule", "cost"],
)
def test_a_plot_is_drawn_from_a_result(name, rows, tmp_path, capsys):
    result, image = tmp_path / f"{name}.json", tmp_path / "images" / "it.png"
    result.write_text(json.dumps({"machine": {"gpu": "NVIDIA H200, 580.159.04"}, "rows": rows}))
    assert plot.main([name, "--result", str(result), "--out", str(image)]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")
    result.write_text("{}")
    assert plot.main([name, "--result", str(result)]) == 2
    assert f"python -m benchmarks.run {name}" in capsys.readouterr().err
    result.write_text(json.dumps({"rows": [{"length": 1, "graph_ms": {}, "limit_ms": 1.0}]}))
    assert plot.main([name, "--result", str(result)]) == 2
    with pytest.raises(DataError):
        plot.draw(name, tmp_path / "absent.json", tmp_path / "x.png")


def test_the_table_of_the_schedule_says_what_the_rule_loses():
    text = delta_schedule.table(SCHEDULE_ROWS)
    row = {**SCHEDULE_ROWS[0], "length": 64, "graph_ms": timed(**{"1": 1.25, "4": 1.0})}
    assert "lost to best" in text and "25%" in delta_schedule.table([row])


@pytest.mark.parametrize(
    ("result", "mean", "most"), [("delta_schedule", 0.02, 0.25), ("delta_schedule-no-decay", 0.025, 0.31)]
)
def test_the_rule_of_now_loses_little_to_the_best_cut_measured(result, mean, most):
    rows = json.loads((docs.ROOT / "benchmarks" / "results" / f"{result}.json").read_text())["rows"]
    lost = [delta_schedule.chosen(row)[1] / delta_schedule.best(row)[1] - 1 for row in rows]
    assert len(lost) == 110 and sum(lost) / len(lost) < mean and max(lost) < most


def test_a_cut_that_was_not_measured_is_said():
    row = {**SCHEDULE_ROWS[0], "num_heads": 1, "length": 65536, "graph_ms": timed(**{"1": 1.0})}
    with pytest.raises(DataError, match="segments of 65536 positions were not measured"):
        delta_schedule.chosen(row)


def test_the_schedule_is_measured_with_the_decays_it_knows(played):
    with pytest.raises(ConfigError, match="no decay 'some'; use usual or none"):
        next(delta_schedule.measure(decay="some"))


def test_shapes_are_read_and_others_refused():
    assert numbers_of("b", "8x2048", "BxT", "8x8192") == (8, 2048)
    for shape in ("8", "8x0", "8x-1", "8x2x3", "", "8xa", "8x2.5"):
        with pytest.raises(ConfigError, match="write it BxT, each 1 or more, as 8x8192"):
            numbers_of("b", shape, "BxT", "8x8192")
