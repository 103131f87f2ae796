"""The configuration grammar: what it takes, what it refuses and in which words."""

from __future__ import annotations

import copy
import json
import pickle
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_offload.config import (
    MODES,
    OFFLOADABLE_ROLES,
    WEIGHT_TRANSFERS,
    LayerOptions,
    OffloadConfig,
    refuse_unbuilt,
)
from omni_offload.errors import OffloadConfigError, OffloadError, OffloadStateError

FULL = {
    "mode": "layer",
    "components": ["dit", "text_encoder"],
    "pin_memory": True,
    "layer_options": {"dit": {"weight_transfer": "rank-local", "resident_layers": 2}},
}


def layer(**fields):
    return {"mode": "layer", **fields}


def options(**fields):
    return layer(layer_options={"dit": fields})


# --- What it takes --------------------------------------------------------------------------------


def test_mapping_json_and_constructor_give_the_same_config():
    expected = OffloadConfig(
        mode="layer",
        components=("dit", "text_encoder"),
        pin_memory=True,
        layer_options={"dit": LayerOptions(weight_transfer="rank-local", resident_layers=2)},
    )
    assert OffloadConfig.from_dict(FULL) == expected
    assert OffloadConfig.parse(MappingProxyType(FULL)) == expected
    assert OffloadConfig.parse(json.dumps(FULL)) == expected
    assert OffloadConfig.parse(expected) is expected


def test_mode_layer_takes_the_dit_where_no_component_is_named():
    assert OffloadConfig.parse({"mode": "layer"}).components == ("dit",)


def test_mode_module_takes_all_dits_and_encoders_where_no_component_is_named():
    assert OffloadConfig.parse({"mode": "module"}).components is None


def test_none_is_the_same_as_left_out():
    given_none = layer(components=None, pin_memory=None, layer_options=None)
    assert OffloadConfig.parse(given_none) == OffloadConfig.parse({"mode": "layer"})


@pytest.mark.parametrize("path", ["transformer_2", "model.language_model", "stages.0.transformer", "modèle"])
def test_a_component_path_is_left_for_the_pipeline_to_check(path):
    assert OffloadConfig.parse(layer(components=[path])).components == (path,)


def test_an_option_left_out_keeps_its_default():
    config = OffloadConfig.parse(options(resident_layers=3))
    assert config.layer_options["dit"] == LayerOptions(weight_transfer="rank-local", resident_layers=3)


def test_a_config_is_a_value():
    config = OffloadConfig.parse(FULL)
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert {config: 1}[OffloadConfig.parse(FULL)] == 1
    assert "'dit': LayerOptions(" in repr(config)
    with pytest.raises(TypeError):
        config.layer_options["dit"] = LayerOptions()


def test_a_config_does_not_change_with_the_mapping_it_came_from():
    source = copy.deepcopy(FULL)
    config = OffloadConfig.parse(source)
    source["components"].append("image_encoder")
    source["layer_options"].clear()
    assert config == OffloadConfig.parse(FULL)


# --- What it refuses ------------------------------------------------------------------------------

