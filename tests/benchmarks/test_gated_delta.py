"""The benchmark of the gated delta rule: its peers, its gate, its tables."""

import json
import sys
from types import ModuleType

import pytest
import torch

from benchmarks import docs, gated_delta, limits, peers, timing
from zoo.errors import ConfigError, ParityError
from zoo.kernels import gated_delta_rule

SHAPES = "3x5x2x16,1x70x1x128,4x1x2x16"


def played_rule(q, k, v, g, beta, initial_state=None, **options):
    """Our own op with the arguments of a peer."""
    normalize = options.pop("use_qk_l2norm_in_kernel")
    assert not options.keys() - {"output_final_state"}
    lengths = torch.full((q.shape[0],), q.shape[1], dtype=torch.int32)
    return gated_delta_rule(q, k, v, g, beta, initial_state, lengths, normalize=normalize)


def played_norm(x):
    """fla's normalisation of the last axis."""
    return (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.fixture
def with_peers(monkeypatch):
    fla, rule, qla = ModuleType("fla"), ModuleType("fla.ops.gated_delta_rule"), ModuleType("flash_qla")
    fla.__version__ = qla.__version__ = "9.9"
    rule.chunk_gated_delta_rule = rule.fused_recurrent_gated_delta_rule = qla.chunk_gated_delta_rule = played_rule
    norm = ModuleType("fla.modules.norm.l2norm")
    norm.l2norm = played_norm
    packages = {name: ModuleType(name) for name in ("fla.ops", "fla.modules", "fla.modules.norm")}
    modules = {"fla": fla, **packages, rule.__name__: rule, norm.__name__: norm, "flash_qla": qla}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("FLA_FLASH_QLA", "1")
    return modules


def test_the_limit_is_the_arithmetic_of_the_notes():
    size = limits.DeltaRuleSize(batch=8, length=8192, num_heads=16, head_dim=64)
    # kernels.md: 0.125 ms at 4.3 TB/s.
    assert limits.milliseconds(size.forward_bytes(), 4.3e12) == pytest.approx(0.125, abs=0.001)
    assert size.backward_bytes() == 7 * size.forward_bytes() // 4
    assert limits.DeltaRuleSize(1024, 1, 8, 64).step_bytes() == 2 * 4 * 1024 * 8 * 64 * 64


def test_it_runs_to_its_tables_beside_its_peers(played, with_peers):
    rows = list(gated_delta.measure(SHAPES))
    assert [row["direction"] for row in rows] == ["forward", "forward+backward"] * 2 + ["step"]
    assert [sorted(row["graph_ms"]) for row in rows[1:4:2]] == [["fla", "op"], ["fla", "flash_qla", "op"]]
    assert set(rows[1]["rms_error"]["fla"]) == {"o", *(f"grad_{n}" for n in ("q", "k", "v", "log_decay", "beta"))}
    assert set(rows[4]["tolerance_used"]["fla"]) == {"o", "state"} and set(rows[4]["eager_ms"]) == {"fla", "op"}
    assert rows[3]["peer_over_ours"] == {"fla": 1, "flash_qla": 1}
    assert all(0 < error < 0.01 for row in rows for errors in row["rms_error"].values() for error in errors.values())
    kept = json.loads(json.dumps(rows))
    text = gated_delta.table(kept)
    assert "| 1 x 70 x 1 x 128 | forward+backward |" in text and "fla is fla-core 9.9." in text
    assert "op ran its reference in PyTorch" in text and "FlashQLA error" in text
    assert "FlashQLA ms" in gated_delta.short_table(kept)


def test_norms_can_be_left_out_of_the_measured_time(played, with_peers, monkeypatch):
    taken = []

    def rule(*tensors, **options):
        taken.append((options["use_qk_l2norm_in_kernel"], tensors[1][0, 0, 0].norm().item()))
        return played_rule(*tensors, **options)

    monkeypatch.setattr(with_peers["flash_qla"], "chunk_gated_delta_rule", rule)
    monkeypatch.setattr(with_peers["fla.ops.gated_delta_rule"], "chunk_gated_delta_rule", rule)
    rows = list(gated_delta.measure("1x70x1x128", normalize="before"))
    assert [sorted(row["graph_ms"]) for row in rows] == [["fla", "flash_qla", "op"]] * 2
    assert taken and all(not inside and norm == pytest.approx(1, abs=0.01) for inside, norm in taken)
    assert "q and k normalised before the measured time" in gated_delta.table(rows)
    with pytest.raises(ConfigError, match="cannot normalise 'after'; use inside or before"):
        list(gated_delta.measure("1x70x1x128", normalize="after"))


def test_flash_qla_is_timed_with_the_fastest_normalisation_at_hand(with_peers, monkeypatch):
    assert peers.flash_qla_delta_rule(normalize=True)[1] == "FlashQLA is flash-qla 9.9 behind fla's normalisation"
    monkeypatch.setitem(sys.modules, "fla.modules.norm.l2norm", None)
    assert peers.flash_qla_delta_rule(normalize=True)[1] == "FlashQLA is flash-qla 9.9 with its own normalisation"


def test_one_shape_and_direction_can_be_run_alone(played):
    assert len(list(gated_delta.measure("2x6x1x16", "forward"))) == 1
    with pytest.raises(ConfigError, match="'2x6x16'; write it BxTxHxD"):
        list(gated_delta.measure("2x6x16"))
    with pytest.raises(ConfigError, match="BxTxHxD"):
        list(gated_delta.measure("2x6x1xD"))
    with pytest.raises(ConfigError, match="no direction 'sideways'"):
        list(gated_delta.measure("2x6x1x16", "sideways"))


def test_a_peer_that_is_not_installed_is_named_with_the_way_to_have_it(played, monkeypatch):
    for name in ("fla", "fla.ops.gated_delta_rule", "fla.modules.norm.l2norm", "flash_qla"):
        monkeypatch.setitem(sys.modules, name, None)
    rows = list(gated_delta.measure("1x6x1x128,2x1x1x16", "forward"))
    assert [set(row["graph_ms"]) for row in rows] == [{"op"}, {"op"}]
    assert rows[0]["peer_over_ours"] == {"fla": None, "flash_qla": None}
    text = gated_delta.table(json.loads(json.dumps(rows)))
    assert "no fla: " in text and "pip install fla-core==0.6.0" in text and "pip install flash-qla==0.1.3" in text


def test_a_peer_whose_import_raises_anything_is_missing(played, with_peers, monkeypatch):
    def refuses(name):
        raise ValueError(f"{name} now supports sm90 only\nmore")

    monkeypatch.setattr(peers.importlib, "import_module", refuses)
    assert peers.flash_qla_delta_rule(normalize=True)[1].startswith(
        "no FlashQLA: ValueError: flash_qla now supports sm90 only; pip"
    )
    assert peers.fla_delta_rule(normalize=True) == (None, peers.fla_delta_rule_step()[1])


def test_fla_is_not_flash_qla_in_disguise(with_peers, monkeypatch):
    assert peers.fla_delta_rule(normalize=True)[0] is not None
    assert peers.os.environ["FLA_FLASH_QLA"] == "0"


def test_a_peer_that_refuses_or_errs_is_left_out_with_a_note(played, with_peers, monkeypatch):
    def without_backward(*tensors, **options):
        if torch.is_grad_enabled():
            raise NotImplementedError("Triton 3.6 on Hopper produces incorrect results\nmore")
        return played_rule(*tensors, **options)

    def wrong(*tensors, **options):
        o, state = played_rule(*tensors, **options)
        return o * 1.1, state

    monkeypatch.setattr(with_peers["fla.ops.gated_delta_rule"], "chunk_gated_delta_rule", without_backward)
    monkeypatch.setattr(with_peers["flash_qla"], "chunk_gated_delta_rule", wrong)
    forward, backward = gated_delta.measure("1x6x1x128")
    assert set(forward["graph_ms"]) == {"op", "fla"} and set(backward["graph_ms"]) == {"op"}
    assert forward["rms_error"]["flash_qla"]["o"] == pytest.approx(0.1, rel=0.05)
    text = gated_delta.table([forward, backward])
    assert "flash_qla is not timed because its o is wrong" in text
    assert (
        "fla is not timed because it failed: forward+backward: NotImplementedError: Triton 3.6 on Hopper produces "
        "incorrect results." in text
    )


def test_a_peer_that_no_graph_can_hold_is_timed_eager(played, with_peers, monkeypatch):
    once = timing.time_graphs

    def captures(candidates, sets, **options):
        if "fla" in candidates:
            raise RuntimeError("operation not permitted when stream is capturing")
        return once(candidates, sets, **options)

    monkeypatch.setattr(timing, "time_graphs", captures)
    (row,) = gated_delta.measure("2x6x1x16", "forward")
    assert set(row["graph_ms"]) == {"op"} and set(row["eager_ms"]) == {"op", "fla"}
    assert "fla is timed eager only, no CUDA graph can hold it: RuntimeError" in gated_delta.table([row])


def test_a_wrong_op_is_refused_before_it_is_timed(played, monkeypatch):
    right = gated_delta.gated_delta_rule

    def wrong(*tensors, **options):
        o, state = right(*tensors, **options)
        return o * 1.1, state

    monkeypatch.setattr(gated_delta, "gated_delta_rule", wrong)
    monkeypatch.setattr(timing, "time_eager", lambda *_, **__: pytest.fail("it was timed"))
    with pytest.raises(ParityError, match="op is not timed because its o is wrong"):
        list(gated_delta.measure("2x6x1x16"))


def test_a_page_is_filled_with_the_whole_and_the_short_table(played, with_peers, tmp_path):
    tools = {"torch": "2.13.0", "triton": "3.6.0", "cuda": "13.0"}
    told = {"gpu": "NVIDIA H200, 580.1", "cpu": "", "tools": tools, "commit": "abc", "time": "2026-12-01T10:00:00"}
    rows = list(gated_delta.measure(SHAPES))
    result = {"benchmark": "gated_delta", "machine": {**told, "command": ["run.py", "gated_delta"]}, "rows": rows}
    (tmp_path / "gated_delta.json").write_text(json.dumps(result))
    marks = [f"<!-- table: gated_delta{kind} -->\n<!-- end of table -->\n" for kind in ("", ":short")]
    whole, short = (docs.fill(mark, tmp_path) for mark in marks)
    assert "op eager ms" in whole and "op eager ms" not in short and "FlashQLA ms" in short
    assert "`python -m benchmarks.run gated_delta`" in whole and "share of floor" in short
