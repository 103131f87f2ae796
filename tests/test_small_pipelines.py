"""The small pipelines are real, repeatable and loadable, and the media writers write what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch import nn

from omni_offload.demo import media
from omni_offload.demo import small_pipelines as small

BLOCK_LISTS = {
    "wan": {"transformer": ["blocks"]},
    "wan22": {"transformer": ["blocks"], "transformer_2": ["blocks"]},
    "wan-i2v": {"transformer": ["blocks"]},
    "flux2": {"transformer": ["transformer_blocks", "single_transformer_blocks"]},
    "flux2-klein": {"transformer": ["transformer_blocks", "single_transformer_blocks"]},
    "split": {"transformer": ["layers", "gen_layers"]},
}
OUTPUT_SHAPES = {
    "wan": (1, 9, 3, 32, 32),
    "wan22": (1, 9, 3, 32, 32),
    "wan-i2v": (1, 9, 3, 32, 32),
    "flux2": (1, 3, 64, 64),
    "flux2-klein": (1, 3, 64, 64),
    "split": (1, 3, 64, 64),
}
all_families = pytest.mark.parametrize("family", small.FAMILIES)


def run(pipe: Any, family: str, *, changes: dict[str, Any] | None = None, **options: Any) -> Any:
    output = pipe(**(small.call_arguments(family, **options) | (changes or {})))
    return output.frames if "frames" in output else output.images


def modules(pipe: Any) -> dict[str, nn.Module]:
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}


@all_families
def test_two_runs_and_two_builds_agree(family: str) -> None:
    pipe = small.build(family)
    first = run(pipe, family)
    assert first.shape == OUTPUT_SHAPES[family]
    assert torch.equal(first, run(pipe, family))
    assert torch.equal(first, run(small.build(family), family))
    assert not torch.equal(first, run(pipe, family, seed=1))
    assert not torch.equal(first, run(small.build(family, seed=1), family))


@all_families
def test_output_is_not_degenerate(family: str) -> None:
    pipe = small.build(family)
    pixels = run(pipe, family)
    assert torch.isfinite(pixels).all()
    assert pixels.std() > 0.1
    assert ((pixels == 0) | (pixels == 1)).float().mean() < 0.1
    other_prompt = run(pipe, family, changes={"prompt": "two dogs play with a blue ball"})
    assert (pixels - other_prompt).abs().mean() > 1e-3
    if family != "flux2":  # whose guidance is an input of the transformer, not a second pass
        assert not torch.equal(pixels, run(pipe, family, changes={"guidance_scale": 1.0}))


@all_families
def test_every_block_matters(family: str) -> None:
    """A block that runs with its neighbour's weights must show in the output."""
    pipe = small.build(family)
    expected = run(pipe, family)
    for part, lists in BLOCK_LISTS[family].items():
        for name in lists:
            blocks = getattr(getattr(pipe, part), name)
            assert len(blocks) >= 3
            for block, neighbour in zip(blocks, [*blocks[1:], blocks[0]], strict=True):
                own = {key: value.clone() for key, value in block.state_dict().items()}
                assert not any(torch.equal(value, neighbour.state_dict()[key]) for key, value in own.items())
                block.load_state_dict(neighbour.state_dict())
                assert (run(pipe, family) - expected).abs().mean() > 1e-3
                block.load_state_dict(own)
    assert torch.equal(run(pipe, family), expected)


@all_families
def test_saved_pipeline_loads_with_its_plain_class(family: str, tmp_path: Path) -> None:
    pipe = small.build(family)
    pipe.save_pretrained(tmp_path)
    loaded = small.pipeline_class(family).from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert {name: type(part) for name, part in loaded.components.items()} == {
        name: type(part) for name, part in pipe.components.items()
    }
    assert torch.equal(run(loaded, family), run(pipe, family))


