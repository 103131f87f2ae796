"""Builds small pipelines out of the real Diffusers and transformers classes, offline.

Owns the tiny configurations, the seeded random weights and the tokenizers made on the spot. Nothing is
downloaded, no global setting is changed, and PyTorch's random state is left as it was found.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import PIL.Image
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)

PROMPT = "A small red boat sails over a quiet lake at sunrise"
NEGATIVE_PROMPT = "blurry, dark, low quality"
_EXTRA_TEXT = (
    "a cat holding a sign that says hello world",
    "an astronaut rides a horse on the moon, high quality, 4k",
    "two dogs play with a blue ball in the snow while the camera moves slowly to the left",
)


def parameter_bytes(module: nn.Module) -> int:
    """Bytes of all parameters of `module`; a parameter that two names share counts once."""
    return sum(p.numel() * p.element_size() for p in module.parameters())


# ---------------------------------------------------------------------------------------------------------
# Random weights
# ---------------------------------------------------------------------------------------------------------


def _part_seed(seed: int, name: str) -> int:
    """A seed of its own for each part, so that a change to one part leaves the others' weights alone."""
    return zlib.crc32(f"{seed}/{name}".encode())


def _fill_constant_tensors(module: nn.Module, generator: torch.Generator) -> None:
    """Spread the values of tensors that start constant (norm weights, biases, batch-norm statistics).

    Left constant, they would be equal in every block, and a block that ran with another block's weights
    could go unnoticed.
    """
    buffers = dict(module.named_buffers())
    state = module.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if not tensor.is_floating_point() or tensor.numel() < 2:
            continue
        if bool((tensor == tensor.flatten()[0]).all()):
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
            # The buffers here are batch-norm statistics: kept positive, since a variance must be.
            change = noise.tanh() if name in buffers else noise
            with torch.no_grad():
                tensor.add_(0.1 * change.to(tensor.dtype))


def _fp32_names(module: nn.Module, dtype: torch.dtype) -> set[str]:
    """Names (one dotted part each) of what `from_pretrained` would leave in float32 for `dtype`."""
    if dtype == torch.float32:
        return set()
    names = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    is_transformers = type(module).__module__.startswith("transformers.")
    if not is_transformers or dtype == torch.float16:
        names |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    return names


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast as `from_pretrained(dtype=dtype)` does.

    `module.to(dtype)` would also cast what loading leaves alone: the modules a model asks to keep in float32
    and the non-persistent buffers (rotary frequencies), which no checkpoint holds.
    """
    kept = _fp32_names(module, dtype)
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and kept.isdisjoint(name.split(".")):
            tensor.data = tensor.data.to(dtype)


def make_module(name: str, make: Callable[[], ModuleT], dtype: torch.dtype, seed: int) -> ModuleT:
    """What `make()` makes with the random state of part `name` and no constant weights, in `dtype` and eval mode."""
    part_seed = _part_seed(seed, name)
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(part_seed)
        module = make()
        _fill_constant_tensors(module, torch.Generator("cpu").manual_seed(part_seed))
    _cast(module, dtype)
    return module.eval()


# ---------------------------------------------------------------------------------------------------------
# Tokenizers
# ---------------------------------------------------------------------------------------------------------


def _training_text() -> list[str]:
    from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

    return [SYSTEM_MESSAGE, PROMPT, NEGATIVE_PROMPT, *_EXTRA_TEXT]


def byte_level_bpe(special_tokens: Sequence[str]) -> tuple[dict[str, int], Any]:
    """Vocabulary (special tokens first) and merged pairs of a byte-level BPE; it can encode any text.

    Each word of the training text becomes one token by merging its characters from left to right.
    """
    from tokenizers import pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(special_tokens)}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary.setdefault(character, len(vocabulary))
    merges: list[tuple[str, str]] = []
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in _training_text():
        for word, _ in splitter.pre_tokenize_str(text):
            head = word[0]
            for character in word[1:]:
                if head + character not in vocabulary:
                    vocabulary[head + character] = len(vocabulary)
                    merges.append((head, character))
                head += character
    return vocabulary, merges


def t5_tokenizer() -> Any:
    """A `T5Tokenizer` over printable ASCII characters and the words of the training text."""
    from transformers import T5Tokenizer

    pieces: dict[str, float] = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, "▁": -4.0}
    for text in _training_text():
        for word in text.split():
            pieces.setdefault("▁" + word, -2.0)
    for code in range(33, 127):
        pieces.setdefault(chr(code), -6.0)
    return T5Tokenizer(vocab=list(pieces.items()), extra_ids=0)


_QWEN_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking -%}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif -%}"
    "{%- endif -%}"
)


def qwen2_tokenizer() -> Any:
    """A `Qwen2Tokenizer` with a chat template of Qwen3's form."""
    from transformers import Qwen2Tokenizer

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    vocabulary, merges = byte_level_bpe(special)
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens=special[1:],
        chat_template=_QWEN_CHAT_TEMPLATE,
    )


