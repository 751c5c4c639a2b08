import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zoo.errors import BundleError, ConfigError
from zoo.models import presets
from zoo.models.gbla import EncodedHistory

ALL_TWINS = [None, *presets.TWINS["gbla"]]


def tiny(twin=None, **overrides):
    torch.manual_seed(0)
    return presets.build(presets.resolve("gbla-tiny", twin=twin, overrides=overrides)).double().eval()


def histories(batch, length, lengths):
    return torch.randint(0, 2**31 - 1, (batch, length)), torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.parametrize("twin", ALL_TWINS)
def test_padding_ids_of_any_value_change_nothing_and_encode_to_zero(twin):
    model = tiny(twin)
    ids, lengths = histories(3, 7, [7, 0, 3])
    clean = model.encode(ids, lengths)
    poisoned = ids.masked_fill(torch.arange(7) >= lengths[:, None], -(2**40))
    for ours, theirs in zip(model.encode(poisoned, lengths), clean, strict=True):
        assert torch.equal(ours, theirs)
        assert (ours[:, 1] == 0).all() and (ours[:, 2, :, 3:] == 0).all()


@pytest.mark.parametrize("twin", ALL_TWINS)
def test_padding_further_and_splitting_the_batch_change_nothing(twin):
    model = tiny(twin)
    ids, lengths = histories(3, 6, [6, 1, 4])
    targets = torch.randint(0, 256, (3, 2, 4))
    loss = model(ids, lengths, targets)
    padded = torch.cat([ids, torch.randint(0, 99, (3, 5))], 1)
    torch.testing.assert_close(model(padded, lengths, targets), loss, rtol=1e-6, atol=1e-6)
    rows = torch.cat([model(ids[i : i + 1], lengths[i : i + 1], targets[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(rows, loss, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("twin", ALL_TWINS)
def test_every_weight_gets_a_finite_gradient(twin):
    model = tiny(twin)
    ids, lengths = histories(3, 9, [9, 5, 2])
    model(ids, lengths, torch.randint(0, 256, (3, 1, 4))).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("twin", ALL_TWINS)
def test_a_causal_encoder_does_not_see_the_future_and_a_bidirectional_one_does(twin):
    model = tiny(twin)
    ids, lengths = histories(1, 8, [8])
    changed = ids.clone()
    changed[0, -1] += 1
    keys, other = model.encode(ids, lengths).values, model.encode(changed, lengths).values
    unchanged = torch.equal(keys[..., :4, :], other[..., :4, :])
    assert unchanged == (model.config.direction == "causal")


def test_the_causal_linear_layer_at_its_last_position_equals_the_bidirectional_one():
    bidirectional = tiny(layout="L", num_layers=1)
    causal = tiny(layout="L", num_layers=1, direction="causal")
    causal.load_state_dict(bidirectional.state_dict())
    ids, lengths = histories(2, 5, [5, 5])
    for ours, theirs in zip(causal.encode(ids, lengths), bidirectional.encode(ids, lengths), strict=True):
        torch.testing.assert_close(ours[..., -1, :], theirs[..., -1, :])


def test_the_decoder_does_not_see_the_digit_it_predicts():
    model = tiny()
    ids, lengths = histories(2, 5, [5, 2])
    encoded = model.encode(ids, lengths)
    codes = torch.randint(0, 256, (2, 3, 4))
    for digit in range(4):
        other = codes.clone()
        other[..., digit:] = torch.randint(0, 256, other[..., digit:].shape)
        at = torch.tensor([digit])
        assert torch.equal(
            model.decode_step(encoded, lengths, codes, at), model.decode_step(encoded, lengths, other, at)
        )


def test_the_training_loss_is_the_sum_of_the_steps_cross_entropies():
    model = tiny()
    ids, lengths = histories(2, 5, [5, 2])
    codes = torch.randint(0, 256, (2, 3, 4))
    encoded = model.encode(ids, lengths)
    steps = [model.decode_step(encoded, lengths, codes, torch.tensor([m])).log_softmax(-1) for m in range(4)]
    expected = -sum(step.gather(-1, codes[..., m : m + 1]).squeeze(-1) for m, step in enumerate(steps))
    torch.testing.assert_close(model(ids, lengths, codes).double(), expected, rtol=1e-5, atol=1e-5)


@given(st.integers(1, 4), st.integers(0, 5))
def test_an_empty_history_gives_finite_scores_whatever_the_padding(batch, length):
    model = tiny()
    ids, lengths = histories(batch, length, [0] * batch)
    step = model.decode_step(
        model.encode(ids, lengths), lengths, torch.zeros(batch, 1, 4, dtype=torch.int64), torch.tensor([0])
    )
    assert step.isfinite().all()
    torch.testing.assert_close(step, step[:1].expand_as(step))


def test_the_hash_family_stays_exact_at_the_largest_id():
    items = tiny().items
    largest = 2**31 - 1
    for a, b, row in zip(
        items.multiplier.tolist(), items.offset.tolist(), items.rows(torch.tensor(largest)).tolist(), strict=True
    ):
        assert row == ((a * largest + b) % (2**31 - 1)) % items.num_rows


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_preset_counts_its_parameters_without_allocating_them(name):
    counts = presets.parameter_counts(presets.resolve(name))
    assert counts["total"] == sum(count for part, count in counts.items() if part != "total")


def test_the_industrial_preset_lives_on_the_meta_device():
    model = presets.build(presets.resolve("gbla-yandex"), device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.config.mixers == "SLLSLLSLL"


def test_recency_follows_the_end_of_the_history():
    """With rotary cross-attention keys, a history padded on the right keeps its distance to the end."""
    model = tiny(cross_recency=True)
    ids, lengths = histories(1, 4, [4])
    longer = torch.cat([ids, ids], 1)
    short = model.encode(ids, lengths).keys
    torch.testing.assert_close(model.encode(longer, lengths).keys[..., :4, :], short)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attention": "flash"}, "gbla, bla, softmax"),
        ({"direction": "left"}, "bidirectional, causal"),
        ({"layout": "SLX"}, "SLX"),
        ({"hash_rows": 1000}, "power of two"),
        ({"head_dim": 7}, "even"),
        ({"num_layers": 0}, "num_layers"),
        ({"dropout": 1.0}, "dropout"),
        ({"d_modle": 8}, "d_modle"),
        ({"d_model": "wide"}, "d_model is 'wide'; it must be a whole number"),
        ({"d_model": 64.0}, "whole number"),
        ({"conv": 1}, "true or false"),
        ({"num_layers": True}, "whole number"),
        ({"num_digits": 1}, "2 or more"),
        ({"eps": 0}, "eps"),
        ({"rotary_base": float("nan")}, "rotary_base"),
        ({"layout": 3}, "text"),
    ],
)
def test_a_bad_configuration_is_named(fields, words):
    with pytest.raises(ConfigError, match=words):
        presets.resolve("gbla-tiny", overrides=fields)


def test_unknown_presets_twins_and_models_are_named():
    with pytest.raises(ConfigError, match="gbla-yandex"):
        presets.resolve("gbla-huge")
    with pytest.raises(ConfigError, match="all-softmax"):
        presets.resolve("gbla-tiny", twin="linear")
    with pytest.raises(BundleError, match="hstu"):
        presets.config_from_json({"model": "hstu"})
    with pytest.raises(BundleError, match="does not fit"):
        presets.config_from_json({"model": "gbla", "colour": "red"})


def test_a_configuration_survives_json():
    config = presets.resolve("gbla-grid", twin="no-conv")
    assert presets.config_from_json(presets.config_to_json(config)) == config


def test_the_whole_model_compiles_and_exports_without_graph_breaks():
    model = tiny().float()
    ids, lengths = histories(2, 5, [5, 2])
    torch.compile(model.encode, fullgraph=True, backend="aot_eager")(ids, lengths)
    for part in model.parts():
        sizes = {"batch": 2, "length": 5, "beams": 3}
        inputs = tuple(
            torch.randn(spec.resolved_shape(sizes))
            if spec.dtype == "float"
            else torch.ones(spec.resolved_shape(sizes), dtype=getattr(torch, spec.dtype))
            for spec in part.signature.inputs
        )
        program = torch.export.export(part.module, inputs)
        outputs = program.module()(*inputs)
        outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        assert [tuple(o.shape) for o in outputs] == [s.resolved_shape(sizes) for s in part.signature.outputs]


def test_encoded_history_is_what_the_signature_says():
    model = tiny()
    assert EncodedHistory._fields == ("keys", "values")
    assert {part.name for part in model.parts()} == {"encoder", "decoder_step"}
