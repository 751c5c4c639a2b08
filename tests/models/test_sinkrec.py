import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.errors import ConfigError
from zoo.layers import ResidualQuantizer
from zoo.models.sinkrec import SinkRec, State
from zoo.models.sinkrec_config import PRESETS, TWINS
from zoo.models.sinkrec_layers import last_rows

ALL_TWINS = [None, *TWINS]
ITEMS = 50


def tiny(twin=None, **overrides):
    torch.manual_seed(0)
    sizes = {"num_items": ITEMS, "window": 8, "codebook_size": 16}
    preset = PRESETS["sinkrec-tiny"].with_overrides(**sizes)
    config = (preset.twin(twin) if twin else preset).with_overrides(**overrides)
    return SinkRec(config).double().eval()


def histories(batch, length, lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    items = torch.randint(ITEMS, (batch, length), generator=generator)
    gaps = torch.randint(-100, 100_000, (batch, length), generator=generator)
    return items, gaps.cumsum(1) + 10**9, torch.tensor(lengths, dtype=torch.int32)


def assert_same(found, wanted):
    for name, ours, theirs in zip(State._fields, found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@st.composite
def splits(draw):
    """Return lengths of whole histories and of their starts."""
    lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=4))
    return lengths, [draw(st.integers(0, length)) for length in lengths]


@pytest.mark.parametrize("twin", ALL_TWINS)
@settings(max_examples=15)
@given(sizes=splits())
def test_a_step_after_a_prefill_is_the_prefill_of_the_whole(twin, sizes):
    lengths, starts = sizes
    model, length = tiny(twin), max(*lengths, 1)
    items, times, counts = histories(len(lengths), length, lengths)
    first = torch.tensor(starts, dtype=torch.int32)
    rest = (counts - first).long()
    places = (first.long().unsqueeze(1) + torch.arange(length)).clamp(max=length - 1)
    with torch.no_grad():
        user, whole = model.prefill(items, times, counts)
        _, before = model.prefill(items, times, first)
        again, after = model.step(items.gather(1, places), times.gather(1, places), rest.int(), before)
    assert_same(after, whole)
    torch.testing.assert_close(again, user)


@pytest.mark.parametrize("twin", ALL_TWINS)
def test_single_steps_from_nothing_are_the_prefill(twin):
    model = tiny(twin)
    items, times, lengths = histories(2, 14, [14, 9])
    with torch.no_grad():
        _, whole = model.prefill(items, times, lengths)
        state = model.initial_state(2)
        for t in range(14):
            _, state = model.step(items[:, t : t + 1], times[:, t : t + 1], (lengths > t).int(), state)
    assert_same(state, whole)


@pytest.mark.parametrize("twin", ALL_TWINS)
def test_padding_of_any_value_and_more_of_it_changes_nothing(twin):
    model = tiny(twin)
    items, times, lengths = histories(3, 12, [12, 0, 5])
    padding = torch.arange(12) >= lengths[:, None]
    with torch.no_grad():
        user, state = model.prefill(items, times, lengths)
        other = items.masked_fill(padding, -(2**40)), times.masked_fill(padding, 2**62)
        assert_same(model.prefill(*other, lengths)[1], state)
        longer = [torch.cat([x, x.new_full((3, 7), -5)], 1) for x in (items, times)]
        assert_same(model.prefill(*longer, lengths)[1], state)
        for row in range(3):
            alone = model.prefill(items[row : row + 1], times[row : row + 1], lengths[row : row + 1])[0]
            torch.testing.assert_close(alone, user[row : row + 1])
    assert (user[1] == 0).all()
    torch.testing.assert_close(user[[0, 2]].norm(dim=-1), torch.ones(2, dtype=torch.float64), rtol=1e-4, atol=0)


def test_a_fresh_recurrence_forgets_slowly():
    """In a step without news it loses at most 1 - exp(-16 * 0.1); with biases of 0 it would lose 50% to 99.998%."""
    model = SinkRec(PRESETS["sinkrec-base"].with_overrides(num_items=10, num_loops=1))
    for layer in model.group[:3]:
        decay, write = layer.mixer.decay_and_write.bias.chunk(2)
        steps = torch.nn.functional.softplus(decay)
        assert (steps > 0.000999).all() and (steps < 0.1001).all() and len(steps.unique()) == len(steps)
        assert (write == 0).all()
        rates = layer.mixer.decay_rate.exp()
        assert (rates >= 1).all() and (rates <= 16).all()


@pytest.mark.parametrize("twin", ALL_TWINS)
def test_every_weight_gets_a_finite_gradient(twin):
    model = tiny(twin, dropout=0.1).train()
    losses = model(*histories(3, 20, [20, 11, 2]))
    losses.total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("twin", ALL_TWINS)