_MISTRAL_SPECIAL_TOKENS = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<pad>",
]  # fmt: skip
_MISTRAL_CHAT_TEMPLATE = (
    "{%- macro body(message) -%}"
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'text' -%}{{ part.text }}{%- else -%}{{ '[IMG]' }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- endmacro -%}"
    "{{ bos_token }}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}{{ '[SYSTEM_PROMPT]' + body(message) + '[/SYSTEM_PROMPT]' }}"
    "{%- elif message.role == 'user' -%}{{ '[INST]' + body(message) + '[/INST]' }}"
    "{%- else -%}{{ body(message) + eos_token }}{%- endif -%}"
    "{%- endfor -%}"
)


def _mistral_processor(patch_size: int, spatial_merge_size: int) -> Any:
    """The text side of FLUX.2: a `PixtralProcessor`, or its tokenizer alone where torchvision is missing.

    transformers refuses to make or load a `PixtralProcessor` without torchvision. Text prompts need no more
    than the tokenizer and its chat template, so the pipeline runs the same with either.
    """
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.utils import is_torchvision_available

    vocabulary, merges = byte_level_bpe(_MISTRAL_SPECIAL_TOKENS)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=_MISTRAL_SPECIAL_TOKENS[3:-1],
        chat_template=_MISTRAL_CHAT_TEMPLATE,
    )
    if not is_torchvision_available():
        return tokenizer
    image_processor = transformers.PixtralImageProcessor(
        patch_size={"height": patch_size, "width": patch_size}, size={"longest_edge": 8 * patch_size}
    )
    return transformers.PixtralProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=patch_size,
        spatial_merge_size=spatial_merge_size,
        chat_template=_MISTRAL_CHAT_TEMPLATE,
    )


# ---------------------------------------------------------------------------------------------------------
# Wan
# ---------------------------------------------------------------------------------------------------------

_WAN_TEXT_WIDTH = 32
_WAN_IMAGE_WIDTH = 32


def _wan_text_encoder(vocabulary_size: int) -> Any:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=vocabulary_size,
            d_model=_WAN_TEXT_WIDTH,
            d_kv=8,
            d_ff=64,
            num_heads=4,
            num_layers=4,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=32,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
        )
    )


def _wan_transformer(layers: int, image: bool = False) -> Any:
    from diffusers import WanTransformer3DModel

    heads, head_width = 4, 16
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=heads,
        attention_head_dim=head_width,
        # Image to video: the noisy latents, a mask of 4 channels and the latents of the first frame.
        in_channels=36 if image else 16,
        out_channels=16,
        text_dim=_WAN_TEXT_WIDTH,
        freq_dim=64,
        ffn_dim=128,
        num_layers=layers,
        image_dim=_WAN_IMAGE_WIDTH if image else None,
        added_kv_proj_dim=heads * head_width if image else None,
        rope_max_seq_len=32,
    )


def _wan_vae() -> Any:
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=4,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )


def _wan_scheduler() -> Any:
    from diffusers import UniPCMultistepScheduler

    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=5.0
    )


def _wan_parts(dtype: torch.dtype, seed: int, layers: int | None, image: bool) -> dict[str, Any]:
    tokenizer = t5_tokenizer()
    return {
        "tokenizer": tokenizer,
        "text_encoder": make_module("text_encoder", lambda: _wan_text_encoder(len(tokenizer)), dtype, seed),
        "vae": make_module("vae", _wan_vae, dtype, seed),
        "scheduler": _wan_scheduler(),
        "transformer": make_module("transformer", lambda: _wan_transformer(layers or 6, image), dtype, seed),
    }


