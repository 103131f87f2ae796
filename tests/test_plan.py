"""What a pipeline class may declare, and what is refused as it is declared."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_offload.errors import OffloadConfigError
from omni_offload.plan import OffloadPlan, SupportsComponentDiscovery

PATH_LISTS = ["encoder_block_attrs", "block_attrs", "offload_submodules"]


def full():
    return OffloadPlan(
        encoder_component_types={"text_encoder": "text_encoder", "vision.tower": "image_encoder"},
        encoder_block_attrs={"text_encoder": ["encoder.block"], "vision.tower": ("stages.0.blocks", "head")},
        block_attrs={"transformer": ["blocks"]},
        offload_submodules={"text_encoder": ["shared"]},
    )


def test_a_plan_declares_nothing_unless_told():
    plan = OffloadPlan()
    assert plan == OffloadPlan(encoder_component_types={}, block_attrs={})
    assert [dict(getattr(plan, name)) for name in PATH_LISTS] == [{}, {}, {}]


def test_lists_are_kept_as_tuples():
    plan = full()
    assert plan.encoder_block_attrs == {
        "text_encoder": ("encoder.block",),
        "vision.tower": ("stages.0.blocks", "head"),
    }
    assert plan.encoder_component_types["vision.tower"] == "image_encoder"


def test_a_plan_is_a_value():
    plan = full()
    assert plan == full()
    assert hash(plan) == hash(full())
    assert plan != OffloadPlan()
    assert copy.deepcopy(plan) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert "block_attrs={'transformer': ('blocks',)}" in repr(plan)


def test_a_plan_cannot_be_changed_from_outside():
    blocks = {"transformer": ["blocks"]}
    plan = OffloadPlan(block_attrs=blocks)
    blocks["transformer"].append("more_blocks")
    blocks["other"] = ["blocks"]
    assert plan.block_attrs == {"transformer": ("blocks",)}
    with pytest.raises(TypeError):
        plan.block_attrs["other"] = ("blocks",)
    with pytest.raises(AttributeError):
        plan.block_attrs = {}


REFUSED = {
    "category": (
        {"encoder_component_types": {"text_encoder": "text_encoders"}},
        "encoder_component_types['text_encoder']='text_encoders' is not one of: 'text_encoder', "
        "'image_encoder'. Did you mean 'text_encoder'?",
    ),
    "category of another type": (
        {"encoder_component_types": {"text_encoder": ["text_encoder"]}},
        "encoder_component_types['text_encoder']=['text_encoder'] is not one of: 'text_encoder', 'image_encoder'.",
    ),
    "no mapping": (
        {"encoder_component_types": ["text_encoder"]},
        "encoder_component_types=['text_encoder'] is of type list; it must be a mapping from dotted paths of "
        "module names.",
    ),
    "two kinds of blocks": (
        {"encoder_block_attrs": {"model": ["layers"]}, "block_attrs": {"model": ["blocks"]}},
        "encoder_block_attrs['model']=('layers',) contradicts block_attrs['model']=('blocks',): a component "
        "is an encoder or a DiT. Keep one of the two.",
    ),
    "blocks as a single unit": (
        {"block_attrs": {"model": ["blocks"]}, "offload_submodules": {"model": ["embed", "blocks"]}},
        "offload_submodules['model'][1]='blocks' is declared as a list of blocks too. Its blocks stream one "
        "by one; take it out of offload_submodules.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_field_and_value(case):
    fields, message = REFUSED[case]
    with pytest.raises(OffloadConfigError) as caught:
        OffloadPlan(**fields)
    assert str(caught.value) == message


@pytest.mark.parametrize("name", PATH_LISTS)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "{}=None; it must be a mapping"),
        ("blocks", "{}='blocks' is of type str; it must be a mapping"),
        ({"": ["blocks"]}, "{} key='' is empty"),
        ({3: ["blocks"]}, "{} key=3 is of type int"),
        ({"model.": ["blocks"]}, "{} key='model.' is not a dotted path"),
        ({"model": "blocks"}, "{}['model']='blocks' is a single string. Put it in a list: ['blocks']."),
        ({"model": None}, "{}['model']=None; it must be a list"),
        ({"model": {"blocks"}}, "{}['model']={{'blocks'}} is of type set; it must be a list"),
        ({"model": []}, "{}['model']=[] is empty"),
        ({"model": [""]}, "{}['model'][0]='' is empty"),
        ({"model": ["a", "b..c"]}, "{}['model'][1]='b..c' is not a dotted path"),
        ({"model": ["0.blocks"]}, "{}['model'][0]='0.blocks' is not a dotted path"),
        ({"model": ["a b"]}, "{}['model'][0]='a b' is not a dotted path"),
        ({"model": [True]}, "{}['model'][0]=True is of type bool"),
        ({"model": ["a", "b", "a"]}, "{}['model'][2]='a' comes twice"),
    ],
)
def test_a_list_of_paths_is_checked_as_it_is_declared(name, value, message):
    with pytest.raises(OffloadConfigError) as caught:
        OffloadPlan(**{name: value})
    assert str(caught.value).startswith(message.format(name))


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(["encoder_component_types", *PATH_LISTS]), junk))
def test_no_declaration_raises_anything_but_a_config_error(fields):
    with contextlib.suppress(OffloadConfigError):
        OffloadPlan(**fields)


class Declared(torch.nn.Module):
    _dit_modules = ["transformer"]
    _encoder_modules = ["text_encoder"]
    _vae_modules = ["vae"]
    _resident_modules = []


class HalfDeclared(torch.nn.Module):
    _dit_modules = ["transformer"]


def test_a_pipeline_that_names_its_components_is_recognised():
    assert isinstance(Declared(), SupportsComponentDiscovery)
    assert not isinstance(HalfDeclared(), SupportsComponentDiscovery)
