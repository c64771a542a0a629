"""Fields of the wrong type in any configuration: refused with the name of the file and the field, or not read at all."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from specbeam.core.records import FINAL
from specbeam.errors import BadHead
from specbeam.models.heads.fields import Fields
from specbeam.models.heads.files import read_files
from specbeam.models.heads.layers import LayerSizes, Rotary
from specbeam.models.heads.own import own_config
from specbeam.models.heads.read import read_head
from specbeam.models.heads.trunk import PairTrunk, TrunkShape

GOLDEN = Path(__file__).parent / "golden"
OURS = "fspad"
# Modules of multi-token prediction have a target of their own; test_mtp.py has their refusals.
NAMES = sorted(one.name for one in GOLDEN.iterdir() if one.is_dir() and not one.name.startswith("mtp"))
# Files that are read by what reads another one's, and differ from it in a field or two.
ALIKE = {
    "dflash_window", "dflash_window_both", "dflash_window_row", "dflash2_window", "domino_slots", "dspark_gated",
    "dspark_rnn_forge", "dspark_rnn_slots", "eagle3_window", "mlp_speculator_tied", "norms", "one_norm", "peagle_window",
    "redrafter_sum", "two_layers", "xpress_anchored",
}  # fmt: skip
HUGE = 10**12
NESTED = [[1, "x"], {"x": 1}]


def wrong_values(found):
    """What a field must not hold that holds this."""
    if isinstance(found, bool):
        return ["x", 7, HUGE, *NESTED]
    if isinstance(found, (int, float)):
        return ["x", True, -7, HUGE, -HUGE, float("nan"), float("inf"), *NESTED]
    if isinstance(found, str):
        return [7, True, *NESTED]
    if isinstance(found, list):
        return ["x", 7, True, [*found, *found, *found], [["x"]], [HUGE], [-7], {"x": 1}]
    if isinstance(found, dict):
        return ["x", 7, True, [1, "x"]]
    return ["x", -7, *NESTED]


def places_of(config, inside=()):
    """The places of all fields, those in objects and in objects of lists, too."""
    items = config.items() if isinstance(config, dict) else enumerate(config)
    for name, value in items:
        if not isinstance(config, list) or isinstance(value, dict):
            yield (*inside, name)
        if isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict)):
            yield from places_of(value, (*inside, name))


def holder_of(config, place):
    """The object that holds the field."""
    for name in place[:-1]:
        config = config[name]
    return config


def named(place):
    """The name of a field."""
    return next(name for name in reversed(place) if isinstance(name, str))


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 8}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=4, max_position_embeddings=128)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def ours(target, tmp_path_factory):
    """A head in the format that is our own."""
    sizes = LayerSizes(16, 16, 4, 2, 4, 8)
    shape = TrunkShape(sizes, 1, (FINAL,), 16, "projection", 32, norms_output=False, sampling=4, alignment=3)
    trunk = PairTrunk(
        shape,
        Rotary(sizes, {"rope_type": "default", "rope_theta": 10000.0}),
        target.get_input_embeddings(),
        target.lm_head,
    )
    folder = tmp_path_factory.mktemp(OURS)
    (folder / "config.json").write_text(json.dumps(own_config(OURS, trunk, target)))
    own = {name: one for name, one in trunk.named_parameters() if not name.startswith(("embed_tokens.", "lm_head."))}
    save_file({name: one.detach().contiguous() for name, one in own.items()}, folder / "model.safetensors")
    return folder


class Given(torch.nn.Module):
    """A module as the source of a head: its tensors are those of a file, its configuration is changed at will."""

    def __init__(self, config, tensors):
        super().__init__()
        self.config = type("Config", (), {"to_dict": lambda _: copy.deepcopy(config)})()
        self.tensors = tensors

    def state_dict(self, *args, **kwargs):
        return dict(self.tensors)


def reading(config, tensors, target):
    """All that is read from a configuration, but for weights."""
    head = read_head(Given(config, tensors), target)
    rotary = getattr(head, "rotary", None)
    rotation = None if rotary is None else {name: one for name, one in rotary.rope.items() if name != "unread"}
    shape = getattr(head, "shape", None) or head.sizes
    more = (getattr(head, "mask", None), getattr(head, "rows", None), getattr(head, "scales_input", None))
    sizes = [tuple(one.shape) for one in head.parameters()]
    return head.described, shape, rotation, more, sizes


def cases():
    """All files, and how many of the wrong values are tried: of files that differ from others in little, one of three."""
    for name in (*NAMES, OURS):
        is_first = name not in ALIKE
        yield pytest.param(name, 1 if is_first else 3, id=name)
        if not is_first:
            yield pytest.param(name, 1, id=f"{name}, all", marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "every"), cases())
def test_wrong_fields_are_refused_by_name_or_not_read(name, every, target, ours):
    """Each field, with each kind of wrong value: the same reading as before, or an error with file and field."""
    folder = ours if name == OURS else GOLDEN / name
    files = read_files(folder)
    expected = reading(files.config, files.tensors, target)
    refused = 0
    wrong = []
    for number, place in enumerate(places_of(files.config)):
        values = wrong_values(holder_of(files.config, place)[place[-1]])
        for value in values[number % every :: every]:
            config = copy.deepcopy(files.config)
            holder_of(config, place)[place[-1]] = value
            try:
                found = reading(config, files.tensors, target)
            except BadHead as error:
                refused += 1
                # Errors call the files of a module by its class. What is in a list goes by the name of the list.
                if "Given" not in str(error) or str(named(place)) not in str(error):
                    wrong.append((place, value, str(error)))
            else:
                if found != expected:
                    wrong.append((place, value, found))
    assert not wrong
    assert refused > 5


def test_a_field_is_named_with_what_it_holds_and_what_it_must_hold():
    fields = Fields("head", {"a": "x", "b": {"c": 1.5, "d": 10**12}, "e": [1, "x"], "f": None})
    inner = fields.inner("b")
    for read, message in (
        (lambda: fields.number("a"), "head: a is 'x' in config.json; it must be a number"),
        (lambda: fields.flag("a", default=True), "head: a is 'x' in config.json; it must be true or false"),
        (lambda: inner.whole("c"), "head: b.c is 1.5 in config.json; it must be an integer of at least 1"),
        (lambda: inner.whole("d"), "head: b.d is 1000000000000 in config.json; it must be an integer of at least 1, and at most 16777216"),
        (lambda: fields.wholes("e"), "head: e is [1, 'x'] in config.json; it must be a list of integers from 0 to 16777216"),
        (lambda: fields.texts("e"), "head: e is [1, 'x'] in config.json; it must be a list of texts"),
        (lambda: fields.whole("f"), "head: config.json has no f"),
    ):  # fmt: skip
        with pytest.raises(BadHead) as raised:
            read()
        assert str(raised.value) == message
    assert fields.whole("f", 3) == 3
    assert inner.number("c") == 1.5
    assert fields.inner("f").values == {}