def _wan_components(dtype: torch.dtype, seed: int, layers: int | None) -> dict[str, Any]:
    """Constructor arguments of `WanPipeline`."""
    return _wan_parts(dtype, seed, layers, image=False)


def _wan22_components(dtype: torch.dtype, seed: int, layers: int | None) -> dict[str, Any]:
    """Constructor arguments of `WanPipeline` with two experts.

    With two steps or more, the first runs `transformer` and the last runs `transformer_2`.
    """
    parts = _wan_parts(dtype, seed, layers, image=False)
    parts["transformer_2"] = make_module("transformer_2", lambda: _wan_transformer(layers or 6), dtype, seed)
    parts["boundary_ratio"] = 0.875
    return parts


def _wan_i2v_components(dtype: torch.dtype, seed: int, layers: int | None) -> dict[str, Any]:
    """Constructor arguments of `WanImageToVideoPipeline`."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    def image_encoder() -> Any:
        return CLIPVisionModel(
            CLIPVisionConfig(
                hidden_size=_WAN_IMAGE_WIDTH,
                intermediate_size=64,
                num_hidden_layers=4,
                num_attention_heads=4,
                image_size=32,
                patch_size=8,
                projection_dim=_WAN_IMAGE_WIDTH,
            )
        )

    parts = _wan_parts(dtype, seed, layers, image=True)
    parts["image_encoder"] = make_module("image_encoder", image_encoder, dtype, seed)
    parts["image_processor"] = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return parts


# ---------------------------------------------------------------------------------------------------------
# FLUX.2
# ---------------------------------------------------------------------------------------------------------

_FLUX2_TEXT_WIDTH = 32
_FLUX2_LATENT_CHANNELS = 4
# Indices into `hidden_states`, whose first entry is the embedding: the outputs of the first, third and last
# of five decoder layers, so that no layer's work goes unused.
_FLUX2_TEXT_LAYERS = (1, 3, 5)
_VISION_PATCH = 8
_SPATIAL_MERGE = 2


def _mistral3_text_encoder(vocabulary_size: int) -> Any:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    token = _MISTRAL_SPECIAL_TOKENS.index
    return Mistral3ForConditionalGeneration(
        Mistral3Config(
            text_config={
                "model_type": "mistral",
                "vocab_size": vocabulary_size,
                "hidden_size": _FLUX2_TEXT_WIDTH,
                "intermediate_size": 64,
                "num_hidden_layers": 5,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "max_position_embeddings": 512,
                "sliding_window": None,
                "initializer_range": 0.2,
                "bos_token_id": token("<s>"),
                "eos_token_id": token("</s>"),
                "pad_token_id": token("<pad>"),
            },
            vision_config={
                "model_type": "pixtral",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "head_dim": 8,
                "image_size": 8 * _VISION_PATCH,
                "patch_size": _VISION_PATCH,
            },
            # As in Mistral Small, and unlike the Qwen3 below: the head has a weight of its own.
            tie_word_embeddings=False,
            image_token_index=token("[IMG]"),
            spatial_merge_size=_SPATIAL_MERGE,
            vision_feature_layer=-1,
        )
    )


def _qwen3_text_encoder(vocabulary_size: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary_size,
            hidden_size=_FLUX2_TEXT_WIDTH,
            intermediate_size=64,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=512,
            initializer_range=0.2,
            # As in Qwen3-4B: the head that gives logits shares the embedding's weight.
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


def _flux2_transformer(layers: int, single_layers: int, guidance: bool) -> Any:
    from diffusers import Flux2Transformer2DModel

    model = Flux2Transformer2DModel(
        patch_size=1,
        in_channels=4 * _FLUX2_LATENT_CHANNELS,
        num_layers=layers,
        num_single_layers=single_layers,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=len(_FLUX2_TEXT_LAYERS) * _FLUX2_TEXT_WIDTH,
        timestep_guidance_channels=64,
        mlp_ratio=2.0,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance,
    )
    # A fresh model's gates are near zero: its blocks would hardly change the image.
    for name in ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation"):
        with torch.no_grad():
            getattr(model, name).linear.weight.mul_(6.0)
    return model


def _flux2_vae() -> Any:
    from diffusers import AutoencoderKLFlux2

    return AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        latent_channels=_FLUX2_LATENT_CHANNELS,
        norm_num_groups=4,
        sample_size=64,
    )


def _flux2_parts(
    dtype: torch.dtype,
    seed: int,
    layers: int | None,
    tokenizer: Any,
    text_encoder: Callable[[], Any],
    guidance: bool,
) -> dict[str, Any]:
    from diffusers import FlowMatchEulerDiscreteScheduler

    double = layers or 3
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        "vae": make_module("vae", _flux2_vae, dtype, seed),
        "text_encoder": make_module("text_encoder", text_encoder, dtype, seed),
        "tokenizer": tokenizer,
        "transformer": make_module(
            "transformer", lambda: _flux2_transformer(double, double + 1, guidance), dtype, seed
        ),
    }


def _flux2_components(dtype: torch.dtype, seed: int, layers: int | None) -> dict[str, Any]:
    """Constructor arguments of `Flux2Pipeline`."""
    processor = _mistral_processor(_VISION_PATCH, _SPATIAL_MERGE)
    vocabulary_size = len(getattr(processor, "tokenizer", processor))
    return _flux2_parts(dtype, seed, layers, processor, lambda: _mistral3_text_encoder(vocabulary_size), guidance=True)


def _flux2_klein_components(dtype: torch.dtype, seed: int, layers: int | None) -> dict[str, Any]:
    """Constructor arguments of `Flux2KleinPipeline`."""
    tokenizer = qwen2_tokenizer()
    return _flux2_parts(dtype, seed, layers, tokenizer, lambda: _qwen3_text_encoder(len(tokenizer)), guidance=False)


# ---------------------------------------------------------------------------------------------------------
# A transformer in two parts
# ---------------------------------------------------------------------------------------------------------


def _split_components(dtype: torch.dtype, seed: int, layers: int | None) -> dict[str, Any]:
    """Constructor arguments of `SmallSplitPipeline`."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler

    from .split_model import SmallSplitTransformer

    def vae() -> Any:
        return AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            block_out_channels=(8, 8, 16),
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=4,
            sample_size=64,
            scaling_factor=0.5,
        )

    return {
        "transformer": make_module("transformer", lambda: SmallSplitTransformer(num_layers=layers or 4), dtype, seed),
        "vae": make_module("vae", vae, dtype, seed),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
    }