REFUSED = {
    "no mode": ({}, "mode is missing. Give one of: 'layer', 'module'."),
    "unknown mode": (
        {"mode": "layerwise"},
        "mode='layerwise' is not one of: 'layer', 'module'. Did you mean 'layer'?",
    ),
    "mode of another type": ({"mode": None}, "mode=None is not one of: 'layer', 'module'."),
    "unknown field": (
        layer(component=["dit"]),
        "component=['dit']: 'component' is not one of: 'mode', 'components', 'pin_memory', 'layer_options'. "
        "Did you mean 'components'?",
    ),
    "field that is no string": (
        {**layer(), 3: 4},
        "[3]=4: 3 is not one of: 'mode', 'components', 'pin_memory', 'layer_options'.",
    ),
    "components as a string": (
        layer(components="dit"),
        "components='dit' is a single string. Put it in a list: ['dit'].",
    ),
    "components of another type": (
        layer(components={"dit": 1}),
        "components={'dit': 1} is of type dict; it must be a list of dotted paths of module names.",
    ),
    "no component": (
        layer(components=[]),
        "components=[] is empty. Name at least one, or leave it out.",
    ),
    "component of another type": (
        layer(components=["dit", 1]),
        "components[1]=1 is of type int; it must be a dotted path of module names.",
    ),
    "empty component": (
        layer(components=[""]),
        "components[0]='' is empty. Give the dotted path of a module.",
    ),
    "component that is no path": (
        layer(components=["text encoder"]),
        "components[0]='text encoder' is not a dotted path of module names, such as 'transformer' or "
        "'text_encoder.encoder'.",
    ),
    "doubled component": (
        layer(components=["dit", "text_encoder", "dit"]),
        "components[2]='dit' comes twice. Name it once.",
    ),
    "the VAE": (
        layer(components=["dit", "vae"]),
        "components[1]='vae' cannot be offloaded: VAEs stay on the device in both modes. Choose from 'dit', "
        "'text_encoder', 'image_encoder', 'controlnet', or the path of a DiT or an encoder.",
    ),
    "residents": (
        {"mode": "module", "components": ["resident"]},
        "components[0]='resident' cannot be offloaded: it is the role of the modules that stay on the "
        "device. Choose from 'dit', 'text_encoder', 'image_encoder', 'controlnet', or the path of a DiT or an encoder.",
    ),
    "pin_memory as a number": (layer(pin_memory=1), "pin_memory=1 is of type int; it must be true or false."),
    "layer_options of another type": (
        layer(layer_options=["dit"]),
        "layer_options=['dit'] is of type list; it must be a mapping from dotted paths of module names.",
    ),
    "no layer_options": (
        layer(layer_options={}),
        "layer_options={} is empty. Name a component's options, or leave it out.",
    ),
    "layer_options in mode module": (
        {"mode": "module", "layer_options": {"dit": {"resident_layers": 1}}},
        "layer_options={'dit': {'resident_layers': 1}} contradicts mode='module': whole components "
        "move there. Leave it out, or use mode='layer'.",
    ),
    "layer_options of a component not named": (
        layer(components=["dit", "text_encoder"], layer_options={"text_encoders": {"resident_layers": 1}}),
        "layer_options.text_encoders={'resident_layers': 1}: 'text_encoders' is not one of: 'dit', "
        "'text_encoder'. Did you mean 'text_encoder'? Add it to components, or leave it out.",
    ),
    "options of another type": (
        layer(layer_options={"dit": 2}),
        "layer_options.dit=2 is of type int; it must be a mapping of options.",
    ),
    "options of None": (
        layer(layer_options={"dit": None}),
        "layer_options.dit=None; it must be a mapping of options.",
    ),
    "no option": (
        layer(layer_options={"dit": {}}),
        "layer_options.dit={} is empty. Give one of: 'weight_transfer', 'resident_layers', or leave it out.",
    ),
    "unknown option": (
        options(resident_layer=2),
        "layer_options.dit.resident_layer=2: 'resident_layer' is not one of: 'weight_transfer', "
        "'resident_layers'. Did you mean 'resident_layers'?",
    ),
    "unknown weight_transfer": (
        options(weight_transfer="all-gather"),
        "layer_options.dit.weight_transfer='all-gather' is not one of: 'rank-local', 'allgather'. "
        "Did you mean 'allgather'?",
    ),
    "resident_layers as a bool": (
        options(resident_layers=True),
        "layer_options.dit.resident_layers=True is of type bool; it must be a whole number of blocks, 0 or more.",
    ),
    "resident_layers as a float": (
        options(resident_layers=2.0),
        "layer_options.dit.resident_layers=2.0 is of type float; it must be a whole number of blocks, 0 or more.",
    ),
    "negative resident_layers": (
        options(resident_layers=-1),
        "layer_options.dit.resident_layers=-1 is negative. Give how many blocks stay on the device, 0 or more.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_field_value_and_choices(case):
    value, message = REFUSED[case]
    with pytest.raises(OffloadConfigError) as caught:
        OffloadConfig.from_dict(value)
    assert str(caught.value) == message


@pytest.mark.parametrize("case", [case for case in REFUSED if case != "field that is no string"])
def test_json_is_refused_in_the_same_words(case):
    value, message = REFUSED[case]
    with pytest.raises(OffloadConfigError) as caught:
        OffloadConfig.parse(json.dumps(value))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"mode": "layer", "mode": "module"}', "mode='module' comes twice. Give it once."),
        (
            '{"mode": "layer", "layer_options": {"dit": {"resident_layers": 1, "resident_layers": 2}}}',
            "layer_options.dit.resident_layers=2 comes twice. Give it once.",
        ),
        (
            '{"mode": "layer", "layer_options": {"dit": {"resident_layers": NaN}}}',
            "layer_options.dit.resident_layers=nan is of type float; it must be a whole number of blocks, 0 or more.",
        ),
        ('["layer"]', 'config=[\'layer\'] is of type list; it must be a mapping, such as {"mode": "layer"}.'),
        ("null", 'config=None; it must be a mapping, such as {"mode": "layer"}.'),
    ],
)
def test_json_that_says_two_things_or_no_thing_is_refused(text, message):
    with pytest.raises(OffloadConfigError) as caught:
        OffloadConfig.parse(text)
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["", "{", "{'mode': 'layer'}", '{"mode": "layer"} x', "[" * 100_000, "9" * 5000])
def test_text_that_is_not_json_is_refused(text):
    with pytest.raises(OffloadConfigError, match=r"^config=.* is not JSON \("):
        OffloadConfig.parse(text)


def test_a_bare_mode_is_told_how_to_write_it():
    with pytest.raises(OffloadConfigError, match=r'Write it as \{"mode": "module"\}\.$'):
        OffloadConfig.parse("module")


@pytest.mark.parametrize("value", [None, 1, b'{"mode": "layer"}', [("mode", "layer")]])
def test_a_value_of_no_known_form_is_refused(value):
    with pytest.raises(OffloadConfigError, match="it must be a mapping, JSON text or an OffloadConfig"):
        OffloadConfig.parse(value)