def test_the_loss_of_a_target_does_not_see_it_or_what_comes_after(twin):
    model = tiny(twin)
    items, times, lengths = histories(1, 20, [20])
    changed = items.clone()
    changed[0, 12:] = (changed[0, 12:] + 1) % ITEMS
    with torch.no_grad():
        ours, theirs = (model(x, times, lengths).next_item for x in (items, changed))
    torch.testing.assert_close(ours[0, :11], theirs[0, :11])
    assert (ours[0, 11:] != theirs[0, 11:]).all()


def test_the_loss_is_the_cross_entropy_of_the_scores():
    model = tiny()
    items, times, lengths = histories(2, 9, [9, 4])
    with torch.no_grad():
        losses = model(items, times, lengths)
        for row, t in ((0, 0), (0, 7), (1, 2)):
            end = torch.tensor([t + 1], dtype=torch.int32)
            user, _ = model.prefill(items[row : row + 1], times[row : row + 1], end)
            wanted = torch.nn.functional.cross_entropy(model.score(user), items[row, t + 1 : t + 2])
            torch.testing.assert_close(losses.next_item[row, t], wanted, rtol=1e-5, atol=1e-5)
    assert losses.targets == 8 + 3 and (losses.next_item[1, 3:] == 0).all()
    torch.testing.assert_close(
        losses.next_item.sum() / 11, losses.total - 0.1 * losses.reconstruction, check_dtype=False
    )


@pytest.mark.parametrize("twin", ALL_TWINS)
def test_training_without_states_gives_the_losses_and_gradients_of_reading_with_them(twin, monkeypatch):
    models, read = [tiny(twin, dropout=0.1).float().train() for _ in range(2)], SinkRec.read

    def keeping(self, *arguments, kept):
        found = read(self, *arguments, kept=True)
        assert not kept and found.state().seen.tolist() == [20, 11, 2]
        return found

    losses = []
    for model in models:
        torch.manual_seed(1)
        losses.append(model(*histories(3, 20, [20, 11, 2])))
        losses[-1].total.backward()
        monkeypatch.setattr(SinkRec, "read", keeping)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*losses, strict=True))
    for (name, ours), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name


def test_users_without_a_state_are_those_of_the_prefill():
    model = tiny()
    batch = histories(4, 12, [12, 0, 1, 7])
    with torch.no_grad():
        assert torch.equal(model.users(*batch), model.prefill(*batch)[0])


@pytest.mark.parametrize("preset", PRESETS)
def test_the_sasrec_twin_has_the_depth_of_the_preset_and_nothing_but_attention(preset):
    ours = PRESETS[preset]
    twin = ours.twin("sasrec")
    assert twin.group == "A" * len(ours.mixers) and twin.num_loops == 1 and twin.shown == 1
    assert (twin.d_model, twin.num_heads, twin.mlp_width, twin.dropout) == (
        ours.d_model, ours.num_heads, ours.mlp_width, ours.dropout,
    )  # fmt: skip


def test_bfloat16_does_not_round_the_logits():
    model = tiny(memory=False, dropout=0.0).float().train()
    items, times, lengths = histories(1, 15, [15])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        losses = model(items, times, lengths)
        users = model.read(items, times, lengths, None, kept=False).users
    wanted = torch.nn.functional.cross_entropy(model.score(users[0, :14].float()), items[0, 1:], reduction="none")
    torch.testing.assert_close(losses.next_item[0], wanted, rtol=1e-5, atol=1e-5)


def test_sampled_negatives_estimate_the_full_softmax():
    full, sampled = tiny(memory=False), tiny(memory=False, sampled_negatives=20_000)
    batch = histories(2, 15, [15, 9])
    with torch.no_grad():
        wanted, found = full(*batch).total, sampled(*batch).total
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0)
    few = tiny(memory=False, sampled_negatives=5)
    few(*batch).total.backward()


@pytest.mark.parametrize("power", [0.0, 0.75])
def test_negatives_follow_the_targets_seen_and_their_correction_keeps_the_softmax(power):
    sizes = {"memory": False, "dropout": 0.0}
    full, model = tiny(**sizes), tiny(**sizes, sampled_negatives=20_000, negatives_power=power).train()
    items, times, lengths = histories(2, 15, [15, 9])
    items[:, ::2] = 3
    found = [model(items, times, lengths).total.detach() for _ in range(3)][-1]
    counts = torch.bincount(torch.cat([items[0, 1:], items[1, 1:9]]), minlength=ITEMS) * 3
    assert torch.equal(model.target_counts, counts.to(model.target_counts.dtype))
    drawn, expected = model._negatives(items[0, :0])
    share = (counts + 1.0) ** power / ((counts + 1.0) ** power).sum()
    torch.testing.assert_close(expected, (20_000 * share[drawn]).float(), check_dtype=False)
    assert (drawn == 3).float().mean() == pytest.approx(float(share[3]), rel=0.1)
    with torch.no_grad():
        wanted = full.eval()(items, times, lengths).total
    torch.testing.assert_close(found, wanted, rtol=0.03, atol=0)