# ---------------------------------------------------------------------------------------------------------
# By name
# ---------------------------------------------------------------------------------------------------------

_COMPONENTS: dict[str, Callable[[torch.dtype, int, int | None], dict[str, Any]]] = {
    "wan": _wan_components,
    "wan22": _wan22_components,
    "wan-i2v": _wan_i2v_components,
    "flux2": _flux2_components,
    "flux2-klein": _flux2_klein_components,
    "split": _split_components,
}
FAMILIES: tuple[str, ...] = tuple(_COMPONENTS)


def _check_family(family: str) -> None:
    if family not in _COMPONENTS:
        raise ValueError(f"unknown family {family!r}; one of: {', '.join(FAMILIES)}")


def pipeline_class(family: str) -> type[DiffusionPipeline]:
    """The plain pipeline class of `family`, as Diffusers (or, for "split", this package) defines it."""
    _check_family(family)
    if family == "split":
        from .split_model import SmallSplitPipeline

        return SmallSplitPipeline
    import diffusers

    names = {
        "wan": "WanPipeline",
        "wan22": "WanPipeline",
        "wan-i2v": "WanImageToVideoPipeline",
        "flux2": "Flux2Pipeline",
        "flux2-klein": "Flux2KleinPipeline",
    }
    return getattr(diffusers, names[family])