@all_families
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_weights_are_those_of_loading(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    small.build(family).save_pretrained(tmp_path)
    loaded = modules(small.pipeline_class(family).from_pretrained(tmp_path, dtype=dtype))
    built = modules(small.build(family, dtype=dtype))
    assert built.keys() == loaded.keys()
    for name, part in built.items():
        own = dict(part.named_parameters()) | dict(part.named_buffers())
        theirs = dict(loaded[name].named_parameters()) | dict(loaded[name].named_buffers())
        assert own.keys() == theirs.keys()
        for key, tensor in own.items():
            assert tensor.dtype == theirs[key].dtype, (name, key)
            assert torch.equal(tensor, theirs[key]), (name, key)


@all_families
def test_bfloat16_runs(family: str) -> None:
    pipe = small.build(family, dtype=torch.bfloat16)
    pixels = run(pipe, family)
    assert torch.isfinite(pixels).all()
    assert (pixels.float() - run(small.build(family), family)).abs().mean() < 0.05


@all_families
def test_building_leaves_the_random_state_and_takes_a_class(family: str) -> None:
    class Marked(small.pipeline_class(family)):  # type: ignore[misc]
        pass

    state = torch.random.get_rng_state()
    pipe = small.build(family, layers=3, cls=Marked)
    assert torch.equal(state, torch.random.get_rng_state())
    assert type(pipe) is Marked
    first_list = BLOCK_LISTS[family]["transformer"][0]
    assert len(getattr(pipe.transformer, first_list)) == 3
    assert not any(part.training for part in modules(pipe).values())


def test_building_ignores_the_default_device() -> None:
    with torch.device("meta"):
        pipe = small.build("wan")
    assert torch.equal(run(pipe, "wan"), run(small.build("wan"), "wan"))


def test_both_experts_run() -> None:
    pipe = small.build("wan22")
    for steps in (2, 3, 4):
        calls: list[str] = []
        hooks = [
            getattr(pipe, name).register_forward_pre_hook(lambda *_, calls=calls, name=name: calls.append(name))
            for name in ("transformer", "transformer_2")
        ]
        run(pipe, "wan22", steps=steps)
        for hook in hooks:
            hook.remove()
        assert len(calls) == 2 * steps  # each step once with the prompt and once without
        assert set(calls) == {"transformer", "transformer_2"}
        assert calls == sorted(calls)


def test_image_reaches_the_video() -> None:
    pipe = small.build("wan-i2v")
    other = run(pipe, "wan-i2v", changes={"image": small.sample_image(32, 32, seed=7)})
    assert not torch.equal(run(pipe, "wan-i2v"), other)


def test_reasoner_runs_once_per_generation() -> None:
    pipe = small.build("split")
    calls = {"layers": 0, "gen_layers": 0}
    for name in calls:
        for block in getattr(pipe.transformer, name):
            block.register_forward_pre_hook(lambda *_, name=name: calls.__setitem__(name, calls[name] + 1))
    run(pipe, "split", steps=3)
    assert calls == {"layers": 4, "gen_layers": 12}


def test_split_pipeline_takes_a_list_and_refuses_a_bad_size() -> None:
    pipe = small.build("split")
    assert run(pipe, "split", changes={"prompt": ["a", "b"]}).shape == (2, 3, 64, 64)
    with pytest.raises(ValueError, match="multiples of 8"):
        run(pipe, "split", changes={"height": 60})


def test_parameter_bytes_counts_a_shared_weight_once() -> None:
    encoder = small.build("flux2-klein").text_encoder
    assert encoder.lm_head.weight is encoder.model.embed_tokens.weight  # so this test means something
    state = encoder.state_dict()
    separate = sum(4 * tensor.numel() for name, tensor in state.items() if name != "lm_head.weight")
    assert small.parameter_bytes(encoder) == separate


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="unknown family 'sdxl'; one of: wan"):
        small.build("sdxl")
    with pytest.raises(ValueError, match="layers must be at least 1"):
        small.build("wan", layers=0)


# --- media ---------------------------------------------------------------------------------------------


def gradient_video(frames: int = 3, height: int = 8, width: int = 12) -> np.ndarray:
    """uint8 frames of shape (frames, height, width, 3), every one different."""
    return np.random.default_rng(0).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


VIDEO = gradient_video()
AS_FLOAT = VIDEO.astype(np.float32) / 255
AS_TENSOR = torch.from_numpy(AS_FLOAT).permute(0, 3, 1, 2)
AS_PIL = [PIL.Image.fromarray(frame) for frame in VIDEO]