def test_the_constructors_refuse_what_the_grammar_refuses():
    with pytest.raises(OffloadConfigError, match=r"components\[1\]='dit' comes twice"):
        OffloadConfig("layer", components=["dit", "dit"])
    with pytest.raises(OffloadConfigError, match="resident_layers=-1 is negative"):
        LayerOptions(resident_layers=-1)
    with pytest.raises(OffloadConfigError, match="'text_encoder' is not one of: 'dit'"):
        OffloadConfig("layer", layer_options={"text_encoder": LayerOptions()})


def test_a_long_value_is_cut():
    for value in ("x" * 10**6, ["dit"] * 10**4, 10**5000, {str(n): n for n in range(1000)}):
        with pytest.raises(OffloadConfigError) as caught:
            OffloadConfig.parse({"mode": value, "components": value})
        assert len(str(caught.value)) < 500


# --- allgather ------------------------------------------------------------------------------------


def test_allgather_is_parsed_and_refused_when_it_would_be_used():
    config = OffloadConfig.parse(options(weight_transfer="allgather"))
    with pytest.raises(OffloadConfigError, match="allgather is not built yet; use 'rank-local'") as caught:
        refuse_unbuilt(config)
    assert str(caught.value).startswith("layer_options.dit.weight_transfer='allgather'")


def test_what_is_built_is_let_through():
    assert refuse_unbuilt(OffloadConfig.parse(FULL)) is None
    assert refuse_unbuilt(OffloadConfig.parse({"mode": "module"})) is None


# --- Errors ---------------------------------------------------------------------------------------


def test_errors_can_be_caught_as_python_s_own_kinds_or_as_one_family():
    assert issubclass(OffloadConfigError, (ValueError,))
    assert issubclass(OffloadConfigError, (OffloadError,))
    assert issubclass(OffloadStateError, (RuntimeError,))
    assert issubclass(OffloadStateError, (OffloadError,))


# --- Any value at all -----------------------------------------------------------------------------

paths = (
    st.lists(st.from_regex(r"\A[a-z_][a-z0-9_]{0,5}\Z"), min_size=1, max_size=3)
    .map(".".join)
    .filter(lambda path: path not in ("vae", "resident"))
)
names = st.sampled_from(OFFLOADABLE_ROLES) | paths
component_lists = st.none() | st.lists(names, min_size=1, max_size=4, unique=True)
layer_option_fields = st.fixed_dictionaries(
    {},
    optional={"weight_transfer": st.sampled_from(WEIGHT_TRANSFERS), "resident_layers": st.integers(0, 2**40)},
).filter(bool)


@st.composite
def configs(draw):
    value = {"mode": draw(st.sampled_from(MODES)), "components": draw(component_lists)}
    value["pin_memory"] = draw(st.sampled_from([None, True, False]))
    if value["mode"] == "layer" and draw(st.booleans()):
        keys = st.sampled_from(value["components"] or ["dit"])
        value["layer_options"] = draw(st.dictionaries(keys, layer_option_fields, min_size=1))
    return value


@given(configs())
def test_every_valid_config_survives_a_round_trip(value):
    config = OffloadConfig.from_dict(value)
    assert OffloadConfig.from_dict(config.to_dict()) == config
    assert OffloadConfig.parse(json.dumps(config.to_dict())) == config
    assert hash(OffloadConfig.from_dict(config.to_dict())) == hash(config)


FIELDS = ["mode", "components", "pin_memory", "layer_options", "weight_transfer", "resident_layers"]
VALUES = ["layer", "module", "dit", "text_encoder", "vae", "allgather", "a.b", "a..b", "0", "dit.", ""]
words = st.sampled_from(FIELDS + VALUES)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | words
    | st.just(float("nan"))
    | st.just(object())
    | st.complex_numbers()
)
keys = words | st.text() | st.integers() | st.none() | st.tuples(st.integers())
junk = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.dictionaries(keys, inner) | st.tuples(inner, inner),
    max_leaves=12,
)
nearly = st.fixed_dictionaries(
    {"mode": st.sampled_from(MODES) | junk},
    optional={
        "components": component_lists | junk,
        "pin_memory": st.booleans() | junk,
        "layer_options": st.dictionaries(names | keys, layer_option_fields | junk) | junk,
    },
)


def refusal(value):
    """What the config error says, or None. Any other exception fails the test."""
    try:
        OffloadConfig.parse(value)
    except OffloadConfigError as error:
        return str(error)
    return None


@given(junk | nearly)
def test_no_value_raises_anything_but_a_config_error(value):
    message = refusal(value)
    assert message is None or 10 < len(message) < 2000


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | words,
    lambda inner: st.lists(inner) | st.dictionaries(words | st.text(), inner),
    max_leaves=12,
)
json_texts = (json_values | configs()).map(json.dumps)


@given(st.text() | json_texts | st.tuples(json_texts, st.text(max_size=3)).map("".join))
def test_no_text_raises_anything_but_a_config_error(text):
    message = refusal(text)
    assert message is None or 10 < len(message) < 2000