def components(
    family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, layers: int | None = None
) -> dict[str, Any]:
    """Constructor arguments of `family`'s pipeline class.

    Args:
        family: one of `FAMILIES`.
        dtype: of the weights; what `from_pretrained(dtype=...)` would leave in float32 stays so here.
        seed: of the weights. The same arguments give the same weights.
        layers: transformer blocks, at least 1. Wan: of each transformer (6). FLUX.2: double blocks (3), with
            one single block more than that. Split: of each of the two stacks (4).

    Returns:
        A fresh dict of component name to object, on the CPU, modules in eval mode.
    """
    _check_family(family)
    if layers is not None and layers < 1:
        raise ValueError(f"layers must be at least 1, got {layers}")
    # Whatever default device the caller may have set.
    with torch.device("cpu"):
        return _COMPONENTS[family](dtype, seed, layers)


def build(
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    layers: int | None = None,
    cls: type[DiffusionPipeline] | None = None,
) -> DiffusionPipeline:
    """A ready pipeline of `family` on the CPU, its progress bar off.

    `cls` replaces the pipeline class, for instance by a subclass with a mixin; the other arguments are those
    of `components`.
    """
    parts = components(family, dtype=dtype, seed=seed, layers=layers)
    pipe = (cls or pipeline_class(family))(**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def wan(**options: Any) -> DiffusionPipeline:
    """`build("wan", **options)`: text to video."""
    return build("wan", **options)


def wan22(**options: Any) -> DiffusionPipeline:
    """`build("wan22", **options)`: text to video with two experts."""
    return build("wan22", **options)


def wan_i2v(**options: Any) -> DiffusionPipeline:
    """`build("wan-i2v", **options)`: image to video."""
    return build("wan-i2v", **options)


def flux2(**options: Any) -> DiffusionPipeline:
    """`build("flux2", **options)`: text to image, Mistral 3 text encoder."""
    return build("flux2", **options)


def flux2_klein(**options: Any) -> DiffusionPipeline:
    """`build("flux2-klein", **options)`: text to image, Qwen3 text encoder."""
    return build("flux2-klein", **options)


def split(**options: Any) -> DiffusionPipeline:
    """`build("split", **options)`: text to image, a transformer with a reasoner and a generator part."""
    return build("split", **options)


def sample_image(width: int, height: int, seed: int = 0) -> PIL.Image.Image:
    """An RGB picture of `width` x `height` pixels: two colour ramps with seeded noise over them."""
    noise = np.random.default_rng(seed).normal(0.0, 0.1, (height, width, 3))
    rows, columns = np.mgrid[0:height, 0:width]
    ramps = np.stack([columns / width, rows / height, np.full((height, width), 0.5)], axis=-1)
    return PIL.Image.fromarray((np.clip(ramps + noise, 0.0, 1.0) * 255).astype(np.uint8))


def call_arguments(family: str, *, steps: int = 2, seed: int = 0, output_type: str = "pt") -> dict[str, Any]:
    """Keyword arguments for one short call of `family`'s pipeline.

    Guidance is on, so every family with an unconditional pass runs it. Each call makes a new generator on the
    CPU: a generator keeps its state, so one dict serves one run.

    Args:
        steps: denoising steps.
        seed: of the starting noise, and of the picture for image to video.
        output_type: "pt", "np", "pil" or "latent".
    """
    _check_family(family)
    arguments: dict[str, Any] = {
        "prompt": PROMPT,
        "num_inference_steps": steps,
        "generator": torch.Generator("cpu").manual_seed(seed),
        "output_type": output_type,
        "height": 64,
        "width": 64,
        "guidance_scale": 4.0,
    }
    if family.startswith("wan"):
        arguments |= {
            "height": 32,
            "width": 32,
            "num_frames": 9,
            "negative_prompt": NEGATIVE_PROMPT,
            "max_sequence_length": 24,
        }
    if family == "wan22":
        arguments["guidance_scale_2"] = 3.0
    if family == "wan-i2v":
        arguments["image"] = sample_image(32, 32, seed)
    if family.startswith("flux2"):
        arguments["text_encoder_out_layers"] = _FLUX2_TEXT_LAYERS
        # FLUX.2 dev puts a long system message before the prompt; a shorter limit would cut the prompt off.
        arguments["max_sequence_length"] = 128 if family == "flux2" else 48
    return arguments