def test_exported_codes_are_the_librarys():
    model = tiny().float().train()
    batch = histories(4, 30, [30, 30, 17, 3])
    model(*batch)  # the codebooks start from k-means
    x, valid = torch.randn(3, 40, 32), torch.ones(3, 40, dtype=torch.bool)
    quantizer = model.memory.quantizer
    with torch.no_grad():
        quantizer.training_side.eval()
        vectors, codes, _ = quantizer.training_side(x)
        found = quantizer.eval()(x, valid)
    assert torch.equal(found.codes, codes)
    torch.testing.assert_close(found.vectors, vectors)


def test_autocast_does_not_collapse_the_codebooks(monkeypatch):
    """Under bf16 the quantiser still counts in float32: many codes stay in use, and dead ones come back."""
    model = tiny(codebook_size=32, dead_below=0.5).float().train()
    quantizer, seen = model.memory.quantizer, set()
    library = quantizer.training_side.forward
    monkeypatch.setattr(quantizer.training_side, "forward", lambda x, **rest: seen.add(x.dtype) or library(x, **rest))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(30):
        with torch.autocast("cpu", torch.bfloat16):
            losses = model(*histories(8, 32, [32] * 8, seed=step))
        optimizer.zero_grad()
        losses.total.backward()
        optimizer.step()
    assert seen == {torch.float32}
    health = quantizer.health()
    assert health["dead_codes"] < 0.5 and health["codebook_perplexity"] > 8


def test_a_collapse_shows_in_the_health_of_the_codebooks():
    quantizer = ResidualQuantizer(8, 1, 64, decay=0.9, dead_below=1.0).train()
    three = torch.randn(3, 8)
    for _ in range(20):
        quantizer(three[torch.randint(3, (4, 50))], torch.ones(4, 50, dtype=torch.bool))
    health = quantizer.health()
    assert int(quantizer.counts.sum()) == 200 and health["dead_codes"] == pytest.approx(61 / 64)
    assert 2 < health["codebook_perplexity"] <= 3.01


@pytest.mark.parametrize("levels", [1, 3])
def test_the_gradient_goes_straight_through_once_whatever_the_levels(levels):
    quantizer = ResidualQuantizer(8, levels, 16, decay=0.9, dead_below=1.0).train()
    x = torch.randn(2, 30, 8, requires_grad=True)
    found = quantizer(x, torch.ones(2, 30, dtype=torch.bool))
    weights = torch.randn(2, 30, 8)
    (gradient,) = torch.autograd.grad((found.vectors * weights).sum(), x)
    torch.testing.assert_close(gradient, weights)


@pytest.mark.parametrize("preset", PRESETS)
def test_without_attention_all_recurrences_are_left(preset):
    ours = PRESETS[preset]
    twin = ours.twin("no-attention")
    assert twin.layers("T") == ours.layers("T") > 0 == twin.layers("A")


def test_a_dead_code_is_drawn_anew():
    model = tiny().float().train()
    batch = histories(4, 30, [30, 30, 17, 3])
    model(*batch)
    codebook = model.memory.quantizer.training_side.layers[0]._codebook
    codebook.embed[0, 3] = 1e4
    codebook.cluster_size[0, 3] = 0
    for _ in range(3):
        model(*batch)
    assert codebook.embed[0, 3].abs().max() < 100


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"group": "TX"}, "group is 'TX'"), ({"group": ""}, "group is ''"), ({"d_model": 0}, "d_model is 0"),
        ({"head_dim": 33}, "head_dim is 33"), ({"temperature": 0.0}, "temperature is 0.0"),
        ({"dropout": 1.0}, "dropout is 1.0"), ({"memory": 1}, "true or false"), ({"num_loops": 1.5}, "a whole number"),
        ({"nonsense": 1}, "no field 'nonsense'"), ({"conv_width": 1}, "conv_width is 1"),
        ({"dead_below": -1.0}, "dead_below is -1.0"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_refused(fields, said):
    with pytest.raises(ConfigError, match=said):
        PRESETS["sinkrec-tiny"].with_overrides(**fields)


def test_the_last_rows_end_where_each_row_does():
    x = torch.arange(8).expand(3, 8).unsqueeze(-1)
    found = last_rows(x, torch.tensor([0, 2, 5], dtype=torch.int32), 3)
    assert found.squeeze(-1).tolist() == [[0, 1, 2], [2, 3, 4], [5, 6, 7]]