LAYOUTS = {
    "uint8": VIDEO,
    "np": AS_FLOAT,
    "np-batch": AS_FLOAT[None],
    "np-list": list(AS_FLOAT),
    "pt": AS_TENSOR,
    "pt-batch": AS_TENSOR[None],
    "pt-list": list(AS_TENSOR),
    "pil": AS_PIL,
    "pil-batch": [AS_PIL],
}


@pytest.mark.parametrize("frames", LAYOUTS.values(), ids=LAYOUTS)
def test_frames_are_written_exactly(frames: Any, tmp_path: Path) -> None:
    paths = media.write_frames(frames, tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["frame_0000.png", "frame_0001.png", "frame_0002.png"]
    assert sorted((tmp_path / "new" / "folder").iterdir()) == paths
    for path, expected in zip(paths, VIDEO, strict=True):
        assert np.array_equal(np.asarray(PIL.Image.open(path)), expected)


@pytest.mark.parametrize("output_type", ["pt", "np", "pil"])
@pytest.mark.parametrize("family", ["wan", "split"])
def test_pipeline_outputs_are_written(family: str, output_type: str, tmp_path: Path) -> None:
    pipe = small.build(family)
    output = pipe(**small.call_arguments(family, output_type=output_type))
    paths = media.write_frames(output, tmp_path)
    assert len(paths) == (9 if family == "wan" else 1)
    expected = media.write_frames(run(pipe, family), tmp_path / "tensor")
    for path, other in zip(paths, expected, strict=True):
        assert np.array_equal(np.asarray(PIL.Image.open(path)), np.asarray(PIL.Image.open(other)))


def test_bfloat16_and_grey_images_are_written(tmp_path: Path) -> None:
    (path,) = media.write_frames(torch.full((1, 4, 6), 0.5, dtype=torch.bfloat16), tmp_path)
    image = PIL.Image.open(path)
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("L", (6, 4), 128)


@pytest.mark.parametrize("name", ["clip.gif", "clip.webp", "clip.png"])
def test_animation_holds_every_frame_at_its_rate(name: str, tmp_path: Path) -> None:
    path = media.write_animation(AS_TENSOR, tmp_path / "deep" / name, fps=10)
    assert path == tmp_path / "deep" / name
    with PIL.Image.open(path) as animation:
        assert (animation.n_frames, animation.size, animation.is_animated) == (3, (12, 8), True)
        for index, expected in enumerate(VIDEO):
            animation.seek(index)
            pixels = np.asarray(animation.convert("RGB"))
            assert animation.info["duration"] == 100
            if not name.endswith(".gif"):
                assert np.array_equal(pixels, expected)


@pytest.mark.parametrize(
    ("frames", "error", "words"),
    [
        ("clip", TypeError, "got str"),
        (None, TypeError, "got NoneType"),
        ([], ValueError, "no frames"),
        (torch.zeros(0, 3, 4, 4), ValueError, "no frames"),
        (torch.zeros(1, 16, 5, 4, 4), ValueError, "latents"),
        (torch.zeros(4, 4), ValueError, "no image or video"),
        (torch.zeros(2, 3, 3, 4, 4), ValueError, "one at a time"),
        ([AS_PIL, AS_PIL], ValueError, "one at a time"),
        (torch.full((3, 4, 4), 7.0), ValueError, "between 0 and 1"),
        (torch.full((3, 4, 4), float("nan")), ValueError, "not finite"),
        (torch.zeros(3, 4, 4, dtype=torch.int64), ValueError, "int64"),
    ],
)
def test_wrong_frames_are_refused_before_anything_is_written(
    frames: Any, error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        media.write_frames(frames, tmp_path / "out")
    with pytest.raises(error, match=words):
        media.write_animation(frames, tmp_path / "out" / "clip.gif")
    assert not (tmp_path / "out").exists()


def test_wrong_animation_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in one of: \.gif"):
        media.write_animation(AS_PIL, tmp_path / "clip.mp4")
    with pytest.raises(ValueError, match="fps must be above zero"):
        media.write_animation(AS_PIL, tmp_path / "clip.gif", fps=0)
    with pytest.raises(ValueError, match="one size"):
        media.write_animation([AS_PIL[0], AS_PIL[1].resize((4, 4))], tmp_path / "clip.gif")
